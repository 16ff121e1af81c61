-- routing: how messages become runs. Each message is in exactly one run of each subscription that
-- wants it, and neighbours that are alike share one.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- n transactions of one message
CREATE PROCEDURE pg_temp.one_by_one(name text, first integer, last integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR n IN first .. last LOOP
        PERFORM outbox.enqueue(name, to_jsonb(n));
        COMMIT;
    END LOOP;
END
$$;
-- the runs with messages of a name
CREATE FUNCTION pg_temp.runs(name text, subscription text DEFAULT 'default')
RETURNS TABLE (runs bigint, messages integer, ranges bigint) LANGUAGE sql AS $$
    SELECT count(*), message_count, (SELECT count(*) FROM unnest(d.positions))
      FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id
     WHERE s.name = $2 AND EXISTS (SELECT FROM outbox.log l WHERE l.name = $1 AND d.positions @> l.position)
     GROUP BY 2, 3 ORDER BY 2 DESC, 3
$$;
SET client_min_messages = warning;
\set ECHO all

-- An eighth of what a pass finds is a run, at most outbox.run_length: so several consumers find some.
CALL pg_temp.one_by_one('few', 1, 1);
SELECT routed FROM outbox.maintain();
CALL pg_temp.one_by_one('few', 2, 9);
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('few');
CALL pg_temp.one_by_one('some', 1, 100);
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('some');
-- a run of many transactions is one range, and so is that of one
CALL pg_temp.one_by_one('many', 1, 400);
SELECT count(*) FROM outbox.enqueue_batch('many', (SELECT jsonb_agg(n) FROM generate_series(401, 2100) n));
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('many');
SET outbox.run_length = 10;
SELECT count(*) FROM outbox.enqueue_batch('short', (SELECT jsonb_agg(n) FROM generate_series(1, 95) n));
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('short');
RESET outbox.run_length;
-- a large backlog: runs grow longer where so many of them are found that 16 are left, to outbox.run_length
SELECT count(*) FROM outbox.enqueue_batch('large', (SELECT jsonb_agg(n) FROM generate_series(1, 9000) n));
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('large');
SET outbox.run_length = 270;
SELECT count(*) FROM outbox.enqueue_batch('larger', (SELECT jsonb_agg(n) FROM generate_series(1, 9000) n));
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('larger');
RESET outbox.run_length;
-- holes that rolled back transactions and savepoints leave do not break it
DO $$
BEGIN
    FOR n IN 1 .. 60 LOOP
        PERFORM outbox.enqueue('holes', to_jsonb(n));
        IF n % 3 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
    END LOOP;
    FOR n IN 61 .. 100 LOOP
        BEGIN
            PERFORM outbox.enqueue('holes', to_jsonb(n));
            IF n % 2 = 0 THEN RAISE 'no'; END IF;
        EXCEPTION WHEN raise_exception THEN NULL;
        END;
    END LOOP;
END
$$;
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('holes');
SELECT * FROM pg_temp.broken();

-- A pass that finds nothing writes nothing.
SELECT count(*) AS before, max(id) AS newest FROM outbox.frontier \gset
SELECT routed FROM outbox.maintain();
SELECT count(*) - :before AS more, max(id) - :newest AS newer FROM outbox.frontier;

-- What is due at the pass has one due time; later ones are rounded up to a tenth of a second.
SELECT count(outbox.enqueue('due', to_jsonb(n), available_at => CAST(t AS timestamptz)))
  FROM (VALUES (1, NULL), (2, '1999-01-01 00:00:00Z'), (3, NULL), (4, '2020-01-01 00:00:00.123Z')) v (n, t);
SELECT count(outbox.enqueue('later', to_jsonb(n), available_at => CAST(t AS timestamptz)))
  FROM (VALUES (1, '2999-01-01 00:00:00.000001Z'), (2, '2999-01-01 00:00:00.05Z'), (3, '2999-01-01 00:00:00.1Z'),
               (4, '2999-01-01 00:00:00.100001Z'), (5, '2999-01-01 00:00:00.2Z'), (6, '2999-01-01 00:00:00.999Z')) v (n, t);
SELECT count(*) FROM outbox.enqueue_batch('filler', (SELECT jsonb_agg(n) FROM generate_series(1, 100) n));
SELECT routed FROM outbox.maintain();
SELECT DISTINCT count(*) OVER () AS runs, message_count
  FROM outbox.delivery d WHERE EXISTS (SELECT FROM outbox.log l WHERE l.name = 'due' AND d.positions @> l.position);
SELECT d.available_at AT TIME ZONE 'UTC' AS due, message_count,
       (SELECT array_agg(payload ORDER BY l.position) FROM outbox.log l WHERE d.positions @> l.position) AS messages
  FROM outbox.delivery d WHERE d.available_at > '2900-01-01' ORDER BY d.available_at;

-- Runs have one budget: the message's, else the handler's, else the subscription's, else the setting.
SELECT outbox.subscribe('own_budget', 'budget', max_attempts => 7);
SELECT outbox.subscribe('no_budget', 'budget');
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS '';
SELECT outbox.register_hook('budget', 'hook', subscription => 'own_budget', kind => 'job', max_attempts => 5);
SELECT count(outbox.enqueue('budget', to_jsonb(n), max_attempts => CASE n % 3 WHEN 0 THEN 2 END,
                            kind => CASE n % 2 WHEN 0 THEN 'job' END)) FROM generate_series(1, 96) n;
SET outbox.max_attempts = 4;
SELECT routed FROM outbox.maintain();
SELECT s.name, d.max_attempts, count(*) AS runs, sum(message_count) AS messages,
       (SELECT array_agg(DISTINCT l.kind || ' ' || coalesce(CAST(l.max_attempts AS text), '-')
                         ORDER BY l.kind || ' ' || coalesce(CAST(l.max_attempts AS text), '-'))
          FROM outbox.log l JOIN outbox.delivery r ON r.positions @> l.position
         WHERE r.subscription_id = s.id AND r.max_attempts = d.max_attempts) AS kind_and_own
  FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id
 WHERE EXISTS (SELECT FROM outbox.log l WHERE l.name = 'budget' AND d.positions @> l.position)
 GROUP BY s.id, s.name, d.max_attempts ORDER BY s.name, d.max_attempts;
-- it is fixed at routing
SET outbox.max_attempts = 9;
SELECT DISTINCT max_attempts FROM outbox.claim_batch(1000, subscription => 'no_budget') ORDER BY 1;
RESET outbox.max_attempts;
SELECT * FROM pg_temp.broken();

-- Interleaved with messages of others, a run ends at 32 ranges.
SELECT outbox.subscribe('odd', 'odd', from_earliest => false);
SELECT outbox.subscribe('odd_job', 'odd', kind => 'job', from_earliest => false);
SELECT count(outbox.enqueue(CASE n % 2 WHEN 1 THEN 'odd' ELSE 'even' END, to_jsonb(n),
                            kind => CASE WHEN n % 10 = 1 THEN 'job' END)) FROM generate_series(1, 1000) n;
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.runs('odd', 'default');
SELECT * FROM pg_temp.runs('odd', 'odd');
SELECT * FROM pg_temp.runs('odd', 'odd_job');
SELECT * FROM pg_temp.broken();

-- Transactions that commit late, each whenever it likes.
SELECT outbox.subscribe('late', 'late.*');
BEGIN;
SELECT count(outbox.enqueue('late.a', to_jsonb(n))) FROM generate_series(1, 5) n;
PREPARE TRANSACTION 'routing a';
CALL pg_temp.one_by_one('late.on_time', 1, 40);
BEGIN;
SELECT count(outbox.enqueue('late.b', to_jsonb(n))) FROM generate_series(6, 7) n;
PREPARE TRANSACTION 'routing b';
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'late');
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'late');
CALL pg_temp.one_by_one('late.on_time', 41, 60);
BEGIN;
SELECT outbox.enqueue('late.c', '8') IS NOT NULL;
PREPARE TRANSACTION 'routing c';
BEGIN;
SELECT outbox.enqueue('late.d', '9') IS NOT NULL;
PREPARE TRANSACTION 'routing d';
CALL pg_temp.one_by_one('late.on_time', 61, 80);
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'late');
COMMIT PREPARED 'routing b';
ROLLBACK PREPARED 'routing d';
SELECT payload FROM outbox.claim_batch(1000, subscription => 'late');
CALL pg_temp.one_by_one('late.on_time', 81, 90);
COMMIT PREPARED 'routing a';
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'late');
COMMIT PREPARED 'routing c';
SELECT payload FROM outbox.claim_batch(1000, subscription => 'late');
SELECT payload FROM outbox.claim_batch(1000, subscription => 'late');
SELECT * FROM pg_temp.broken('{odd,odd_job}');
-- A late transaction's messages have a run of their own, with no range beyond that transaction.
SELECT l.name, count(DISTINCT d.id) AS runs, bool_and(lower(d.positions) >> 20 = (upper(d.positions) - 1) >> 20) AS within
  FROM outbox.log l JOIN outbox.delivery d ON d.positions @> l.position
  JOIN outbox.subscription s ON s.id = d.subscription_id AND s.name = 'late'
 WHERE l.name IN ('late.a', 'late.b', 'late.c') GROUP BY l.name ORDER BY l.name;

-- A subscription made while a transaction is in progress gets its messages once: from the
-- earliest, and from now on, where they were not there yet.
BEGIN;
SELECT count(outbox.enqueue('sub', to_jsonb(n))) FROM generate_series(1, 3) n;
PREPARE TRANSACTION 'routing sub';
CALL pg_temp.one_by_one('sub', 4, 5);
SELECT outbox.subscribe('sub_earliest', 'sub');
SELECT outbox.subscribe('sub_from_now', 'sub', from_earliest => false);
CALL pg_temp.one_by_one('sub', 6, 7);
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(1000, subscription => 'sub_earliest');
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(1000, subscription => 'sub_from_now');
COMMIT PREPARED 'routing sub';
CALL pg_temp.one_by_one('sub', 8, 8);
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(1000, subscription => 'sub_earliest');
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(1000, subscription => 'sub_from_now');
SELECT * FROM pg_temp.broken('{odd,odd_job,sub_from_now}');
-- made in a transaction that is rolled back, it never was, and nobody misses anything
CALL pg_temp.one_by_one('sub', 9, 10);
BEGIN;
SELECT outbox.subscribe('sub_rolled_back', 'sub');
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'sub_rolled_back');
ROLLBACK;
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(1000, subscription => 'sub_earliest');
SELECT * FROM pg_temp.broken('{odd,odd_job,sub_from_now}');

-- A pass is a transaction's own: rolled back, the next one finds the same.
CALL pg_temp.one_by_one('again', 1, 5);
BEGIN;
SELECT routed FROM outbox.maintain();
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT routed FROM outbox.maintain();
ROLLBACK TO s;
SELECT routed FROM outbox.maintain();
COMMIT;
SELECT sum(message_count) FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id
 WHERE s.name = 'default' AND EXISTS (SELECT FROM outbox.log l WHERE l.name = 'again' AND d.positions @> l.position);
SELECT * FROM pg_temp.broken('{odd,odd_job,sub_from_now}');
-- and it cannot be prepared
CALL pg_temp.one_by_one('again', 6, 6);
BEGIN;
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'late');
PREPARE TRANSACTION 'routing';
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.broken('{odd,odd_job,sub_from_now}');
-- Numbers above 2^31, as after years: of every sequence.
SELECT pg_temp.anew();
SELECT count(setval(CAST(s.oid AS regclass), 3000000000)) AS sequences FROM pg_class s WHERE s.relkind = 'S' AND s.relnamespace = to_regnamespace('outbox');
SELECT outbox.subscribe('numbers', 'numbers');
SELECT count(outbox.enqueue('numbers', to_jsonb(n))) FROM generate_series(1, 3) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(2, subscription => 'numbers');
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1)), outbox.settle(pg_temp.id(2), pg_temp.token(2), 'dead');
SELECT outbox.requeue(pg_temp.id(2)), outbox.skip('numbers', 'infinity');
SELECT bool_and(id > 3000000000) FROM outbox.delivery WHERE subscription_id > 3000000000;
SELECT * FROM pg_temp.broken();
SELECT outbox.unsubscribe('numbers', true);

-- Each row of the frontier follows the one before it.
SELECT max(id) - min(id) + 1 - count(*) AS missing FROM outbox.frontier;
DROP FUNCTION hook;
