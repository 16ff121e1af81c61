-- settle: every outcome of settle() and settle_batch(), what they return, and what they refuse.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- enqueues messages with the numbers first to last, and claims them under one token
CREATE FUNCTION pg_temp.take(first integer, last integer, lease interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.enqueue('t', to_jsonb(n)) FROM generate_series(first, last) n;
    INSERT INTO held SELECT * FROM outbox.claim_batch(last - first + 1, lease, worker => 'worker');
    RETURN (SELECT count(*) FROM held WHERE payload BETWEEN to_jsonb(first) AND to_jsonb(last));
END
$$;
CREATE FUNCTION pg_temp.settle(n integer, outcome text, error text DEFAULT NULL, error_detail jsonb DEFAULT NULL,
                               retry_at timestamptz DEFAULT NULL) RETURNS text LANGUAGE sql AS $$
    SELECT outbox.settle(pg_temp.id($1), pg_temp.token($1), $2, $3, $4, $5)
$$;
-- what became of them; due in seconds
CREATE FUNCTION pg_temp.became(first integer, last integer)
RETURNS TABLE (n jsonb, status text, attempts integer, max_attempts integer, due integer, settled boolean, last_error jsonb) LANGUAGE sql AS $$
    SELECT payload, status, attempts, max_attempts,
           CASE WHEN status = 'scheduled' THEN CAST(round(extract(epoch FROM available_at - outbox.clock())) AS integer) END,
           settled_at BETWEEN outbox.clock() - interval '1 min' AND outbox.clock(), last_error
      FROM outbox.messages WHERE payload BETWEEN to_jsonb($1) AND to_jsonb($2) ORDER BY payload
$$;
\set ECHO all
-- Exact delays, that no machine is too slow for.
SET outbox.jitter = 0;
SET outbox.backoff_base = '1000s';
SET outbox.backoff_max = '60000s';

-- The outcomes, and the status they lead to.
SELECT pg_temp.take(1, 9);
SELECT pg_temp.settle(1, 'delivered');
SELECT pg_temp.settle(2, NULL);
SELECT outbox.settle(pg_temp.id(3), pg_temp.token(3));
SELECT pg_temp.settle(4, 'failed', 'it broke');
SELECT pg_temp.settle(5, 'dead', 'hopeless');
SELECT pg_temp.settle(6, 'released');
SELECT pg_temp.settle(7, 'failed');
SELECT pg_temp.settle(8, 'failed', 'with more', '{"sqlstate": "XX000", "code": [1, 2]}');
SELECT pg_temp.settle(9, 'released', 'shutting down');
SELECT * FROM pg_temp.became(1, 9);
-- the lease is gone from all of them
SELECT count(*) FROM outbox.leases;
SELECT id = pg_temp.id(5) AS id, attempts, last_error_message, died_at IS NOT NULL AS died FROM outbox.dead_letters;
SELECT * FROM pg_temp.broken();

-- The server decides between retry and dead; released ones are not charged.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 2);
SELECT pg_temp.settle(1, 'failed', 'first'), pg_temp.settle(2, 'released');
SET outbox.clock_offset = '1001s';
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
SELECT pg_temp.settle(1, 'failed', 'second'), pg_temp.settle(2, 'released');
SELECT n, status, attempts, due FROM pg_temp.became(1, 1);
SET outbox.clock_offset = '3002s';
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
SELECT pg_temp.settle(1, 'failed', 'third'), pg_temp.settle(2, 'released');
SELECT * FROM pg_temp.became(1, 2);
-- however often
DO $$
BEGIN
    FOR i IN 1 .. 100 LOOP
        DELETE FROM held;
        INSERT INTO held SELECT * FROM outbox.claim_batch(1);
        ASSERT (SELECT attempts = 1 AND max_attempts = 3 FROM held), i;
        ASSERT pg_temp.settle(2, 'released') = 'ready';
    END LOOP;
END
$$;
SELECT n, status, attempts, max_attempts FROM pg_temp.became(2, 2);
RESET outbox.clock_offset;

-- An error stays after a later success, and after a release that says nothing.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 1);
SELECT pg_temp.settle(1, 'failed', 'once');
SET outbox.clock_offset = '1001s';
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT pg_temp.settle(1, 'released');
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT pg_temp.settle(1, 'delivered');
SELECT n, status, attempts, last_error FROM pg_temp.became(1, 1);
RESET outbox.clock_offset;
-- a long one is kept in part
SELECT pg_temp.take(2, 3);
SELECT pg_temp.settle(2, 'dead', repeat('x', 1000000));
SELECT left(last_error ->> 'message', 5) AS begins, length(last_error ->> 'message') BETWEEN 1000 AND 100000 AS cut
  FROM outbox.messages WHERE payload = '2';
CALL pg_temp.try($$ SELECT pg_temp.settle(3, 'delivered', 'but') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(3, 'delivered', NULL, '{"but": 1}') $$);

-- retry_at is taken as it is given, without jitter, and a past one means now.
SELECT pg_temp.anew();
SET outbox.jitter = 1;
SELECT pg_temp.take(1, 8);
SELECT pg_temp.settle(1, 'failed', 'later', NULL, '2999-01-01 00:00:00.123456Z');
SELECT pg_temp.settle(2, 'released', NULL, NULL, '2999-01-01 00:00:00.123456Z');
SELECT pg_temp.settle(3, 'failed', 'past', NULL, '1999-01-01Z');
SELECT pg_temp.settle(4, 'released', NULL, NULL, '1999-01-01Z');
SELECT pg_temp.settle(5, 'failed', 'now', NULL, outbox.clock());
SELECT payload, status, attempts, CASE WHEN status = 'scheduled' THEN available_at AT TIME ZONE 'UTC' END AS due
  FROM outbox.messages WHERE payload <= '5' ORDER BY payload;
SELECT count(*) FROM outbox.messages WHERE available_at < created_at;
CALL pg_temp.try($$ SELECT pg_temp.settle(6, 'failed', NULL, NULL, 'infinity') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(6, 'released', NULL, NULL, '-infinity') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(6, 'delivered', NULL, NULL, now()) $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(6, 'dead', NULL, NULL, now()) $$);
-- the last attempt is the last, whatever retry_at says
SELECT outbox.enqueue('t', '9', max_attempts => 1) IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT pg_temp.settle(9, 'failed', 'spent', NULL, '2999-01-01');
SET outbox.jitter = 0;

-- Backoff: min(maximum, base * 2^(attempts - 1)), 1 s to 60 s at first.
SELECT n, outbox.backoff(n) FROM generate_series(1, 8) n;
RESET outbox.backoff_base;
RESET outbox.backoff_max;
SELECT n, outbox.backoff(n) FROM unnest('{1,2,3,4,5,6,7,8,31,32,33,64,65,2147483647}'::integer[]) n;
SET outbox.backoff_base = 300;
SET outbox.backoff_max = 1000;
SELECT n, outbox.backoff(n) FROM generate_series(1, 4) n;
SET outbox.backoff_base = 5000;
SELECT n, outbox.backoff(n) FROM generate_series(1, 2) n;
CALL pg_temp.try($$ SELECT outbox.backoff(0) $$);
CALL pg_temp.try($$ SELECT outbox.backoff(-1) $$);
CALL pg_temp.try($$ SELECT outbox.backoff(NULL) $$);
-- Jitter adds up to its part, differently for each settlement.
SELECT pg_temp.anew();
SET outbox.backoff_base = '1000s';
SET outbox.backoff_max = '60000s';
RESET outbox.jitter;
SELECT pg_temp.take(1, 50);
SELECT DISTINCT pg_temp.settle(n, 'failed') FROM generate_series(1, 50) n;
SELECT min(due) >= 950 AND max(due) <= 1100 AS within, count(DISTINCT due) > 5 AS spread, max(due) - min(due) > 20 AS wide
  FROM pg_temp.became(1, 50);
SET outbox.jitter = 1;
SELECT pg_temp.take(101, 150);
SELECT DISTINCT pg_temp.settle(n, 'failed') FROM generate_series(101, 150) n;
SELECT min(due) >= 950 AND max(due) <= 2000 AS within, max(due) - min(due) > 400 AS wide FROM pg_temp.became(101, 150);
SET outbox.jitter = 0;

-- A batch as a whole: the count is what was settled.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 10);
SELECT outbox.settle_batch(pg_temp.token(1));
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), 'failed') $$);
SELECT pg_temp.take(11, 13);
SELECT outbox.settle_batch(pg_temp.token(11), 'failed', 'all', '{"more": 1}', '2999-01-01');
SELECT pg_temp.take(14, 16);
SELECT outbox.settle_batch(pg_temp.token(14), 'released');
SELECT count(*) FROM outbox.claim_batch() WHERE payload BETWEEN '14' AND '16' AND attempts = 1;
SELECT pg_temp.take(17, 19);
SELECT outbox.settle_batch(pg_temp.token(17), 'dead', 'all');
SELECT * FROM pg_temp.states();
-- messages of one batch whose budgets differ
SELECT count(*) FROM outbox.enqueue_batch('[{"name": "t", "payload": 20, "max_attempts": 1}, {"name": "t", "payload": 21},
                                            {"name": "t", "payload": 22, "max_attempts": 1}]');
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload;
SELECT outbox.settle_batch(pg_temp.token(20), 'failed', 'mixed');
SELECT n, status, attempts, max_attempts FROM pg_temp.became(20, 22);
SELECT * FROM pg_temp.broken();

-- Some of a batch, by ids: those that are held are settled and counted.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 30);
SELECT outbox.settle_batch(pg_temp.token(1), ids => '{}');
SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(2)]);
SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(7), pg_temp.id(5), pg_temp.id(7), pg_temp.id(5)]);
SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(2), pg_temp.id(9)]);
SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(10), '01900000-0000-7000-8000-000000000000']);
SELECT outbox.settle_batch(pg_temp.token(1), 'failed', 'odd', ids => array_agg(pg_temp.id(n))) FROM generate_series(11, 30, 2) n;
SELECT outbox.settle_batch(pg_temp.token(1), 'dead', 'even', ids => array_agg(pg_temp.id(n))) FROM generate_series(12, 24, 2) n;
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.broken();
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(2)]) $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(2), pg_temp.id(11), pg_temp.id(12)]) $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), ids => '{01900000-0000-7000-8000-000000000000}') $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(1), NULL]) $$);
-- the rest, after a part
SELECT outbox.settle_batch(pg_temp.token(1));
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1)) $$);
SELECT outbox.settle_batch(pg_temp.token(1), ids => '{}');
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.broken();

-- Settling one by one leaves no row a message: what is delivered of a claim joins.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 100);
SELECT count(*) AS runs FROM outbox.delivery \gset
SELECT DISTINCT pg_temp.settle(n, 'delivered') FROM generate_series(1, 100) n;
SELECT state, sum(message_count) AS messages, count(*) <= 2 * :runs AS joined FROM outbox.delivery GROUP BY state;
-- in any order, each in a transaction of its own
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 100);
DO $$
BEGIN
    FOR i IN 0 .. 99 LOOP
        PERFORM pg_temp.settle(1 + i * 37 % 100, 'delivered');
        COMMIT;
    END LOOP;
END
$$;
SELECT state, sum(message_count) AS messages, count(*) <= 2 * :runs AS joined FROM outbox.delivery GROUP BY state;
SELECT * FROM pg_temp.broken();

-- The id of a delivery that comes twice, since its sequence was set back, mixes nothing up.
SELECT pg_temp.anew();
SET client_min_messages = warning;
SELECT outbox.subscribe('other');
RESET client_min_messages;
SELECT pg_temp.take(1, 3);
SELECT claim_token AS token FROM outbox.claim_batch(1, subscription => 'other') \gset other_
SELECT setval('outbox.delivery_id_seq', id - 1) = id - 1 AS back FROM outbox.delivery WHERE claim_token = :'other_token';
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1)), outbox.settle(pg_temp.id(1), :'other_token'),
       outbox.settle(pg_temp.id(2), pg_temp.token(2));
SELECT count(*) - count(DISTINCT id) AS twice FROM outbox.delivery;
SELECT subscription, status, string_agg(payload::text, ' ' ORDER BY payload) FROM outbox.messages GROUP BY 1, 2 ORDER BY 1, 2;

-- Who does not hold a message cannot settle it.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 3);
SELECT payload, claim_token AS token FROM outbox.claim_batch(1, subscription => 'other') \gset other_
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(1), '01900000-0000-4000-8000-000000000000') $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch('01900000-0000-4000-8000-000000000000') $$);
CALL pg_temp.try($$ SELECT outbox.settle('01900000-0000-7000-8000-000000000000', pg_temp.token(1)) $$);
-- the token of another subscription, which has not claimed this message
CALL pg_temp.try(format($$ SELECT outbox.settle(pg_temp.id(3), %L) $$, :'other_token'));
CALL pg_temp.try(format($$ SELECT outbox.settle_batch(%L, ids => ARRAY[pg_temp.id(2), pg_temp.id(3)]) $$, :'other_token'));
-- each subscription settles its own
SELECT outbox.settle(pg_temp.id(1), :'other_token');
SELECT subscription, status, count(*) FROM outbox.messages GROUP BY 1, 2 ORDER BY 1, 2;
CALL pg_temp.try($$ SELECT outbox.settle(NULL, pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(1), NULL) $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(NULL) $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(1, 'Delivered') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(1, '') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(1, 'retry') $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), 'pending') $$);
SELECT outbox.unsubscribe('other', discard_pending => true);

-- Nor whose lease has ended, taken over or not.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 3);
SET outbox.clock_offset = '31s';
CALL pg_temp.try($$ SELECT pg_temp.settle(1, 'delivered') $$);
CALL pg_temp.try($$ SELECT pg_temp.settle(1, 'released') $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(1)]) $$);
SELECT claim_token AS old FROM held WHERE payload = '1' \gset
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
CALL pg_temp.try(format($$ SELECT outbox.settle(pg_temp.id(1), %L) $$, :'old'));
CALL pg_temp.try(format($$ SELECT outbox.settle_batch(%L) $$, :'old'));
SELECT pg_temp.settle(1, 'delivered');
SELECT n, status, attempts FROM pg_temp.became(1, 1);
RESET outbox.clock_offset;
-- but a settlement in the transaction that claimed is never late
BEGIN;
SELECT pg_temp.take(11, 12);
SET LOCAL outbox.clock_offset = '1h';
SELECT pg_temp.settle(11, 'delivered');
SELECT outbox.settle_batch(pg_temp.token(12));
COMMIT;
SELECT n, status FROM pg_temp.became(11, 12);

-- A settlement belongs to its transaction.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 3);
BEGIN;
SELECT pg_temp.settle(1, 'delivered');
SELECT outbox.settle_batch(pg_temp.token(2), 'dead', 'no');
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT outbox.settle_batch(pg_temp.token(1), 'dead', 'no');
ROLLBACK TO s;
SELECT pg_temp.settle(2, 'delivered');
COMMIT;
SELECT pg_temp.id(3) AS id, pg_temp.token(3) AS token \gset
BEGIN;
SELECT outbox.settle(:'id', :'token');
PREPARE TRANSACTION 'settle';
SELECT count(*) FROM outbox.claim_batch();
COMMIT PREPARED 'settle';
SELECT * FROM pg_temp.states();
SELECT outbox.settle_batch(pg_temp.token(1));
BEGIN READ ONLY;
SELECT outbox.settle_batch('01900000-0000-4000-8000-000000000000');
ROLLBACK;
SELECT * FROM pg_temp.broken();

-- Settled one after the other in one transaction, each with a row of its own: what is gone of the token is not read
-- again for each that is left.
SELECT outbox.reset() >= 0;
DO $$
BEGIN
    FOR n IN 1..200 LOOP
        PERFORM outbox.enqueue('m', to_jsonb(n));
        COMMIT;
        PERFORM FROM outbox.maintain();
        COMMIT;
    END LOOP;
END
$$;
SELECT count(*) FROM outbox.delivery;
BEGIN;
DO $$
DECLARE
    message record;
BEGIN
    FOR message IN SELECT id, claim_token FROM outbox.claim_batch(200) LOOP
        PERFORM outbox.settle(message.id, message.claim_token);
    END LOOP;
END
$$;
SELECT count(*), bool_and(status = 'delivered') AS delivered FROM outbox.messages;
SELECT pg_stat_get_xact_tuples_returned('outbox.delivery_token_idx'::regclass) < 2000 AS few;
COMMIT;
