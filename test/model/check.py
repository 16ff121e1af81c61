# Compares what the sessions saw with the model, when all transactions have ended.
#
# The events of each message in each subscription are played through states.py in the order in which they
# happened; then the server's own tables must show one of the states that are possible at the end.  A settlement or
# renewal that was refused (OB003) must have had a reason at some moment of the call.
import collections

import moves
import push_check
import server
import states
from model import COMMITTED, Finding, now, short
from states import ABSENT, State

RUNS = """
    SELECT d.subscription_id, l.id::text, d.state, d.attempts, d.max_attempts, d.claim_token::text,
           model.us(d.locked_until)
      FROM outbox.delivery d
     CROSS JOIN LATERAL unnest(d.positions) r
      JOIN outbox.log l ON l.position >= lower(r) AND l.position < upper(r)
"""
LOG = 'SELECT id::text, model.us(created_at), name, kind, payload FROM outbox.log'


class Comparison:
    def __init__(self, world, connection, preloaded):
        self.world = world
        self.preloaded = preloaded
        self.log = {r[0]: r[1:] for r in server.query(connection, LOG)}
        self.runs = {(r[0], r[1]): r[2:] for r in server.query(connection, RUNS)}
        self.clock = world.clock_high()
        self.by_message = collections.defaultdict(list)
        self.refusals = collections.defaultdict(list)
        self.bulk = collections.defaultdict(list)
        self.checks = 0
        self.sort_events()

    def sort_events(self):
        for event in self.world.events:
            if event.counts() and event.key is not None:
                event.data.update(surely=0, possibly=0)
                if event.kind in ('skip', 'requeue_all'):
                    self.bulk[event.subscription].append(event)
                elif event.kind in ('claim', 'settle', 'renew', 'requeue', 'discard', 'cancel'):
                    for i in event.ids + event.data.get('others', []):
                        self.by_message[i].append(event)
            elif event.refused in moves.NOT_HELD and event.kind in ('settle', 'renew'):
                for i in event.ids:
                    self.refusals[i, event.subscription].append(event)

    def run(self):
        self.compare_log()
        self.compare_times()
        subscriptions = self.world.static + [s for s in self.world.subscriptions_by_id.values() if s.created]
        for i, message in self.world.messages.items():
            if message.exists():
                for s in subscriptions:
                    if s.matches(message.name, message.kind):
                        self.replay(message, s)
        self.compare_counts()
        self.compare_pauses()
        self.world.checks += self.checks

    # The log

    def compare_log(self):
        for i, message in self.world.messages.items():
            self.checks += 1
            if message.exists() and i not in self.log:
                message.created_at = self.world.history.created.get(i, message.event.clock_low)     # or later
                self.world.history.judge(i, message.created_at)
            if not message.exists() and i in self.log:
                raise Finding(2, 'rolled back, but in the log', i)
        for i, row in self.log.items():
            message = self.world.messages.get(i)
            if message is None:
                raise Finding(2, 'in the log, but nobody enqueued it', i)
            if row[1:] != (message.name, message.kind, message.payload):
                raise Finding(1, f'another content in the log: {row}', i)
            message.created_at = row[0]
        for event in self.world.again:
            message = self.world.messages[event.ids[0]]
            if message.exists() and message.id in self.log:
                raise Finding(7, f'an id that exists was enqueued again\n{event}', message.id)
        for i, events in self.by_message.items():
            message = self.world.messages.get(i)
            if message is None or not message.exists():
                raise Finding(2, f'{events[0].kind}, but it does not exist', i)

    def compare_times(self):
        """created_at increases in each session, and is unique in all."""
        last = collections.defaultdict(int)
        for message in self.world.messages.values():
            if message.exists() and message.id in self.log:
                session = message.event.txn.session
                if message.created_at <= last[session]:
                    raise Finding(8, f'created_at {message.created_at} after {last[session]} in session {session}',
                                  message.id)
                last[session] = message.created_at
                self.checks += 1
        if self.preloaded and len({m[0] for m in self.log.values()}) < len(self.log):
            raise Finding(8, 'two messages have the same created_at')

    # One message in one subscription

    def replay(self, message, subscription):
        events = [e for e in self.by_message[message.id] if e.subscription is subscription
                  or e.kind == 'cancel' and not came_after(subscription, e)]
        events = sorted(events + self.bulk[subscription], key=lambda e: (e.key, e.number))
        now_states = self.at_first(message, subscription)
        history = [(0, 0, now_states)]
        for event in events:
            if event.kind == 'settle' and event.partial:
                self.count_settled(now_states, event)
            settled_down = was_before(subscription, event) and all(end < event.start for _, end, _ in history)
            now_states = states.step(now_states, event, message, settled_down)
            history.append((event.key, event.txn.commit_end, now_states))
            self.checks += 1
        for refusal in self.refusals[message.id, subscription]:
            self.look_at_refusal(history, refusal, message)
        if subscription.dropped is None:
            self.compare_state(now_states, message, subscription)

    def at_first(self, message, subscription):
        """Whether it belongs to a subscription that came in mid-flight depends on who committed first."""
        ready = State('ready', 0, due=message.available_at or 0)
        created = subscription.created
        txn = message.event.txn
        if created is not None and subscription.from_earliest and message.id not in self.log:
            return {ready, ABSENT}      # it may have left before
        if created is None or subscription.from_earliest or txn.commit_start > created.key and txn is not created.txn:
            return {ready}
        if txn.commit_end < created.start:
            return {ABSENT}
        return {ready, ABSENT}

    @staticmethod
    def count_settled(now_states, event):
        held = [s for s in now_states if states.held(s, event)]
        event.data['possibly'] += any(not states.surely_late(s, event) for s in held)
        event.data['surely'] += len(held) == len(now_states) and not any(states.perhaps_late(s, event) for s in held)

    def look_at_refusal(self, history, refusal, message):
        """What it may have met: the states in force at some moment between its start and its answer."""
        self.checks += 1
        if refusal.refused == 'OB002' and message.id in self.log:
            raise Finding(7, f'{refusal.kind}: unknown message, but it is there', message.id)
        if refusal.subscription.dropped or self.touched_before(refusal):
            return
        ends = [entry[1] for entry in history[1:]] + [None]
        met = [s for (key, _, possible), end in zip(history, ends)
               if key <= refusal.key and (end is None or end >= refusal.start) for s in possible]
        if all(states.firmly_held(s, refusal) for s in met):
            told = '\n'.join(map(str, refusal.txn.events))
            raise Finding(7, f'{refusal.kind} was refused although the lease was held; its transaction:\n{told}',
                          message.id)

    @staticmethod
    def touched_before(refusal):
        """Its own transaction may have settled it, or removed it, and then have been rolled back."""
        lease = refusal.lease_held
        return lease.claim.txn.state != COMMITTED or any(
            e.number < refusal.number and (e.lease_held is lease or e.kind in ('skip', 'unsubscribe'))
            for e in refusal.txn.events)

    def compare_state(self, possible, message, subscription):
        self.checks += 1
        run = self.runs.get((subscription.id, message.id))
        possible = states.with_expiry(possible, self.clock)
        if run is None:
            if message.id not in self.log and not any(s.kind in states.GONE for s in possible):
                raise Finding(11, f'it has left the log; in {subscription.name} it is {possible}', message.id)
            if message.id in self.log and ABSENT not in possible:
                raise Finding(1, f'lost: in no run of {subscription.name}', message.id)
            return
        kind, attempts, limit, token, until = run
        for s in possible:
            if s.kind == kind and s.attempts == attempts and s.limit in (None, limit) and s.token == token \
                    and s.until == until:
                return
        raise Finding(6, f'the run in {subscription.name} is {kind}, attempts {attempts} of {limit}, token {token} '
                      f'until {until}; possible is {possible}', message.id)

    # All of them

    def compare_counts(self):
        for event in self.world.events:
            if event.kind == 'settle' and event.counts() and event.partial:
                self.checks += 1
                if not event.surely <= event.changed <= event.possibly:
                    raise Finding(7, f'settle_batch says {event.changed}, it is {event.surely} to {event.possibly}'
                                  f'\n{event}', event.ids[0])

    def compare_pauses(self):
        """Nothing is claimed while a pause is surely in force."""
        switches = collections.defaultdict(list)
        for event in self.world.events:
            if event.kind in ('pause', 'resume') and event.counts():
                switches[event.subscription].append(event)
        for event in self.world.events:
            if event.kind == 'claim' and event.ids and not self.switched(event.txn) and switches[event.subscription]:
                before = [s for s in switches[event.subscription] if s.start < event.key]
                last = max(before, key=lambda s: s.key, default=None)
                self.checks += 1
                if last is not None and last.kind == 'pause' and last.txn.commit_end < event.start \
                        and not any(s.kind == 'resume' and s.txn.commit_end > last.start for s in before):
                    raise Finding(7, f'claimed from {event.subscription.name}, which was paused\n{last}\n{event}',
                                  event.ids[0])

    @staticmethod
    def switched(txn):
        return any(e.kind in ('pause', 'resume') for e in txn.events)


def came_after(subscription, event):
    return subscription.created is not None and subscription.created.start > event.key


def was_before(subscription, event):
    return subscription.created is None or subscription.created.txn.commit_end < event.start


def tell_history(world, message_id):
    """All that anybody did to a message or with its tokens, the undone and refused included."""
    lines = []
    message = world.messages.get(message_id)
    if message is not None:
        lines.append(f'message {message_id} {message.name} {message.kind} max_attempts {message.max_attempts} '
                     f'available_at {message.available_at} created_at {message.created_at}')
    tokens = {e.rows[message_id][0] for e in world.events if e.kind == 'claim' and message_id in e.ids}
    for event in world.events:
        if message_id in event.ids or event.data.get('token') in tokens:
            row = event.data.get('rows', {}).get(message_id)
            lines.append(str(event) + (f'\n        token {row[0]} until {row[1]} attempt {row[2]} of {row[3]} '
                                       f'clock {row[4]}' if row else ''))
    for since, offset in world.jumps:
        lines.append(f'clock_offset {offset} since {short(since)}')
    lines += push_check.tell_history(world, message_id)
    lines.append(f'it is {short(now())} microseconds now')
    return '\n'.join('    ' + line for line in lines)
