"""Claim and settle, each in a transaction of its own, of a backlog of 200,000 messages (quick: 20,000).

The backlog is filled up, vacuumed and analysed before each measurement, and each case has a warm-up, which also says how
many messages are about a second's work. A consumer fetches id and payload of what it has claimed. Batches are settled
whole, and in another measurement message by message. With synchronous_commit off, so that the disk does not hide what the
queue costs; the cases that have goals again with it on.
"""
import contextlib

TITLE = 'claim and settle'
# batch and consumers; the first ones are those that have goals
GOALS = [(100, 1), (100, 4), (1000, 1), (1, 4)]
OTHERS = [(1, 1), (1, 8), (10, 1), (10, 4), (10, 8), (100, 8), (1000, 4), (1000, 8)]
EACH = [(100, 1), (100, 4), (100, 8)]


def run(bench):
    with contextlib.ExitStack() as stack:
        queues = {}

        def create(peer):
            db = stack.enter_context(bench.server.database(peer.name))
            peer.create(db)
            queues[peer] = Queue(bench, peer, db)
        bench.each(bench.peers, create)
        some = {peer: queue for peer, queue in queues.items() if peer.rounds > 2}
        with bench.server.settings(synchronous_commit='off'):
            for case in GOALS:
                measure(bench, queues, case, 'off', False, bench.pick(2, 4))
            measure(bench, queues, EACH[0], 'off', True, bench.pick(2, 4))
            for case in bench.pick([], EACH[1:]):
                measure(bench, queues, case, 'off', True, 1)
            for case in bench.pick([], OTHERS):
                measure(bench, some, case, 'off', False, 1)
        for case in bench.pick([], GOALS):
            measure(bench, some, case, 'on', False, 1)


def measure(bench, queues, case, commit, each, rounds):
    batch, consumers = case
    bench.interleave('claim', 'messages/s', {(peer, ()): work(bench, queue, batch, consumers, each) for peer, queue in queues.items()},
                     rounds, batch=batch, consumers=consumers, commit=commit, settle='each' if each else 'batch')


def work(bench, queue, batch, consumers, each):
    """What interleave() calls each round; the first time it warms up."""
    least = 5 * batch * consumers
    state = {}

    def once():
        if each:
            queue.peer.check_each()
        if not state:
            rate = queue.consume(batch, consumers, max(least, 200), each)
            wanted = int(rate.per_second * bench.pick(0.5, 1))
            state['messages'] = min(max(wanted, least), queue.backlog * 3 // 4) // (batch * consumers) * batch * consumers
        return queue.consume(batch, consumers, state['messages'], each).per_second
    return once


class Queue:
    """A peer's queue, and how many messages wait in it."""

    def __init__(self, bench, peer, db):
        self.peer = peer
        self.db = db
        self.backlog = bench.pick(20000, 200000)
        self.held = 0

    def consume(self, batch, consumers, messages, each):
        self.top_up(batch, consumers, messages)
        rate = self.peer.consume(self.db, batch, consumers, messages, each)
        self.held -= rate.messages
        if rate.messages < messages * 0.8:
            raise RuntimeError(f'settled {rate.messages} of {messages} messages')
        return rate

    def top_up(self, batch, consumers, messages):
        """Where filling fixes the batches, all of them are new, and no more than the case can take."""
        backlog = max(self.backlog, messages * 5 // 4)
        if self.peer.batches_by_fill:
            self.peer.fill(self.db, messages * 5 // 4 if batch < 100 else backlog, batch, consumers)
        elif self.held < backlog:
            self.peer.fill(self.db, backlog - self.held, batch, consumers)
            self.held = backlog
        self.peer.maintain(self.db)
