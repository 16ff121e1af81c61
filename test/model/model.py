# What the sessions report, in a form that can be judged afterwards.
#
# A Txn is a transaction as a session sees it; an Event is a call that was answered in it: an enqueue with the
# ids it returned, a claim with what it got, a settlement with the answer.  Events of a transaction count when it
# commits, all of them or, after ROLLBACK TO, those that are left.
#
# All times are microseconds since 1970.  `key` is the server's clock_timestamp() after the call had returned, so
# it lies between the moment the call had its locks and the commit.  Since every call locks the runs that it
# changes until its transaction ends, events of different transactions about the same message and subscription
# happened in the order of their keys.  `clock_low` and `clock_high` bound the clock of outbox, which differs from
# the wall clock by the setting outbox.clock_offset.
import collections
import itertools
import threading
import time

SLACK = 100_000     # between two readings of clocks that should agree

OPEN, PREPARED, COMMITTED, ABORTED = 'open', 'prepared', 'committed', 'aborted'


HIDDEN = ('rows', 'surely', 'possibly', 'others')


def now():
    return time.time_ns() // 1000


class Aborted(Exception):
    """A statement failed as it may; the transaction or savepoint is over."""


class Finding(Exception):
    """A rule was broken."""

    def __init__(self, rule, text, message_id=None):
        super().__init__(text)
        self.rule = rule
        self.message_id = message_id


class Subscription:
    def __init__(self, name, pattern, kind=None, lease=30_000, max_active=300_000, max_attempts=3,
                 from_earliest=True, static=False):
        self.name = name
        self.id = None
        self.pattern = pattern
        self.kind = kind
        self.lease = lease * 1000
        self.max_active = max_active * 1000
        self.limits = {max_attempts}        # more than one where it was altered
        self.from_earliest = from_earliest
        self.static = static
        self.created = None                 # the event, of those that were not there from the start
        self.dropped = None

    def matches(self, name, kind):
        return self.kind in (None, kind) and topic_matches(self.pattern.split('.'), name.split('.'))


def topic_matches(pattern, words):
    """AMQP: * is one word, # any number."""
    if not pattern:
        return not words
    if pattern[0] == '#':
        return any(topic_matches(pattern[1:], words[i:]) for i in range(len(words) + 1))
    return bool(words) and pattern[0] in ('*', words[0]) and topic_matches(pattern[1:], words[1:])


class Message:
    def __init__(self, message_id, event, name, kind, payload, available_at, max_attempts):
        self.id = message_id
        self.event = event
        self.name = name
        self.kind = kind
        self.payload = payload
        self.available_at = available_at    # or None
        self.max_attempts = max_attempts    # or None
        self.created_at = None              # as the log says at the end

    def exists(self):
        return self.event.counts()


class Txn:
    numbers = itertools.count(1)

    def __init__(self, session, isolation):
        self.number = next(Txn.numbers)
        self.session = session
        self.isolation = isolation          # or None: a single statement without BEGIN
        self.state = OPEN
        self.events = []
        self.leases = []                    # what it claimed
        self.commit_start = None
        self.commit_end = None

    def end(self, state):
        self.state = state
        self.commit_end = now()


class Event:
    numbers = itertools.count(1)

    def __init__(self, txn, kind, subscription=None, ids=(), **data):
        self.number = next(Event.numbers)
        self.txn = txn
        self.kind = kind
        self.subscription = subscription
        self.ids = list(ids)
        self.start = now()
        self.key = None
        self.undone = False                 # by ROLLBACK TO
        self.refused = None                 # SQLSTATE
        self.lease_held = None              # the Lease that it settles or renews
        self.clock_low = 0
        self.clock_high = 0
        self.data = data                    # arguments and answers, by kind

    def __getattr__(self, name):
        try:
            return self.__dict__['data'][name]
        except KeyError:
            raise AttributeError(name) from None

    def counts(self):
        return self.txn.state == COMMITTED and not self.undone and self.refused is None

    def __str__(self):
        txn = self.txn
        end = 'undone by ROLLBACK TO' if self.undone else txn.state
        data = ' '.join(f'{k}={v}' for k, v in self.data.items() if v is not None and k not in HIDDEN)
        refused = f'refused {self.refused}, ' if self.refused else ''
        return (f'#{self.number} session {txn.session} transaction {txn.number} ({txn.isolation or "one statement"}): '
                f'{self.kind} {self.subscription.name if self.subscription else ""} {data}\n'
                f'        from {short(self.start)} to {short(self.key)}, {refused}{end} {short(txn.commit_end)}')


def short(microseconds):
    """The last digits: a thousand seconds."""
    return '' if microseconds is None else str(microseconds % 1_000_000_000)


class Lease:
    """A claim token that a session holds or held, with the messages not yet settled."""

    def __init__(self, token, claim, subscription, ids, until):
        self.token = token
        self.claim = claim                  # the event
        self.subscription = subscription
        self.ids = set(ids)
        self.until = until


class World:
    """What all threads share."""

    def __init__(self, options, seed):
        self.options = options
        self.seed = seed
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.failure = None
        self.events = []
        self.messages = {}
        self.sessions = []
        self.calm = False
        self.scarce = False                 # little is enqueued, so that claims find nothing
        self.prepares = 0.12                # this part of the transactions is prepared
        self.static = []
        self.slots = {}                     # name of a passing subscription: it, None, or BUSY
        self.subscriptions_by_id = {}
        self.prepared = {}                  # gid: Txn
        self.dead = collections.deque(maxlen=500)       # (id, subscription) that operators may look at
        self.moves = collections.Counter()
        self.notes = collections.Counter()
        self.checks = 0
        self.jumps = [(0, 0)]               # (since, offset) in microseconds, as ordered
        self.max_prepared = 0
        self.pids = {}                      # session: backend
        self.worker_pids = []
        self.lull = threading.Event()       # sessions make no moves for a moment
        self.reading = False                # a snapshot is held, see invariants.py
        self.history = None                 # what was in the log, see retention.py
        self.again = []                     # events: an id was accepted that had been accepted before
        self.disturbances = None            # what is done to the server, see disturbances.py
        self.pushed = []
        self.folder = None                  # where hooks say that they have begun
        self.push_history = {}

    BUSY = object()

    def fail(self, finding):
        with self.lock:
            if self.failure is None:
                self.failure = finding
        self.stop.set()

    def count(self, *moves):
        with self.lock:
            self.moves.update(moves)

    def note(self, text):
        with self.lock:
            self.notes[text] += 1

    def add_event(self, event):
        self.events.append(event)
        event.txn.events.append(event)

    def add_messages(self, event, messages):
        for message in messages:
            self.messages[message.id] = message

    def offset_high(self, at):
        """The largest offset that a server process may have had until then, in microseconds."""
        return max(offset for since, offset in list(self.jumps) if since <= at)

    def clock_high(self):
        at = now()
        return at + self.offset_high(at) + SLACK

    def operable(self):
        return self.live() + self.pushed

    def live(self):
        """Subscriptions that can be claimed from."""
        return self.static + [s for s in list(self.slots.values()) if isinstance(s, Subscription)]
