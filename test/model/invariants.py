# What must be so in every snapshot, asked of the tables themselves while the sessions go on.
#
# A run's message_count is the number of messages of the log at its positions; that of a settled run may be more
# between the decision that a segment goes and the end of sweeping after it.  A message is in one run of a
# subscription at most, and in exactly one if routing has come past it (the subscriptions that are there from the
# start; of passing ones check.py knows what they should have).
import collections
import itertools

import psycopg2

import server
from model import Finding
from moves import KINDS, NAMES
from server import ConnectionLost

DONE = 'done'               # what hooks enqueue
BUSY = ('55P03',)           # lock timeout: a session that has truncated has not ended

FILED = """
    WITH filed AS MATERIALIZED (
        SELECT d.id AS run, d.subscription_id, d.state, l.position, l.id
          FROM outbox.delivery d
         CROSS JOIN LATERAL unnest(d.positions) r
          JOIN outbox.log l ON l.position >= lower(r) AND l.position < upper(r)
         LIMIT 1000000),        -- for the planner, who expects a hundred times as many
"""
BROKEN = FILED + """
    frontier AS (SELECT horizon, running FROM outbox.frontier ORDER BY id DESC LIMIT 1)
    SELECT 6, format('run %s (%s) counts %s messages, the log has %s', d.id, d.state, d.message_count,
                     coalesce(f.n, 0)), NULL
      FROM outbox.delivery d
      LEFT JOIN (SELECT run, count(*) AS n FROM filed GROUP BY run) f ON f.run = d.id
     WHERE d.message_count <> coalesce(f.n, 0)
       AND (d.state IN ('ready', 'leased', 'unhandled', 'dead') OR NOT EXISTS (
            SELECT FROM outbox.segment g WHERE g.condemned_at IS NOT NULL OR g.sweep_to IS NOT NULL))
     UNION ALL
    SELECT 6, format('position %s is in the runs %s of subscription %s', position, array_agg(run), subscription_id),
           id::text
      FROM filed GROUP BY subscription_id, position, id HAVING count(*) > 1
     UNION ALL
    SELECT 1, format('position %s lies behind the frontier, in no run of subscription %s', l.position,
                     w.subscription_id), l.id::text
      FROM frontier f
      JOIN outbox.log l ON (l.position >> 20) < f.horizon AND (l.position >> 20) <> ALL (f.running)
      JOIN model.wanted w ON w.name = l.name AND w.kind = l.kind
      LEFT JOIN filed ON filed.subscription_id = w.subscription_id AND filed.position = l.position
     WHERE filed.position IS NULL
     LIMIT 10
"""
COUNTS = FILED + """
    statuses AS (
        SELECT s.name, f.state, count(*) AS n
          FROM filed f JOIN outbox.subscription s ON s.id = f.subscription_id GROUP BY s.name, f.state)
    SELECT name, state, n FROM statuses
"""
WORDS = ('pending', 'scheduled', 'ready', 'leased', 'unhandled', 'delivered', 'dead', 'discarded', 'cancelled')


def want(connection, subscriptions):
    """Tells the queries above which messages belong to these subscriptions."""
    for s in subscriptions:
        found = server.query(connection, 'SELECT id FROM outbox.subscription WHERE name = %s', (s.name,))
        s.id = found[0][0]
        for name, kind in itertools.product(NAMES + (DONE,), sorted(set(KINDS))):
            if s.matches(name, kind):
                server.query(connection, 'INSERT INTO model.wanted VALUES (%s, %s, %s)', (s.id, name, kind))


def look(world, connection):
    for rule, text, message_id in server.query(connection, BROKEN):
        raise Finding(rule, text, message_id)
    world.count('look at the invariants')
    world.checks += 3


def read_with_old_snapshots(world, chance):
    """For one thread.  A snapshot that is older than a TRUNCATE must still find the messages of its runs."""
    connection = server.connect(patience=60)
    while not world.stop.wait(chance.uniform(0, 1.5)):
        world.reading = not world.lull.is_set()
        if not world.reading:
            continue
        try:
            server.query(connection, 'BEGIN ISOLATION LEVEL REPEATABLE READ')
            server.query(connection, 'SELECT FROM outbox.subscription')       # a snapshot, and no lock on the log
            world.stop.wait(chance.choice((0.1, 0.3, 1, 3)))
            look(world, connection)
            server.query(connection, 'COMMIT')
            world.reading = False
            world.count('old snapshot')
        except ConnectionLost:
            connection.close()
            connection = server.connect(patience=60)
        except psycopg2.Error as error:
            if error.pgcode not in BUSY:
                raise
            server.query(connection, 'ROLLBACK')
    connection.close()


def compare_status(world, connection):
    """When nobody works: each number of the view status is what the log and the runs say."""
    counted = collections.Counter()
    server.query(connection, 'BEGIN ISOLATION LEVEL REPEATABLE READ')      # workers take back what expires
    for name, state, n in server.query(connection, COUNTS):
        counted[name, state] = n
    rows = server.query(connection, f'SELECT subscription, {", ".join(WORDS)} FROM outbox.status')
    server.query(connection, 'COMMIT')
    for name, *shown in rows:
        shown = dict(zip(WORDS, shown))
        shown['ready'] += shown.pop('scheduled')
        for word, n in shown.items():
            world.checks += 1
            if n != counted[name, word]:
                raise Finding(6, f'status says that {n} messages of {name} are {word}, it is {counted[name, word]}')
