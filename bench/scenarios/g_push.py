"""Push: the server delivers. Hooks that do nothing, in SQL and PL/pgSQL; NOTIFY with a listener that counts; latencies.

Throughput is that of a backlog of 200,000 (quick: 30,000), from the moment the workers are switched on. Latency is counted
from the commit, by PostgreSQL's own commit timestamps, to the call of the hook, or to a listening client that has claimed
the message; idle (100 messages/s, for the client 4, since it is notified once in outbox.notify_interval, 100 ms) and at
5,000 messages/s.
"""
import select
import threading
import time

from harness import pgbench
from harness.results import percentile
from harness.server import payload

TITLE = 'push: hooks, NOTIFY, latencies'
FUNCTIONS = {
    'sql': "create function public.hook_sql(m outbox.message) returns void language sql as 'select'",
    'plpgsql': "create function public.hook_plpgsql(m outbox.message) returns void language plpgsql as 'begin end'",
    'stamp': "create function public.hook_stamp(m outbox.message) returns void language sql as "
             "'insert into public.got values (m.id, clock_timestamp())'",
}


def run(bench):
    for peer in bench.peers[1:]:
        bench.results.skip('g', peer.name, 'its server calls no functions: a process of the application has to poll')
    with bench.server.restarted(track_commit_timestamp='on'):
        rounds = bench.pick(1, 3)
        for workers in (1, 2):
            for language in ('sql', 'plpgsql'):
                bench.interleave('hooks', 'messages/s', {(bench.outbox, ()): lambda: hooks(bench, language, workers)},
                                 rounds if language == 'plpgsql' and workers == 1 else 1, language=language, workers=workers)
        bench.interleave('notify', 'messages/s', {(bench.outbox, ()): lambda: notify(bench)}, 1, workers=1)
        for load, rates in (('idle', {'hook': 100, 'claim': 4}), ('loaded', {'hook': 5000, 'claim': 5000})):
            for way, rate in rates.items():
                try:
                    latency(bench, load, rate, way)
                except Exception as error:  # pylint: disable=broad-except
                    bench.broke(bench.outbox, error, load=load, to=way)


def backlog(bench):
    return bench.pick(30000, 200000)


def wait_delivered(db, count, seconds=300):
    db.wait(f'select coalesce(sum(delivered), 0) >= {count} from outbox.status', seconds)


def prepared(bench, db, register):
    """A backlog with the workers off; returns how large it is. They are on when this is left."""
    with bench.outbox.quiet():
        bench.outbox.create(db)
        register()
        bench.outbox.fill(db, backlog(bench))


def hooks(bench, language, workers):
    with bench.server.settings(outbox__workers=workers), bench.server.database('push') as db:
        def register():
            db.run(FUNCTIONS[language])
            db.run('select outbox.register_hook(%s, %s)', '#', f'public.hook_{language}')
        prepared(bench, db, register)
        begin = time.monotonic()
        wait_delivered(db, backlog(bench))
        return backlog(bench) / (time.monotonic() - begin)


def notify(bench):
    with bench.server.database('push') as db:
        listener = db.connect()
        listener.cursor().execute('listen bench')
        prepared(bench, db, lambda: db.run("select outbox.register_notify('#', 'bench')"))
        begin = time.monotonic()
        count = 0
        while count < backlog(bench):
            if not select.select([listener], [], [], 60)[0]:
                raise TimeoutError(f'{count} of {backlog(bench)} notifications')
            listener.poll()
            count += len(listener.notifies)
            listener.notifies.clear()
        listener.close()
        return backlog(bench) / (time.monotonic() - begin)


def latency(bench, load, rate, way):
    """The producer keeps the id in a table of its own, whose row has the transaction."""
    seconds = bench.pick(3, 20) if rate >= 100 else bench.pick(10, 60)
    with bench.server.database('push') as db:
        bench.outbox.create(db)
        db.run('create table sent (id uuid primary key); create table got (id uuid, at timestamptz)')
        consumer = None
        if way == 'hook':
            db.run(FUNCTIONS['stamp'])
            db.run("select outbox.register_hook('#', 'public.hook_stamp')")
        else:
            consumer = Consumer(db)
            consumer.start()
        script = "insert into sent select outbox.enqueue('order.created', :payload);\n"
        pgbench.run(bench, db, script, 2, seconds, variables={'payload': payload(250)}, rate=rate, options='-c synchronous_commit=off')
        wait_delivered(db, db.value('select count(*) from sent'))
        if consumer:
            consumer.stop(db)
        values = [row[0] for row in db.run("""
            select 1000 * extract(epoch from g.at - pg_xact_commit_timestamp(s.xmin))::float8
              from sent s join got g using (id)
             where pg_xact_commit_timestamp(s.xmin) > (select min(pg_xact_commit_timestamp(xmin)) + interval '0.5 s' from sent)""")]
        sent = db.value("""select count(*) / extract(epoch from max(pg_xact_commit_timestamp(xmin)) - min(pg_xact_commit_timestamp(xmin)))
            from sent""")
        params = {'load': load, 'to': way, 'rate': round(float(sent))}
        bench.add('latency, median', bench.outbox, 'ms', [percentile(values, 0.5)], **params)
        bench.add('latency, p99', bench.outbox, 'ms', [percentile(values, 0.99)], **params)


class Consumer(threading.Thread):
    """Listens, claims when it is told, notes when it had the message, settles."""

    def __init__(self, db):
        super().__init__(daemon=True)
        self.connection = db.connect()
        self.cursor = self.connection.cursor()
        self.cursor.execute('listen outbox_ready')
        self.cursor.execute('prepare claim as select id, claim_token, name, payload from outbox.claim_batch(100)')
        self.cursor.execute('prepare settle(uuid) as select outbox.settle_batch($1)')
        self.stopping = False
        self.got = []

    def run(self):
        while not self.stopping:
            while self.take():
                pass
            select.select([self.connection], [], [], 1)
            self.connection.poll()
            self.connection.notifies.clear()

    def take(self):
        self.cursor.execute('execute claim')
        rows = self.cursor.fetchall()
        at = time.time()
        if rows:
            self.got += [(row[0], at) for row in rows]
            self.cursor.execute('execute settle(%s)', (rows[0][1],))
        return rows

    def stop(self, db):
        self.stopping = True
        self.join(5)
        self.connection.close()
        with db.connection.cursor() as cursor:
            for begin in range(0, len(self.got), 1000):
                part = self.got[begin:begin + 1000]
                values = ','.join(cursor.mogrify('(%s, to_timestamp(%s))', pair).decode() for pair in part)
                cursor.execute(f'insert into got values {values}')
