"""Runs scenarios with peers, as bench/run was told to, and writes what came out. See bench/README.md."""
import argparse
import importlib
import os
import signal
import sys
import time
import traceback

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'),
                os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'peers')]

SCENARIOS = {'a': 'a_enqueue', 'b': 'b_bulk', 'c': 'c_claim', 'd': 'd_bytes', 'e': 'e_snapshot', 'f': 'f_backlog', 'g': 'g_push',
             'h': 'h_load'}
PEERS = {'textbook': 'textbook', 'pgq': 'pgq', 'graphile-worker': 'graphile_worker', 'pg-boss': 'pg_boss', 'pgmq': 'pgmq'}


def scenario(letter):
    return importlib.import_module(f'scenarios.{SCENARIOS[letter]}')


def peer_class(name):
    return importlib.import_module(f'peers.{PEERS.get(name, name)}').PEER


class Bench:
    """What a scenario gets: the server, the peers, the results, and how much to do."""

    def __init__(self, options):
        from harness.results import Results
        from harness.server import Server
        self.options = options
        self.quick = options.quick
        self.rounds = options.rounds or (2 if options.quick else 5)
        self.server = Server(options.work)
        self.results = Results()
        self.files = 0
        self.letter = ''
        self.versions = {}
        self.seconds = {}
        self.peers = []
        self.scripts = os.path.join(options.work, 'scripts')
        os.makedirs(self.scripts, exist_ok=True)
        self.outbox = peer_class('outbox')(self)
        self.floor = peer_class('floor')(self)

    def install_peers(self, names):
        """outbox, and those of the others that this machine can have."""
        from harness.peer import NotHere
        for peer in [self.outbox] + [peer_class(name)(self) for name in names]:
            try:
                peer.install()
                with self.server.database(peer.name) as db:
                    peer.create(db)
                    self.versions[peer.name] = str(peer.version(db))
                self.peers.append(peer)
            except NotHere as reason:
                self.results.skip('all', peer.name, str(reason))
                self.say(f'without {peer.name}: {reason}')

    @staticmethod
    def scenario(letter):
        return scenario(letter)

    def pick(self, quick, full):
        return quick if self.quick else full

    def say(self, text):
        print(f'   {text}', flush=True)

    def write(self, text):
        """A script as a file; returns its name."""
        self.files += 1
        name = os.path.join(self.scripts, f'{self.files}.sql')
        with open(name, 'w', encoding='utf-8') as file:
            file.write(text)
        return name

    def add(self, measure, peer, unit, values, series=None, **params):
        name = peer if isinstance(peer, str) else peer.name
        self.results.add(self.letter, measure, name, unit, values, series, **params)
        record = self.results.records[-1]
        what = ', '.join(f'{key} {value}' for key, value in params.items())
        spread = f" ({record['min']:,.4g} to {record['max']:,.4g})" if len(record['values']) > 1 else ''
        self.say(f"{measure}, {name}{', ' if what else ''}{what}: {record['median']:,.4g} {unit}{spread}")

    def each(self, peers, work, **params):
        """Calls work(peer) for each; who cannot is noted with the reason, who breaks with the error."""
        from harness.peer import NotHere
        for peer in peers:
            try:
                work(peer)
            except NotHere as reason:
                self.results.skip(self.letter, peer.name, str(reason))
            except Exception as error:  # pylint: disable=broad-except
                self.broke(peer, error, **params)

    def broke(self, peer, error, **params):
        self.results.fail(self.letter, peer.name, f'{type(error).__name__}: {str(error).strip()}', **params)
        self.say(f'{peer.name} broke: {error}')
        traceback.print_exc(file=sys.stderr)

    def interleave(self, measure, unit, variants, rounds=None, **params):
        """Measures variants in turn, round by round: {(peer, params): function returning a value}; each is a record."""
        from harness.peer import NotHere
        values = {key: [] for key in variants}
        for number in range(rounds or self.rounds):
            for (peer, more), function in variants.items():
                key = (peer, more)
                if values[key] is None or number >= peer.rounds:
                    continue
                try:
                    values[key].append(function())
                except NotHere as reason:
                    self.results.skip(self.letter, peer.name, str(reason))
                    values[key] = None
                except Exception as error:  # pylint: disable=broad-except
                    self.broke(peer, error, **params, **dict(more))
                    values[key] = None
        for (peer, more), found in values.items():
            if found:
                self.add(measure, peer, unit, found, **params, **dict(more))

    def run(self, letters):
        for letter in letters:
            module = scenario(letter)
            self.letter = letter
            print(f'== {letter}. {module.TITLE}', flush=True)
            begin = time.monotonic()
            try:
                with self.server.settings(**getattr(module, 'SETTINGS', {})):
                    module.run(self)
            except Exception as error:  # pylint: disable=broad-except
                self.broke(self.outbox, error)
            self.seconds[letter] = round(time.monotonic() - begin, 1)
            self.say(f'{self.seconds[letter]:.0f} s')


def parse():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument('--work')
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--only', default=','.join(SCENARIOS))
    parser.add_argument('--peers', default=','.join(PEERS))
    parser.add_argument('--pgmq')
    parser.add_argument('--results', default='bench-results')
    parser.add_argument('--rounds', type=int)
    parser.add_argument('--list', action='store_true')
    options = parser.parse_args()
    options.only = [word.strip() for word in options.only.split(',') if word.strip()]
    options.peers = [] if options.peers == 'none' else [word.strip() for word in options.peers.split(',') if word.strip()]
    for word in options.only:
        if word not in SCENARIOS:
            parser.error(f'unknown scenario: {word}; there are {", ".join(SCENARIOS)}')
    for word in options.peers:
        if word not in PEERS:
            parser.error(f'unknown peer: {word}; there are {", ".join(PEERS)}')
    return options


def list_all():
    os.environ.setdefault('OUTBOX_TOP', os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
    for letter in SCENARIOS:
        print(f'{letter}  {scenario(letter).TITLE}')
    for name in PEERS:
        print(f'{name}: {peer_class(name).about}')


def main():
    options = parse()
    if options.list:
        list_all()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from harness import report
    begin = time.monotonic()
    bench = Bench(options)
    bench.install_peers(options.peers)
    try:
        bench.run(options.only)
    finally:
        # who stops it after half an hour has the scenarios that are done
        bench.seconds['all'] = round(time.monotonic() - begin, 1)
        report.write(bench)
    return 1 if bench.results.broken else 0


if __name__ == '__main__':
    sys.exit(main())
