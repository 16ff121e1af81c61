"""Enqueue in bulk: 1,000 messages in one statement and transaction, against INSERT ... SELECT into a table as wide.

With synchronous_commit off.
"""
import contextlib

from harness import pgbench

TITLE = 'enqueue in bulk, 1,000 messages per call'
SETTINGS = {'synchronous_commit': 'off'}
COUNT = 1000


def run(bench):
    with contextlib.ExitStack() as stack:
        variants = {}

        def create(peer):
            db = stack.enter_context(bench.server.database(peer.name))
            peer.create(db)
            script = pgbench.loading(db.input(COUNT, 250)) + peer.bulk()
            stack.enter_context(peer.background(db))
            pgbench.run(bench, db, script, transactions=20, variables={'loaded': 0})
            variants[(peer, ())] = lambda: COUNT * bulk(bench, db, script, bench.pick(1, 2)).tps
        bench.each([bench.floor] + bench.peers, create)
        bench.interleave('bulk', 'messages/s', variants, clients=1, size=250)


def bulk(bench, db, script, seconds):
    return pgbench.run(bench, db, script, seconds=seconds, variables={'loaded': 0})
