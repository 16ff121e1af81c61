# The model check: options, rounds, and what is printed.  test/model/run starts it; README.md explains it.
import argparse
import collections
import copy
import random
import secrets
import sys
import threading
import time
import traceback

import check
import invariants
import moves
import operators
import server
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

# A run of thirty seconds or more has made each of these moves.
OUTCOMES = ('delivered', 'failed', 'dead', 'released')
NEEDED = [
    'enqueue', 'enqueue of a known id', 'enqueue_batch of objects', 'enqueue_batch of payloads', 'insert into outgoing',
    'claim', 'claim of own message', 'claim of separate tokens', 'claim of nothing', 'claim of a retry',
    *(f'{form} {outcome}' for form in ('settle', 'settle_batch', 'settle_batch by ids') for outcome in OUTCOMES),
    'settle late', 'settle with a wrong token', 'settle_batch of some', 'lease of another session',
    'renew', 'renew_batch', 'renew_batch by ids', 'maintain', 'pause', 'resume', 'skip', 'requeue', 'requeue_all',
    'discard', 'cancel', 'subscribe from the earliest', 'subscribe from now', 'subscribe with replace', 'unsubscribe',
    'read committed', 'repeatable read', 'serializable', 'commit', 'rollback', 'rolled back by an error',
    'rollback to savepoint', 'release savepoint', 'held open', 'slow end', 'clock jump', 'look at the invariants',
]


def parse_options():
    parser = argparse.ArgumentParser(prog='test/model/run')
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--seed', type=int)
    parser.add_argument('--sessions', type=int, default=8)
    parser.add_argument('--round', type=float, default=15)
    parser.add_argument('--kill', action='store_true')
    parser.add_argument('--kill-command')
    parser.add_argument('--keep', action='store_true')
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    return options


class Round:
    """A fresh database, a time of moves, a comparison, an end to all that is left, and another comparison."""

    def __init__(self, options, seed, seconds):
        self.options = options
        self.seconds = seconds
        self.world = World(options, seed)
        self.random = random.Random(f'{seed}/clock')
        # Every third round is calm: claims leave out what lies below a floor, and floors rise where queues are short,
        # the clock does not jump, and maintain() does not put them back.  A prepared transaction holds them: few, or
        # many.
        self.world.calm = calm = seed % 3 == 0
        self.jumps = (0,) if calm else (0.05, 0.3, 1, 3, 8, 21)
        self.world.scarce = calm or seed % 4 == 1
        self.world.prepares = 0.002 if calm and seed % 2 else 0.12
        self.watcher = None             # a connection

    def run(self):
        world = self.world
        try:
            self.prepare()
            world.sessions = [Session(world, n + 1) for n in range(self.options.sessions)]
            threads = world.sessions + [
                threading.Thread(target=self.guard, args=(work,)) for work in (self.watch, self.freeze)]
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
        self.watcher = server.make_database()
        world.max_prepared = int(server.setting(self.watcher, 'max_prepared_transactions')) // 2
        self.preloaded = 'outbox' in server.setting(self.watcher, 'shared_preload_libraries')
        world.static = self.make_subscriptions()
        world.slots = dict.fromkeys(PASSING)

    def make_subscriptions(self):
        made = list(copy.deepcopy(STATIC))
        for s in made[1:]:
            server.query(self.watcher, 'SELECT r FROM ' + operators.SUBSCRIBE,
                         operators.arguments(s, max(s.limits)) + (False,))
        invariants.want(self.watcher, made)
        return made

    # While the sessions work

    def watch(self):
        while not self.world.stop.wait(1):
            try:
                invariants.look(self.world, self.watcher)
            except ConnectionLost:
                self.watcher.close()
                self.watcher = server.connect(patience=60)

    def disturb(self):
        """Moves the clock and kills, until the time is over."""
        connection = server.connect()
        end = time.monotonic() + self.seconds
        next_kill = time.monotonic() + self.random.uniform(1, 4)
        while time.monotonic() < end and len(self.world.messages) < MAX_MESSAGES:
            if self.world.stop.wait(self.random.uniform(0.1, 1)):
                break
            try:
                self.jump(connection, int(self.random.choice(self.jumps) * 1_000_000))
                if self.options.kill and time.monotonic() > next_kill:
                    next_kill = time.monotonic() + self.random.uniform(2, 6)
                    self.kill_somebody()
            except ConnectionLost:
                connection = server.connect(patience=60)
        connection.close()

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
            pid = chance.choice(sorted(self.world.pids.values()) or [0])
            if server.is_backend(pid) and server.freeze(pid, chance.uniform(0.001, 0.04)):
                self.world.count('freeze')

    def kill_somebody(self):
        pid = self.random.choice(sorted(self.world.pids.values()))
        self.world.kills.append(now())
        if server.kill(pid, self.options.kill_command):
            self.world.count('kill')

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
        self.maintain()
        invariants.look(world, self.watcher)
        self.compare()
        self.drain(closer)
        self.jump(self.watcher, FINAL_JUMP)
        for connection in (self.watcher, closer.connection):
            server.wait_for_clock(connection, world.jumps[-1][1])
        self.drain(closer)
        self.maintain()
        invariants.look(world, self.watcher)
        self.compare()
        self.nothing_left()
        closer.connection.close()
        self.watcher.close()

    def maintain(self):
        server.query(self.watcher, 'SELECT outbox.maintain()')

    def compare(self):
        invariants.compare_status(self.world, self.watcher)
        check.Comparison(self.world, self.watcher, self.preloaded).run()

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


def tell(world):
    finding = world.failure
    print(f'\nFINDING, seed {world.seed}: rule {finding.rule}: {finding}')
    if finding.message_id:
        print(f'history of message {finding.message_id}:')
        print(check.tell_history(world, finding.message_id))


def missing_moves(options, world, moves_made):
    needed = NEEDED + (['kill', 'transaction cut off'] if options.kill else ['single statement'])
    if world.max_prepared:
        needed += ['prepare', 'commit prepared', 'rollback prepared']
    return [m for m in needed if not moves_made[m]]


def main():
    options = parse_options()
    total, checks, rounds = collections.Counter(), 0, 0
    end = time.monotonic() + options.seconds
    started = time.monotonic()
    print(f'seed {options.seed}, {options.sessions} sessions', flush=True)
    while rounds == 0 or time.monotonic() < end - 3:
        this = Round(options, options.seed + rounds, min(options.round, max(3, end - time.monotonic())))
        this.run()
        world = this.world
        rounds += 1
        total.update(world.moves)
        checks += world.checks
        print(f'round {rounds}, seed {world.seed}: {len(world.messages)} messages, {world.moves.total()} moves, '
              f'{world.checks} checks, {time.monotonic() - started:.0f} s', flush=True)
        if world.failure is not None:
            tell(world)
            return 1
    server.change_settings()
    if not options.keep:
        server.drop_database()
    for move, n in sorted(total.items()):
        print(f'{n:9d} {move}')
    missing = missing_moves(options, world, total)
    if options.seconds >= 30 and missing:
        print(f'moves that never happened: {", ".join(missing)}')
        return 1
    print(f'{checks} checks passed')
    return 0


if __name__ == '__main__':
    sys.exit(main())
