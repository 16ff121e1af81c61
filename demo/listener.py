#!/usr/bin/env python3
"""A listener: it receives the notifications of a channel, and notes each message in shop.received.

   listener.py CHANNEL

A notification is a CloudEvents envelope. One whose payload was too long for NOTIFY comes without data: the message is
fetched by its id. It ends at SIGTERM. The database is that of the PG* environment variables.
"""
import json
import select
import signal
import sys

import psycopg2
from psycopg2 import sql


class Listener:
    def __init__(self, channel):
        self.connection = psycopg2.connect("")
        self.connection.autocommit = True  # LISTEN takes effect at commit, and notifications come between transactions
        self.cursor = self.connection.cursor()
        self.cursor.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        self.stopping = False
        self.received = self.fetched = 0

    def stop(self, *_):
        self.stopping = True

    def run(self):
        while not self.stopping:
            select.select([self.connection], [], [], 0.1)
            self.connection.poll()
            while self.connection.notifies:
                self.receive(json.loads(self.connection.notifies.pop(0).payload))

    def receive(self, envelope):
        if "data" not in envelope:
            self.cursor.execute("select payload from outbox.messages where id = %s::uuid limit 1", (envelope["id"],))
            (envelope["data"],) = self.cursor.fetchone()
            self.fetched += 1
        self.cursor.execute("select shop.note_received('notify', %s::uuid)", (envelope["id"],))
        self.received += 1


def main():
    listener = Listener(sys.argv[1])
    signal.signal(signal.SIGTERM, listener.stop)
    print(f"listening on {sys.argv[1]}", flush=True)
    listener.run()
    print(f"{listener.received} notifications, {listener.fetched} of them without data: too long, fetched by id")


main()
