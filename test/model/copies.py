# A copy of the database beside the one where everybody works: what a dump, or a template, has brought is judged.
#
# A dump is made and restored in the middle of a round; or else the database is a template when the sessions have ended.
# Until the end of the round nothing may happen in the copy but enqueue.  Then it is adopted: what had been settled
# where it comes from stays so, and each other message is delivered once.
import collections
import os
import shutil
import subprocess
import tempfile

import psycopg2

import check
import invariants
import push
import server
from model import Finding, now

DATABASE = server.DATABASE + '_copy'
PATIENCE = 120
RULE = 12
ENDED = ('delivered', 'dead', 'discarded', 'cancelled')
REFUSED = ("outbox.claim_batch(subscription => 'alpha')", 'outbox.maintain()', "outbox.skip('beta', 'infinity')",
           "outbox.purge('infinity')", 'outbox.deliver()')
TABLES = ('delivery', 'frontier', 'identity', 'segment', 'subscription', 'handler', 'self_routed')
SUBSCRIPTIONS = 'SELECT id, name FROM outbox.subscription ORDER BY id'
ENQUEUE = """SELECT outbox.enqueue('order.created', '{"made": "in the copy"}')::text"""


class Copy:
    def __init__(self, world, cluster):
        self.world = world
        self.cluster = cluster
        self.how = None             # 'dump' or 'template', once it is there
        self.start = self.end = 0   # when its state was in force
        self.connection = None

    # It is made

    def by_dump(self):
        """False: the server crashed."""
        folder = tempfile.mkdtemp(prefix='outbox-model-dump.')
        try:
            file = os.path.join(folder, 'dump')
            self.start = now()
            if not self.run('pg_dump', '-Fc', '-f', file, server.DATABASE):
                return False
            self.end = now()
            self.drop()
            server.with_maintenance(f'CREATE DATABASE {DATABASE}')
            if not self.run('pg_restore', '--exit-on-error', '-d', DATABASE, file):
                return False
            self.made('dump')
        except server.ConnectionLost:
            return False
        finally:
            shutil.rmtree(folder)
        return True

    def run(self, program, *args):
        path = os.path.join(subprocess.check_output([os.environ['PG_CONFIG'], '--bindir'], text=True).strip(), program)
        done = subprocess.run([path, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                              timeout=PATIENCE)
        if done.returncode != 0 and not self.world.disturbances.explains_loss():
            raise Finding(RULE, f'{program}: {done.stdout}')
        return done.returncode == 0

    def by_template(self):
        """Nobody is connected."""
        self.drop()
        self.start = now()
        server.with_maintenance(f'CREATE DATABASE {DATABASE} TEMPLATE {server.DATABASE}')
        self.end = now()
        self.made('template')

    def made(self, how):
        connection = server.connect(DATABASE, patience=60)
        if self.world.pushed:
            self.folder = self.cluster.make_folder(f'copy.{self.world.seed}')
            server.query(connection, 'UPDATE model.mood SET folder = %s', (self.folder,))
        self.fingerprint = self.take_fingerprint(connection)
        connection.close()
        self.how = how

    @staticmethod
    def drop():
        server.with_maintenance(f'DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)')

    @staticmethod
    def take_fingerprint(connection):
        """Of all but enqueue's tables."""
        return [server.query(connection, f"SELECT md5(string_agg(t::text, '|' ORDER BY t::text)) FROM outbox.{table} t")
                for table in TABLES]

    # It is judged

    def judge(self, original, switch_workers, wait_for):
        """When nothing goes on in the original, whose log and states those are; `wait_for` waits for the workers."""
        self.connection = server.connect(DATABASE, patience=60)
        server.wait_for_clock(self.connection, self.world.jumps[-1][1])     # beyond all due times
        self.subscriptions = dict(self.query(SUBSCRIPTIONS))
        self.pushed = {i for i, name in self.subscriptions.items() if name in {s.name for s in self.world.pushed}}
        self.log, self.runs = self.read()
        self.compare_with_original(original)
        self.nothing_happens()
        self.adopt()
        self.deliver_pulled()
        if self.world.pushed:
            self.deliver_pushed(switch_workers, wait_for)
        invariants.compare_status(self.world, self.connection)
        self.connection.close()
        self.world.count(f'copy by {self.how}')

    def query(self, text, args=None):
        return server.query(self.connection, text, args)

    def read(self):
        return {r[0]: r[1:] for r in self.query(check.LOG)}, {(r[0], r[1]): r[2:] for r in self.query(check.RUNS)}

    def compare_with_original(self, original):
        """What was committed before is there, nothing that was not, and what was delivered then is so here."""
        for i, message in self.world.messages.items():
            self.world.checks += 1
            if i in self.log and (not message.exists() or message.event.txn.commit_start > self.end):
                raise Finding(RULE, f'not committed, but in the {self.how}', i)
            if i not in self.log and i in original.log and message.exists() and \
                    message.event.txn.commit_end < self.start:
                raise Finding(RULE, f'committed before, but not in the {self.how}', i)
        delivered = collections.defaultdict(list)
        for event in self.world.events:
            if event.kind == 'settle' and event.outcome == 'delivered' and event.counts():
                for i in event.ids:
                    delivered[event.subscription.id, i].append(event)
        for (subscription, i), events in delivered.items():
            if subscription in self.subscriptions and i in self.log and \
                    any(e.txn.commit_end < self.start and not e.partial for e in events):
                self.expect(subscription, i, 'delivered')
        for (subscription, i), run in self.runs.items():
            if run[0] == 'delivered' and subscription not in self.pushed and \
                    not any(e.txn.commit_start < self.end for e in delivered[subscription, i]):
                raise Finding(RULE, f'nobody delivered it to {self.subscriptions[subscription]} before the {self.how}', i)

    def expect(self, subscription, message_id, state):
        self.world.checks += 1
        run = self.runs.get((subscription, message_id), ('in no run',))
        if run[0] != state:
            raise Finding(RULE, f'in the {self.how}, in subscription {subscription}, it is {run}', message_id)

    def nothing_happens(self):
        for call in REFUSED:
            try:
                self.query('SELECT ' + call)
            except psycopg2.Error as error:
                if error.pgcode == '55000':
                    self.world.checks += 1
                    continue
                raise
            raise Finding(RULE, f'{call} is not refused in a copy that was not adopted')
        self.query(ENQUEUE)         # may write an identity
        for table, before, after in zip(TABLES, self.fingerprint, self.take_fingerprint(self.connection)):
            if before != after and table != 'identity':
                raise Finding(RULE, f'outbox.{table} changes in a copy that was not adopted')

    def adopt(self):
        if self.query('SELECT outbox.adopt()') != [(True,)] or self.query('SELECT outbox.adopt()') != [(False,)]:
            raise Finding(RULE, 'adopt() does not say that it has adopted')
        self.query(ENQUEUE)
        self.query("SELECT r FROM outbox.subscription s, outbox.resume(s.name) r WHERE s.name = 'gamma'")
        self.query('SELECT outbox.maintain()')
        self.log, runs = self.read()
        for key, run in self.runs.items():
            if run[0] in ENDED and runs.get(key, ('lost',))[0] != run[0]:
                raise Finding(RULE, f'{run} before the adoption, {runs.get(key)} after it', key[1])
        invariants.look(self.world, self.connection)
        self.runs = runs

    def expected(self, subscription):
        """What is still to be delivered; who has no attempt left when his lease ends dies."""
        return {i for (s, i), (state, attempts, limit, *_) in self.runs.items()
                if s == subscription and state not in ENDED and not (state == 'leased' and attempts >= limit)}

    def deliver_pulled(self):
        for subscription in self.subscriptions.keys() - self.pushed:
            name, claimed = self.subscriptions[subscription], collections.Counter()
            while rows := self.query('SELECT id::text, claim_token::text FROM outbox.claim_batch(1000, subscription => %s)',
                                     (name,)):
                claimed.update(r[0] for r in rows)
                for token in {r[1] for r in rows}:
                    self.query('SELECT outbox.settle_batch(%s)', (token,))
            self.compare_delivered(name, claimed, self.expected(subscription))

    def compare_delivered(self, name, delivered, expected):
        self.world.checks += len(expected)
        for i in expected ^ delivered.keys():
            raise Finding(RULE, f'{"not " if i in expected else ""}delivered in the {self.how} to {name}', i)
        for i, n in delivered.items():
            if n > 1:
                raise Finding(RULE, f'delivered {n} times in the {self.how} to {name}', i)

    def deliver_pushed(self, switch_workers, wait_for):
        """By the workers.  An effect is there once, and exactly where the message is delivered."""
        push.calm_down(self.connection)
        switch_workers('on')
        wait_for(self.connection, list(self.pushed))
        switch_workers('off')
        self.log, runs = self.read()
        for subscription in self.pushed:
            name = self.subscriptions[subscription]
            here = {i for (s, i), run in runs.items() if s == subscription and run[0] == 'delivered'}
            if name != push.TOLD.name:
                effects = collections.Counter(r[0] for r in self.query(
                    'SELECT id::text FROM model.effect WHERE subscription = %s', (name,)) if r[0] in self.log)
                self.compare_delivered(name, effects, here)
