"""Enqueue 100, claim 100, settle 100 in a loop, while another session holds a snapshot, so that VACUUM removes nothing.

In the variant "writer" the other session is not a reader but a transaction that has itself enqueued and stays open. The
control is the same loop with nobody else. outbox goes on to 2,000,000 messages (quick: 40,000), peers to 200,000 (10,000)
or as far as they get in their time. A minute lies between outbox's first tenth and its last, in which the machine may have
become slower or faster: so the two go by quarters of windows, each followed by one of the control, in a database that begins
anew with that tenth, and are compared by what they reach of it (medians). With synchronous_commit off, and without
checkpoints meanwhile: the WAL of 2,000,000 messages would begin one in the middle and another in the last tenth, and none in
the first, with which that is compared.
"""
import time

from harness.peer import NotHere
from harness.server import payload

TITLE = 'behind an open snapshot'
SETTINGS = {'synchronous_commit': 'off', 'max_wal_size': '16GB', 'checkpoint_timeout': '1h'}
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
        if peer is bench.outbox and other:
            tenth = windows // 10
            series = beside_control(bench, peer, db, window // 4, range(4 * tenth), name, 'first', variant)
            series += pass_windows(peer, db, window, range(tenth, windows - tenth), limit, name)
            done = 4 * series[-1][0] // window
            series += beside_control(bench, peer, db, window // 4, range(done, done + 4 * tenth), name, 'last', variant)
        else:
            series = pass_windows(peer, db, window, range(windows), limit, name)
        if other:
            other.rollback()
            other.close()
        rates = [rate for _, rate in series]
        # the windows of a tenth: they are smaller beside a control
        tenth = max(1, sum(passed <= series[-1][0] / 10 for passed, _ in series))
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


def beside_control(bench, peer, db, window, numbers, name, which, variant):
    """The windows of a tenth, each followed by one of the control."""
    series, shares = [], []
    with bench.server.database(peer.name) as control:
        peer.create(control)
        control.input(BATCH, 250)
        peer.run_loop(control, BATCH, 20 * BATCH, name)
        for number in numbers:
            series += pass_windows(peer, db, window, [number], 0, name)
            shares.append(series[-1][1] / peer.run_loop(control, BATCH, window, name).per_second)
    bench.add(f'{which} tenth against control', peer, '×', shares, variant=variant)
    return series


def pass_windows(peer, db, window, numbers, limit, name):
    """The rate of each window, with the number of messages that have passed."""
    series = []
    begin = time.monotonic()
    for number in numbers:
        series.append([(number + 1) * window, peer.run_loop(db, BATCH, window, name).per_second])
        if time.monotonic() - begin > limit:
            break
    if not series:
        raise NotHere('nothing passed')
    return series
