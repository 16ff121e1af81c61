# Claims keep TRUNCATE away, which waits for nobody.  So now and then there is a lull, in which the ring turns.
#
# The sessions end what is prepared and rest; only the reader of invariants.py may have a snapshot open.  What has been
# committed last is not routed yet, and perhaps everything shall go: the segment that is written too.
import time

import moves
import operators
import retention
from model import COMMITTED, Aborted, Txn, now
from session import Session

LONGEST = 4         # seconds


class Turner(Session):
    def turn(self):
        stop, lull = self.world.stop, self.world.lull
        if stop.wait(self.random.uniform(0.5, 2.5)):
            return
        lull.set()
        try:
            self.wait_for_silence(self.random.random() < 0.6)
            if self.random.random() < 0.7:
                self.do_in_transaction(operators.maintain)
                self.do_in_transaction(moves.enqueue)
                for _ in range(self.random.choice((0, 3))):
                    self.do_in_transaction(operators.unsubscribe)
                self.do_in_transaction(retention.purge_all)
                for _ in range(self.random.choice((0, 1, 5))):      # what is condemned is wanted again
                    self.do_in_transaction(self.random.choice((operators.requeue, operators.subscribe)))
            for _ in range(self.random.randint(1, 3)):
                self.do_in_transaction(operators.maintain)
        finally:
            lull.clear()

    def wait_for_silence(self, without_reader):
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and not self.world.stop.wait(0.02):
            if all(s.resting for s in self.world.sessions) and not self.world.prepared \
                    and not (without_reader and self.world.reading):
                break

    def do_in_transaction(self, move):
        self.txn = txn = Txn(self.number, 'READ COMMITTED')
        self.execute('BEGIN')
        try:
            move(self, txn)
            self.execute('INSERT INTO model.txn VALUES (%s)', (txn.number,))
            txn.commit_start = now()
            self.execute('COMMIT')
            txn.end(COMMITTED)
        except Aborted:
            self.roll_back(txn)
        self.take_over(txn)
