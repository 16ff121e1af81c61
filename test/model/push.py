# Pushed subscriptions: hooks and a NOTIFY handler, and the moves that go with them.
#
# Three of them: "hooked" belongs to the superuser, its handlers come and go, drain() and deliver() work on it as well
# as the workers; "guarded" has one hook of another role, which only workers call; "told" is notified about.
import contextlib
import os

import psycopg2

import operators
import server
from model import Aborted, Event, Finding, Subscription, now
from server import ConnectionLost

ROLE = 'outbox_model_pusher'
CHANNEL = 'outbox_model'
LEASE = 8_000

HOOKED = Subscription('hooked', 'order.#', lease=LEASE, max_active=60_000, static=True)
GUARDED = Subscription('guarded', '#.created', 'event', lease=LEASE, max_active=60_000, max_attempts=4, static=True)
TOLD = Subscription('told', 'invoice.#', lease=LEASE, max_active=60_000, static=True)
PUSHED = (HOOKED, GUARDED, TOLD)

SETUP = f"""
    GRANT pg_write_server_files, pg_execute_server_program, pg_read_server_files, pg_read_all_settings TO {ROLE};
    GRANT USAGE ON SCHEMA model TO {ROLE};
    GRANT SELECT ON model.mood TO {ROLE};
    GRANT INSERT ON model.effect TO {ROLE};
    GRANT EXECUTE ON FUNCTION pg_stat_file(text, boolean) TO {ROLE};
    SELECT outbox.grant_access('{ROLE}', kind) FROM unnest('{{producer,consumer,reader}}'::text[]) AS kind;
"""
PLANS = ['failed'] * 60 + ['dead'] * 15 + ['later'] * 40 + ['slow', 'stuck'] + ['done'] * 383
FOLLOWED = 0.05

REGISTER = """outbox.register_hook(name_pattern => %s, function => %s, subscription => %s, timeout => %s::interval,
    max_attempts => %s, retry => %s::interval[], replace => %s) AS r"""
RETRY = '{50 ms}'
PATTERNS = ('#', '#', 'order.#', 'order.created', 'order.*')


def prepare(connection, world, asynchronous):
    """Makes hooks and handlers; the subscriptions are there."""
    with open(os.path.join(os.path.dirname(__file__), 'hook.sql'), encoding='utf-8') as file:
        server.query(connection, file.read())
    if not server.query(connection, 'SELECT 1 FROM pg_roles WHERE rolname = %s', (ROLE,)):
        server.query(connection, f'CREATE ROLE {ROLE} LOGIN')
    server.query(connection, SETUP)
    server.query(connection, 'INSERT INTO model.mood VALUES (%s, %s, %s)', (world.folder, PLANS, FOLLOWED))
    if asynchronous:        # workers commit what hooks did without a flush
        server.query(connection, f'ALTER DATABASE {server.DATABASE} SET synchronous_commit = off')
    register_always(connection, HOOKED)
    server.query(connection, f'SET ROLE {ROLE}')
    register_always(connection, GUARDED)
    server.query(connection, 'RESET ROLE')
    server.query(connection, 'SELECT outbox.register_notify(%s, %s, subscription => %s)', ('#', CHANNEL, TOLD.name))


def register_always(connection, subscription):
    server.query(connection, 'SELECT r FROM ' + REGISTER,
                 ('#', 'model.hook', subscription.name, '2 s', None, RETRY, True))


def calm_down(connection):
    """From now on no hook fails, and there is one for everything."""
    server.query(connection, 'UPDATE model.mood SET plans = %s', (['done'],))
    register_always(connection, HOOKED)


# Moves in a transaction

def hooked(world):
    return next(s for s in world.pushed if s.name == HOOKED.name)


def register(session, txn):
    rnd, subscription = session.random, hooked(session.world)
    limit = rnd.choice((None, None, 2, 4))
    if limit:
        subscription.limits.add(limit)
    event = Event(txn, 'register', subscription)
    rows = session.call(event, 'r', REGISTER, (
        rnd.choice(PATTERNS), rnd.choice(('model.hook', 'model.other_hook')), subscription.name,
        rnd.choice((None, '2 s')), limit, RETRY, rnd.random() < 0.7), ('42710',))
    session.world.count(f'register_hook {rows[0][0]}')


def unregister(session, txn):
    event = Event(txn, 'unregister', hooked(session.world))
    rows = session.call(event, 'r', 'outbox.unregister(%s, %s) AS r',
                        (session.random.choice(PATTERNS), event.subscription.name))
    if rows[0][0]:
        session.world.count('unregister')


def deliver(session, txn):
    """What its hooks begin counts when the transaction commits."""
    event = Event(txn, 'deliver', hooked(session.world), answer=None)
    session.execute("SELECT set_config('model.by', %s, true)", (str(event.number),))
    rows = session.call(event, 'r.claimed, r.delivered, r.retried, r.dead, r.unhandled', 'outbox.deliver(%s, %s) AS r',
                        (event.subscription.name, session.random.choice((1, 3, 10))), ('55000',))
    session.execute("SELECT set_config('model.by', '0', true)")
    event.data['answer'] = rows[0]
    session.world.count('deliver' if rows[0][0] else 'deliver of nothing')


def claim_pushed(session, txn):
    subscription = session.random.choice([s for s in session.world.pushed if s.name != HOOKED.name])
    event = Event(txn, 'claim of a pushed one', subscription)
    session.world.count('claim of a pushed one')
    session.call(event, 'c.id', 'outbox.claim_batch(subscription => %s) AS c', (subscription.name,), ('55000',))
    raise Finding(7, f'claimed from {subscription.name}, which has handlers')


def revoke(session, txn):
    subscription = session.random.choice(session.world.pushed)
    rows = session.execute('SELECT worker FROM outbox.leases WHERE subscription = %s LIMIT 1', (subscription.name,))
    if rows:
        event = Event(txn, 'revoke', subscription)
        session.world.disturbances.revokes.append(event)
        session.call(event, 'r', 'outbox.revoke_lease(%s, %s) AS r', (subscription.name, rows[0][0]))
        session.world.count('revoke_lease')


MOVES = {register: 0.6, unregister: 0.5, deliver: 2.5, claim_pushed: 0.2, revoke: 0.3}


# Moves outside of one

def drain(session):
    """Commits for itself, perhaps without a flush; the claims it flushes all the same."""
    if session.random.random() < 0.5:
        session.execute('SET synchronous_commit = off')
    try:
        rows = session.execute('CALL outbox.drain(%s, %s)', (HOOKED.name, session.random.choice((1, 10, 100))),
                               allowed=('55000',))
        session.world.count('drain' if rows[0][0] else 'drain of nothing')
    except Aborted:
        pass
    session.execute('SET synchronous_commit = local')


# Who listens

class Listener:
    """What comes on the channel: (id of the message, when)."""

    def __init__(self, world):
        self.world = world
        self.heard = []
        self.whole = True           # nothing was missed
        self.connection = None
        self.connect()

    def connect(self):
        self.connection = server.connect(patience=60)
        server.query(self.connection, f'LISTEN {CHANNEL}')

    def look(self):
        try:
            server.query(self.connection, 'SELECT 1')
            while self.connection.notifies:
                self.heard.append((self.connection.notifies.pop(0).payload, now()))
        except ConnectionLost:
            self.whole = False
            with contextlib.suppress(psycopg2.Error):
                self.connection.close()
            self.connect()

    def close(self):
        self.look()
        self.connection.close()


def find_dead(world, connection):
    """For operators to look at."""
    ids = {s.id: s for s in world.pushed}
    for subscription_id, message_id in server.query(connection, """
            SELECT d.subscription_id, l.id::text
              FROM outbox.delivery d
             CROSS JOIN LATERAL unnest(d.positions) r
              JOIN outbox.log l ON l.position >= lower(r) AND l.position < upper(r)
             WHERE d.state = 'dead' AND d.subscription_id = ANY (%s) ORDER BY d.settled_at DESC LIMIT 20""",
            (list(ids),)):
        world.dead.append((message_id, ids[subscription_id]))


def with_operators(table):
    """Operators' moves are about pushed subscriptions too."""
    return table | MOVES | {operators.requeue: table[operators.requeue] + 1}
