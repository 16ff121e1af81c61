# The moves that producers and consumers make; operators.py has those of operators.
#
# A move makes one call in the session's transaction and notes it as an event.  What cannot be right at once is
# found here; what depends on others is judged by check.py when the round is over.
import datetime
import json
import uuid

import operators
import push
import retention
from model import ABORTED, Aborted, Event, Finding, Lease, Message, now

NAMES = ('order', 'order.created', 'order.paid', 'order.item.created', 'invoice.created', 'user')
BATCH_SIZE = 100
KINDS = ('event', 'event', 'event', 'job')

CLAIM_COLUMNS = """c.id::text, c.claim_token::text, model.us(c.locked_until), model.us(c.active_until), c.attempts,
    c.max_attempts, c.name, c.kind, c.payload, c.subscription"""
CLAIM = """outbox.claim_batch(max_messages => %s, lease => %s * interval '1 microsecond', subscription => %s,
    worker => %s, separate_tokens => %s) AS c"""


def make(session, txn, single=False):
    """One random move."""
    world = session.world
    table = SINGLE | operators.SINGLE
    if not single:
        table |= MORE | operators.MORE
        if world.pushed:
            table = push.with_operators(table)
    if world.calm:
        del table[operators.maintain], table[retention.purge]
    if world.scarce:
        table.update({move: table[move] * 0.15 for move in PRODUCING})
    move = session.random.choices(list(table), list(table.values()))[0]
    move(session, txn)


def after_end(world, event):
    operators.after_end(world, event)
    if event.counts() and event.kind == 'settle' and event.answer == 'dead':
        world.dead.append((event.ids[0], event.subscription))


# Producers

def random_message(session):
    rnd = session.random
    message = {'name': rnd.choice(NAMES), 'kind': rnd.choice(KINDS), 'payload': new_payload(session)}
    if rnd.random() < 0.2:
        message['id'] = str(uuid.UUID(int=rnd.getrandbits(128), version=4))
    if rnd.random() < 0.12:
        message['available_at'] = now() + session.world.offset_high(now()) + rnd.randrange(20_000_000)
    if rnd.random() < 0.15:
        message['max_attempts'] = rnd.randint(1, 4)
    return message


def new_payload(session):
    session.made = getattr(session, 'made', 0) + 1
    return {'session': session.number, 'made': session.made}


def enqueued(session, event, messages, ids):
    if len(ids) != len(messages):
        raise Finding(7, f'{len(ids)} ids for {len(messages)} messages\n{event}')
    for message, message_id in zip(messages, ids):
        if message.get('id', message_id) != message_id:
            raise Finding(7, f'enqueued {message["id"]}, the answer is {message_id}', message_id)
    event.ids = ids
    session.world.add_messages(event, [
        Message(i, event, m['name'], m['kind'], m['payload'], m.get('available_at'), m.get('max_attempts'))
        for m, i in zip(messages, ids)])


def enqueue(session, txn):
    m = random_message(session)
    event = Event(txn, 'enqueue', name=m['name'])
    rows = session.call(event, 'r::text', """outbox.enqueue(name => %s, payload => %s, kind => %s, id => %s,
        available_at => model.at(%s), max_attempts => %s) AS r""",
        (m['name'], json.dumps(m['payload']), m['kind'], m.get('id'), m.get('available_at'), m.get('max_attempts')))
    enqueued(session, event, [m], [rows[0][0]])
    session.world.count('enqueue')


def enqueue_objects(session, txn):
    messages = [random_message(session) for _ in range(session.random.choice((1, 3, 10, 30)))]
    event = Event(txn, 'enqueue', form='objects')
    rows = session.call(event, 'r::text', 'outbox.enqueue_batch(messages => %s) AS r',
                        (json.dumps([dict(m, **iso_time(m)) for m in messages]),))
    enqueued(session, event, messages, [r[0] for r in rows])
    session.world.count('enqueue_batch of objects')


def iso_time(message):
    at = message.get('available_at')
    if at is None:
        return {}
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return {'available_at': (epoch + datetime.timedelta(microseconds=at)).isoformat()}


def enqueue_payloads(session, txn):
    name = session.random.choice(NAMES)
    messages = [{'name': name, 'kind': 'event', 'payload': new_payload(session)}
                for _ in range(session.random.choice((1, 2, 20, 60)))]
    event = Event(txn, 'enqueue', form='payloads', name=name)
    rows = session.call(event, 'r::text', 'outbox.enqueue_batch(name => %s, payloads => %s) AS r',
                        (name, json.dumps([m['payload'] for m in messages])))
    enqueued(session, event, messages, [r[0] for r in rows])
    session.world.count('enqueue_batch of payloads')


def enqueue_by_view(session, txn):
    messages = [random_message(session) for _ in range(session.random.choice((1, 1, 3)))]
    event = Event(txn, 'enqueue', form='outgoing')
    session.world.add_event(event)
    event.start = now()
    args = []
    for m in messages:
        args += [m.get('id'), m['name'], m['kind'], json.dumps(m['payload']), m.get('available_at'),
                 m.get('max_attempts')]
    values = ', '.join(['(%s::uuid, %s, %s, %s::jsonb, model.at(%s), %s::integer)'] * len(messages))
    rows = session.note(event, session.execute(
        f"""INSERT INTO outbox.outgoing (id, name, kind, payload, available_at, max_attempts) VALUES {values}
            RETURNING id::text, model.us(clock_timestamp()), current_setting('outbox.clock_offset')""", args, event))
    enqueued(session, event, messages, [r[0] for r in rows])
    session.world.count('insert into outgoing')


def enqueue_again(session, txn):
    """An id that is there is refused, in whichever segment it is; one that comes and goes is waited for."""
    known = list(session.world.messages.values())
    known = known[-50:] if session.random.random() < 0.5 else known
    if not known:
        return
    message = session.random.choice(known)
    event = Event(txn, 'enqueue again', ids=[message.id])
    session.world.count('enqueue of a known id')
    session.call(event, 'r::text', 'outbox.enqueue(name => %s, payload => %s, id => %s) AS r',
                 (message.name, '{}', message.id), allowed=('23505',))
    event.undone = True         # it has left, or was rolled back; check.py asks
    session.world.count('enqueue of an id that has left')
    session.world.again.append(event)
    raise Aborted


# Consumers

def claim(session, txn):
    rnd = session.random
    usable = [s for s in session.world.live() if s.static or txn.isolation]
    claim_from(session, txn, rnd.choice(usable), rnd.choice((1, 2, 5, 10, 20, 50, 100, None)),
               rnd.choice((None, None, 1_000_000, 5_000_000, 20_000_000)), rnd.random() < 0.25)


def claim_from(session, txn, subscription, size=None, lease=None, separate=False):
    """Returns how many messages it got."""
    event = Event(txn, 'claim', subscription, size=size)
    rows = session.call(event, CLAIM_COLUMNS, CLAIM, (size, lease, subscription.name, f'session {session.number}',
                        separate), allowed=('42704',))
    if not rows:
        session.world.count('claim of nothing')
        return 0
    if not subscription.static:
        event.subscription = subscription = claimed_from(session, rows[0][1])
    event.ids = [r[0] for r in rows]
    event.data['rows'] = {r[0]: (r[1], r[2], r[4], r[5], moment_of(subscription, lease, r)) for r in rows}
    look_at_claim(session, event, subscription, size or BATCH_SIZE, rows)
    for token in sorted({r[1] for r in rows}):
        ids = [r[0] for r in rows if r[1] == token]
        txn.leases.append(Lease(token, event, subscription, ids, min(r[2] for r in rows)))
    session.world.count('claim of separate tokens' if separate else 'claim')
    return len(rows)


def claimed_from(session, token):
    """A name can be used again: which subscription of that name it was."""
    found = session.execute('SELECT DISTINCT subscription_id FROM outbox.delivery WHERE claim_token = %s', (token,))
    return session.world.subscriptions_by_id[found[0][0]]


def moment_of(subscription, lease, row):
    """The clock at the claim, which must be the same by either end of the lease."""
    moment = row[2] - (lease or subscription.lease)
    if moment != row[3] - subscription.max_active:
        raise Finding(7, f'locked_until {row[2]} and active_until {row[3]} do not fit the lease {lease}', row[0])
    return moment


def look_at_claim(session, event, subscription, size, rows):
    if len(rows) > size:
        raise Finding(7, f'{len(rows)} messages in a claim of {size}\n{event}')
    if len(event.data['rows']) < len(rows):
        raise Finding(3, f'a message is twice in one claim\n{event}')
    for row in rows:
        if row[9] != subscription.name:
            raise Finding(1, f'claimed from {subscription.name}, it says {row[9]}', row[0])
        message = session.world.messages.get(row[0])
        if message is None:
            continue            # its enqueuer has not yet read the answer; judged at the end
        if (row[6], row[7], row[8]) != (message.name, message.kind, message.payload):
            raise Finding(1, f'claimed with another content: {row[6]} {row[7]} {row[8]}', row[0])
        if not subscription.matches(message.name, message.kind):
            raise Finding(1, f'claimed from {subscription.name}, whose pattern is {subscription.pattern}', row[0])
        if message.event.txn.state == ABORTED or message.event.undone:
            raise Finding(2, 'claimed although its enqueue was rolled back', row[0])
        if message.event.txn is event.txn:
            session.world.count('claim of own message')
    if any(r[4] > 1 for r in rows):
        session.world.count('claim of a retry')


def left(txn, lease):
    """The messages of a lease that this transaction has not yet settled."""
    done = {i for e in txn.events if e.kind == 'settle' and e.lease_held is lease and not e.undone and not e.refused
            for i in e.ids}
    return sorted(lease.ids - done)


def pick_lease(session, txn, ended=False):
    """A lease and what is left of it, which may be settled beside us at any moment."""
    leases = session.held + txn.leases
    if session.random.random() < 0.1:
        leases = list(session.random.choice(session.world.sessions).held)       # beside its owner: a heartbeat
        session.world.count('lease of another session')
    leases = [(e, ids) for e in leases if not e.claim.undone and (ids := left(txn, e))]
    if ended:
        clock = session.look_at_clock()
        leases = [(e, ids) for e, ids in leases if e.until < clock and e.claim.txn is not txn]
    elif session.random.random() < 0.9:
        clock = session.world.clock_high()
        leases = [(e, ids) for e, ids in leases if e.until > clock or e.claim.txn is txn]
    return session.random.choice(leases) if leases else (None, [])


SETTLE = """outbox.settle(id => %s, claim_token => %s, outcome => %s, error => %s, error_detail => %s,
    retry_at => model.at(%s)) AS r"""
SETTLE_BATCH = """outbox.settle_batch(claim_token => %s, outcome => %s, error => %s, error_detail => %s,
    retry_at => model.at(%s), ids => %s::uuid[]) AS r"""
RENEWALS = {
    'renew': ("renew(claim_token => %s, lease => %s * interval '1 microsecond', id => %s)", ('token', 'lease', 'id')),
    'renew_batch': ("renew_batch(%s, %s * interval '1 microsecond')", ('token', 'lease')),
    'renew_batch by ids': ("renew_batch(%s, %s * interval '1 microsecond', %s::uuid[])", ('token', 'lease', 'ids')),
}
NOT_HELD = ('OB003', 'OB002')      # the second where it has left the log


def use(session, event, columns, source, args):
    """Settles or renews.  What the same transaction has claimed it holds, at least until the lease ends."""
    lease = event.lease_held
    touched = any(e.lease_held is lease or e.kind in ('skip', 'unsubscribe') for e in event.txn.events)
    try:
        return session.call(event, columns, source, args, NOT_HELD)
    except Aborted:
        own = lease.claim.txn is event.txn and not touched
        if own and event.refused in NOT_HELD and event.clock_high < lease.until:
            raise Finding(7, f'refused to the transaction that claimed it\n{event}', event.ids[0]) from None
        raise


def random_outcome(session):
    """Outcome, error, error_detail and retry_at."""
    rnd = session.random
    outcome = rnd.choices(('delivered', 'failed', 'dead', 'released'), (60, 20, 5, 15))[0]
    later = None
    if outcome in ('failed', 'released') and rnd.random() < 0.4:
        later = now() + session.world.offset_high(now()) + rnd.randrange(10_000_000)
    error = 'it did not work' if outcome in ('failed', 'dead') else None
    return outcome, error, '{"a": 1}' if error and rnd.random() < 0.5 else None, later


def settle_one(session, txn, lease, ids, name):
    outcome, error, detail, later = random_outcome(session)
    event = Event(txn, 'settle', lease.subscription, [session.random.choice(ids)], token=lease.token, outcome=outcome,
                  retry_at=later, partial=False, answer=None)
    event.lease_held = lease
    session.world.count(name or f'settle {outcome}')
    rows = use(session, event, 'r', SETTLE, (event.ids[0], lease.token, outcome, error, detail, later))
    event.data['answer'] = rows[0][0]


def settle(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        settle_one(session, txn, lease, ids, None)


def settle_late(session, txn):
    lease, ids = pick_lease(session, txn, ended=True)
    if lease:
        settle_one(session, txn, lease, ids, 'settle late')


def settle_batch(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        settle_many(session, txn, lease, ids, None, 'settle_batch')


def settle_some(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        ids = session.random.sample(ids, session.random.randint(1, len(ids)))
        if session.random.random() < 0.2:
            ids += [m.id for m in list(session.world.messages.values())[-5:] if m.exists() and m.id not in ids]
        settle_many(session, txn, lease, ids, ids, 'settle_batch by ids')


def settle_many(session, txn, lease, ids, asked, name, chosen=None):
    outcome, error, detail, later = chosen or random_outcome(session)
    event = Event(txn, 'settle', lease.subscription, ids, token=lease.token, outcome=outcome, retry_at=later,
                  partial=True, answer=None)
    event.lease_held = lease
    session.world.count(f'{name} {outcome}')
    rows = use(session, event, 'r', SETTLE_BATCH, (lease.token, outcome, error, detail, later, asked))
    event.data['changed'] = rows[0][0]
    event.data['partial'] = event.changed < len(ids)
    if not 0 < event.changed <= len(ids):
        raise Finding(7, f'settle_batch says {event.changed} of at most {len(ids)}', ids[0])
    if event.partial:
        session.world.count('settle_batch of some')


def settle_wrongly(session, txn):
    """A token that was never given out, or one that holds another message."""
    leases = [e for e in session.held if left(txn, e)]
    lease = session.random.choice(leases or [None])
    ids = left(txn, lease) if lease else []
    if not ids:
        return
    tokens = [str(uuid.uuid4())] + [e.token for e in leases if not e.ids & lease.ids]
    token = session.random.choice(tokens)
    event = Event(txn, 'settle wrongly', lease.subscription, [session.random.choice(ids)], token=token)
    session.world.count('settle with a wrong token')
    session.call(event, 'r', SETTLE, (event.ids[0], token, 'delivered', None, None, None), NOT_HELD)
    raise Finding(7, f'settled with the wrong token {token}', event.ids[0])


def renew_one(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        renew(session, txn, lease, [session.random.choice(ids)], 'renew')


def renew_batch(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        renew(session, txn, lease, ids, 'renew_batch')


def renew_some(session, txn):
    lease, ids = pick_lease(session, txn)
    if lease:
        ids = session.random.sample(ids, session.random.randint(1, len(ids)))
        renew(session, txn, lease, ids, 'renew_batch by ids')


def renew(session, txn, lease, ids, name):
    longer = session.random.choice((1_000_000, 5_000_000, 20_000_000))
    event = Event(txn, 'renew', lease.subscription, ids, token=lease.token, lease=longer, until=None,
                  partial=name != 'renew', others=[i for i in left(txn, lease) if i not in ids])
    event.lease_held = lease
    session.world.count(name)
    source, args = RENEWALS[name]
    rows = use(session, event, 'model.us(r)', f'outbox.{source} AS r',
               [{'id': ids[0], 'ids': ids, 'token': lease.token, 'lease': longer}[a] for a in args])
    event.data['until'] = lease.until = rows[0][0]


# How often.  A single statement without BEGIN can be one of SINGLE.
SINGLE = {
    enqueue: 12, enqueue_objects: 3, enqueue_payloads: 2, enqueue_by_view: 3, claim: 22, settle: 18, settle_batch: 9,
    settle_some: 7, settle_late: 3, settle_wrongly: 1, renew_one: 3, renew_batch: 3, renew_some: 2,
}
MORE = {enqueue_again: 1}
PRODUCING = (enqueue, enqueue_objects, enqueue_payloads, enqueue_by_view)
