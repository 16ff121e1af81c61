-- operators: get, requeue, discard and cancel, of one message and of many; what they
-- refuse; reset.
SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
CREATE SCHEMA operators;
GRANT USAGE ON SCHEMA operators TO PUBLIC;
SET search_path = operators, public;
SET outbox.jitter = 0;

-- messages have numbers here
CREATE FUNCTION m(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE
RETURN CAST('00000000-0000-7000-8000-' || lpad(CAST(n AS text), 12, '0') AS uuid);
CREATE VIEW state AS
SELECT CAST(right(CAST(id AS text), 4) AS integer) AS m, subscription, status, attempts, max_attempts AS max
  FROM outbox.messages;
-- claims one message and settles it
CREATE FUNCTION work(outcome text, subscription text DEFAULT 'default') RETURNS text LANGUAGE sql
RETURN (SELECT right(CAST(c.id AS text), 4) || ' ' || outbox.settle(c.id, c.claim_token, work.outcome,
                                                                 CASE WHEN work.outcome <> 'delivered' THEN 'it broke' END)
          FROM outbox.claim_batch(1, subscription => work.subscription) c);
-- the code with which a statement is refused
CREATE FUNCTION refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;

SELECT outbox.subscribe('audit', 'order.#');
SELECT count(outbox.enqueue('order.placed', to_jsonb(n), id => m(n))) FROM generate_series(1, 6) n;

-- get: what a listener asks for whose envelope had no data
SELECT id = m(2) AS found, name, payload, subscription, attempts FROM outbox.get(m(2));
SELECT outbox.get(m(99));
\echo :LAST_ERROR_SQLSTATE

-- cancel: before it is routed, it is routed first
SELECT DISTINCT status FROM state;
SELECT outbox.cancel(m(1));
SELECT * FROM state WHERE m = 1 ORDER BY subscription;
SELECT outbox.cancel(m(1));
\echo :LAST_ERROR_SQLSTATE

-- where it is being worked on it is left alone
SELECT id = m(2) AS claimed FROM outbox.claim_batch(1, worker => 'w');
SELECT outbox.cancel(m(2));
SELECT * FROM state WHERE m = 2 ORDER BY subscription;
SELECT outbox.cancel(m(2));
SELECT outbox.discard(m(2), 'default');
SELECT outbox.requeue(m(2), 'default');

-- requeue: dead letters, and others only by name of the subscription
SELECT outbox.requeue(m(2));
SELECT outbox.requeue(m(2), 'audit');
SELECT * FROM state WHERE m = 2 ORDER BY subscription;
SELECT outbox.requeue(m(2), 'audit');
SELECT outbox.requeue(m(3));
SELECT work('dead');
SELECT * FROM state WHERE m = 3 ORDER BY subscription;
SELECT outbox.requeue(m(3));
SELECT * FROM state WHERE m = 3 ORDER BY subscription;
SELECT outbox.requeue(m(3));
-- dead in both: the call without a subscription means both
SELECT outbox.cancel(m(n)) FROM generate_series(4, 6) n;
SELECT work('dead'), work('dead', 'audit'), work('dead', 'audit');
SELECT * FROM state WHERE m IN (2, 3) ORDER BY m, subscription;
SELECT outbox.requeue(m(3));
SELECT * FROM state WHERE m IN (2, 3) ORDER BY m, subscription;
SELECT work('delivered'), work('delivered', 'audit');
SELECT outbox.requeue(m(3), 'audit');
SELECT outbox.cancel(m(3));
-- the error stays on record
SELECT status, last_error ->> 'message' AS error FROM outbox.messages WHERE id = m(3) ORDER BY subscription;

-- attempts can be kept: then there is one more at least
SELECT outbox.unsubscribe('audit', discard_pending => true) >= 0 AS gone;
SELECT outbox.enqueue('a', '{}', id => m(10), max_attempts => 1) = m(10) AS enqueued;
SELECT work('failed');
SELECT outbox.requeue(m(10), reset_attempts => false);
SELECT * FROM state WHERE m = 10;
SELECT work('failed');
SELECT * FROM state WHERE m = 10;
SELECT outbox.requeue(m(10), reset_attempts => NULL);
SELECT * FROM state WHERE m = 10;
SELECT work('delivered');

-- the budget is read again: subscription, setting; the message's own wins
SELECT outbox.enqueue('a', '{}', id => m(11)) = m(11) AS enqueued;
SELECT work('dead');
SELECT * FROM state WHERE m = 11;
SET outbox.max_attempts = 5;
SELECT outbox.requeue(m(11));
SELECT * FROM state WHERE m = 11;
SELECT work('dead');
SELECT outbox.subscribe('default', max_attempts => 7, replace => true);
SELECT outbox.requeue(m(11));
SELECT * FROM state WHERE m = 11;
RESET outbox.max_attempts;

-- when: in the future, in the past
SELECT work('dead');
SELECT outbox.requeue(m(11), available_at => outbox.clock() + interval '1 hour');
SELECT * FROM state WHERE m = 11;
SELECT work('dead');
SET outbox.clock_offset = '61min';
SELECT work('dead');
SELECT outbox.requeue(m(11), available_at => outbox.clock() - interval '1 year');
SELECT status, outbox.clock() - available_at < interval '1 min' AS due_now FROM outbox.messages WHERE id = m(11);
RESET outbox.clock_offset;

-- discard: with a reason beside the error; and back again
SELECT work('dead');
SET outbox.clock_offset = '61min';
SELECT work('dead');
SELECT outbox.discard(m(11), reason => 'sold to somebody else');
SELECT status, last_error - 'message' AS more, last_error ->> 'message' AS error FROM outbox.messages WHERE id = m(11);
SELECT outbox.discard(m(11));
SELECT outbox.requeue(m(11));
SELECT outbox.requeue(m(11), 'default');
SELECT outbox.discard(m(11), 'default');
SELECT * FROM state WHERE m = 11;
RESET outbox.clock_offset;
-- a pending and a scheduled one
SELECT outbox.enqueue('a', '{}', id => m(12), available_at => outbox.clock() + interval '1 day') = m(12) AS enqueued;
SELECT outbox.discard(m(12));
SELECT outbox.enqueue('a', '{}', id => m(13), available_at => outbox.clock() + interval '1 day') = m(13) AS enqueued;
SELECT count(*) FROM outbox.claim_batch();
SELECT * FROM state WHERE m = 13;
SELECT outbox.cancel(m(13));
SELECT * FROM state WHERE m IN (12, 13) ORDER BY m;
-- a lease that has ended protects nobody
SELECT outbox.enqueue('a', '{}', id => m(n), max_attempts => n - 13) = m(n) AS enqueued FROM generate_series(14, 15) n;
SELECT count(*) FROM outbox.claim_batch(lease => '10 s');
SELECT outbox.cancel(m(15));
SET outbox.clock_offset = 10001;
SELECT outbox.cancel(m(15));
SELECT outbox.cancel(m(14));
SELECT outbox.discard(m(14));
SELECT * FROM state WHERE m IN (14, 15) ORDER BY m;
RESET outbox.clock_offset;

-- what the transaction has enqueued itself; nobody else has seen it
BEGIN;
SELECT outbox.enqueue('a', '{}', id => m(n)) = m(n) AS enqueued FROM generate_series(20, 22) n;
SELECT outbox.cancel(m(20)), outbox.discard(m(21));
SELECT id = m(22) AS claimed FROM outbox.claim_batch();
SELECT * FROM state WHERE m BETWEEN 20 AND 22 ORDER BY m;
COMMIT;
SELECT * FROM state WHERE m BETWEEN 20 AND 22 ORDER BY m;
BEGIN;
SELECT outbox.enqueue('a', '{}', id => m(23)) = m(23) AS enqueued;
SELECT outbox.cancel(m(23));
ROLLBACK;
SELECT refused('SELECT outbox.cancel(m(23))');

-- many at once
SELECT outbox.subscribe('bulk', 'bulk.#', from_earliest => false);
SELECT outbox.unsubscribe('default', discard_pending => true) >= 0 AS gone;
SELECT count(outbox.enqueue('bulk.' || CASE WHEN n % 3 = 0 THEN 'a' ELSE 'b' END, to_jsonb(n), id => m(n)))
  FROM generate_series(1001, 1600) n;
CREATE FUNCTION die(most integer, error text) RETURNS bigint LANGUAGE sql
RETURN (SELECT sum(outbox.settle_batch(c.claim_token, 'dead', die.error))
          FROM (SELECT DISTINCT claim_token FROM outbox.claim_batch(most, subscription => 'bulk')) c);
CREATE VIEW counts AS SELECT pending, scheduled, ready, leased, delivered, dead, discarded FROM outbox.status;
SELECT die(200, 'card declined');
SET outbox.clock_offset = 1000;
SELECT die(200, 'no such customer');
SET outbox.clock_offset = 2000;
SELECT die(200, 'card expired');
SELECT * FROM counts;
SELECT last_error_message, count(*), min(payload::int), max(payload::int) FROM outbox.dead_letters GROUP BY 1 ORDER BY 3;
-- the longest dead first
SELECT outbox.requeue_all('bulk', max_messages => 3);
SELECT m, status FROM state WHERE status = 'ready' ORDER BY m;
SELECT count(*) < 20 AS few_rows FROM outbox.delivery;
SELECT * FROM counts;
-- filters, alone and together
SELECT outbox.discard_all('bulk', error_like => 'card%', name_pattern => 'bulk.a', max_messages => 10, reason => 'refunded');
SELECT outbox.discard_all('bulk', error_like => 'card%', name_pattern => '*.a', reason => 'refunded');
SELECT min(m), max(m), count(*) FROM state WHERE status = 'discarded';
SELECT outbox.discard_all('bulk', error_like => 'no such thing');
SELECT outbox.discard_all('bulk', error_sqlstate => '22012');
SELECT outbox.discard_all('bulk', name_pattern => 'order.#');
SELECT outbox.requeue_all('bulk', dead_after => died_at) AS last_minute
  FROM (SELECT max(died_at) AS died_at FROM outbox.dead_letters) x;
SELECT outbox.requeue_all('bulk', dead_before => died_at) AS before_the_first
  FROM (SELECT min(died_at) AS died_at FROM outbox.dead_letters) x;
SELECT * FROM counts;
SELECT outbox.requeue_all('bulk', error_like => 'card%');
SELECT last_error_message, count(*), count(DISTINCT attempts) FROM outbox.dead_letters GROUP BY 1;
-- due times spread evenly, in order, over the time
SELECT outbox.requeue_all('bulk', spread_over => '1 hour');
SELECT count(*), count(DISTINCT available_at) AS times,
       max(available_at) - min(available_at) BETWEEN '59 min' AND '1 hour' AS over_the_hour,
       bool_and(date_trunc('minute', available_at - least_at) = date_trunc('minute', (rank - 1) * interval '18 s')) AS evenly
  FROM (SELECT available_at, min(available_at) OVER () AS least_at, rank() OVER (ORDER BY id) AS rank
          FROM outbox.messages WHERE status = 'scheduled' OR last_error ->> 'message' = 'no such customer') x;
SELECT outbox.requeue_all('bulk'), outbox.discard_all('bulk');
SELECT * FROM counts;
-- few rows hold them: what goes the same way stays together
SELECT sum(message_count), count(*) < 20 AS few_rows FROM outbox.delivery WHERE state = 'ready' AND available_at <= outbox.clock();
-- everything is where it was counted
SELECT status, count(*) FROM state GROUP BY 1 ORDER BY 1;
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'bulk');

-- messages of one run with different budgets
SELECT outbox.subscribe('budget', 'budget', from_earliest => false);
SELECT outbox.enqueue_batch('budget', '[1, 2]') IS NOT NULL AS enqueued;
SELECT outbox.enqueue('budget', '3', max_attempts => 3) IS NOT NULL AS enqueued;
SELECT count(outbox.settle(c.id, c.claim_token, 'dead')) FROM outbox.claim_batch(10, subscription => 'budget') c;
SELECT outbox.subscribe('budget', 'budget', max_attempts => 9, replace => true);
SELECT outbox.requeue_all('budget');
SELECT payload, status, max_attempts FROM outbox.messages WHERE subscription = 'budget' ORDER BY id;

-- what ran out of attempts without a word can be told apart
SELECT count(*) FROM outbox.claim_batch(10, subscription => 'budget', lease => '1 s');
SET outbox.max_attempts = 1;
SELECT outbox.enqueue('budget', '4', max_attempts => 1) IS NOT NULL AS enqueued;
SELECT payload FROM outbox.claim_batch(10, subscription => 'budget', lease => '1 s');
SET outbox.clock_offset = 10000;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'budget', lease => '1 s');
SELECT payload, last_error_sqlstate FROM outbox.dead_letters WHERE subscription = 'budget';
SELECT outbox.requeue_all('budget', error_sqlstate => 'OB006');
RESET outbox.max_attempts;
RESET outbox.clock_offset;

-- bad arguments
SELECT statement, refused('SELECT outbox.' || statement)
  FROM unnest(ARRAY[
    $$get(NULL)$$,
    $$get('00000000-0000-0000-0000-000000000000')$$,
    $$requeue(NULL)$$,
    $$requeue(m(99))$$,
    $$requeue(m(1001), 'nobody')$$,
    $$requeue(m(1001), ' ')$$,
    $$requeue(m(1001), repeat('x', 256))$$,
    $$requeue(m(1001), available_at => 'infinity')$$,
    $$requeue(m(1001), available_at => '-infinity')$$,
    $$discard(NULL)$$,
    $$discard(m(99))$$,
    $$discard(m(1001), 'nobody')$$,
    $$discard(m(1001), reason => repeat('x', 256))$$,
    $$cancel(NULL)$$,
    $$cancel(m(99))$$,
    $$requeue_all(NULL)$$,
    $$requeue_all('')$$,
    $$requeue_all('nobody')$$,
    $$requeue_all('bulk', name_pattern => 'a..b')$$,
    $$requeue_all('bulk', error_sqlstate => 'card')$$,
    $$requeue_all('bulk', error_sqlstate => 'ob006')$$,
    $$requeue_all('bulk', dead_after => 'infinity')$$,
    $$requeue_all('bulk', dead_before => '-infinity')$$,
    $$requeue_all('bulk', max_messages => 0)$$,
    $$requeue_all('bulk', max_messages => -1)$$,
    $$requeue_all('bulk', spread_over => '0')$$,
    $$requeue_all('bulk', spread_over => '-1 s')$$,
    $$requeue_all('bulk', spread_over => '1 month')$$,
    $$requeue_all('bulk', spread_over => '100000000 days')$$,
    $$discard_all(NULL)$$,
    $$discard_all('nobody')$$,
    $$discard_all('bulk', max_messages => 0)$$]) AS statement;
-- with their detail and hint
SELECT outbox.requeue_all('bulk', error_sqlstate => 'card');
SELECT outbox.requeue_all('bulk', max_messages => 0);
SELECT outbox.requeue(m(1001), available_at => 'infinity');
SELECT outbox.requeue_all('bulk', spread_over => '1 month');
BEGIN READ ONLY;
SELECT outbox.requeue(m(1001));
ROLLBACK;
BEGIN READ ONLY;
SELECT name, payload FROM outbox.get(m(1001));
ROLLBACK;

-- a consumer of one subscription gets what that one gets
CREATE ROLE regress_listener;
SELECT outbox.grant_access('regress_listener', 'consumer', 'bulk');
SELECT outbox.enqueue('order.placed', '{}', id => m(41)) = m(41) AS enqueued;
SET ROLE regress_listener;
SELECT name FROM outbox.get(m(1001));
SELECT name FROM outbox.get(m(41));
SELECT outbox.requeue(m(1001));
RESET ROLE;
SELECT outbox.grant_access('regress_listener', 'consumer');
SET ROLE regress_listener;
SELECT name FROM outbox.get(m(41));
RESET ROLE;
SELECT outbox.revoke_access('regress_listener', 'consumer');
DROP ROLE regress_listener;

-- reset: messages go, subscriptions stay, and nothing is routed twice or lost
CREATE ROLE regress_visitor;
GRANT USAGE ON SCHEMA outbox TO regress_visitor;
GRANT EXECUTE ON FUNCTION outbox.reset() TO regress_visitor;
SET ROLE regress_visitor;
SELECT outbox.reset();
RESET ROLE;
DROP OWNED BY regress_visitor;
DROP ROLE regress_visitor;
SELECT outbox.enqueue('bulk.a', '"lost"', id => m(40), dedupe_key => 'k') = m(40) AS enqueued;
SELECT count(*) AS messages FROM outbox.log \gset
SELECT outbox.reset() = :messages AS all_of_them;
SELECT outbox.reset();
SELECT * FROM counts;
SELECT count(*) FROM outbox.messages;
SELECT outbox.enqueue('bulk.a', '"first"', id => m(40), dedupe_key => 'k') = m(40) AS enqueued;
SELECT payload FROM outbox.claim_batch(subscription => 'bulk');
BEGIN;
SELECT outbox.enqueue('bulk.a', '"gone"') IS NOT NULL AS enqueued;
SELECT outbox.reset();
SELECT outbox.enqueue('bulk.a', '"kept"') IS NOT NULL AS enqueued;
SELECT payload FROM outbox.claim_batch(subscription => 'bulk');
COMMIT;
SELECT outbox.enqueue('bulk.a', '"last"') IS NOT NULL AS enqueued;
SELECT payload FROM outbox.claim_batch(subscription => 'bulk');
SELECT ready, leased FROM outbox.status WHERE subscription = 'bulk';

DROP SCHEMA operators CASCADE;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
