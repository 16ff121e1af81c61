#!/usr/bin/env python3
"""A worker that pulls: it appends each message of the subscription "archive" to a file, as a line of JSON.

   worker.py FILE [--hang-after N]

Claim, commit, work, settle; a heartbeat keeps the lease. Where there is nothing, it waits until the server says on the
channel outbox_ready that there is. SIGTERM gives back what it has not begun. --hang-after N: it writes N messages,
settles all of them but the last, and goes silent, so that the demo can kill it in the middle. The database is that of
the PG* environment variables. docs/examples/worker.mjs is the same for Node, with more care.
"""
import argparse
import json
import os
import select
import signal
import socket
import sys
import threading

import psycopg2
import psycopg2.extras
from psycopg2 import sql

LEASE_SECONDS = 2
LEASE = f"{LEASE_SECONDS} seconds"
POLL_SECONDS = 10  # a notification can be missed
CLAIM_NOT_HELD = "OB003"


class Database:
    """A connection on which each call is a transaction: a claim is committed before the work begins."""

    def __init__(self):
        self.connection = psycopg2.connect("", cursor_factory=psycopg2.extras.RealDictCursor)
        self.connection.autocommit = True

    def call(self, statement, *arguments):
        with self.connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            return cursor.fetchall()

    def listen(self, channel):
        with self.connection.cursor() as cursor:
            cursor.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))

    def wait_for_notification(self, seconds, also):
        """Until one has come, or "also" can be read."""
        if not self.connection.notifies:
            select.select([self.connection, also], [], [], seconds)
            self.connection.poll()
        self.connection.notifies.clear()


class Heartbeat(threading.Thread):
    """Renews the lease of a batch, from a connection of its own, until it is left or the lease is lost."""

    def __init__(self, token):
        super().__init__(daemon=True)
        self.token = token
        self.ended = threading.Event()
        self.lost = False

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.join()

    def run(self):
        database = Database()
        while not self.ended.wait(LEASE_SECONDS / 3):
            try:
                database.call("select outbox.renew_batch(%s::uuid, %s::interval)", self.token, LEASE)
            except psycopg2.Error as error:
                if error.pgcode != CLAIM_NOT_HELD:
                    raise
                self.lost = True
                break
        database.connection.close()


class Worker:
    def __init__(self, file, hang_after):
        self.file = file
        self.hang_after = hang_after
        self.name = f"archive-{os.getpid()}"
        self.database = Database()
        self.stopping = False
        self.signals, wakeup = socket.socketpair()  # SIGTERM ends the wait for a notification
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())
        self.written = self.taken_over = 0

    def stop(self, *_):
        self.stopping = True

    def run(self):
        self.database.listen("outbox_ready")
        while not self.stopping:
            messages = self.database.call(
                "select * from outbox.claim_batch(100, %s::interval, 'archive', worker => %s)", LEASE, self.name)
            if messages:
                self.work(messages)
            else:
                self.database.wait_for_notification(POLL_SECONDS, self.signals)

    def work(self, messages):
        token = messages[0]["claim_token"]  # of all of them
        try:
            with Heartbeat(token) as heartbeat:
                for message in messages:
                    if heartbeat.lost:
                        return
                    if self.stopping:
                        self.database.call("select outbox.settle_batch(%s::uuid, 'released')", token)
                        return
                    self.write(message)
                    if self.written == self.hang_after:
                        hang(len(messages), self.written)
                    self.database.call("select outbox.settle(%s::uuid, %s::uuid)", message["id"], token)
        except psycopg2.Error as error:
            if error.pgcode != CLAIM_NOT_HELD:  # else somebody else has the rest of them
                raise

    def write(self, message):
        line = {"id": message["id"], "name": message["name"], "payload": message["payload"]}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self.written += 1
        self.taken_over += message["attempts"] > 1


def hang(claimed, written):
    print(f"claimed {claimed} messages, wrote {written}, settled {written - 1}, and went silent", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("file")
    options.add_argument("--hang-after", type=int)
    options = options.parse_args()
    with open(options.file, "a", encoding="utf-8") as file:
        worker = Worker(file, options.hang_after)
        signal.signal(signal.SIGTERM, worker.stop)
        worker.run()
    print(f"wrote {worker.written} messages, {worker.taken_over} of them in a second or later attempt")


sys.exit(main())
