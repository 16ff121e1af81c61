# The moves of operators: maintain, pause, requeue, discard, subscribe in mid-flight, and what goes with them.
import retention
from model import Event, Finding, Subscription, World, now

PATTERNS = ('#', 'order.#', '*.created', 'order.*')
GONE = ('42704',)
CONDEMNED = 'r, (SELECT count(*) FROM outbox.segment WHERE condemned_at IS NOT NULL)'


def after_end(world, event):
    """The transaction has ended: passing subscriptions are there, or gone, or as they were."""
    if event.kind == 'subscribe':
        if event.counts():
            event.subscription.created = event
        world.slots[event.subscription.name] = event.subscription if event.counts() else None
    elif event.kind == 'unsubscribe':
        if event.counts():
            event.subscription.dropped = event
        world.slots[event.subscription.name] = None if event.counts() else event.subscription
    elif event.kind in ('discard', 'cancel') and event.counts():
        subscription = event.subscription or next(s for s in world.static if s.name == 'default')
        world.dead.append((event.ids[0], subscription))


def maintain(session, txn):
    event = Event(txn, 'maintain')
    rows = session.call(event, 'r.routed, r.expired, r.rotated', 'outbox.maintain() AS r', ())
    session.world.count('maintain', *['segment emptied'] * rows[0][2])


def pause(session, txn):
    switch(session, txn, 'pause')


def resume(session, txn):
    switch(session, txn, 'resume')


def switch(session, txn, name):
    subscription = next(s for s in session.world.static if s.name == 'gamma')
    event = Event(txn, name, subscription)
    session.call(event, 'r', f'outbox.{name}(%s) AS r', (subscription.name,))
    session.world.count(name)


def skip(session, txn):
    subscription = session.random.choice([s for s in session.world.operable() if s.name not in ('default', 'alpha')])
    before = now() + session.world.offset_high(now()) - session.random.randrange(5_000_000)
    event = Event(txn, 'skip', subscription, before=before)
    rows = session.call(event, 'r', 'outbox.skip(%s, model.at(%s)) AS r', (subscription.name, before), GONE)
    event.data['changed'] = rows[0][0]
    session.world.count('skip')


def pick_dead(session):
    dead = [d for d in list(session.world.dead) if d[1].dropped is None]
    dead = dead[-20:] if session.random.random() < 0.5 else dead
    return session.random.choice(dead) if dead and session.random.random() < 0.8 else pick_any(session)


def pick_any(session):
    known = [m for m in list(session.world.messages.values())[-400:] if m.exists()]
    if not known:
        return None
    message = session.random.choice(known)
    fitting = [s for s in session.world.operable() if s.matches(message.name, message.kind)]
    return message.id, session.random.choice(fitting)


def requeue(session, txn, picked=None):
    picked = picked or pick_dead(session)
    if picked is None:
        return
    rnd = session.random
    later = now() + session.world.offset_high(now()) + rnd.randrange(5_000_000) if rnd.random() < 0.3 else None
    reset = rnd.random() < 0.7
    event = Event(txn, 'requeue', picked[1], [picked[0]], available_at=later, reset_attempts=reset)
    rows = session.call(event, CONDEMNED, """outbox.requeue(id => %s, subscription => %s, available_at => model.at(%s),
        reset_attempts => %s) AS r""", (picked[0], picked[1].name, later, reset), ('55000', 'OB002') + GONE)
    event.data['answer'], condemned = rows[0]
    session.world.count('requeue', *['requeue beside a condemned segment'] * condemned)


def requeue_all(session, txn):
    subscription = session.random.choice(session.world.operable())
    event = Event(txn, 'requeue_all', subscription, available_at=None, reset_attempts=True)
    rows = session.call(event, 'r', 'outbox.requeue_all(subscription => %s) AS r', (subscription.name,), GONE)
    event.data['changed'] = rows[0][0]
    session.world.count('requeue_all')


def discard(session, txn):
    picked = pick_dead(session)
    if picked is None:
        return
    event = Event(txn, 'discard', picked[1], [picked[0]], partial=False)
    rows = session.call(event, 'r', 'outbox.discard(id => %s, subscription => %s, reason => %s) AS r',
                        (picked[0], picked[1].name, 'not wanted'), ('55000', 'OB002') + GONE)
    event.data['answer'] = rows[0][0]
    session.world.count('discard')


def cancel(session, txn):
    picked = pick_any(session)
    if picked is None:
        return
    event = Event(txn, 'cancel', None, [picked[0]], partial=True)
    rows = session.call(event, 'r', 'outbox.cancel(%s) AS r', (picked[0],), ('55000', 'OB002'))
    event.data['answer'] = rows[0][0]
    session.world.count('cancel')


def subscribe_to_all(session, txn):
    subscribe(session, txn, '#', True)


def subscribe(session, txn, pattern=None, from_earliest=None):
    world, rnd = session.world, session.random
    with world.lock:
        free = [n for n, s in sorted(world.slots.items()) if s is None]
        if not free:
            return
        name = rnd.choice(free)
        world.slots[name] = World.BUSY
    new = Subscription(name, pattern or rnd.choice(PATTERNS), None if pattern else rnd.choice((None, None, 'job')),
                       lease=10_000, max_active=100_000, max_attempts=rnd.randint(1, 4),
                       from_earliest=from_earliest or rnd.random() < 0.5)
    event = Event(txn, 'subscribe', new, pattern=new.pattern, for_kind=new.kind, from_earliest=new.from_earliest)
    rows = session.call(event, 'r', SUBSCRIBE, arguments(new, max(new.limits)) + (False,))
    if rows[0][0] != 'created':
        raise Finding(7, f'subscribe says {rows[0][0]}\n{event}')
    new.id = session.execute('SELECT max(id) FROM outbox.subscription WHERE name = %s', (name,))[0][0]
    world.subscriptions_by_id[new.id] = new
    world.count(f'subscribe from {"the earliest" if new.from_earliest else "now"}')


SUBSCRIBE = """outbox.subscribe(name => %s, pattern => %s, kind => %s, from_earliest => %s,
    lease => %s * interval '1 microsecond', max_active => %s * interval '1 microsecond', max_attempts => %s,
    replace => %s) AS r"""


def arguments(subscription, limit):
    s = subscription
    return s.name, s.pattern, s.kind, s.from_earliest, s.lease, s.max_active, limit


def alter(session, txn):
    subscription = next(s for s in session.world.static if s.name == 'beta')
    limit = session.random.randint(2, 5)
    subscription.limits.add(limit)
    event = Event(txn, 'alter', subscription, limit=limit)
    rows = session.call(event, 'r', SUBSCRIBE, arguments(subscription, limit) + (True,))
    if rows[0][0] not in ('altered', 'unchanged'):
        raise Finding(7, f'subscribe with replace says {rows[0][0]}\n{event}')
    session.world.count('subscribe with replace')


def unsubscribe(session, txn):
    world = session.world
    with world.lock:
        there = [s for _, s in sorted(world.slots.items()) if isinstance(s, Subscription)]
        if not there:
            return
        subscription = session.random.choice(there)
        world.slots[subscription.name] = World.BUSY
    event = Event(txn, 'unsubscribe', subscription)
    rows = session.call(event, 'r', 'outbox.unsubscribe(%s, discard_pending => true) AS r', (subscription.name,))
    event.data['changed'] = rows[0][0]
    world.count('unsubscribe')


SINGLE = {maintain: 4, retention.purge: 0.7, requeue: 2, discard: 1, cancel: 0.5, requeue_all: 0.3, pause: 0.4, resume: 1.2}
MORE = {skip: 0.2, subscribe: 1, unsubscribe: 0.7, alter: 0.3}
