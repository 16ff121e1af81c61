# The server: connections, a fresh database for each round, the clock, and kill -9.
import os
import re
import shlex
import signal
import subprocess
import time

import psycopg2

DATABASE = 'outbox_model'
# Lock waits end: a prepared transaction of somebody who waits for us would hang both.
SESSION = ('-c lock_timeout=1s -c statement_timeout=60s -c deadlock_timeout=200ms -c synchronous_commit=local '
           '-c jit=off -c work_mem=64MB')

SETUP = """
    CREATE EXTENSION outbox;
    CREATE SCHEMA model;
    CREATE FUNCTION model.us(timestamptz) RETURNS bigint LANGUAGE sql STABLE
        AS $$ SELECT (extract(epoch FROM $1) * 1000000)::bigint $$;
    CREATE FUNCTION model.at(bigint) RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT 'epoch'::timestamptz + $1 * interval '1 microsecond' $$;
    CREATE TABLE model.txn (number bigint PRIMARY KEY);
    CREATE TABLE model.wanted (subscription_id bigint, name text, kind text);
"""


class ConnectionLost(Exception):
    pass


def connect(database=DATABASE, patience=0):
    """Tries again for so many seconds while the server restarts."""
    end = time.monotonic() + patience
    while True:
        try:
            connection = psycopg2.connect(dbname=database, application_name='outbox_model', options=SESSION)
            connection.autocommit = True
            query(connection, "LOAD 'outbox'")      # for its settings, where it is not preloaded
            return connection
        except (psycopg2.OperationalError, ConnectionLost) as error:
            if time.monotonic() > end:
                raise ConnectionLost(str(error)) from error
            time.sleep(0.05)    # poll until it is there again


def query(connection, text, args=None):
    try:
        with connection.cursor() as cursor:
            cursor.execute(text, args)
            return cursor.fetchall() if cursor.description else []
    except psycopg2.Error as error:
        if is_lost(connection, error):
            raise ConnectionLost(str(error)) from error
        raise


def is_lost(connection, error):
    return connection.closed or error.pgcode in (None, '57P01', '57P02', '57P03')


def instance(connection):
    return query(connection, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")


def make_database():
    drop_database()
    change_settings('SET {} = {}')
    with_maintenance('CREATE DATABASE ' + DATABASE)
    connection = connect()
    query(connection, SETUP)
    return connection


def drop_database():
    try:
        connection = connect()
        for (gid,) in query(connection, 'SELECT gid FROM pg_prepared_xacts WHERE database = current_database()'):
            query(connection, 'ROLLBACK PREPARED %s', (gid,))
        connection.close()
    except ConnectionLost:
        pass
    with_maintenance(f'DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)')


def with_maintenance(text):
    connection = connect('postgres', patience=60)
    try:
        return query(connection, text)
    finally:
        connection.close()


def setting(connection, name):
    return query(connection, 'SELECT current_setting(%s, true)', (name,))[0][0]


UNITS = {'': 1, 'ms': 1, 's': 1000, 'min': 60_000, 'h': 3_600_000, 'd': 86_400_000}


def milliseconds(text):
    """What current_setting() says of a time."""
    number, unit = re.fullmatch(r'(-?\d+) ?([a-z]*)', text).groups()
    return int(number) * UNITS[unit]


def set_clock(connection, offset):
    """Moves everybody's clock; the sessions notice before their next statement."""
    if offset:
        query(connection, 'ALTER SYSTEM SET outbox.clock_offset = %s', (offset // 1000,))
    else:
        query(connection, 'ALTER SYSTEM RESET outbox.clock_offset')
    query(connection, 'SELECT pg_reload_conf()')


def wait_for_clock(connection, offset):
    while milliseconds(setting(connection, 'outbox.clock_offset')) < offset // 1000:
        time.sleep(0.01)    # poll: the reload comes by a signal


def change_settings(command='RESET {}'):
    """For everybody: the clock as it is, and a standby that is not there for whoever wants to wait for it."""
    connection = connect('postgres', patience=60)
    for name, value in ('synchronous_commit', 'local'), ('synchronous_standby_names', "'nobody'"):
        query(connection, 'ALTER SYSTEM ' + command.format(name, value))
    set_clock(connection, 0)
    connection.close()


def is_backend(pid):
    """On this machine, and not somebody else who got the number."""
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            return file.read().startswith(b'postgres: ')
    except OSError:
        return False


def freeze(pid, seconds):
    """Stops a backend wherever it is: what is a microsecond long becomes long enough to meet."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)     # on purpose
        os.kill(pid, signal.SIGCONT)
        return True
    except OSError:             # not ours, or gone
        return False


def kill(pid, command):
    if not is_backend(pid):
        return False
    if command:
        return subprocess.call(shlex.split(command) + [str(pid)]) == 0
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False

