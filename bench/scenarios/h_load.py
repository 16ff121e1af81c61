"""Under load: fan-out to 1, 4, 16 consumers; messages that fail once; producers beside consumers, with the rate over time.

Fan-out: each of several subscriptions gets every message. Enqueueing must not feel it, and delivering must cost as much
as is delivered. Failing: one message in a hundred fails once and is tried again. The flat line: 16 producers beside 16
consumers for five minutes (quick: 6 s), autovacuum running; peers for half a minute. With synchronous_commit off.
"""
import contextlib
import time

from harness import pgbench
from harness.peer import NotHere
from harness.server import payload

TITLE = 'fan-out, failures, and a steady load'
SETTINGS = {'synchronous_commit': 'off'}


def run(bench):
    fan_out(bench)
    bench.each([bench.outbox], lambda peer: failing(bench, peer))
    bench.each(bench.peers, lambda peer: steady(bench, peer))


def fan_out(bench):
    counts = (1, 4, 16)
    with contextlib.ExitStack() as stack:
        databases = {}

        def create(peer):
            for count in counts:
                db = stack.enter_context(bench.server.database(peer.name))
                peer.create(db)
                peer.subscribers(db, count)
                databases[(peer, (('subscriptions', count),))] = db
        bench.each(bench.peers, create)

        def tps(db, peer):
            return lambda: pgbench.run(bench, db, peer.enqueue(), 1, bench.pick(1, 2), variables={'payload': payload(250)}).tps

        def deliver(db, peer, count):
            return lambda: delivered(bench, db, peer, count)
        bench.interleave('enqueue', 'messages/s', {key: tps(db, key[0]) for key, db in databases.items()})
        variants = {key: deliver(db, key[0], dict(key[1])['subscriptions']) for key, db in databases.items()}
        bench.interleave('deliver', 'deliveries/s', variants, bench.pick(1, 2))


def delivered(bench, db, peer, count):
    """Deliveries per second of one consumer at a time, each of them taking all the messages."""
    messages = bench.pick(10000, 20000)
    name = db.input(1000, 250)
    pgbench.run(bench, db, pgbench.loading(name) + peer.bulk(), transactions=messages // 1000, variables={'loaded': 0})
    peer.settled_down(db)
    done, seconds = 0, 0.0
    for number in range(count):
        rate = peer.consume_as(db, number, 100, messages)
        done += rate.messages
        seconds += rate.seconds
    return done / seconds


FAIL = """\\set attempts 0
select id, claim_token as token, attempts, payload from outbox.claim_batch(100) \\aset
\\if :attempts = 1
select outbox.settle(:id, :token, 'failed', error => 'bad luck', retry_at => now());
\\endif
\\if :attempts > 0
select outbox.settle_batch(:token);
\\endif
"""
# the claim that takes one message only has to settle nothing more
ALL_WELL = FAIL.replace("'failed', error => 'bad luck', retry_at => now()", "'delivered'")


def failing(bench, peer):
    messages = bench.pick(10000, 100000)
    with contextlib.ExitStack() as stack:
        databases = {kind: stack.enter_context(bench.server.database(peer.name)) for kind in ('none', 'one in 100')}
        for db in databases.values():
            peer.create(db)
            peer.fill(db, 2 * messages * bench.pick(2, 3))

        def rate(kind):
            def work():
                db = databases[kind]
                before = peer.settled(db)
                run = pgbench.run(bench, db, ALL_WELL if kind == 'none' else FAIL, transactions=messages // 100)
                return (peer.settled(db) - before) / run.seconds
            return work
        bench.interleave('failing', 'messages/s', {(peer, (('failures', kind),)): rate(kind) for kind in databases}, bench.pick(2, 3))


def steady(bench, peer):
    """Nobody is held back but for a short pause after each claim: what is not consumed is backlog."""
    try:
        claim = peer.claim(100)
    except NotImplementedError:
        raise NotHere('consumed by a library that claims by itself: no pgbench script for many consumers') from None
    seconds = bench.pick(6, 300 if peer is bench.outbox else 30)
    step = bench.pick(1, 5)
    claim = claim + '\\sleep 5 ms\n'
    with bench.server.database(peer.name) as db:
        peer.create(db)
        with peer.background(db):
            producers = pgbench.start(bench, db, peer.enqueue(), 16, seconds + 2, variables={'payload': payload(250)})
            count = 16 if peer.shares_queue else 1
            consumers = pgbench.start(bench, db, claim, count, seconds + 2)
            series = watch(peer, db, seconds, step)
            enqueued = pgbench.finish(*producers)
            pgbench.finish(*consumers)
            rates = [rate for _, rate in series]
            fifth = max(1, len(rates) // 5)
            bench.add('steady', peer, 'messages/s', rates, series, producers=16, consumers=count)
            bench.add('steady, enqueued', peer, 'messages/s', [enqueued.tps])
            bench.add('steady, last fifth by first', peer, 'x', [(sum(rates[-fifth:]) / fifth) / max(1e-9, sum(rates[:fifth]) / fifth)])
            bench.add('steady, size', peer, 'B', [db.size()])


def watch(peer, db, seconds, step):
    """Messages settled per second, every few seconds; the first step is warming up."""
    series = []
    time.sleep(step)
    last, before = peer.settled(db), time.monotonic()
    begin = before
    while before - begin < seconds - 2 * step:
        time.sleep(step)
        now, at = peer.settled(db), time.monotonic()
        series.append([round(at - begin, 1), (now - last) / (at - before)])
        last, before = now, at
    return series
