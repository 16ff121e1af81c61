"""Enqueue 100, claim 100, settle 100 in a loop, while another session holds a snapshot, so that VACUUM removes nothing.

In the variant "writer" the other session is not a reader but a transaction that has itself enqueued and stays open. The
control is the same loop with nobody else. outbox goes on to 2,000,000 messages (quick: 40,000), peers to 200,000 (10,000)
or as far as they get in their time. With synchronous_commit off.
"""
import time

from harness.peer import NotHere
from harness.server import payload

TITLE = 'behind an open snapshot'
SETTINGS = {'synchronous_commit': 'off'}
BATCH = 100


def run(bench):
    window = bench.pick(2000, 20000)
    for variant in ('control', 'snapshot', 'writer'):
        bench.each(bench.peers, lambda peer: measure(bench, peer, variant, window), variant=variant)


def measure(bench, peer, variant, window):
    if peer is bench.outbox:
        windows, limit = (10, 60) if variant == 'control' else (bench.pick(20, 100), 300)
    else:
        limit = {'control': 20, 'snapshot': 60, 'writer': 20}[variant]
        windows, limit = bench.pick((5, 6), (10, limit if peer.rounds > 2 else limit // 2))
    with bench.server.database(peer.name) as db:
        peer.create(db)
        name = db.input(BATCH, 250)
        peer.run_loop(db, BATCH, 20 * BATCH, name)
        peer.maintain(db)
        other = hold(peer, db, variant)
        series = pass_windows(peer, db, window, windows, limit, name)
        if other:
            other.rollback()
            other.close()
        rates = [rate for _, rate in series]
        tenth = max(1, len(rates) // 10)
        params = {'variant': variant}
        bench.add('loop', peer, 'messages/s', rates, series, messages=series[-1][0], **params)
        bench.add('first tenth', peer, 'messages/s', [sum(rates[:tenth]) / tenth], **params)
        bench.add('last tenth', peer, 'messages/s', [sum(rates[-tenth:]) / tenth], **params)
        bench.add('size', peer, 'B', [db.size()], **params)


def hold(peer, db, variant):
    """The session that stays open, if there is one."""
    if variant == 'control':
        return None
    other = db.connect()
    other.autocommit = False
    cursor = other.cursor()
    if variant == 'snapshot':
        cursor.execute('set transaction isolation level repeatable read')
        cursor.execute('select 1')
    else:
        cursor.execute(peer.enqueue().replace(':payload', '%s').rstrip(';\n'), (payload(250),))
    return other


def pass_windows(peer, db, window, windows, limit, name):
    """The rate of each window, with the number of messages that have passed."""
    series = []
    begin = time.monotonic()
    for number in range(windows):
        series.append([(number + 1) * window, peer.run_loop(db, BATCH, window, name).per_second])
        if time.monotonic() - begin > limit:
            break
    if not series:
        raise NotHere('nothing passed')
    return series
