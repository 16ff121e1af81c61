"""What the README says about arguments, results and transactions, with the driver psycopg2."""
import datetime
import json
import unittest
import uuid

import psycopg2
import psycopg2.extras

CLAIM_NOT_HELD = "OB003"


class Driver(unittest.TestCase):
    def setUp(self):
        self.connection = psycopg2.connect("", cursor_factory=psycopg2.extras.RealDictCursor)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.addCleanup(self.connection.close)

    def rows(self, sql, *arguments):
        self.cursor.execute(sql, arguments)
        return self.cursor.fetchall()

    def value(self, sql, *arguments):
        (row,) = self.rows(sql, *arguments)
        (value,) = row.values()
        return value

    def refused(self, code, sql, *arguments):
        with self.assertRaises(psycopg2.Error) as raised:
            self.rows(sql, *arguments)
        self.assertEqual(raised.exception.pgcode, code)

    def enqueue(self, name="python", payload=None):
        return self.value("select outbox.enqueue(%s, %s::jsonb)", name, json.dumps(payload))

    def claim(self, *arguments):
        return self.rows("select * from outbox.claim_batch(%s, %s::interval, %s)", *(arguments or (None, None, "default")))

    def settle_all(self):
        for message in self.claim():
            self.value("select outbox.settle(%s::uuid, %s::uuid)", message["id"], message["claim_token"])

    def test_payloads(self):
        """A payload is json.dumps() with a cast, or Json()."""
        payloads = [{"a": [1, "ü", None]}, [1, 2], "text", 17, None, True]
        for payload in payloads:
            self.enqueue(payload=payload)
        self.value("select outbox.enqueue('python', %s)", psycopg2.extras.Json({"b": 1}))
        claimed = self.claim()
        self.assertEqual([message["payload"] for message in claimed], payloads + [{"b": 1}])
        token = claimed[0]["claim_token"]
        self.assertEqual(self.value("select outbox.settle_batch(%s::uuid)", token), 7)

    def test_dict_without_json(self):
        """psycopg2 cannot send a dict, and sends a list as an array."""
        with self.assertRaises(psycopg2.ProgrammingError):
            self.rows("select outbox.enqueue('python', %s)", {"a": 1})
        self.refused("42883", "select outbox.enqueue('python', %s)", [1, 2])

    def test_none_is_default(self):
        self.value("select outbox.enqueue(%s, %s, kind => %s, version => %s, available_at => %s, max_attempts => %s,"
                   " headers => %s)", "python", "{}", None, None, None, None, None)
        (message,) = self.claim(None, None, None)
        self.assertEqual((message["kind"], message["version"], message["max_attempts"]), ("event", 1, 3))
        self.assertEqual(self.value("select outbox.settle(%s::uuid, %s::uuid, %s, %s, %s, %s)", message["id"],
                                    message["claim_token"], None, None, None, None), "delivered")

    def test_none_for_what_is_required(self):
        self.refused("22004", "select outbox.enqueue(%s, '{}')", None)
        self.refused("22004", "select outbox.enqueue('python', %s)", None)
        self.refused("22004", "select outbox.settle(%s, %s)", None, None)

    def test_interval_and_times(self):
        self.enqueue()
        (message,) = self.claim(1, datetime.timedelta(seconds=90), "default")
        left = message["locked_until"] - datetime.datetime.now(datetime.timezone.utc)
        self.assertTrue(80 < left.total_seconds() < 91, left)
        later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
        self.assertEqual(self.value("select outbox.settle(%s::uuid, %s::uuid, 'failed', error => %s, error_detail => %s,"
                                    " retry_at => %s)", message["id"], message["claim_token"], "busy",
                                    psycopg2.extras.Json(["busy", 17]), later), "scheduled")
        self.refused("22023", "select * from outbox.claim_batch(lease => %s::interval)", "30000")

    def test_uuids(self):
        """They come as text; objects need register_uuid(), and a list of texts a cast."""
        given = uuid.uuid4()
        psycopg2.extras.register_uuid(conn_or_curs=self.cursor)
        self.assertEqual(self.value("select outbox.enqueue('python', '{}', id => %s)", given), given)
        (message,) = self.claim()
        token = message["claim_token"]
        self.assertEqual(message["id"], given)
        self.assertEqual(self.value("select outbox.settle_batch(%s, ids => %s::uuid[])", token, []), 0)
        self.assertEqual(self.value("select outbox.settle_batch(%s, ids => %s::uuid[])", token, [str(given)]), 1)
        self.refused(CLAIM_NOT_HELD, "select outbox.settle_batch(%s)", token)
        self.refused("23505", "select outbox.enqueue('python', '{}', id => %s)", given)

    def test_transactions(self):
        """Without autocommit a claim is only kept by commit(); rollback() takes it back, uncharged."""
        self.enqueue(payload="first")
        other = psycopg2.connect("", cursor_factory=psycopg2.extras.RealDictCursor)
        self.addCleanup(other.close)
        with other, other.cursor() as cursor:
            cursor.execute("select outbox.enqueue('python', '\"second\"')")
            cursor.execute("select payload, attempts from outbox.claim_batch()")
            self.assertEqual(sorted(row["payload"] for row in cursor.fetchall()), ["first", "second"])
            other.rollback()
        (message,) = self.claim()
        self.assertEqual((message["payload"], message["attempts"]), ("first", 1))
        self.value("select outbox.settle(%s::uuid, %s::uuid)", message["id"], message["claim_token"])
        self.assertEqual(self.claim(), [])

    def test_settle_with_the_work(self):
        """Work in the same database: settled in its transaction, it happens exactly once."""
        self.cursor.execute("create temporary table done (id uuid)")
        self.enqueue()
        (message,) = self.claim()
        self.connection.autocommit = False
        with self.connection:
            self.cursor.execute("insert into done values (%s::uuid)", (message["id"],))
            self.value("select outbox.settle(%s::uuid, %s::uuid)", message["id"], message["claim_token"])
        self.connection.autocommit = True
        self.assertEqual(self.value("select count(*) from done"), 1)
        self.refused(CLAIM_NOT_HELD, "select outbox.settle(%s::uuid, %s::uuid)", message["id"], message["claim_token"])


if __name__ == "__main__":
    unittest.main()
