"""PgQ, from Debian's postgresql-15-pgq3: batches between two ticks, a pointer per consumer, no lease per message.

A batch is what lies between two ticks, so its size is fixed when the messages are enqueued. Where the size of the batches
is to be measured, fill() makes the ticks; elsewhere pgqd makes them. Several consumers have a queue each, since one
consumer's batches cannot be shared.
"""
import contextlib
import os
import shutil
import subprocess

from harness.peer import NotHere, Peer, Rate
from harness import pgbench
from harness.server import TOP, payload, unprivileged


class PgQ(Peer):
    name = 'pgq'
    about = 'Debian\'s postgresql-15-pgq3, with pgqd where ticks are not part of the measurement; text payloads; several ' \
            'consumers have a queue each'
    shares_queue = False
    batches_by_fill = True

    def install(self):
        control = subprocess.check_output([os.environ['PG_CONFIG'], '--sharedir'], text=True).strip() + '/extension/pgq.control'
        if not (os.path.exists(control) and shutil.which('pgqd')):
            subprocess.run([f'{TOP}/dev/install-deps', 'pgq'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not (os.path.exists(control) and shutil.which('pgqd')):
            raise NotHere('the packages postgresql-15-pgq3 and pgqd could not be installed for this server')

    def version(self, db):
        return db.value('select pgq.version()')

    def create(self, db):
        db.run('create extension pgq')
        db.run("""
            create procedure bench.fill(queue text, batches integer, batch integer, message text) language plpgsql as $$
            begin
                for i in 1 .. batches loop
                    perform pgq.insert_event(queue, 'order.created', message) from generate_series(1, batch);
                    commit;
                    perform pgq.ticker(queue);
                    commit;
                end loop;
            end $$""")
        self.queue(db, 'q')

    # a tick whenever somebody asks for one and there is something new, unless pgqd is to decide
    def queue(self, db, name, ticks='own'):
        db.run('select pgq.create_queue(%s), pgq.register_consumer(%s, %s)', name, name, 'c')
        # a sequence that was never asked and one that was asked once look alike to a tick: settled() would be one short
        db.run('select nextval(queue_event_seq::regclass) from pgq.queue where queue_name = %s', name)
        if ticks == 'own':
            for setting, value in (('ticker_max_count', '1'), ('ticker_max_lag', '1 hour'), ('ticker_idle_period', '1 day')):
                db.run('select pgq.set_queue_config(%s, %s, %s)', name, setting, value)

    @contextlib.contextmanager
    def background(self, db):
        folder = f'{self.bench.server.work}/pgqd'
        subprocess.run(unprivileged(['mkdir', '-p', folder]), check=True)
        name = f'{folder}/{db.name}.ini'
        text = (f'[pgqd]\nlogfile = {folder}/{db.name}.log\npidfile = {folder}/{db.name}.pid\ndatabase_list = {db.name}\n'
                f"base_connstr = host={os.environ['PGHOST']} port={os.environ['PGPORT']} user=postgres\n")
        subprocess.run(unprivileged(['tee', name]), input=text, text=True, check=True, stdout=subprocess.DEVNULL)
        process = subprocess.Popen(unprivileged(['pgqd', name]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def enqueue(self):
        return "select pgq.insert_event('q', 'order.created', :payload);\n"

    def bulk(self):
        return "select count(pgq.insert_event('q', 'order.created', e::text)) from jsonb_array_elements(:payloads::jsonb) as e;\n"

    def fill(self, db, messages, batch=100, consumers=1, size=250):
        for (queue,) in db.run('select queue_name from pgq.get_queue_info()'):
            db.run('select pgq.unregister_consumer(%s, %s), pgq.drop_queue(%s)', queue, 'c', queue)
        for number in range(consumers):
            queue = 'q' if consumers == 1 else f'q{number}'
            self.queue(db, queue)
            db.run('set synchronous_commit = off')
            db.run('select pgq.ticker(%s)', queue)
            db.run('call bench.fill(%s, %s, %s, %s)', queue, max(1, messages // batch // consumers), batch, payload(size))
            db.run('reset synchronous_commit')

    def claim(self, batch, queue="'q'"):
        return f"""begin;
select coalesce(pgq.next_batch({queue}, 'c'), 0) as batch \\gset
\\if :batch > 0
select ev_id, ev_data from pgq.get_batch_events(:batch);
\\endif
commit;
\\if :batch > 0
select pgq.finish_batch(:batch);
\\endif
"""

    def loop(self, batch, name):
        return pgbench.loading(name) + self.bulk() + "select pgq.ticker('q');\n" + self.claim(batch)

    def settled(self, db):
        return db.value("""select coalesce(sum(t.tick_event_seq), 0)::bigint from pgq.subscription s
            join pgq.tick t on t.tick_queue = s.sub_queue and t.tick_id = s.sub_last_tick""")

    def consume(self, db, batch, consumers, messages, each=False):
        script = self.claim(batch, "'q'" if consumers == 1 else "'q' || :client_id::text")
        before = self.settled(db)
        run = pgbench.run(self.bench, db, script, consumers, transactions=max(1, messages // batch // consumers))
        return Rate(self.settled(db) - before, run.seconds)

    def drain(self, db, batch, messages):
        db.run("select pgq.ticker('q')")
        ticks = db.value('''select count(*) from pgq.tick t, pgq.subscription s
            where t.tick_queue = s.sub_queue and t.tick_id > s.sub_last_tick''')
        rate = self.consume(db, 1, 1, ticks)
        if rate.messages < messages:
            raise RuntimeError(f'settled {rate.messages} of {messages} messages')
        return rate

    def probe(self, db):
        return PgQProbe(db)

    def status(self):
        return 'select * from pgq.get_consumer_info()'

    def subscribers(self, db, count):
        db.run("select pgq.unregister_consumer('q', 'c')")
        for number in range(count):
            db.run("select pgq.register_consumer('q', %s)", f'c{number}')

    def consume_as(self, db, number, batch, messages):
        db.run("select pgq.ticker('q')")
        script = self.claim(batch).replace("'c'", f"'c{number}'")
        run = pgbench.run(self.bench, db, script, transactions=max(1, messages // batch))
        return Rate(messages, run.seconds)


class PgQProbe:
    """Its claim is two statements; the events of a batch are as many as the last fill() has put between two ticks."""

    def __init__(self, db):
        import time
        self.now = time.perf_counter
        self.connection = db.connect()
        self.connection.autocommit = False
        self.cursor = self.connection.cursor()
        self.cursor.execute("prepare next as select pgq.next_batch('q', 'c')")
        self.cursor.execute('prepare events(bigint) as select ev_id, ev_data from pgq.get_batch_events($1)')
        self.cursor.execute('prepare finish(bigint) as select pgq.finish_batch($1)')
        self.connection.commit()

    def warm(self, batch):
        for _ in range(8):
            self.cursor.execute('execute next')
            self.connection.commit()

    def measure(self, batch, times):
        claims, settlements = [], []
        for _ in range(times):
            begin = self.now()
            self.cursor.execute('execute next')
            number = self.cursor.fetchone()[0]
            if number is None:
                raise RuntimeError('no batch')
            self.cursor.execute('execute events(%s)', (number,))
            self.cursor.fetchall()
            self.connection.commit()
            middle = self.now()
            self.cursor.execute('execute finish(%s)', (number,))
            self.connection.commit()
            claims.append(1000 * (middle - begin))
            settlements.append(1000 * (self.now() - middle))
        return claims, settlements

    def close(self):
        self.connection.close()


PEER = PgQ
