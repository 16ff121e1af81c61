# History that leaves: what a round keeps, purge(), and when a message may be gone.
#
# In rounds with a short retention the ring turns all the time, since the clock jumps; in those with the default one a
# message leaves by purge() only; in calm ones nothing does.  What has left the log must have been settled in each
# subscription (check.py), and, seen by looking each second, old enough.
import server
from model import ABORTED, SLACK, Event, Finding, now

DEFAULT = 3 * 86_400_000_000

LOG = 'SELECT id::text, model.us(created_at) FROM outbox.log'


class History:
    """What is known of the log."""

    def __init__(self, world, chance):
        self.world = world
        self.retention = DEFAULT if world.seed % 3 != 1 else chance.choice((1, 3)) * 1_000_000
        self.there = {}         # id: created_at, as it was seen last
        self.created = {}       # all that were ever seen
        self.purges = []        # events

    def prepare(self, connection):
        server.query(connection, f"ALTER DATABASE {server.DATABASE} SET outbox.retention = {self.retention // 1_000_000}")
        server.query(connection, f'SET outbox.retention = {self.retention // 1_000_000}')

    def look(self, connection):
        there = dict(server.query(connection, LOG))
        left = self.there.keys() - there.keys()
        for message_id in left:
            self.judge(message_id, self.there[message_id])
        if left:
            self.world.count('messages have left')
        self.created.update(there)
        self.there = there

    def judge(self, message_id, created):
        """Is a message that was enqueued then, or later, gone with good reason?"""
        if self.world.calm or not (created + self.retention < self.world.clock_high() or self.is_purged(created)):
            raise Finding(11, f'it has left the log, enqueued at {created}, the clock is at {self.world.clock_high()}, '
                          f'retention {self.retention}', message_id)

    def is_purged(self, created):
        """A segment goes as a whole when it was closed before that time: so all in it is older."""
        return any(e.before + SLACK > created for e in self.purges
                   if e.txn.state != ABORTED and not e.undone and not e.refused)


def purge(session, txn, ahead=None):
    """So many microseconds before now, or after."""
    ahead = session.random.randrange(-8_000_000, 3_000_000) if ahead is None else ahead
    event = Event(txn, 'purge', before=now() + session.world.offset_high(now()) + ahead)
    session.world.history.purges.append(event)
    rows = session.call(event, 'r', 'outbox.purge(model.at(%s)) AS r', (event.before,))
    session.world.count('purge' if rows[0][0] else 'purge of nothing')


def purge_all(session, txn):
    """The segment that is written too."""
    purge(session, txn, 1_000_000)
