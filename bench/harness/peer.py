"""What a peer is: the base of all classes in bench/peers.

A peer is a queue that lives in one database. Most of it is text: pgbench scripts, in which :payload is a JSON object and
:payloads an array of them. What a peer does not have raises NotHere with the reason, which is then in the report.
"""
import contextlib
import time

from . import pgbench
from .server import payloads


class NotHere(Exception):
    """This peer has no such thing, or cannot run on this machine; the text says why."""


class Rate:
    """Messages in a time."""

    def __init__(self, messages, seconds):
        self.messages = messages
        self.seconds = seconds
        self.per_second = messages / seconds if seconds else 0.0


def one_by_one(claim, batch, settle, id_type='bigint'):
    """A pgbench script: what a claim has left in :n and :ids, settled message by message; settle(id) is the statement for one."""
    names = ', '.join(f'a[{i}] as i{i}' for i in range(1, batch + 1))
    lines = [claim, f'select {names} from (select :ids::{id_type}[] as a offset 0) x \\gset\n']
    for i in range(1, batch + 1):
        lines.append(f'\\if :n >= {i}\n{settle(f":i{i}")};\n\\endif\n')
    return ''.join(lines)


class Peer:
    name = ''                # as in --peers, and in the results
    about = ''               # what it is and how it is driven, for the report
    push = False             # whether the server calls functions with messages
    rounds = 99              # at most so many rounds; for those that no goal is about and that take long
    shares_queue = True      # whether several consumers can take from one queue
    batches_by_fill = False  # whether fill() fixes the size of the batches, so that each measurement needs its own

    def __init__(self, bench):
        self.bench = bench

    # --- once in a run

    def install(self):
        """Makes sure that it can be used; raises NotHere if it cannot."""

    def version(self, db):
        return ''

    # --- in a new database

    def create(self, db):
        """Its schema, and a queue."""
        raise NotImplementedError

    @contextlib.contextmanager
    def background(self, db):
        """The processes that its documentation wants to run beside the server, for as long as the block lasts."""
        yield

    @contextlib.contextmanager
    def quiet(self):
        """Without any background work of its own: what is measured then is only what the client asked for."""
        yield

    def maintain(self, db):
        """What autovacuum or the peer's own maintenance would do sooner or later."""
        db.run('vacuum (analyze)')

    # --- producers

    def enqueue(self):
        """Script: enqueues :payload."""
        raise NotImplementedError

    def bulk(self):
        """Script: enqueues the array :payloads in one statement."""
        raise NotImplementedError

    def fill(self, db, messages, batch=100, consumers=1, size=250):
        """Enqueues a backlog and waits until all of it can be claimed. Batch and consumers are those of the claims to come."""
        block = 1000 if size < 1000 else 100
        blocks, rest = divmod(messages, block)
        if blocks:
            name = db.input(block, size)
            clients = min(2, blocks)
            script = pgbench.loading(name) + self.bulk()
            pgbench.run(self.bench, db, script, clients, transactions=blocks // clients, variables={'loaded': 0},
                        options='-c synchronous_commit=off')
            rest += block * (blocks % clients)
        if rest:
            sql = self.bulk().replace('%', '%%').replace(':payloads', '%(payloads)s').strip().rstrip(';')
            with db.connection.cursor() as cursor:
                cursor.execute(sql, {'payloads': payloads(rest, size)})
        self.settled_down(db)

    def settled_down(self, db):
        """Waits until everything that was enqueued can be claimed."""

    # --- consumers

    def claim(self, batch):
        """Script: claims up to so many messages and fetches id and payload; commits; settles them all; commits."""
        raise NotImplementedError

    def claim_each(self, batch):
        """Script: the same, but each message is settled by a call and a transaction of its own."""
        raise NotHere('no settlement of single messages')

    def check_each(self):
        """Raises NotHere if it cannot settle single messages of a batch."""
        self.claim_each(1)

    def loop(self, batch, name):
        """Script: enqueues a batch, claims it, settles it; three transactions."""
        return pgbench.loading(name) + self.bulk() + self.claim(batch)

    def settled(self, db):
        """How many messages are settled so far, from any starting point."""
        raise NotImplementedError

    def consume(self, db, batch, consumers, messages, each=False):
        """Claims and settles about so many messages of the backlog, which is larger; returns the Rate."""
        script = self.claim_each(batch) if each else self.claim(batch)
        before = self.settled(db)
        run = pgbench.run(self.bench, db, script, consumers, transactions=max(1, messages // batch // consumers))
        return Rate(self.settled(db) - before, run.seconds)

    def drain(self, db, batch, messages):
        """Claims and settles exactly so many, which are all there are; returns the Rate."""
        done, seconds = 0, 0.0
        for _ in range(20):
            rate = self.consume(db, batch, 1, messages - done)
            done += rate.messages
            seconds += rate.seconds
            if done >= messages:
                return Rate(done, seconds)
        raise RuntimeError(f'settled {done} of {messages} messages')

    def run_loop(self, db, batch, messages, name):
        """Lets so many messages pass, from enqueue to settlement, a batch at a time; returns the Rate."""
        run = pgbench.run(self.bench, db, self.loop(batch, name), transactions=messages // batch, variables={'loaded': 0})
        return Rate(messages, run.seconds)

    def probe(self, db):
        """A consumer for single claims, whose latencies are measured: see Probe."""
        raise NotHere('no claim that could be timed by itself')

    def status(self):
        """A query that counts messages by their state, as an operator would."""
        raise NotHere('no status query')

    # --- fan-out

    def subscribers(self, db, count):
        """Lets so many independent consumers have each message that is enqueued from now on."""
        raise NotHere('no fan-out')

    def consume_as(self, db, number, batch, messages):
        """The consumer of that number claims and settles so many; returns the Rate."""
        raise NotHere('no fan-out')


class Probe:
    """One session that claims and settles, and tells how long each took, in milliseconds.

    Its statements are prepared when it is made, which is before the queue has messages: as in an application that was
    there first. claim_sql has $1, the number of messages; settle_sql has $1, what keys() makes of the rows.
    """

    def __init__(self, db, claim_sql, settle_sql, keys, types=('integer', 'uuid')):
        self.connection = db.connect()
        self.cursor = self.connection.cursor()
        self.keys = keys
        self.cursor.execute(f'prepare claim({types[0]}) as {claim_sql}')
        self.cursor.execute(f'prepare settle({types[1]}) as {settle_sql}')

    def claim(self, batch):
        begin = time.perf_counter()
        self.cursor.execute('execute claim(%s)', (batch,))
        rows = self.cursor.fetchall()
        return rows, 1000 * (time.perf_counter() - begin)

    def settle(self, rows):
        begin = time.perf_counter()
        self.cursor.execute('execute settle(%s)', (self.keys(rows),))
        return 1000 * (time.perf_counter() - begin)

    def warm(self, batch):
        """On an empty queue: often enough that the server has decided on a plan for good."""
        for _ in range(8):
            self.claim(batch)

    def measure(self, batch, times):
        claims, settlements = [], []
        for _ in range(times):
            rows, took = self.claim(batch)
            if not rows:
                raise RuntimeError('a claim has found nothing')
            claims.append(took)
            settlements.append(self.settle(rows))
        return claims, settlements

    def close(self):
        self.connection.close()
