# The plain model of one message in one subscription: which states are possible after each event.
#
# Expiry is not reported to anybody, and a few calls do not say which messages they changed.  So a set of possible
# states is kept, nearly always of one; a set that becomes empty is a finding.  A lease that may have ended by the
# server's clock stays in the set beside the state after its expiry, until an event tells them apart.
import collections

from model import Finding, SLACK

State = collections.namedtuple('State', 'kind attempts limit token until due claimer size', defaults=(None,) * 6)

ABSENT = State('absent', 0)
GONE = ('absent', 'delivered', 'discarded', 'cancelled')        # what may leave the log
RETRY_LOW = 0.85        # jitter is a tenth at most


def backoff(attempts):
    return min(60, 2 ** (attempts - 1)) * 1_000_000


def expired(state):
    if state.attempts >= state.limit:
        return State('dead', state.attempts, state.limit)
    return State('ready', state.attempts, state.limit, due=0, size=state.size)


def with_expiry(states, clock):
    """And what they may have become by then without anybody saying so."""
    return states | {expired(s) for s in states if s.kind == 'leased' and s.until <= clock}


def held(state, event):
    return state.kind == 'leased' and state.token == event.token


def surely_late(state, event):
    return event.clock_low - SLACK >= state.until and event.txn is not state.claimer


def perhaps_late(state, event):
    return event.clock_high >= state.until and event.txn is not state.claimer


def settled(state, event):
    outcome = event.outcome
    if outcome == 'delivered':
        return State('delivered', state.attempts, state.limit)
    if outcome == 'dead' or outcome == 'failed' and state.attempts >= state.limit:
        return State('dead', state.attempts, state.limit)
    if event.retry_at is not None:
        due = event.retry_at
    elif outcome == 'failed':
        due = event.clock_low - SLACK + int(backoff(state.attempts) * RETRY_LOW)
    else:
        due = 0
    return State('ready', state.attempts - (outcome == 'released'), state.limit, due=due)


def answer_is(state, answer):
    return answer is None or answer == state.kind or state.kind == 'ready' and answer == 'scheduled'


def claim(states, event, message):
    """The rules of a claim; says which one is broken if no state allows it."""
    token, until, attempts, limit, moment = event.rows[message.id]
    after, reasons = set(), []
    for s in with_expiry(states, moment):
        if s.kind == 'leased' and s.until <= moment:
            continue                    # what it was after its expiry is among the states
        if s.kind == 'leased':
            reasons.append((4, f'claimed at {moment} while the lease {s.token} was live until {s.until}'))
        elif s.kind != 'ready':
            reasons.append(({'absent': 2, 'dead': 5}.get(s.kind, 3), f'claimed while {s.kind}'))
        elif attempts != s.attempts + 1:
            reasons.append((5, f'attempts is {attempts} after {s.attempts}'))
        elif s.limit is not None and limit != s.limit:
            reasons.append((5, f'max_attempts is {limit} after {s.limit}'))
        elif s.limit is None and limit not in limits(s, event.subscription, message):
            reasons.append((5, f'max_attempts is {limit}, not of {limits(s, event.subscription, message)}'))
        elif attempts > limit:
            reasons.append((5, f'attempt {attempts} of {limit}'))
        elif moment < s.due:
            reasons.append((3, f'claimed at {moment}, due at {s.due}'))
        elif s.size and len(event.rows) > (1 if attempts == limit else max(1, -(-s.size // 10))):
            reasons.append((5, f'{len(event.rows)} messages in the claim after an expired one of {s.size}'))
        else:
            after.add(State('leased', attempts, limit, token, until, 0, event.txn, len(event.rows)))
    if not after:
        leased = [r for r in reasons if r[0] == 4]
        raise Finding(*(leased or reasons or [(3, 'claimed from nowhere')])[0], message.id)
    return after


def limits(state, subscription, message):
    """What max_attempts may be at the first claim after routing or a requeue."""
    of = {message.max_attempts} if message.max_attempts else subscription.limits
    return {limit if state.attempts < limit else state.attempts + 1 for limit in of}


def settle(states, event, message):
    after, reasons = set(), []
    for s in states:
        if not held(s, event):
            reasons.append(f'{s.kind} {s.token or ""}')
            if event.partial:
                after.add(s)
        elif surely_late(s, event):
            reasons.append(f'the lease ended at {s.until}, the clock was at {event.clock_low} or later')
            if event.partial:
                after.add(s)
        else:
            new = settled(s, event)
            if answer_is(new, event.answer):
                after.add(new)
            else:
                reasons.append(f'the answer is {event.answer}, it should be {new.kind}')
            if event.partial and perhaps_late(s, event):
                after.add(s)
    if not after:
        raise Finding(7, f'settled {event.outcome} by {event.token}, but: {", ".join(reasons)}', message.id)
    return after


def renew(states, event, message):
    """What shares a run with a message whose lease is extended may be extended too, never shortened."""
    if message.id in event.others:
        return states | {s._replace(until=max(event.until, s.until)) for s in states if held(s, event)}
    after, reasons = set(), []
    for s in states:
        if not held(s, event):
            reasons.append(f'{s.kind} {s.token or ""}')
            if event.partial:
                after.add(s)
        elif surely_late(s, event):
            reasons.append(f'the lease ended at {s.until}, the clock was at {event.clock_low} or later')
        elif event.until > max(s.until, event.clock_high + event.lease):
            reasons.append(f'renewed until {event.until}, longer than asked for')
        else:
            after.update(s._replace(until=until) for until in (event.until, max(event.until, s.until)))
        if event.partial and held(s, event) and perhaps_late(s, event):
            after.add(s)
    if not after:
        raise Finding(7, f'renewed {event.token}, but: {", ".join(reasons)}', message.id)
    return after


def operator(states, event, message, source, target):
    """A call that named a message, and was not refused, found it in one of the states `source`."""
    after = {target(s) for s in with_expiry(states, event.clock_high) if s.kind in source}
    if not after:
        raise Finding(7, f'{event.kind} was answered, but the state is {", ".join(s.kind for s in states)}', message.id)
    return after


def some(states, event, source, target, certain=False):
    """A call that did not name it may have found it; it has, where that is certain."""
    states = with_expiry(states, event.clock_high)
    return {target(s) for s in states if s.kind in source} | {s for s in states if s.kind not in source or not certain}


def given_up(kind):
    return lambda state: State(kind, state.attempts, state.limit)


def readied(event):
    """Who keeps the attempts of a message whose budget is spent gives it one more; max_attempts is read again."""
    return lambda s: State('ready', 0 if event.reset_attempts else s.attempts, due=event.available_at or 0)


def step(states, event, message, certain=True):
    """The states possible after a committed event; `certain`: they did not change while a cancel looked."""
    kind = event.kind
    if kind == 'claim':
        return claim(states, event, message)
    if kind == 'settle':
        return settle(states, event, message)
    if kind == 'renew':
        return renew(states, event, message)
    if kind == 'requeue':
        return operator(states, event, message, ('dead', 'discarded', 'cancelled'), readied(event))
    if kind == 'discard':
        return operator(states, event, message, ('ready', 'dead'), given_up('discarded'))
    if kind == 'cancel':
        return some(states, event, ('ready',), given_up('cancelled'), certain)
    if kind == 'requeue_all':
        return some(states, event, ('dead',), readied(event))
    if kind == 'skip' and message.created_at < event.before:
        return some(states, event, ('ready',), given_up('discarded'))
    return states


def firmly_held(state, observation):
    """A refusal to somebody who holds this lease is wrong."""
    return held(state, observation) and state.until > observation.clock_high
