"""Claim and settle, each in a transaction of its own, of a backlog of 200,000 messages (quick: 20,000).

The backlog is filled up, vacuumed and analysed before each measurement. A consumer fetches id and payload of what it has
claimed. Batches are settled whole, and in another measurement message by message. With synchronous_commit off, so that the
disk does not hide what the queue costs; the cases that have goals again with it on.
"""
import contextlib

TITLE = 'claim and settle'
# batch, consumers, and how many messages of the backlog are taken; the first ones are those that have goals
GOALS = [(100, 1, 150000), (100, 4, 150000), (1000, 1, 150000), (1, 4, 12000)]
OTHERS = [(1, 1, 6000), (1, 8, 12000), (10, 1, 40000), (10, 4, 40000), (10, 8, 40000), (100, 8, 150000), (1000, 4, 160000),
          (1000, 8, 160000)]
EACH = [(100, 1, 8000), (100, 4, 16000), (100, 8, 16000)]
BACKLOG = 200000
QUICK = 10


def run(bench):
    with contextlib.ExitStack() as stack:
        databases = {}

        def create(peer):
            db = stack.enter_context(bench.server.database(peer.name))
            peer.create(db)
            databases[peer] = db
        bench.each(bench.peers, create)
        held = {peer: 0 for peer in databases}
        with bench.server.settings(synchronous_commit='off'):
            for case in GOALS:
                measure(bench, databases, held, *case, 'off', False, bench.pick(2, 5))
            for case in bench.pick(EACH[:1], EACH):
                measure(bench, databases, held, *case, 'off', True, bench.pick(2, 3))
            for case in bench.pick([], OTHERS):
                measure(bench, databases, held, *case, 'off', False, 2)
        for case in bench.pick([], GOALS):
            measure(bench, databases, held, *case, 'on', False, 2)


def measure(bench, databases, held, batch, consumers, messages, commit, each, rounds):
    backlog = BACKLOG // bench.pick(QUICK, 1)
    messages = messages // bench.pick(QUICK, 1)
    if messages // batch // consumers < 5:
        messages = batch * consumers * 5

    def once(peer, db):
        def work():
            if each:
                peer.check_each()
            top_up(bench, peer, db, held, max(backlog, messages * 5 // 4), batch, consumers, messages)
            rate = peer.consume(db, batch, consumers, messages, each)
            held[peer] -= rate.messages
            if rate.messages < messages * 0.8:
                raise RuntimeError(f'settled {rate.messages} of {messages} messages')
            return rate.per_second
        return work
    bench.interleave('claim', 'messages/s', {(peer, ()): once(peer, db) for peer, db in databases.items()}, rounds, batch=batch,
                     consumers=consumers, commit=commit, settle='each' if each else 'batch')


def top_up(bench, peer, db, held, backlog, batch, consumers, messages):
    """Where filling fixes the batches, all of them are new."""
    if peer.batches_by_fill:
        peer.fill(db, messages * 5 // 4 if batch == 1 else backlog, batch, consumers)
    elif held[peer] < backlog:
        peer.fill(db, backlog - held[peer], batch, consumers)
        held[peer] = backlog
    peer.maintain(db)
