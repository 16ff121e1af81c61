# Claims keep TRUNCATE away, which waits for nobody.  So now and then there is a lull, in which the ring turns.
#
# The sessions end what is prepared and rest; only the reader of invariants.py may have a snapshot open.  What has been
# committed last is not routed yet, and perhaps everything shall go: the segment that is written too.  What is not
# settled is moved first, so in some lulls everything is settled before: then what is condemned goes, unless
# somebody wants it again.
import time

import moves
import operators
import retention
from model import COMMITTED, Aborted, Txn, now
from session import Session

LONGEST = 4         # seconds that silence takes, and settling
DELIVERED = ('delivered', None, None, None)


class Turner(Session):
    def turn(self):
        stop, lull = self.world.stop, self.world.lull
        if stop.wait(self.random.uniform(0.5, 2.5)):
            return
        lull.set()
        try:
            self.wait_for_silence(self.random.random() < 0.6)
            chance = self.random.random()
            if chance < 0.3:
                self.throw_away()
            elif chance < 0.8:
                self.throw_away_what_is_settled()
            for _ in range(self.random.randint(1, 3)):
                self.do_in_transaction(operators.maintain)
        finally:
            lull.clear()

    def throw_away(self):
        self.do_in_transaction(operators.maintain)
        self.do_in_transaction(moves.enqueue)
        for _ in range(self.random.choice((0, 3))):
            self.do_in_transaction(operators.unsubscribe)
        self.do_in_transaction(retention.purge_all)
        for _ in range(self.random.choice((0, 1, 5))):      # what is condemned is wanted again
            self.do_in_transaction(self.random.choice((operators.requeue, operators.subscribe)))

    def throw_away_what_is_settled(self):
        """And some of it is wanted again."""
        discarded = []
        self.do_in_transaction(operators.unsubscribe)
        for _ in range(8):
            self.do_in_transaction(operators.discard)
            discarded += [(operators.requeue, (e.ids[0], e.subscription)) for e in self.txn.events if e.counts()]
        end = time.monotonic() + LONGEST
        for subscription in self.world.live():
            while time.monotonic() < end and self.settle(subscription):
                pass
        for wishes in discarded, [(operators.subscribe_to_all,)]:
            self.do_in_transaction(retention.purge_all)
            for wish in wishes:
                self.do_in_transaction(*wish)
            self.do_in_transaction(operators.maintain)
        self.world.count('purge of what is settled')

    def settle(self, subscription):
        """False: there is nothing to claim."""
        self.do_in_transaction(moves.claim_from, subscription)
        leases = list(self.txn.leases)
        for lease in leases:
            self.do_in_transaction(moves.settle_many, lease, sorted(lease.ids), None, 'drain', DELIVERED)
        return bool(leases)

    def wait_for_silence(self, without_reader):
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and not self.world.stop.wait(0.02):
            if all(s.resting for s in self.world.sessions) and not self.world.prepared \
                    and not (without_reader and self.world.reading):
                break

    def do_in_transaction(self, move, *args):
        self.txn = txn = Txn(self.number, 'READ COMMITTED')
        self.execute('BEGIN')
        try:
            move(self, txn, *args)
            self.execute('INSERT INTO model.txn VALUES (%s)', (txn.number,))
            txn.commit_start = now()
            self.execute('COMMIT')
            txn.end(COMMITTED)
        except Aborted:
            self.roll_back(txn)
        self.take_over(txn)
