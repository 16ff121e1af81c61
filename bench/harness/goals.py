"""The goals, each with how it is computed from the results. A goal is a ratio, a number of messages, bytes or milliseconds."""
from .results import Spread


class Goal:
    """Text, what was seen in prototypes and peers, and the rule: at least, or at most, so much."""

    def __init__(self, scenario, text, seen, rule, bound, reached, unit='×'):
        self.scenario = scenario
        self.text = text
        self.seen = seen
        self.rule = rule
        self.bound = bound
        self.reached = reached
        self.unit = unit

    def judge(self, results):
        """(Spread or None, verdict)"""
        spread = self.reached(results)
        if spread is None:
            return None, 'not measured'
        good = spread.median >= self.bound if self.rule == 'at least' else spread.median <= self.bound
        return spread, 'pass' if good else 'FAIL'

    def bound_text(self):
        return f'{self.rule} {self.bound:g} {self.unit}'


def against(scenario, measure, peer, **params):
    """outbox's figure as a multiple of a peer's, round by round."""
    return lambda r: r.ratio(r.spread(scenario, measure, 'outbox', **params), r.spread(scenario, measure, peer, **params))


def figure(scenario, measure, **params):
    return lambda r: r.spread(scenario, measure, 'outbox', **params)


def between(scenario, above, below):
    """The ratio of two of outbox's own figures, each a pair of measure and parameters."""
    return lambda r: r.ratio(r.spread(scenario, above[0], 'outbox', **above[1]), r.spread(scenario, below[0], 'outbox', **below[1]))


def tenths(variant):
    """The last tenth against the first, each by what it reached of the control beside it."""
    def reached(r):
        last, first = (r.spread('e', f'{which} tenth against control', 'outbox', variant=variant) for which in ('last', 'first'))
        return Spread([last.median / first.median]) if last and first else None
    return reached


def backlog_ratio(state):
    """claim(10), p99: the largest backlog against the smallest, both in that state of the statistics."""
    def reached(r):
        found = r.find('f', 'latency of claim, p99', 'outbox', analyze=state)
        if len(found) < 2:
            return None
        found.sort(key=lambda record: record['params']['backlog'])
        return r.ratio(Spread(found[-1]['values']), Spread(found[0]['values']))
    return reached


def per_delivery(r):
    """Cost of a delivery with 16 subscriptions, as a multiple of that with one."""
    return r.ratio(r.spread('h', 'deliver', 'outbox', subscriptions=1), r.spread('h', 'deliver', 'outbox', subscriptions=16))


def below_pgq(r):
    return r.ratio(r.spread('d', 'whole', 'outbox'), r.spread('d', 'whole', 'pgq'))


def claims(batch, consumers, settle='batch'):
    return {'batch': batch, 'consumers': consumers, 'settle': settle, 'commit': 'off'}


def added(commit):
    return between('a', ('tpcb', {'commit': commit, 'enqueues': True}), ('tpcb', {'commit': commit, 'enqueues': False}))


def claim_goals(text, params, *peers):
    """A goal for each peer: (name, bound, what was seen)."""
    return [Goal('c', f'{text}, against {peer}', seen, 'at least', bound, against('c', 'claim', peer, **params))
            for peer, bound, seen in peers]


ENQUEUE = {'clients': 4, 'size': 250}

GOALS = [
    Goal('a', 'enqueue against a bare INSERT, 4 clients, synchronous_commit off',
         'textbook 0.74, PgQ 0.71, pg-boss 0.38, pgmq 0.33, graphile-worker 0.08; spike 0.87 (SPI), 1.05 (direct)',
         'at least', 0.95, against('a', 'enqueue', 'floor', commit='off', **ENQUEUE)),
    Goal('a', 'the same, synchronous_commit on', 'textbook 0.80, PgQ 0.92, pgmq 0.62',
         'at least', 0.97, against('a', 'enqueue', 'floor', commit='on', **ENQUEUE)),
    Goal('a', 'a TPC-B transaction that enqueues against one that does not, synchronous_commit off', '',
         'at least', 0.95, added('off')),
    Goal('a', 'the same, synchronous_commit on', '', 'at least', 0.95, added('on')),
    Goal('b', 'bulk of 1,000 against INSERT ... SELECT into a table with the same two indexes', 'spike 1.02',
         'at least', 0.95, against('b', 'bulk', 'floor')),
    *claim_goals('batch 100, 1 consumer', claims(100, 1), ('textbook', 5, '30,000/s; spike 123,000/s = 4.1 ×'),
                 ('pgmq', 3, '51,000/s'), ('pgq', 1.5, '96,000/s')),
    *claim_goals('batch 100, 4 consumers', claims(100, 4), ('textbook', 5, '38,000/s; spike 4.0 ×'),
                 ('pgmq', 3, '69,000/s'), ('pgq', 1, '188,000/s, four queues')),
    *claim_goals('batch 1,000, 1 consumer', claims(1000, 1), ('textbook', 8, '37,000/s; spike 226,000/s = 6.5 ×'),
                 ('pgmq', 4, '80,000/s'), ('pgq', 0.8, '407,000/s')),
    *claim_goals('batch 1, 4 consumers', claims(1, 4), ('textbook', 1.3, '')),
    *claim_goals('batch 100, settled one by one', claims(100, 1, 'each'), ('textbook', 1.5, '')),
    Goal('d', 'WAL of claim and settle, batches of 100', 'textbook 1,258 B, pgmq 661 B, PgQ 6 B, prototype 8 B',
         'at most', 12, figure('d', 'wal', part='claim and settle'), 'B'),
    Goal('d', 'WAL of a whole life against that of its enqueue alone', '',
         'at most', 1.1, between('d', ('whole', {}), ('wal', {'part': 'enqueue'}))),
    Goal('d', 'WAL of a whole life against PgQ', '487 B', 'at most', 1, below_pgq),
    Goal('e', 'last tenth against first tenth of 2,000,000, behind a snapshot',
         'slower than their own controls after 200,000: pgmq 58 ×, textbook 19 ×, PgQ 1.9 ×; prototype 1.0 after 300,000',
         'at least', 0.95, tenths('snapshot')),
    Goal('e', 'the same behind an open transaction that has enqueued', '',
         'at least', 0.95, tenths('writer')),
    Goal('f', 'claim(10), p99, at 10 million against 1 thousand, stale statistics',
         'PgQ 291 ms at 1 million, pg-boss 1,485 ms', 'at most', 1.5, backlog_ratio('before')),
    Goal('f', 'the same after ANALYZE', '', 'at most', 1.5, backlog_ratio('after')),
    Goal('g', 'hooks per second, PL/pgSQL that does nothing, one worker', '',
         'at least', 30000, figure('g', 'hooks', language='plpgsql', workers=1), '/s'),
    Goal('g', 'commit to hook, idle, median', '', 'at most', 1, figure('g', 'latency, median', to='hook', load='idle'), 'ms'),
    Goal('g', 'commit to hook, idle, p99', '', 'at most', 5, figure('g', 'latency, p99', to='hook', load='idle'), 'ms'),
    Goal('g', "commit to a listening client's claim, idle, median", '', 'at most', 10,
         figure('g', 'latency, median', to='claim', load='idle'), 'ms'),
    Goal('h', 'enqueue with 16 subscriptions against one', '',
         'at least', 0.97, between('h', ('enqueue', {'subscriptions': 16}), ('enqueue', {'subscriptions': 1}))),
    Goal('h', 'cost of a delivery with 16 subscriptions against one', '', 'at most', 1.1, per_delivery),
    Goal('h', 'steady load: last fifth against first fifth', '', 'at least', 0.95, figure('h', 'steady, last fifth by first')),
]
