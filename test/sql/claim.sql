-- claim: order, numbers, leases and workers of claim_batch(), and what it refuses.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
SELECT set_config('outbox.jitter', '0', false) \gset ignored_
\set ECHO all

-- Nothing there, nothing claimed; and an empty claim keeps nothing.
SELECT count(*) FROM outbox.claim_batch();
SELECT count(*) FROM outbox.claim_batch();
SELECT outbox.enqueue('later', '1', available_at => '2999-01-01') IS NOT NULL;
SELECT count(*) FROM outbox.claim_batch();
SELECT mode, ready, scheduled, leased FROM outbox.status;
SELECT count(*) AS before, max(id) AS newest FROM outbox.frontier \gset
SELECT count(*) FROM outbox.claim_batch(worker => 'nobody');
SELECT count(*) - :before AS more, max(id) - :newest AS newer FROM outbox.frontier;
SELECT count(*) FROM outbox.leases;
SELECT outbox.enqueue('now', '2') IS NOT NULL;
SELECT payload FROM outbox.claim_batch();

-- All columns of one message.
SELECT outbox.enqueue('full', '3', 'job', 2, NULL, NULL, 9, '{"h": 1}', 'co', 'ca', 'at', 'ai', 't', 'o', 'd',
                      '1999-01-01 00:00Z', 'k') AS id \gset
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING
    id = :'id' AS id, substr(CAST(claim_token AS text), 15, 1) AS token_version, attempts, max_attempts, name, kind, version,
    payload, headers, subscription, correlation_id, causation_id, aggregate_type, aggregate_id, tenant_id, owner_id,
    dedupe_key, ordering_key, occurred_at AT TIME ZONE 'UTC' AS occurred_at \gx
SELECT h.created_at = l.created_at AS created_at, h.available_at >= h.created_at AS available_at
  FROM held h JOIN outbox.log l USING (id) WHERE l.payload = '3';
-- headers that were not given are an empty object
SELECT outbox.enqueue('bare', '4') IS NOT NULL;
SELECT headers, correlation_id FROM outbox.claim_batch();

-- The lease is 30 s from now, and renewals can carry it to 300 s.
SELECT outbox.enqueue('lease', to_jsonb(n)) IS NOT NULL FROM generate_series(1, 4) n;
CREATE FUNCTION pg_temp.leases(OUT worker text, OUT lease interval, OUT active interval, OUT from_now boolean)
RETURNS SETOF record LANGUAGE sql AS $$
    SELECT worker, locked_until - claimed_at, active_until - claimed_at,
           claimed_at BETWEEN outbox.clock() - interval '1 min' AND outbox.clock()
      FROM outbox.leases ORDER BY claimed_at
$$;
DELETE FROM held;
INSERT INTO held SELECT * FROM outbox.claim_batch(1, worker => 'default');
INSERT INTO held SELECT * FROM outbox.claim_batch(1, '100 s', worker => '100 s');
INSERT INTO held SELECT * FROM outbox.claim_batch(1, '300 s', worker => '300 s');
INSERT INTO held SELECT * FROM outbox.claim_batch(1, '299.999999 s', worker => '1 us less');
SELECT * FROM pg_temp.leases() WHERE worker IS NOT NULL;
SELECT h.locked_until = l.locked_until AS locked_until, h.active_until = l.active_until AS active_until
  FROM held h JOIN outbox.delivery l USING (claim_token) WHERE h.name = 'lease';
-- A setting, the subscription's own, the caller's: the last one that says something counts.
SET outbox.lease = '20s';
SET outbox.max_active = '40s';
SELECT outbox.enqueue('set', to_jsonb(n)) IS NOT NULL FROM generate_series(1, 3) n;
SELECT count(*) FROM outbox.claim_batch(1, worker => 'set');
SET client_min_messages = warning;
SELECT outbox.subscribe('default', lease => '25 s', max_active => '60 s', replace => true);
RESET client_min_messages;
SELECT count(*) FROM outbox.claim_batch(1, worker => 'set and subscription');
SELECT count(*) FROM outbox.claim_batch(1, '50 s', worker => 'set, subscription and call');
SELECT * FROM pg_temp.leases() WHERE worker LIKE 'set%';
-- A configured lease that is longer than max_active is cut to it; one that is asked for is refused.
SELECT outbox.enqueue('cut', to_jsonb(n)) IS NOT NULL FROM generate_series(1, 3) n;
SET outbox.lease = '90s';
SELECT outbox.subscribe('default', max_active => '45 s', replace => true);
SELECT count(*) FROM outbox.claim_batch(1, worker => 'cut to 45 s');
SELECT * FROM pg_temp.leases() WHERE worker LIKE 'cut%';
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '45.1 s') $$);
SELECT outbox.subscribe('default', replace => true);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '41 s') $$);
RESET outbox.lease;
RESET outbox.max_active;
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '30000 s') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '36500 days') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '100 years') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '178000000 years') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '1 month -30 days') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '0') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '-30 s') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, '1 day -24 hours') $$);

-- Numbers: NULL means outbox.batch_size, 100 at first.
SELECT outbox.reset();
SELECT count(*) FROM outbox.enqueue_batch('number', (SELECT jsonb_agg(n) FROM generate_series(1, 500) n));
SELECT count(*) FROM outbox.claim_batch();
SELECT count(*) FROM outbox.claim_batch(NULL, NULL, NULL, NULL, NULL);
SELECT count(*) FROM outbox.claim_batch(1);
SET outbox.batch_size = 7;
SELECT count(*) FROM outbox.claim_batch();
RESET outbox.batch_size;
SELECT count(*) FROM outbox.claim_batch(230);
SELECT count(*) FROM outbox.claim_batch(100000);
SELECT count(*) FROM outbox.claim_batch(100000);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(0) $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(-1) $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(100001) $$);
SELECT * FROM pg_temp.broken();

-- Order: by due time, then created_at, across runs and transactions.
SET client_min_messages = warning;
SELECT outbox.subscribe(name, 'order.' || name) FROM unnest('{a,b,c}'::text[]) name;
RESET client_min_messages;
SELECT outbox.enqueue('order.a', '1', available_at => outbox.clock() + '200 s') IS NOT NULL;
SELECT outbox.enqueue('order.a', '2', available_at => outbox.clock() + '100 s') IS NOT NULL;
SELECT outbox.enqueue('order.a', to_jsonb(n)) IS NOT NULL FROM generate_series(3, 5) n;
SELECT outbox.enqueue('order.a', '6', available_at => '1999-01-01') IS NOT NULL;
SELECT array_agg(payload) FROM outbox.claim_batch(2, '300 s', 'a');
SELECT array_agg(payload) FROM outbox.claim_batch(10, '300 s', 'a');
SET outbox.clock_offset = '250s';
SELECT array_agg(payload) FROM outbox.claim_batch(10, '300 s', 'a');
RESET outbox.clock_offset;
-- a transaction that took its id early, or late, comes in the order of enqueueing
BEGIN;
SELECT outbox.enqueue('order.b', '11') IS NOT NULL;
PREPARE TRANSACTION 'claim early';
SELECT outbox.enqueue('order.b', to_jsonb(n)) IS NOT NULL FROM generate_series(12, 13) n;
COMMIT PREPARED 'claim early';
SELECT array_agg(payload) FROM outbox.claim_batch(subscription => 'b');
-- the longest due run first, whatever its messages' age
SELECT outbox.enqueue('order.c', '21', available_at => outbox.clock() + '300 s') IS NOT NULL;
SELECT outbox.enqueue('order.c', '22', available_at => outbox.clock() + '100 s') IS NOT NULL;
SELECT outbox.enqueue('order.c', '23', available_at => outbox.clock() + '200 s') IS NOT NULL;
SELECT count(*) FROM outbox.claim_batch(subscription => 'c');
SET outbox.clock_offset = '400s';
SELECT payload FROM outbox.claim_batch(1, subscription => 'c');
SELECT payload FROM outbox.claim_batch(1, subscription => 'c');
SELECT payload FROM outbox.claim_batch(1, subscription => 'c');
RESET outbox.clock_offset;
SELECT count(*) FROM outbox.claim_batch(1000);

-- One token for the batch, over several runs; or one for each message.
DELETE FROM held;
SELECT count(outbox.enqueue('token', to_jsonb(n))) FROM generate_series(1, 6) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(3);
SELECT count(DISTINCT claim_token) FROM held WHERE name = 'token';
INSERT INTO held SELECT * FROM outbox.claim_batch(3, separate_tokens => true);
SELECT count(DISTINCT claim_token) FROM held WHERE name = 'token';
SELECT * FROM pg_temp.broken();
SELECT outbox.settle_batch(pg_temp.token(1)), outbox.settle_batch(pg_temp.token(4)), outbox.settle_batch(pg_temp.token(5));
-- separate tokens, cut out of one run
DELETE FROM held;
SELECT count(*) FROM outbox.enqueue_batch('separate', (SELECT jsonb_agg(n) FROM generate_series(1, 100) n));
INSERT INTO held SELECT * FROM outbox.claim_batch(20, worker => 'separate', separate_tokens => true);
SELECT count(*), count(DISTINCT claim_token) AS tokens, array_agg(DISTINCT attempts) AS attempts
  FROM held;
SELECT count(*), sum(messages) FROM outbox.leases WHERE worker = 'separate';
SELECT count(*) FROM outbox.claim_batch(100);
SELECT * FROM pg_temp.broken();

-- Tokens are random: version 4, none twice, and each other bit is set in about half of them.
BEGIN;
SELECT count(*) FROM outbox.enqueue_batch('random', (SELECT jsonb_agg(n) FROM generate_series(1, 4000) n));
CREATE TEMP TABLE tokens ON COMMIT DROP AS
SELECT claim_token, decode(replace(claim_token::text, '-', ''), 'hex') AS bits FROM outbox.claim_batch(4000, separate_tokens => true);
SELECT count(DISTINCT claim_token) AS tokens, bool_and(claim_token::text ~ '^.{14}4.{4}[89ab]') AS version_4 FROM tokens;
SELECT bit, ones FROM (SELECT bit, sum(get_bit(bits, bit)) AS ones FROM tokens, generate_series(0, 127) bit GROUP BY bit) b
 WHERE bit NOT BETWEEN 52 AND 55 AND bit NOT IN (70, 71) AND ones NOT BETWEEN 1800 AND 2200;
ROLLBACK;

-- The worker's name is for people.
SELECT outbox.enqueue('worker', to_jsonb(n)) IS NOT NULL FROM generate_series(1, 4) n;
SELECT count(*) FROM outbox.claim_batch(1, worker => 'host-7/12345');
SELECT count(*) FROM outbox.claim_batch(1, worker => '');
SELECT count(*) FROM outbox.claim_batch(1, worker => repeat('w', 255));
SELECT left(worker, 20) AS worker FROM outbox.messages WHERE name = 'worker' ORDER BY created_at;
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(1, worker => repeat('w', 256)) $$);

-- A claim that is rolled back did not happen: no attempt is charged.
BEGIN;
SELECT payload, attempts FROM outbox.claim_batch();
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT payload, attempts FROM outbox.claim_batch();
ROLLBACK TO s;
SELECT payload, attempts FROM outbox.claim_batch();
COMMIT;
-- what somebody has claimed nobody else gets
SELECT count(*) FROM outbox.claim_batch();

-- Subscriptions: NULL means default, an unknown one is named, a paused one gives nothing.
SELECT outbox.enqueue('paused', '1') IS NOT NULL;
SELECT outbox.pause('default');
SELECT count(*) FROM outbox.claim_batch();
SELECT outbox.resume('default');
SELECT payload FROM outbox.claim_batch(subscription => NULL);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(subscription => 'nobody') $$);
CALL pg_temp.try($$ SELECT * FROM outbox.claim_batch(subscription => 'Default') $$);

-- A claim within a statement that is cut short takes everything all the same.
SELECT count(outbox.enqueue('cut short', to_jsonb(n))) FROM generate_series(1, 3) n;
SELECT payload FROM outbox.claim_batch() LIMIT 1;
SELECT count(*) FROM outbox.claim_batch();
-- and so in a WITH, beside other work
SELECT outbox.enqueue('with', '1') IS NOT NULL;
WITH taken AS (SELECT * FROM outbox.claim_batch())
SELECT outbox.settle(id, claim_token) FROM taken;

SELECT * FROM pg_temp.broken();
-- What a superuser has deleted from the log costs only itself.
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('gone', (SELECT jsonb_agg(n) FROM generate_series(1, 16) n));
SELECT routed > 0 AS routed FROM outbox.maintain();
DELETE FROM outbox.log_0 WHERE payload IN ('1', '3', '4');
SET client_min_messages = error;
INSERT INTO held SELECT * FROM outbox.claim_batch();
RESET client_min_messages;
SELECT array_agg(payload) FROM held;
SELECT outbox.settle_batch(pg_temp.token(2));
SELECT ready, leased, delivered, discarded FROM outbox.status WHERE subscription = 'default';

-- Not in a transaction that may not write.
BEGIN READ ONLY;
SELECT count(*) FROM outbox.claim_batch();
ROLLBACK;
