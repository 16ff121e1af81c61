# A session: one connection that makes random moves in random transactions.
#
# A transaction is a few moves, perhaps some of them in savepoints, and one of four ends: COMMIT, ROLLBACK, PREPARE
# TRANSACTION (ended later by any session), or an error.  With --kill the connection may be lost at any moment; then
# a transaction whose COMMIT was under way counts as committed if its number is in model.txn, where it was written
# before.  Without --kill some moves are single statements without BEGIN.
import contextlib
import random
import threading
import time
import traceback

import psycopg2

import moves
import push
import server
from model import ABORTED, COMMITTED, OPEN, PREPARED, Aborted, Finding, Txn, now
from server import ConnectionLost

ISOLATION = ['READ COMMITTED'] * 6 + ['REPEATABLE READ', 'SERIALIZABLE']
# Could not serialize, deadlock, lock timeout: whoever gets them tries again.
RETRY = {'40001': 'could not serialize', '40P01': 'deadlock', '55P03': 'lock timeout'}
MAX_HELD = 40


class Unsure(Exception):
    """Cancelled at the end: it may have come through."""


class Session(threading.Thread):
    def __init__(self, world, number):
        super().__init__(name=f'session {number}')
        self.world = world
        self.number = number
        self.random = random.Random(f'{world.seed}/{number}')
        self.connection = None
        self.txn = None
        self.gid = None             # the prepared transaction that is being made or ended
        self.instance = None        # of the server: another one after each crash
        self.offset_low = 0         # of the clock, as this server process said last
        self.held = []
        self.resting = False

    def run(self):
        try:
            self.connect()
            while not self.world.stop.is_set():
                try:
                    self.turn()
                except ConnectionLost as error:
                    self.reconnect(error)
                    self.resolve()
                except Unsure:
                    self.execute('ROLLBACK')
                    self.execute('SET synchronous_commit = local')
                    self.resolve()
            self.connection.close()
        except Finding as finding:
            self.world.fail(finding)
        except Exception:
            self.world.fail(Finding('the check itself failed', traceback.format_exc()))

    def connect(self):
        self.connection = server.connect(patience=60)
        self.instance = server.instance(self.connection)
        self.world.pids[self.number] = self.connection.get_backend_pid()

    def turn(self):
        chance = self.random.random()
        self.resting = self.world.lull.is_set()
        if self.resting:
            self.rest()
        elif chance < (0.03 if self.world.calm else 0.1):
            self.end_prepared()
        elif self.world.pushed and chance < 0.15:
            push.drain(self)
        elif chance < 0.30 and not self.world.options.kill:
            self.single()
        else:
            self.transaction()

    def rest(self):
        if self.world.prepared:
            self.end_prepared()
        else:
            time.sleep(0.01)        # poll: until all others rest too, and are waked

    # Statements

    def execute(self, text, args=None, event=None, allowed=()):
        """Runs a statement.  An error that may happen ends in Aborted, any other one is a finding."""
        try:
            return server.query(self.connection, text, args)
        except psycopg2.Error as error:
            code = error.pgcode
            if event is not None:
                event.refused = code
                event.key = now()
                event.clock_high = self.world.clock_high()
            if code in RETRY:
                self.world.count(RETRY[code])
            elif code not in allowed:
                context = f'\n{event}' if event is not None else ''
                raise Finding('no error but those that are documented', f'{code} {error}in: {text} {args}{context}',
                              event.ids[0] if event is not None and event.ids else None) from error
            raise Aborted(code) from error

    def call(self, event, columns, source, args, allowed=()):
        """Calls a function of outbox for an event and notes the time; returns the rows."""
        self.world.add_event(event)
        event.start = now()
        event.clock_low = event.start + self.offset_low
        rows = self.execute(f"""SELECT {columns}, model.us(clock_timestamp()), current_setting('outbox.clock_offset')
                                FROM {source}""", args, event, allowed)
        return self.note(event, rows)

    def note(self, event, rows):
        event.clock_high = self.world.clock_high()
        if rows:
            event.key = rows[0][-2]
            self.offset_low = max(self.offset_low, server.milliseconds(rows[0][-1]) * 1000)
        return [row[:-2] for row in rows]

    def look_at_clock(self):
        offset = self.execute("SELECT current_setting('outbox.clock_offset')")[0][0]
        self.offset_low = max(self.offset_low, server.milliseconds(offset) * 1000)
        return now() + self.offset_low

    # Transactions

    def single(self):
        self.do(moves.make, True)
        self.world.count('single statement')

    def do(self, move, *args):
        """A move in one statement without BEGIN."""
        self.txn = txn = Txn(self.number, None)
        txn.commit_start = now()
        try:
            move(self, txn, *args)
            txn.end(COMMITTED)
        except Aborted:
            txn.end(ABORTED)
        self.take_over(txn)

    def transaction(self):
        isolation = self.random.choice(ISOLATION)
        self.txn = txn = Txn(self.number, isolation)
        self.execute('BEGIN ISOLATION LEVEL ' + isolation)
        self.world.count(isolation.lower())
        try:
            for _ in range(self.random.choice((1, 1, 2, 2, 3, 6))):
                self.move(txn, 0)
            self.finish(txn)
        except Aborted:
            self.roll_back(txn)
            self.world.count('rolled back by an error')
        if txn.state == PREPARED:
            self.txn = None
        else:
            self.take_over(txn)

    def move(self, txn, depth):
        if self.random.random() < 0.12 and depth < 3:
            self.savepoint(txn, depth)
        elif self.random.random() < 0.06:
            for_long = not self.world.calm and self.random.random() < 0.06
            time.sleep(3 if for_long else self.random.choice((0.01, 0.05, 0.2, 0.6)))       # held open on purpose
            self.world.count('held open for long' if for_long else 'held open')
        else:
            moves.make(self, txn)

    def savepoint(self, txn, depth):
        mark = len(txn.events)
        self.execute(f'SAVEPOINT s{depth}')
        try:
            for _ in range(self.random.choice((1, 1, 2, 3))):
                self.move(txn, depth + 1)
            keep = self.random.random() < 0.5
        except Aborted:
            keep = False
        if keep:
            self.execute(f'RELEASE s{depth}')
            self.world.count('release savepoint')
        else:
            self.execute(f'ROLLBACK TO s{depth}')
            for event in txn.events[mark:]:
                event.undone = True
            self.world.count('rollback to savepoint')

    def finish(self, txn):
        chance = self.random.random()
        if chance < 0.12:
            self.roll_back(txn)
            self.world.count('rollback')
            return
        prepare = chance < 0.12 + self.world.prepares and len(self.world.prepared) < self.world.max_prepared
        slow = self.random.random() < 0.08
        if self.world.options.kill or prepare or slow:
            self.execute('INSERT INTO model.txn VALUES (%s)', (txn.number,))
        if prepare:
            self.prepare(txn, slow)
            return
        txn.commit_start = now()
        self.end_by('COMMIT', slow)
        txn.end(COMMITTED)
        self.world.count('commit')

    def end_by(self, text, slow, args=None, allowed=()):
        """A slow end hangs in the middle: it waits for a standby that is not there, until it is cancelled."""
        if not slow:
            self.execute(text, args, allowed=allowed)
            return
        self.execute('SET synchronous_commit = on')
        over = threading.Event()
        canceller = threading.Thread(target=self.cancel_until, args=(over, self.random.uniform(0.005, 0.1)))
        canceller.start()
        try:
            self.execute(text, args, allowed=allowed + ('57014',))
        except Aborted as error:
            if error.args[0] == '57014':        # before its work or after it
                raise Unsure from error
            raise
        finally:
            over.set()
            canceller.join()
        self.execute('SET synchronous_commit = local')
        self.world.count('slow end')

    def cancel_until(self, over, seconds):
        while not over.wait(seconds):
            with contextlib.suppress(psycopg2.Error):
                self.connection.cancel()

    def roll_back(self, txn):
        self.execute('ROLLBACK')
        txn.end(ABORTED)

    def prepare(self, txn, slow):
        """What it touched belongs to whoever ends it.  A transaction that has routed cannot be prepared."""
        gid = f'model {txn.number}'
        self.gid = gid
        try:
            self.end_by('PREPARE TRANSACTION %s', slow, (gid,), ('0A000',))
        except Aborted:
            self.gid = None
            self.world.count('prepare refused')
            raise
        self.was_prepared(gid, txn)

    def was_prepared(self, gid, txn):
        touched = {e.lease_held for e in txn.events if e.lease_held is not None}
        self.held = [lease for lease in self.held if lease not in touched]
        txn.leases += [lease for lease in touched if lease not in txn.leases]
        txn.state = PREPARED
        self.world.prepared[gid] = txn
        self.gid = None
        self.world.count('prepare')

    def end_prepared(self):
        world = self.world
        with world.lock:
            gid = next(iter(world.prepared), None)      # the oldest, which holds most
            if self.random.random() < 0.5:
                gid = self.random.choice(sorted(world.prepared) or [None])
            self.txn = txn = world.prepared.pop(gid, None)
        if txn is None:
            return
        commit = self.random.random() < 0.7
        self.gid = gid
        txn.commit_start = now()
        self.end_by(('COMMIT' if commit else 'ROLLBACK') + ' PREPARED %s', self.random.random() < 0.08, (gid,))
        self.gid = None
        self.end_as(txn, commit)
        world.count('commit prepared' if commit else 'rollback prepared')

    def end_as(self, txn, committed):
        txn.end(COMMITTED if committed else ABORTED)
        self.take_over(txn)

    def take_over(self, txn):
        """After the end: which leases this session holds now, and what follows for subscriptions."""
        for event in txn.events:
            moves.after_end(self.world, event)
            if event.counts() and event.kind == 'settle':
                event.lease_held.ids.difference_update(event.ids)
        for lease in txn.leases:
            if lease not in self.held and (lease.claim.txn is not txn or lease.claim.counts()):
                self.held.append(lease)
        self.held = [lease for lease in self.held if lease.ids][-MAX_HELD:]

    # Who does not know whether it ended asks

    def reconnect(self, error):
        """After a crash, when the server has restarted: until then what was killed seems to be in progress."""
        if not self.world.disturbances.explains_loss():
            raise Finding('the server does not crash', str(error))
        instance = self.instance
        end = time.monotonic() + 60
        while self.instance == instance:
            if time.monotonic() > end:
                raise Finding('a connection is lost only when the server restarts', str(error))
            with contextlib.suppress(ConnectionLost):
                self.connection.close()
                self.connect()

    def resolve(self):
        """A transaction that meant to commit wrote its number into model.txn."""
        txn, gid = self.txn, self.gid
        self.txn = self.gid = None
        if txn is None or txn.state not in (OPEN, PREPARED):
            return
        while True:
            try:
                prepared = self.finds('pg_prepared_xacts WHERE gid = %s', gid)
                done = self.finds('model.txn WHERE number = %s', txn.number)
                break
            except ConnectionLost as error:
                self.reconnect(error)
        self.world.count('transaction cut off')
        if prepared:
            self.was_prepared(gid, txn)
        else:
            self.end_as(txn, done)

    def finds(self, source, key):
        return bool(server.query(self.connection, 'SELECT 1 FROM ' + source, (key,)))
