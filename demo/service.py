#!/usr/bin/env python3
"""The traffic of the order service: orders and payments, and events from outside, from several connections at once.

   service.py ORDERS EVENTS.jsonl

Each is one transaction. Some orders fail, after they have enqueued. A line of the file is {"name": ..., "payload": ...}
or a payload alone, which is then named "event". The database is that of the PG* environment variables.
"""
import json
import queue
import random
import sys
import threading

import psycopg2

CONNECTIONS = 4
CUSTOMERS = ["Ada", "Grace", "Edsger", "Barbara", "Tony", "Leslie", "Frances", "Donald"]


def read_events(path):
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError as error:
                sys.exit(f"{path}, line {number}: {error}")
            if isinstance(event, dict) and set(event) == {"name", "payload"}:
                yield number, event["name"], event["payload"]
            else:
                yield number, "event", event


def receive_event(cursor, number, name, payload):
    try:
        # A cast says which type the driver's text is.
        cursor.execute("select shop.receive_event(%s::text, %s::jsonb)", (name, json.dumps(payload)))
    except psycopg2.Error as error:
        raise ValueError(f"the event in line {number} was refused: {error.diag.message_primary}") from error


def order(cursor, customer, item, quantity, pays):
    cursor.execute("select shop.place_order(%s, %s, %s)", (customer, item, quantity))
    if pays:
        (number,) = cursor.fetchone()
        cursor.execute("select shop.pay_order(%s)", (number,))


def orders(count):
    for i in range(count):
        customer = CUSTOMERS[i % len(CUSTOMERS)]
        if i == count // 2:
            yield order, (customer, "gift card", 0, False)
        elif i % 10 == 3:
            yield order, (customer, "samovar", 1, True)
        else:
            yield order, (customer, ("teapot", "saucer")[i % 2], i % 4 + 1, i % 3 == 0)


class Service:
    def __init__(self, work):
        self.work = queue.Queue()
        for item in work:
            self.work.put(item)
        self.committed = self.refused = 0
        self.error = None
        self.lock = threading.Lock()

    def serve(self):
        connection = psycopg2.connect("")
        try:
            while self.error is None:
                function, arguments = self.work.get_nowait()
                self.transaction(connection, function, arguments)
        except queue.Empty:
            pass
        except Exception as error:  # the first one is reported, and ends the others
            self.error = error
        finally:
            connection.close()

    def transaction(self, connection, function, arguments):
        try:
            with connection, connection.cursor() as cursor:
                function(cursor, *arguments)
            done = "committed"
        except psycopg2.errors.CheckViolation:  # out of stock
            done = "refused"
        with self.lock:
            setattr(self, done, getattr(self, done) + 1)

    def run(self):
        threads = [threading.Thread(target=self.serve) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            sys.exit(str(self.error))


def main():
    work = list(orders(int(sys.argv[1])))
    work += [(receive_event, event) for event in read_events(sys.argv[2])]
    random.Random(1).shuffle(work)
    service = Service(work)
    service.run()
    print(f"{service.committed} transactions committed, {service.refused} rolled back (out of stock)")


main()
