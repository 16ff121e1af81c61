"""The private cluster that bench/run has started: databases, settings, restarts.

Everything connects by the PG* environment variables; only the database differs. A database holds one peer, and a
schema `bench` with what the scripts send: JSON of known size.
"""
import contextlib
import json
import os
import subprocess
import time

import psycopg2
import psycopg2.extras

TOP = os.environ['OUTBOX_TOP']
psycopg2.extras.register_uuid()


def payload(size, number=0):
    """A JSON object of about so many bytes, as an application would send it."""
    item = {'order': 100000 + number, 'customer': 'Jane Doe', 'currency': 'EUR', 'paid': True,
            'items': [{'sku': 'A-1', 'qty': 2, 'price': '10.50'}, {'sku': 'B-2', 'qty': 1, 'price': '99.00'}], 'note': ''}
    words = 'please ring twice, the bell is quiet; '
    missing = size - len(json.dumps(item))
    item['note'] = (words * (missing // len(words) + 1))[:missing]
    return json.dumps(item)


def payloads(count, size):
    """A JSON array of so many of them."""
    return '[' + ', '.join(payload(size, number) for number in range(count)) + ']'


def unprivileged(command):
    """The command, as the user that runs PostgreSQL where the caller is root."""
    if os.geteuid() != 0:
        return command
    return ['runuser', '-u', 'postgres', '--', 'env', 'HOME=/tmp'] + command


class Database:
    """A database of the cluster, and one connection to it that commits each statement."""

    def __init__(self, name):
        self.name = name
        self.connection = self.connect()

    def connect(self, **options):
        connection = psycopg2.connect(dbname=self.name, **options)
        connection.autocommit = True
        return connection

    def run(self, sql, *args):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, args or None)
            return cursor.fetchall() if cursor.description else []

    def value(self, sql, *args):
        return self.run(sql, *args)[0][0]

    def wait(self, sql, seconds=60):
        """Until a query says true."""
        end = time.monotonic() + seconds
        while not self.value(sql):
            if time.monotonic() > end:
                raise TimeoutError(f'waited {seconds} s in vain: {sql}')
            time.sleep(0.01)

    def size(self):
        return self.value('select pg_database_size(current_database())')

    def input(self, count, size):
        """Makes sure that bench.input has such an array, and returns its name."""
        name = f'{count} x {size}'
        self.run('insert into bench.input values (%s, %s) on conflict do nothing', name, payloads(count, size))
        return name

    def close(self):
        self.connection.close()


class Server:
    """The cluster."""

    def __init__(self, work):
        self.work = work
        self.number = 0
        self.admin = Database('postgres')

    def new_database(self, label):
        self.number += 1
        name = f'bench_{label}_{self.number}'.replace('-', '_')
        self.admin.run(f'create database {name}')
        db = Database(name)
        db.run('create schema bench create table input (name text primary key, value text not null)')
        return db

    def drop(self, db):
        db.close()
        self.admin.run(f'drop database if exists {db.name} with (force)')

    @contextlib.contextmanager
    def database(self, label):
        db = self.new_database(label)
        try:
            yield db
        finally:
            self.drop(db)

    def set(self, **settings):
        """Changes settings of the running server; None takes the change back."""
        for name, value in settings.items():
            name = name.replace('__', '.')
            if value is None:
                self.admin.run(f'alter system reset {name}')
            else:
                self.admin.run(f"alter system set {name} = '{value}'")
        self.admin.run('select pg_reload_conf()')
        time.sleep(0.1)

    @contextlib.contextmanager
    def settings(self, **settings):
        self.set(**settings)
        try:
            yield
        finally:
            self.set(**{name: None for name in settings})

    @contextlib.contextmanager
    def restarted(self, **settings):
        """The server with settings that need a restart, and afterwards the server as it was."""
        self.set(**settings)
        self.restart()
        try:
            yield
        finally:
            self.set(**{name: None for name in settings})
            self.restart()

    def restart(self):
        self.admin.close()
        for action in ('stop', 'start'):
            subprocess.run([f'{TOP}/dev/cluster', action, f'{self.work}/cluster'], check=True, stdout=subprocess.DEVNULL)
        self.admin = Database('postgres')

    def wal(self):
        """Bytes of WAL written since the cluster was made."""
        return int(self.admin.value("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"))
