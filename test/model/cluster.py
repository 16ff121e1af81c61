# The server that --workers needs: a cluster of its own, whose postmaster is a child of this process.
#
# It can fail over to a standby: then the server is another one, with a folder and a port of its own.
import contextlib
import os
import re
import shutil
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
        self.data = os.path.join(self.server, 'data')
        self.log = os.path.join(self.server, 'log')
        told = self.call('start', '--no-fsync', *SETTINGS)
        os.environ.update(re.findall(r'(PG[A-Z]+)=(\S+)', told))
        self.call('stop')
        self.process = self.standby = None
        self.start()

    def call(self, action, *args):
        return subprocess.run([f'{TOP}/dev/cluster', action, self.server, *args], check=True, stdout=subprocess.PIPE,
                              text=True).stdout

    def start(self):
        """What an orphan of the one before still holds makes it fail at once: again, then."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.process = self.run(self.data, os.environ['PGPORT'])
            if self.becomes('ready', self.process, self.data):
                return
        raise RuntimeError(f'the server does not start, see {self.log}')

    def run(self, data, port, *options):
        with open(self.log, 'a', encoding='utf-8') as log:
            return subprocess.Popen([self.program('postgres'), '-D', data, '-p', port, *options], stdout=log,
                                    stderr=log, start_new_session=True, **self.owner())

    @staticmethod
    def becomes(state, process, data, seconds=10):
        """False: it has ended, or it takes too long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if process.poll() is not None:
                return False
            with contextlib.suppress(OSError), open(f'{data}/postmaster.pid', encoding='utf-8') as file:
                lines = file.read().split('\n')
                if lines[0] == str(process.pid) and len(lines) > 7 and lines[7].strip() == state:
                    return True
            time.sleep(0.05)    # poll: it says so in a file
        return False

    # A standby

    def make_standby(self):
        """It streams, and reads what its primary has written when that is dead, to the end: so it has all that was answered,
        as if each commit had waited for it."""
        port = str(int(os.environ['PGPORT']) + 1)
        self.standby_data = os.path.join(self.server, f'data.{port}')
        subprocess.run([self.program('pg_basebackup'), '-R', '-D', self.standby_data, '-c', 'fast', '--no-sync'],
                       check=True, **self.owner())
        self.standby = self.run(self.standby_data, port, '-c', f'restore_command=cp {self.data}/pg_wal/%f %p 2>/dev/null')
        self.becomes('standby', self.standby, self.standby_data, 2)     # much later where subtransactions are many
        return port

    def promote(self, port):
        """When the one before is dead.  Who connects now finds this one."""
        subprocess.run([self.program('pg_ctl'), 'promote', '-s', '-t', '60', '-D', self.standby_data], check=True,
                       **self.owner())
        if not self.becomes('ready', self.standby, self.standby_data, 60):
            raise RuntimeError(f'the standby is not promoted, see {self.log}')
        shutil.rmtree(self.data)
        self.process, self.data, self.standby = self.standby, self.standby_data, None
        os.environ['PGPORT'] = port

    @staticmethod
    def program(name):
        return os.path.join(subprocess.check_output([os.environ['PG_CONFIG'], '--bindir'], text=True).strip(), name)

    @staticmethod
    def owner():
        return {'user': 'postgres', 'group': 'postgres', 'extra_groups': []} if os.geteuid() == 0 else {}

    def make_folder(self, name):
        """Where the server can write; one that a crash has interrupted may have left its own."""
        folder = os.path.join(self.folder, name)
        shutil.rmtree(folder, ignore_errors=True)
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

    def end(self):
        self.stop()
        if self.standby:
            self.standby.send_signal(signal.SIGQUIT)
            self.standby.wait()

    def remove(self):
        subprocess.call(['rm', '-rf', self.folder])
