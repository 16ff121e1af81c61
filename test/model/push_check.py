# Compares what hooks have begun and done with the model, when no worker runs and all transactions have ended.
#
# Effects commit with the settlement: a message that is delivered has had one effect, and any other none.  The rest,
# above all that an attempt that has begun is charged whatever happens to the server, is in push_states.py.
import collections
import json
import os

import server
import states
from model import COMMITTED, Event, Finding, Message, Txn, now, short
from push_states import Begun, Effect, Player, tell

EFFECTS = 'SELECT subscription, id::text, attempt, pid, at, by, followed::text FROM model.effect'
BESIDE = 3_000_000          # microseconds


class PushComparison:
    """Is made before the comparison of everybody's messages, since hooks have enqueued too."""

    def __init__(self, world, connection):
        self.world = world
        self.by_message = collections.defaultdict(list)
        self.events = {e.number: e for e in world.events if e.kind == 'deliver'}
        self.effects = [Effect('effect', *row, n)
                        for n, row in enumerate(server.query(connection, EFFECTS + ' ORDER BY at'))]
        self.begun = self.read_begun()
        self.sort()
        for effect in self.effects:
            if effect.followed:
                self.add_followed(effect)

    def read_begun(self):
        begun = []
        for name in sorted(os.listdir(self.world.folder)):
            if '~' in name:
                subscription, message_id, attempt, limit, pid, at, clock, plan, by = name.split('~')
                begun.append(Begun('begun', subscription, message_id, int(attempt), int(limit), int(pid), int(at),
                                   int(clock), plan, int(by), len(begun)))
        return begun

    def sort(self):
        """What an undone deliver() has begun does not count."""
        told = collections.defaultdict(list)
        stuck = {(b.pid, b.key) for b in self.begun if b.plan == 'stuck'}
        for pid, at in stuck:           # its process is ended by the coordinator
            window = self.world.disturbances.stop('stuck', pid)
            window.begin, window.end = at, at + 20_000_000
        for entry in self.begun + self.effects:
            told[entry.id].append(entry)
            if not entry.by or self.events[entry.by].counts():
                self.by_message[entry.id, entry.subscription].append(entry)
            elif entry.kind == 'effect':
                raise Finding(2, 'effect of a deliver() that was rolled back', entry.id)
        self.world.push_history = told

    def add_followed(self, effect):
        if effect.followed in self.world.messages:
            return
        txn = Txn(f'of {effect.pid} for message {effect.id}', None)
        txn.commit_start, txn.commit_end, txn.state = effect.key, now(), COMMITTED
        event = Event(txn, 'enqueue', ids=[effect.followed], name='done')
        event.start = event.key = effect.key
        self.world.add_messages(event, [Message(effect.followed, event, 'done', 'event',
                                                {'of': effect.id, 'in': effect.subscription}, None, None)])

    # The comparison

    def run(self, comparison):
        self.compare_effects()
        self.compare_deliver()
        for message in self.world.messages.values():
            if message.exists():
                for subscription in self.world.pushed:
                    if subscription.matches(message.name, message.kind):
                        self.replay(comparison, message, subscription)
        for (message_id, name), entries in self.by_message.items():
            message = self.world.messages.get(message_id)
            if message is None or not message.exists():
                raise Finding(2, f'{entries[0].kind} in {name}, but the message does not exist', message_id)

    def compare_effects(self):
        counted = collections.Counter((e.id, e.subscription) for e in self.effects)
        for (message_id, name), n in counted.items():
            self.world.checks += 1
            if n > 1:
                raise Finding(9, f'{n} effects in {name}', message_id)

    def compare_deliver(self):
        """Its answer is true."""
        effects = collections.Counter(e.by for e in self.effects)
        for event in self.events.values():
            if event.counts() and event.answer is not None:
                claimed, delivered, retried, dead, unhandled = event.answer
                self.world.checks += 1
                if delivered != effects[event.number] or claimed != delivered + retried + dead + unhandled:
                    raise Finding(7, f'deliver() says {event.answer}, it had {effects[event.number]} effects\n{event}')

    def replay(self, comparison, message, subscription):
        name = subscription.name
        events = [e for e in comparison.by_message[message.id] if e.subscription is subscription or e.kind == 'cancel']
        events += comparison.bulk[subscription] + self.by_message[message.id, name]
        player = Player(self.world, message, subscription)
        for event in sorted(events, key=lambda e: (e.key, e.number)):
            player.step(event)
            self.world.checks += 1
        run = comparison.runs.get((subscription.id, message.id))
        possible = player.reachable(now())
        if run is None and message.id not in comparison.log:
            if not any(s.kind in states.GONE for s in possible):
                raise Finding(11, f'it has left the log; in {name} it is {tell(possible)}', message.id)
            return
        if run is None:
            raise Finding(1, f'lost: in no run of {name}', message.id)
        kind, attempts, limit = run[:3]
        if not any((s.kind, s.attempts) == (kind, attempts) and s.limit in (None, limit) for s in possible):
            rule = 9 if kind == 'delivered' or any(s.kind == 'delivered' for s in possible) else 6
            raise Finding(rule, f'the run in {name} is {kind}, attempts {attempts} of {limit}; possible is '
                          f'{tell(possible)}', message.id)

    def compare_notifications(self, listener, comparison):
        """Once, with the settlement.  A crash can lose one that was sent, or the commit that was not flushed."""
        told = next(s for s in self.world.pushed if s.name == 'told')
        last = {}
        for payload, at in listener.heard:
            message_id = json.loads(payload)['id']
            self.world.checks += 1
            if message_id not in self.world.messages or not self.world.messages[message_id].exists():
                raise Finding(2, 'a notification of what does not exist', message_id)
            if message_id in last and not self.world.disturbances.crashed(last[message_id], at):
                raise Finding(9, 'notified twice', message_id)
            last[message_id] = at
        delivered = {i for (subscription, i), run in comparison.runs.items()
                     if subscription == told.id and run[0] == 'delivered'}
        if listener.whole and delivered - set(last):
            raise Finding(1, 'delivered, but not notified', min(delivered - set(last)))


def tell_history(world, message_id):
    """What its hooks have begun and done, what the same processes did beside it, and what happened to the server."""
    own = world.push_history.get(message_id, [])
    pids = {entry.pid for entry in own}
    beside = [e for entries in world.push_history.values() for e in entries
              if e.pid in pids and e.id != message_id and any(abs(e.key - o.key) < BESIDE for o in own)]
    lines = []
    for entry in sorted(own + beside, key=lambda e: e.key):
        whose = '' if entry.id == message_id else f' of {entry.id}'
        by = f' called by event #{entry.by}' if entry.by else ''
        what = f'begins attempt {entry.attempt} of {entry.limit}{whose}, plan {entry.plan}' if entry.kind == 'begun' \
            else f'has had its effect in attempt {entry.attempt}{whose}'
        lines.append(f'{short(entry.key)} {entry.subscription}: {entry.pid} {what}{by}')
    for w in world.disturbances.crashes + world.disturbances.stops:
        lines.append(f'{w.what}{f" ({w.pid})" if w.pid else ""} from {short(w.begin)} to {short(w.end)}')
    return lines
