# What is done to the server's processes on purpose, and what was done when: who judges needs to know.
#
# A *crash* ends all processes in the middle, and what was not flushed is lost: kill -9 of any process, of the
# postmaster, or an immediate shutdown, after which a standby may be promoted: a failover.  A *stop* is an order to one process, or to all, to end or to give up.
# A trap is a crash that a hook triggers itself, right after it has begun (hook.sql).
import contextlib
import os
import signal

import server
from model import Finding, now
from server import ConnectionLost

AFTER_CRASH = 30_000_000        # a connection lost so long after a crash was lost by it
CLOCK_LAG = 2_000_000           # until all processes have noticed a jump
STOPPING = 10_000_000           # so long a process that is told to stop may take notice
PATIENCE = 60
KILL_TAKES = 10         # seconds, until the server is back

PROCESSES = ('launcher', 'coordinator', 'delivery')
CRASHES = ('kill session', 'kill launcher', 'kill coordinator', 'kill delivery')
RESTARTS = ('kill postmaster', 'immediate restart', 'fast restart', 'failover')
TRAPS = ('trap one', 'trap one', 'trap all', 'trap all')
STOPS = ('terminate launcher', 'terminate coordinator', 'terminate delivery', 'terminate delivery',
         'cancel coordinator', 'cancel delivery', 'reload', 'set workers')


class Window:
    """From a moment before to a moment after; open: not over yet."""

    def __init__(self, what, end=None, pid=None):
        self.what = what
        self.begin = now()
        self.end = end
        self.pid = pid          # None: all processes

    def close(self):
        self.end = now()

    def meets(self, since, until):
        return self.begin <= until and (self.end is None or self.end >= since)


class Disturbances:
    """The record."""

    def __init__(self):
        self.crashes = []
        self.stops = []
        self.revokes = []       # events: leases ended by an operator

    def crash(self, what):
        self.crashes.append(Window(what))
        return self.crashes[-1]

    def stop(self, what, pid=None, lasts=None):
        self.stops.append(Window(what, pid=pid, end=lasts and now() + lasts))
        return self.stops[-1]

    def explains_loss(self):
        """May a connection be lost now?"""
        windows = self.crashes + [s for s in self.stops if s.pid is None]
        return any(w.meets(now() - AFTER_CRASH, now()) for w in windows)

    def crashed(self, since, until):
        return any(w.meets(since, until) for w in self.crashes)

    def stopped(self, pid, since, until):
        return any(w.pid in (None, pid) and w.meets(since, until) for w in self.stops)

    def lease_lost(self, jumps, since, until):
        """May somebody who claimed then not have come to settle?"""
        return self.crashed(since, until) or any(w.meets(since, until) for w in self.stops) or \
            any(since - CLOCK_LAG <= at <= until for at, _ in jumps[1:]) or \
            any(e.start <= until and (e.txn.commit_end or until) >= since for e in self.revokes)


class Disturber:
    """Who does it.  Runs in one thread."""

    def __init__(self, world, cluster, chance):
        self.world = world
        self.cluster = cluster
        self.random = chance
        self.record = world.disturbances
        self.trap = None        # a Window
        self.trap_name = None
        self.trap_ends = 0
        self.before = None      # the instance that it is for
        self.decks = {}

    def draw(self, cards):
        """Each card once before one comes again."""
        if not self.decks.get(cards):
            self.decks[cards] = self.random.sample(cards, len(cards))
        return self.decks[cards].pop()

    # Crashes

    def crash(self):
        what = self.draw(CRASHES + RESTARTS + TRAPS) if self.cluster else 'kill session'
        if self.trap:
            return
        if what.startswith('trap'):
            self.arm(what)
        elif what == 'failover':
            self.fail_over()
        elif what.endswith('restart') or what == 'kill postmaster':
            self.restart(what)
        else:
            self.kill(what)

    def kill(self, what):
        kind = what.split()[1]
        pids = list(self.world.pids.values()) if kind == 'session' else self.pids(kind)
        if not pids:
            return
        before = self.instance()
        window = self.record.crash(what)
        if server.kill(self.random.choice(sorted(pids)), self.world.options.kill_command):
            if self.wait_until_back(before, KILL_TAKES):
                self.world.count('crash', what)
        window.close()

    def restart(self, what):
        number = {'kill postmaster': signal.SIGKILL, 'immediate restart': signal.SIGQUIT,
                  'fast restart': signal.SIGINT}[what]
        # who loses the postmaster may end in good order
        windows = [self.record.stop(what)] if what != 'immediate restart' else []
        windows += [self.record.crash(what)] if what != 'fast restart' else []
        if not self.cluster.stop(number):
            raise Finding('the server stops when it is asked to', f'{what} takes too long')
        self.cluster.start()
        self.wait_until_back(None, PATIENCE)
        for window in windows:
            window.close()
        self.world.count('crash', what)

    def fail_over(self):
        port = self.cluster.make_standby()
        self.world.stop.wait(self.random.uniform(0, 1))     # it streams
        window = self.record.crash('failover')
        if not self.cluster.stop(signal.SIGQUIT):
            raise Finding('the server stops when it is asked to', 'failover takes too long')
        self.cluster.promote(port)
        self.wait_until_back(None, PATIENCE)
        window.close()
        self.world.count('crash', 'failover')

    def arm(self, what):
        self.before = self.instance()
        self.trap = self.record.crash(what)
        self.trap_name = what
        self.trap_ends = now() + 4_000_000
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f'{self.world.folder}/fired')     # left there for whoever comes late
        with open(f'{self.world.folder}/arming', 'w', encoding='utf-8') as file:
            file.write(what.split()[1] + '\n')
        os.rename(f'{self.world.folder}/arming', f'{self.world.folder}/armed')

    def look_at_trap(self):
        """Has it snapped?  After a while it is taken away."""
        if not self.trap:
            return
        armed, fired = (f'{self.world.folder}/{name}' for name in ('armed', 'fired'))
        if not os.path.exists(fired):
            if now() < self.trap_ends:
                return
            with contextlib.suppress(FileExistsError):
                open(fired, 'x', encoding='utf-8').close()
                self.end_trap(armed, 'trap taken away')
                return
        if self.trap_name == 'trap all':
            if self.cluster.has_ended(KILL_TAKES):
                self.cluster.start()
            else:
                self.cluster.send(signal.SIGCONT)
        if self.wait_until_back(self.before, KILL_TAKES):
            self.end_trap(armed, 'crash', self.trap_name)
        else:       # a cancel of the hook has ended the one who wanted to kill
            self.end_trap(armed, 'trap taken away')

    def end_trap(self, armed, *moves):
        os.unlink(armed)
        self.trap.close()
        self.trap = None
        self.world.count(*moves)

    def take_trap_away(self):
        self.trap_ends = 0
        self.look_at_trap()

    @staticmethod
    def instance():
        connection = server.connect(patience=PATIENCE)
        try:
            return server.instance(connection)
        finally:
            connection.close()

    def wait_until_back(self, before, seconds):
        """Until another instance than that answers; false: none does, nobody was killed."""
        end = now() + seconds * 1_000_000
        while now() < end:
            with contextlib.suppress(ConnectionLost):
                if self.instance() != before:
                    return True
        return False

    # Stops

    def stop_somebody(self, connection):
        what = self.draw(STOPS)
        if what == 'set workers':
            server.query(connection, 'ALTER SYSTEM SET outbox.workers = %s', (self.random.randint(1, 3),))
            server.query(connection, 'SELECT pg_reload_conf()')
        elif what == 'reload':
            server.query(connection, 'SELECT pg_reload_conf()')
        else:
            action, kind = what.split()
            pids = self.pids(kind, connection)
            if not pids:
                return
            pid = self.random.choice(pids)
            self.record.stop(what, pid, STOPPING)
            server.query(connection, f'SELECT pg_{action}_backend(%s)', (pid,))
        self.world.count(what)

    @staticmethod
    def pids(kind, connection=None):
        own = connection or server.connect(patience=PATIENCE)
        try:
            return sorted(r[0] for r in server.query(
                own, 'SELECT pid FROM pg_stat_activity WHERE backend_type = %s', (f'outbox {kind}',)))
        finally:
            if connection is None:
                own.close()
