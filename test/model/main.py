# The model check: options, and what is printed.  test/model/run starts it; README.md explains it.
import argparse
import collections
import faulthandler
import secrets
import signal
import sys
import time

import check
import disturbances
import server
from cluster import Cluster
from copies import Copy
from round import Round

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
# One of two minutes, whose rounds differ.
NEEDED_FOR_LONGER = [
    'copy by dump', 'copy by template', 'purge', 'segment emptied', 'messages have left', 'old snapshot',
    'held open for long', 'enqueue of an id that has left', 'requeue beside a condemned segment',
]
NEEDED_WITH_WORKERS = ['drain', 'deliver', 'register_hook created', 'register_hook altered', 'unregister',
                       'claim of a pushed one', 'effect by a worker', 'effect by a session', 'notification']
MORE_ROUNDS = 4     # at most, where a move has not happened in the time
LONG = 300          # seconds, after which everything has been done to the server too


def parse_options():
    parser = argparse.ArgumentParser(prog='test/model/run')
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--seed', type=int)
    parser.add_argument('--sessions', type=int, default=8)
    parser.add_argument('--round', type=float, default=15)
    parser.add_argument('--workers', action='store_true')
    parser.add_argument('--kill', action='store_true')
    parser.add_argument('--kill-command')
    parser.add_argument('--keep', action='store_true')
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    return options


def tell(world):
    finding = world.failure
    print(f'\nFINDING, seed {world.seed}: rule {finding.rule}: {finding}')
    if finding.message_id:
        print(f'history of message {finding.message_id}:')
        print(check.tell_history(world, finding.message_id))


def missing_moves(options, world, moves_made):
    needed = NEEDED + (['crash', 'transaction cut off'] if options.kill else ['single statement'])
    if options.seconds >= 120:
        needed += NEEDED_FOR_LONGER
        if not options.kill:        # it takes seconds
            needed += ['purge of what is settled']
    if options.workers:
        needed += NEEDED_WITH_WORKERS
        if options.seconds > LONG:
            needed += disturbances.STOPS
            if options.kill:
                needed += [*disturbances.CRASHES, *disturbances.RESTARTS, *disturbances.TRAPS]
    if world.max_prepared:
        needed += ['prepare', 'commit prepared', 'rollback prepared']
    return [m for m in needed if not moves_made[m]]


def main():
    options = parse_options()
    faulthandler.register(signal.SIGUSR1)       # tells where all threads are
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended by SIGTERM'))
    if not options.workers:
        return run(options, None)
    cluster = Cluster()
    status = 1
    try:
        status = run(options, cluster)
    finally:
        cluster.end()
        if status and options.keep:
            print(f'the cluster is in {cluster.folder}')
        else:
            if status:
                cluster.tell_log()
            cluster.remove()
    return status


def run(options, cluster):
    total, checks, rounds = collections.Counter(), 0, 0
    end = time.monotonic() + options.seconds
    started = time.monotonic()
    print(f'seed {options.seed}, {options.sessions} sessions', flush=True)
    more = 0            # rounds for what chance has left out
    while rounds == 0 or time.monotonic() < end - 3 or more:
        left = end - time.monotonic()
        this = Round(options, options.seed + rounds, options.round if more else min(options.round, max(3, left)), cluster)
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
        missing = missing_moves(options, world, total) if options.seconds >= 30 else []
        more = more + 1 if missing and time.monotonic() >= end - 3 and more < MORE_ROUNDS else 0
    server.change_settings()
    if not options.keep:
        server.drop_database()
        Copy.drop()
    for move, n in sorted(total.items()):
        print(f'{n:9d} {move}')
    if missing:
        print(f'moves that never happened: {", ".join(missing)}')
        return 1
    print(f'{checks} checks passed')
    return 0


if __name__ == '__main__':
    sys.exit(main())
