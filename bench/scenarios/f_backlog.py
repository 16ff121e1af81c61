"""Backlogs of 1 thousand to 10 million (quick: 30 thousand): latency of claim(10) and of its settlement; time of the status.

The consumer has prepared its statements while the queue was empty, which was analysed then and not since: autovacuum comes
when it comes, here never. "before" is measured so, "after" behind an ANALYZE, by the same consumer. The backlogs, each in
a database of its own, are measured in turn. Peers go up to a million (PgQ and those filled by a library to 100
thousand) and have two rounds: a claim that sorts all of it takes a second and more. With synchronous_commit off.
"""
import contextlib
import time

from harness.peer import NotHere
from harness.results import percentile

TITLE = 'latency of claim(10) by backlog'
SETTINGS = {'synchronous_commit': 'off', 'autovacuum': 'off'}
CLAIM = 10


def run(bench):
    bench.each(bench.peers, lambda peer: measure(bench, peer))


def backlogs(bench, peer):
    if bench.quick:
        return [1000, 30000]
    if peer is bench.outbox:
        return [1000, 100000, 1000000, 10000000]
    # to fill a million in tens takes PgQ, and those filled by a library, too long
    return [1000, 100000] if peer.batches_by_fill or peer.rounds <= 2 else [1000, 100000, 1000000]


def measure(bench, peer):
    with contextlib.ExitStack() as stack:
        queues = {}
        for backlog in backlogs(bench, peer):
            db = stack.enter_context(bench.server.database(peer.name))
            peer.create(db)
            db.run('analyze')
            probe = peer.probe(db)
            stack.callback(probe.close)
            probe.warm(CLAIM)
            peer.fill(db, backlog, CLAIM)
            queues[backlog] = (db, probe)
        for state in ('before', 'after'):
            if state == 'after':
                for db, _ in queues.values():
                    db.run('analyze')
            in_turn(bench, peer, queues, state)
        for backlog, (db, _) in queues.items():
            status(bench, peer, db, backlog)


def in_turn(bench, peer, queues, state):
    """Some hundred claims of each backlog, round by round."""
    found = {}
    for _ in range(bench.rounds if peer is bench.outbox else min(2, bench.rounds)):
        for backlog, (db, probe) in queues.items():
            for what, values in zip(('claim', 'settle'), sample(bench, peer, db, probe, backlog)):
                found.setdefault((what, 'median', backlog), []).append(percentile(values, 0.5))
                found.setdefault((what, 'p99', backlog), []).append(percentile(values, 0.99))
    for (what, which, backlog), values in found.items():
        bench.add(f'latency of {what}, {which}', peer, 'ms', values, backlog=backlog, analyze=state)


def sample(bench, peer, db, probe, backlog):
    """What was taken is filled up again before it is a tenth of the backlog; slow claims are sampled for some seconds only."""
    claims, settlements, taken = [], [], 0
    times = bench.pick(100, 300)
    end = time.monotonic() + bench.pick(1, 3)
    while len(claims) < times and (time.monotonic() < end or len(claims) < 20):
        chunk = min(20, times - len(claims), max(1, backlog // CLAIM // 4))
        more = probe.measure(CLAIM, chunk)
        claims += more[0]
        settlements += more[1]
        taken += chunk * CLAIM
        if taken * 10 > backlog:
            peer.fill(db, backlog if peer.batches_by_fill else taken, CLAIM)
            taken = 0
    return claims, settlements


def status(bench, peer, db, backlog):
    try:
        query = peer.status()
    except NotHere as reason:
        bench.results.skip('f', peer.name, str(reason))
        return
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        db.run(query)
        took.append(1000 * (time.perf_counter() - begin))
    bench.add('status', peer, 'ms', took, backlog=backlog)
