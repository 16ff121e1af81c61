"""WAL and table bytes per message over its whole life, without full-page images: their number depends on checkpoints only.

Enqueued one message per transaction by four clients, claimed and settled in batches of 100 by one consumer, then
maintained. Autovacuum is off meanwhile, and done at the end. The parts are measured without any background work, so that
they can be told apart; the whole as installed.
"""
from harness import pgbench
from harness.server import payload

TITLE = 'WAL and table bytes per message'
BATCH = 100
WARM_UP = 400


def run(bench):
    with bench.server.settings(full_page_writes='off', autovacuum='off'):
        bench.each(bench.peers, lambda peer: parts(bench, peer))
        bench.each(bench.peers, lambda peer: whole(bench, peer))


def enqueue(bench, peer, db, messages):
    pgbench.run(bench, db, peer.enqueue(), 4, transactions=messages // 4, variables={'payload': payload(250)},
                options='-c synchronous_commit=off')


def warm_up(bench, peer, db):
    enqueue(bench, peer, db, WARM_UP)
    peer.settled_down(db)
    peer.drain(db, BATCH, WARM_UP)


def messages_of(bench, peer):
    """Fewer for those that are slow: bytes are the same in each run."""
    return bench.pick(8000, 40000 if peer.rounds > 2 else 10000)


def parts(bench, peer):
    messages = messages_of(bench, peer)
    with peer.quiet(), bench.server.database(peer.name) as db:
        peer.create(db)
        warm_up(bench, peer, db)
        marks = [bench.server.wal()]

        def mark(part):
            marks.append(bench.server.wal())
            bench.add('wal', peer, 'B/message', [(marks[-1] - marks[-2]) / messages], part=part)
        enqueue(bench, peer, db, messages)
        mark('enqueue')
        if peer.batches_by_fill:
            peer.fill(db, messages, BATCH)
            marks.append(bench.server.wal())
        else:
            peer.settled_down(db)
            mark('route')
        peer.drain(db, BATCH, messages)
        mark('claim and settle')
        peer.maintain(db)
        mark('maintain')


def whole(bench, peer):
    messages = messages_of(bench, peer)
    with bench.server.database(peer.name) as db:
        peer.create(db)
        with peer.background(db):
            warm_up(bench, peer, db)
            peer.maintain(db)
            wal, size = bench.server.wal(), db.size()
            enqueue(bench, peer, db, messages)
            peer.settled_down(db)
            peer.drain(db, BATCH, messages)
            peer.maintain(db)
            bench.add('whole', peer, 'B/message', [(bench.server.wal() - wal) / messages])
            bench.add('table', peer, 'B/message', [(db.size() - size) / messages])
