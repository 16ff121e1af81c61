# The plain model of a message in a pushed subscription.
#
# Workers report nothing.  What is seen is when a hook begins (a file), when its effects have been committed (a row),
# and what operators do.  Between these the message goes through states that nobody sees; `reachable` finds them all.
# What is allowed only for a reason, such as that a lease was lost, is reachable only if there was one at the time.
import collections

import states
from model import Finding

State = collections.namedtuple('State', 'kind attempts limit due pid plan at', defaults=(None,) * 5)
Begun = collections.namedtuple('Begun', 'kind subscription id attempt limit pid key clock plan by number')
Effect = collections.namedtuple('Effect', 'kind subscription id attempt pid key by followed number')

ENDS = ('delivered', 'dead', 'discarded', 'cancelled')
MAY_FAIL = ('failed', 'slow', 'stuck')
MAY_END_WELL = ('done', 'slow', 'stuck')


def tell(possible):
    """Attempts after the slash are the limit."""
    told = {f'{s.kind} {s.attempts}/{s.limit or "?"}' + (f' by {s.pid}, plan {s.plan}' if s.pid else '')
            for s in possible}
    return ', '.join(sorted(told))


def first(message):
    return {State('ready', 0, due=message.available_at or 0)}


class Player:
    """Plays what happened to one message in one subscription."""

    def __init__(self, world, message, subscription):
        self.world = world
        self.record = world.disturbances
        self.message = message
        self.subscription = subscription
        self.has_hooks = subscription.name != 'told'
        self.may_lack_handlers = subscription.name == 'hooked'
        self.states = first(message)
        self.since = message.event.start

    # What may have happened unseen

    def reachable(self, until):
        lost = self.record.lease_lost(self.world.jumps, self.since, until)
        found, todo = set(self.states), list(self.states)
        while todo:
            for state in self.following(todo.pop(), until, lost):
                if state not in found:
                    found.add(state)
                    todo.append(state)
        return found

    def following(self, s, until, lost):
        if s.kind == 'ready':
            yield from self.claimed(s)
            if self.may_lack_handlers:
                yield s._replace(kind='unhandled')
        elif s.kind == 'unhandled':
            yield s._replace(kind='ready')
        elif s.kind == 'leased' and s.pid is None:
            yield s._replace(kind='ready', attempts=s.attempts - 1)
            if lost:
                yield from self.charged(s)
            if not self.has_hooks:
                yield State('delivered', s.attempts, s.limit)
        elif s.kind == 'leased':
            yield from self.ended(s, until)

    def claimed(self, s):
        if s.limit is None and s.attempts < max(self.limits(s)) or s.limit is not None and s.attempts < s.limit:
            yield s._replace(kind='leased', attempts=s.attempts + 1)

    def ended(self, s, until):
        """How a hook that has begun may have ended without effect."""
        stopped = self.record.stopped(s.pid, s.at, until)
        if stopped or s.plan == 'later':
            yield State('ready', s.attempts - 1, s.limit, 0)
        if s.plan == 'dead':
            yield State('dead', s.attempts, s.limit)
        if stopped or s.plan in MAY_FAIL or self.record.crashed(s.at, until):
            yield from self.charged(s)

    def charged(self, s):
        limits = {s.limit} if s.limit is not None else self.limits(s)
        if any(s.attempts >= limit for limit in limits):
            yield State('dead', s.attempts, s.limit)
        if any(s.attempts < limit for limit in limits):
            yield State('ready', s.attempts, s.limit, 0)

    def limits(self, s):
        before = s._replace(attempts=s.attempts - 1) if s.kind == 'leased' else s
        return states.limits(before, self.subscription, self.message)

    # What was seen

    def step(self, event):
        kind = event.kind
        if kind == 'begun':
            self.states = self.begin(event)
        elif kind == 'effect':
            self.states = self.take_effect(event)
        elif kind == 'requeue':
            self.named(event, ('dead', 'discarded', 'cancelled', 'unhandled'), self.readied(event))
        elif kind == 'requeue_all':
            self.some(event, ('dead',), self.readied(event))
        elif kind == 'discard':
            self.named(event, ('ready', 'unhandled', 'dead'), self.given_up('discarded'))
        elif kind == 'cancel':
            self.some(event, ('ready', 'unhandled'), self.given_up('cancelled'))
        elif kind == 'skip' and self.message.created_at < event.before:
            self.some(event, ('ready', 'unhandled'), self.given_up('discarded'))
        self.since = event.key

    def begin(self, e):
        after, reasons = set(), []
        if e.attempt > e.limit:
            raise Finding(5, f'attempt {e.attempt} of {e.limit} begun in {self.subscription.name}', self.message.id)
        for s in self.reachable(e.key):
            if s.kind != 'leased':
                reasons.append(f'{s.kind} after attempt {s.attempts}')
            elif s.attempts != e.attempt or s.pid not in (None, e.pid):
                reasons.append(f'in attempt {s.attempts}' + (f' by {s.pid}' if s.pid else ''))
            elif e.limit != s.limit and (s.limit is not None or e.limit not in self.limits(s)):
                reasons.append(f'max_attempts {s.limit or self.limits(s)}')
            elif s.due and e.clock < s.due:
                reasons.append(f'due at {s.due}')
            else:
                after.add(State('leased', e.attempt, e.limit, None, e.pid, e.plan, e.key))
        if not after:
            rule = 3 if any(s.kind in ENDS for s in self.states) else 10
            raise Finding(rule, f'attempt {e.attempt} of {e.limit} begun in {self.subscription.name} by {e.pid}, but '
                          f'it is {", ".join(sorted(set(reasons)))}', self.message.id)
        return after

    def take_effect(self, e):
        if not any(s.kind == 'leased' and (s.attempts, s.pid) == (e.attempt, e.pid) and s.plan in MAY_END_WELL
                   for s in self.states):
            raise Finding(9, f'effect of attempt {e.attempt} by {e.pid} in {self.subscription.name}, but it is '
                          f'{tell(self.states)}', self.message.id)
        return {State('delivered', e.attempt, next(iter(self.states)).limit)}

    def named(self, event, source, target):
        """A call that named the message, and was not refused, found it in one of these states."""
        possible = self.reachable(event.key)
        self.states = {target(s) for s in possible if s.kind in source}
        if not self.states:
            raise Finding(7, f'{event.kind} was answered, but in {self.subscription.name} it is '
                          f'{", ".join(sorted({s.kind for s in possible}))}', self.message.id)

    def some(self, event, source, target):
        """A call about many may have met it."""
        possible = self.reachable(event.key)
        self.states = possible | {target(s) for s in possible if s.kind in source}

    @staticmethod
    def given_up(kind):
        return lambda s: State(kind, s.attempts, s.limit)

    @staticmethod
    def readied(event):
        return lambda s: State('ready', 0 if event.reset_attempts else s.attempts, due=event.available_at or 0)
