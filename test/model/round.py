# A round of the model check: a fresh database, a time of moves, and whether it was right.
import copy
import random
import threading
import time
import traceback

import psycopg2

import check
import copies
import disturbances
import invariants
import moves
import operators
import push
import push_check
import retention
import server
from lull import Turner
from model import Finding, Subscription, World, now
from server import ConnectionLost
from session import Session

STATIC = (
    Subscription('default', '#', static=True),
    Subscription('alpha', '#', lease=10_000, max_active=120_000, max_attempts=2, static=True),
    Subscription('beta', 'order.*', lease=30_000, max_active=60_000, static=True),
    Subscription('gamma', '#.created', 'event', lease=20_000, max_active=40_000, max_attempts=5, static=True),
)
PASSING = ('omega1', 'omega2', 'omega3')
FINAL_JUMP = 7_200_000_000      # beyond all due times
DELIVERED = ('delivered', None, None, None)
MAX_MESSAGES = 12_000           # in a round
PATIENCE = 60

# Not settled, or not even routed.
NOT_PUSHED = """
    SELECT s.name, d.state, sum(d.message_count) FROM outbox.delivery d JOIN outbox.subscription s
        ON s.id = d.subscription_id
     WHERE d.subscription_id = ANY (%s) AND d.state IN ('ready', 'leased', 'unhandled') GROUP BY s.name, d.state
     UNION ALL
    SELECT subscription, 'pending', pending FROM outbox.status WHERE pending > 0"""
NOT_IDLE = """
    SELECT pid, backend_type, state, query, xact_start, backend_xid, backend_xmin FROM pg_stat_activity
     WHERE backend_type ~ '^outbox'
       AND (xact_start IS NOT NULL OR backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)"""
NOT_SWEPT = 'SELECT * FROM outbox.segment WHERE condemned_at IS NOT NULL OR sweep_to IS NOT NULL'
NOT_OFF = "SELECT pid, backend_type, query FROM pg_stat_activity WHERE backend_type ~ 'outbox (coordinator|delivery)'"


class Round:
    """A fresh database, a time of moves, a comparison, an end to all that is left, and another comparison."""

    def __init__(self, options, seed, seconds, cluster=None):
        self.options = options
        self.cluster = cluster
        self.seconds = seconds
        self.world = world = World(options, seed)
        world.disturbances = disturbances.Disturbances()
        self.random = random.Random(f'{seed}/clock')
        self.disturber = disturbances.Disturber(world, cluster, self.random)
        self.listener = None
        # Every third round is calm: claims leave out what lies below a floor, and floors rise where queues are short,
        # the clock does not jump, and maintain() does not put them back.  A prepared transaction holds them, and what
        # is condemned: few, or many.
        self.world.calm = calm = seed % 3 == 0
        self.jumps = (0,) if calm else (0.05, 0.3, 1, 3, 8, 21)
        self.world.scarce = calm or seed % 4 == 1
        self.world.prepares = (0.002 if calm else 0.02) if seed % 2 else 0.12
        world.history = retention.History(world, self.random)
        self.copied = copies.Copy(world, cluster)
        self.comparison = None
        self.watcher = None             # a connection

    def run(self):
        world = self.world
        try:
            self.prepare()
            world.sessions = [Session(world, n + 1) for n in range(self.options.sessions)]
            threads = world.sessions + ([] if world.calm else [Turner(world, -1)]) + [
                threading.Thread(target=self.guard, args=(work,)) for work in (self.watch, self.freeze, self.read, self.copy)]
            for thread in threads:
                thread.start()
            self.guard(self.disturb)
            world.stop.set()
            for thread in threads:
                thread.join()
            if world.failure is None:
                self.guard(self.finish)
        finally:
            world.stop.set()

    def guard(self, work):
        try:
            work()
        except Finding as finding:
            self.world.fail(finding)
        except Exception:
            self.world.fail(Finding('the check itself failed', traceback.format_exc()))

    def prepare(self):
        world = self.world
        self.copied.drop()
        self.watcher = server.make_database()
        world.history.prepare(self.watcher)
        world.max_prepared = int(server.setting(self.watcher, 'max_prepared_transactions')) // 2
        self.preloaded = 'outbox' in server.setting(self.watcher, 'shared_preload_libraries')
        world.static = self.make_subscriptions(STATIC)
        world.slots = dict.fromkeys(PASSING)
        if self.options.workers:
            world.pushed = self.make_subscriptions(push.PUSHED)
            world.folder = self.cluster.make_folder(f'round.{world.seed}')
            push.prepare(self.watcher, world, world.seed % 4 != 0)
            self.listener = push.Listener(world)
            self.switch_workers('on')       # off since the end of the round before

    def make_subscriptions(self, subscriptions):
        made = list(copy.deepcopy(subscriptions))
        for s in made:
            if s.name != 'default':
                server.query(self.watcher, 'SELECT r FROM ' + operators.SUBSCRIBE,
                             operators.arguments(s, max(s.limits)) + (False,))
        invariants.want(self.watcher, made)
        return made

    # While the sessions work

    def watch(self):
        while not self.world.stop.wait(1):
            try:
                invariants.look(self.world, self.watcher)
                self.world.history.look(self.watcher)
                if self.world.pushed:
                    self.watch_pushed()
            except ConnectionLost:
                self.watcher.close()
                self.watcher = server.connect(patience=60)
            except psycopg2.Error as error:
                if error.pgcode not in invariants.BUSY:
                    raise

    def read(self):
        invariants.read_with_old_snapshots(self.world, random.Random(f'{self.world.seed}/read'))

    def copy(self):
        """In every second round; should the server always crash meanwhile, at its end."""
        chance = random.Random(f'{self.world.seed}/copy')
        while self.world.seed % 2 == 0 and not self.world.stop.wait(chance.uniform(1, self.seconds / 2)):
            if self.copied.by_dump():
                return
            self.world.count('dump cut off')

    def watch_pushed(self):
        push.find_dead(self.world, self.watcher)
        self.listener.look()
        self.world.worker_pids = [pid for kind in disturbances.PROCESSES
                                  for pid in self.disturber.pids(kind, self.watcher)]

    def disturb(self):
        """Moves the clock and kills, until the time is over."""
        connection = server.connect()
        end = time.monotonic() + self.seconds
        next_kill = time.monotonic() + self.random.uniform(1, 4)
        next_stop = time.monotonic() + self.random.uniform(1, 2)
        while time.monotonic() < end and len(self.world.messages) < MAX_MESSAGES:
            if self.world.stop.wait(self.random.uniform(0.1, 1)):
                break
            try:
                self.jump(connection, int(self.random.choice(self.jumps) * 1_000_000))
                if self.options.kill and time.monotonic() > next_kill:
                    next_kill = time.monotonic() + self.random.uniform(1, 4)
                    self.disturber.crash()
                if self.world.pushed and not self.world.calm and time.monotonic() > next_stop:
                    next_stop = time.monotonic() + self.random.uniform(0.3, 2)
                    self.disturber.stop_somebody(connection)
                self.disturber.look_at_trap()
            except ConnectionLost:
                self.disturber.look_at_trap()
                connection = server.connect(patience=60)
        connection.close()
        self.disturber.take_trap_away()

    def jump(self, connection, by):
        if by == 0:
            return
        offset = self.world.jumps[-1][1] + by
        self.world.jumps.append((now(), offset))
        server.set_clock(connection, offset)
        self.world.count('clock jump')

    def freeze(self):
        """Where we may send signals to the server's processes."""
        chance = random.Random(f'{self.world.seed}/freeze')
        while not self.world.stop.wait(chance.uniform(0, 0.04)):
            pid = chance.choice(sorted(self.world.pids.values()) + self.world.worker_pids or [0])
            if server.is_backend(pid) and server.freeze(pid, chance.uniform(0.001, 0.04)):
                self.world.count('freeze')

    # Afterwards

    def finish(self):
        world = self.world
        self.watcher.close()
        self.watcher = server.connect(patience=60)
        closer = Session(world, 0)
        closer.connect()
        while world.prepared:
            closer.end_prepared()
        closer.do(operators.resume)
        if world.calm:
            self.drain(closer)
        if world.pushed:
            self.count_effects()
            self.switch_workers('off')
        self.maintain()
        invariants.look(world, self.watcher)
        self.compare()
        if not self.copied.how and (world.seed % 2 or not self.copied.by_dump()):
            self.make_template(closer)
        self.drain(closer)
        self.jump(self.watcher, FINAL_JUMP)
        for connection in (self.watcher, closer.connection):
            server.wait_for_clock(connection, world.jumps[-1][1])
        if world.pushed:
            self.finish_pushed()
        self.drain(closer)
        self.maintain()
        invariants.look(world, self.watcher)
        self.compare()
        self.nothing_left()
        closer.connection.close()
        self.copied.judge(self.comparison, self.switch_workers, self.wait_until_pushed)
        self.copied.drop()
        self.watcher.close()

    def make_template(self, closer):
        """For which nobody may be connected."""
        connections = [closer.connection, self.watcher] + ([self.listener.connection] if self.listener else [])
        if self.listener:
            self.listener.look()
        for connection in connections:
            connection.close()
        self.copied.by_template()
        self.watcher = server.connect(patience=60)
        closer.connect()
        if self.listener:
            self.listener.connect()

    def maintain(self):
        """Until what is condemned has left, and all that is known of it."""
        end = time.monotonic() + PATIENCE
        while True:
            server.query(self.watcher, 'SELECT outbox.maintain()')
            if not (left := server.query(self.watcher, NOT_SWEPT)):
                return
            if time.monotonic() > end:
                raise Finding('what is condemned leaves when nobody is there', f'{left}')

    def compare(self):
        invariants.compare_status(self.world, self.watcher)
        if self.world.pushed:
            self.listener.look()
            pushed = push_check.PushComparison(self.world, self.watcher)
        self.comparison = comparison = check.Comparison(self.world, self.watcher, self.preloaded)
        comparison.run()
        if self.world.pushed:
            pushed.run(comparison)
            pushed.compare_notifications(self.listener, comparison)

    # The workers

    def finish_pushed(self):
        """Nobody fails any more, and the workers deliver what is left by themselves; then they are idle."""
        push.calm_down(self.watcher)
        self.switch_workers('on')
        self.wait_until_pushed(self.watcher, [s.id for s in self.world.pushed])
        self.wait_for(NOT_IDLE, (), 'idle workers hold no transaction')
        self.switch_workers('off')

    def count_effects(self):
        """While the sessions worked."""
        by_workers, by_sessions = server.query(self.watcher, """
            SELECT count(*) FILTER (WHERE worker), count(*) FILTER (WHERE NOT worker) FROM model.effect""")[0]
        with self.world.lock:
            self.world.moves.update({'effect by a worker': by_workers, 'effect by a session': by_sessions,
                                     'notification': len(self.listener.heard)})

    def switch_workers(self, to):
        window = self.world.disturbances.stop('switched off') if to == 'off' else None
        server.query(self.watcher, f'ALTER SYSTEM SET outbox.enabled = {to}')
        server.query(self.watcher, 'SELECT pg_reload_conf()')
        if to == 'off':
            self.wait_for(NOT_OFF, (), 'workers leave when they are switched off')
            window.close()
            self.world.count('workers switched off')

    def wait_until_pushed(self, connection, subscriptions):
        self.wait_for(NOT_PUSHED, (subscriptions,), 'workers deliver what is there', connection)

    def wait_for(self, query, args, rule, connection=None):
        """Until there are no rows."""
        end = time.monotonic() + PATIENCE
        while rows := server.query(connection or self.watcher, query, args):
            if time.monotonic() > end:
                raise Finding(rule, f'after {PATIENCE} seconds there is still {rows}')
            time.sleep(0.05)        # poll
        self.world.checks += 1

    def drain(self, session):
        """Claims and delivers until nothing comes; then nothing may be left that could have come."""
        for subscription in self.world.live():
            empty = 0
            while empty < 3:
                clock = server.query(self.watcher, 'SELECT model.us(outbox.clock())')[0][0]
                session.do(moves.claim_from, subscription)
                leases = list(session.txn.leases)
                for lease in leases:
                    session.do(moves.settle_many, lease, sorted(lease.ids), None, 'drain', DELIVERED)
                empty = 0 if leases else empty + 1
            self.nothing_left('d.subscription_id = %s AND coalesce(d.locked_until, d.available_at) < model.at(%s)',
                              (subscription.id, clock))

    def nothing_left(self, condition='true', args=()):
        rows = server.query(self.watcher, f"""
            SELECT s.name, d.state, model.us(d.available_at), model.us(d.locked_until), d.message_count
              FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id
             WHERE d.state NOT IN ('delivered', 'dead', 'discarded', 'cancelled') AND {condition}""", args)
        self.world.checks += 1
        if rows:
            raise Finding(1, f'claims said that nothing is left, but there is {rows[:5]}')
