# The server that --workers needs: a cluster of its own, whose postmaster is a child of this process.
import os
import re
import signal
import subprocess
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What is not flushed on request is not flushed for long, so that it is lost when the server crashes.
SETTINGS = ('wal_writer_delay = 10s', 'max_worker_processes = 20', 'max_connections = 60', 'max_wal_size = 2GB',
            'log_min_messages = warning', 'log_min_error_statement = panic',
            'outbox.poll_interval = 5s')
SHUTDOWN = 15       # seconds: five are promised, on a machine that has nothing else to do


class Cluster:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix='outbox-model.', dir='/tmp')
        os.chmod(self.folder, 0o755)
        self.server = os.path.join(self.folder, 'server')
        self.log = os.path.join(self.server, 'log')
        told = self.call('start', '--no-fsync', *SETTINGS)
        os.environ.update(re.findall(r'(PG[A-Z]+)=(\S+)', told))
        self.call('stop')
        self.process = None
        self.start()

    def call(self, action, *args):
        return subprocess.run([f'{TOP}/dev/cluster', action, self.server, *args], check=True, stdout=subprocess.PIPE,
                              text=True).stdout

    def start(self):
        """What an orphan of the one before still holds makes it fail at once: again, then."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with open(self.log, 'a', encoding='utf-8') as log:
                self.process = subprocess.Popen([self.program('postgres'), '-D', f'{self.server}/data'], stdout=log,
                                                stderr=log, start_new_session=True, **self.owner())
            for _ in range(200):
                if self.process.poll() is not None:
                    break
                if self.is_ready():
                    return
                time.sleep(0.05)    # poll: it says so in a file
        raise RuntimeError(f'the server does not start, see {self.log}')

    def is_ready(self):
        try:
            with open(f'{self.server}/data/postmaster.pid', encoding='utf-8') as file:
                lines = file.read().split('\n')
        except OSError:
            return False
        return lines[0] == str(self.process.pid) and len(lines) > 7 and lines[7].strip() == 'ready'

    @staticmethod
    def program(name):
        return os.path.join(subprocess.check_output([os.environ['PG_CONFIG'], '--bindir'], text=True).strip(), name)

    @staticmethod
    def owner():
        return {'user': 'postgres', 'group': 'postgres', 'extra_groups': []} if os.geteuid() == 0 else {}

    def make_folder(self, name):
        """Where the server can write."""
        folder = os.path.join(self.folder, name)
        os.mkdir(folder)
        os.chmod(folder, 0o777)
        return folder

    def is_up(self):
        return self.process.poll() is None

    def send(self, number):
        self.process.send_signal(number)

    def has_ended(self, seconds):
        try:
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def stop(self, number=signal.SIGINT):
        """Returns false where it takes too long."""
        if self.is_up():
            self.send(number)
        if self.has_ended(SHUTDOWN):
            return True
        self.send(signal.SIGQUIT)
        self.process.wait()
        return False

    def tell_log(self):
        with open(self.log, encoding='utf-8', errors='replace') as file:
            print('end of the server\'s log:', *file.read().splitlines()[-40:], sep='\n    ')

    def remove(self):
        self.stop()
        subprocess.call(['rm', '-rf', self.folder])
