"""Enqueue, one message per transaction: clients, synchronous_commit on and off, 250 bytes and 8 kB, against a bare INSERT.

And inside a business transaction of pgbench's TPC-B kind, against the same transaction without it, in the same database.
"""
import contextlib

from harness import pgbench
from harness.server import payload

TITLE = 'enqueue, one message per transaction'

TPCB = """\\set aid random(1, 100000 * :scale)
\\set bid random(1, 1 * :scale)
\\set tid random(1, 10 * :scale)
\\set delta random(-5000, 5000)
begin;
update pgbench_accounts set abalance = abalance + :delta where aid = :aid;
select abalance from pgbench_accounts where aid = :aid;
update pgbench_tellers set tbalance = tbalance + :delta where tid = :tid;
update pgbench_branches set bbalance = bbalance + :delta where bid = :bid;
insert into pgbench_history (tid, bid, aid, delta, mtime) values (:tid, :bid, :aid, :delta, current_timestamp);
{enqueue}end;
"""


def run(bench):
    with contextlib.ExitStack() as stack:
        databases = prepare(bench, stack, [bench.floor] + bench.peers)
        for size in bench.pick([250], [250, 8000]):
            for clients, commit in combinations(bench, size):
                measure(bench, databases, clients, commit, size)
    with contextlib.ExitStack() as stack:
        business(bench, stack)


def combinations(bench, size):
    if size > 1000:
        return [(4, 'on'), (4, 'off')]
    return bench.pick([(4, 'off'), (4, 'on')],
                      [(clients, commit) for clients in (4, 1, 8, 32) for commit in ('off', 'on')])


def prepare(bench, stack, peers):
    databases = {}

    def create(peer):
        db = stack.enter_context(bench.server.database(peer.name))
        peer.create(db)
        stack.enter_context(peer.background(db))
        pgbench.run(bench, db, peer.enqueue(), 4, seconds=1, variables={'payload': payload(250)})
        databases[peer] = db
    bench.each(peers, create)
    return databases


def measure(bench, databases, clients, commit, size):
    seconds = bench.pick(1, 2 if clients == 4 else 1)
    variables = {'payload': payload(size)}
    options = f'-c synchronous_commit={commit}'

    def tps(peer, db):
        return lambda: pgbench.run(bench, db, peer.enqueue(), clients, seconds, variables=variables, options=options).tps
    bench.interleave('enqueue', 'messages/s', {(peer, ()): tps(peer, db) for peer, db in databases.items()},
                     rounds=None if clients == 4 and size == 250 else 2, clients=clients, commit=commit, size=size)


def business(bench, stack):
    """The floor is a bare INSERT in the same place: what any row more costs."""
    scale = bench.pick(5, 20)
    names = bench.pick(('outbox',), ('outbox', 'floor', 'textbook'))
    peers = [peer for peer in [bench.floor] + bench.peers if peer.name in names]
    databases = prepare(bench, stack, peers)
    for db in databases.values():
        initialise(bench, db, scale)
    for commit in ('off', 'on'):
        variants = {}
        for peer, db in databases.items():
            variants[(peer, (('enqueues', False),))] = tpcb(bench, db, '', commit, scale)
            variants[(peer, (('enqueues', True),))] = tpcb(bench, db, peer.enqueue(), commit, scale)
        bench.interleave('tpcb', 'transactions/s', variants, clients=4, commit=commit)


def initialise(bench, db, scale):
    import subprocess
    subprocess.run(['pgbench', '-i', '-q', '-s', str(scale), db.name], check=True, capture_output=True)
    pgbench.run(bench, db, TPCB.format(enqueue=''), 4, seconds=1, variables={'scale': scale})


def tpcb(bench, db, enqueue, commit, scale):
    variables = {'scale': scale, 'payload': payload(250)}
    return lambda: pgbench.run(bench, db, TPCB.format(enqueue=enqueue), 4, bench.pick(1, 2), variables=variables,
                               options=f'-c synchronous_commit={commit}').tps
