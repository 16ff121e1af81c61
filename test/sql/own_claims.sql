-- own_claims: a transaction can claim and settle what it has enqueued itself, and nobody gets it
-- a second time after the commit.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
SET client_min_messages = warning;
\set ECHO all
SELECT outbox.subscribe('a', 'a.*'), outbox.subscribe('all');

-- Enqueue, claim, settle, in one transaction. Before the commit nobody else sees any of it.
BEGIN;
SELECT count(outbox.enqueue('a.x', to_jsonb(n))) FROM generate_series(1, 3) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(subscription => 'a') RETURNING payload, attempts, max_attempts, subscription;
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));
SELECT outbox.settle_batch(pg_temp.token(2), ids => ARRAY[pg_temp.id(2)]);
SELECT * FROM pg_temp.states('a');
COMMIT;
SELECT * FROM pg_temp.states('a');
-- the claim is in force after the commit
SELECT outbox.settle(pg_temp.id(3), pg_temp.token(3));
-- the router leaves out what was filed, for this subscription only
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT payload FROM outbox.claim_batch();
SELECT count(*) FROM outbox.self_routed;
SELECT * FROM pg_temp.broken();

-- Rolled back it leaves nothing.
BEGIN;
SELECT count(outbox.enqueue('a.x', to_jsonb(n))) FROM generate_series(11, 12) n;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
ROLLBACK;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT count(*) FROM outbox.self_routed;

-- In several steps: what was enqueued after a claim is found by the next one.
BEGIN;
SELECT outbox.enqueue('a.x', '21') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT outbox.enqueue('a.x', '22') IS NOT NULL;
SELECT outbox.enqueue('b', '23') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT outbox.enqueue('a.x', '24') IS NOT NULL;
COMMIT;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch();
SELECT * FROM pg_temp.broken();
-- a claim that came first, and routed what others had committed, misses nothing that comes later
SELECT outbox.enqueue('a.x', '31') IS NOT NULL;
BEGIN;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT outbox.enqueue('a.x', '32') IS NOT NULL;
COMMIT;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
BEGIN;
SELECT outbox.enqueue('a.x', '33') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT outbox.enqueue('a.x', '34') IS NOT NULL;
COMMIT;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch();
SELECT * FROM pg_temp.broken();
-- the same where the very first row of the frontier is made by such a transaction
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
BEGIN;
SELECT outbox.enqueue('first', '1') IS NOT NULL;
SELECT payload FROM outbox.claim_batch();
SELECT outbox.enqueue('first', '2') IS NOT NULL;
COMMIT;
SELECT payload FROM outbox.claim_batch();
SELECT payload FROM outbox.claim_batch();
SELECT * FROM pg_temp.broken();
SELECT outbox.subscribe('a', 'a.*'), outbox.subscribe('all', 'a.#');

-- Savepoints: a claim that is rolled back to is undone, the messages before it stay.
BEGIN;
SELECT outbox.enqueue('a.x', '41') IS NOT NULL;
SAVEPOINT s;
SELECT payload, attempts FROM outbox.claim_batch(subscription => 'a');
ROLLBACK TO s;
SELECT payload, attempts FROM outbox.claim_batch(subscription => 'a');
SAVEPOINT t;
SELECT outbox.enqueue('a.x', '42') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
ROLLBACK TO t;
SELECT outbox.enqueue('a.x', '43') IS NOT NULL;
SAVEPOINT u;
SELECT outbox.enqueue('a.x', '44') IS NOT NULL;
RELEASE u;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
COMMIT;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT array_agg(payload ORDER BY payload) FROM outbox.claim_batch(subscription => 'all');
SELECT status, payload FROM outbox.messages WHERE subscription = 'a' AND payload >= '41' ORDER BY payload;
SELECT * FROM pg_temp.broken();

-- Only some of it is claimed: the rest is ready, after the commit for everybody.
BEGIN;
SELECT count(outbox.enqueue('a.part', to_jsonb(n))) FROM generate_series(51, 60) n;
SELECT payload FROM outbox.claim_batch(4, subscription => 'a');
COMMIT;
SELECT count(*) FROM outbox.claim_batch(100, subscription => 'a');
SELECT count(*) FROM outbox.claim_batch(100, subscription => 'all');
SELECT * FROM pg_temp.broken();
-- settled as failed, released or dead, it goes its way after the commit
SET outbox.jitter = 0;
BEGIN;
SELECT count(outbox.enqueue('a.out', to_jsonb(n), max_attempts => CASE n WHEN 64 THEN 1 END)) FROM generate_series(61, 64) n;
DELETE FROM held;
INSERT INTO held SELECT * FROM outbox.claim_batch(subscription => 'a');
SELECT n, outbox.settle(pg_temp.id(n), pg_temp.token(n), outcome, error => 'why')
  FROM (VALUES (61, 'failed'), (62, 'released'), (63, 'dead'), (64, 'failed')) v (n, outcome);
SELECT payload, attempts FROM outbox.claim_batch(subscription => 'a');
COMMIT;
SELECT payload, status, attempts, last_error ->> 'message' AS error
  FROM outbox.messages WHERE subscription = 'a' AND name = 'a.out' ORDER BY payload;
-- a delayed one is not due
BEGIN;
SELECT outbox.enqueue('a.delayed', '71', available_at => '2999-01-01') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
COMMIT;
SELECT status FROM outbox.messages WHERE subscription = 'a' AND name = 'a.delayed';

-- DO blocks, with and without a commit inside.
DO $$
DECLARE
    token uuid;
BEGIN
    PERFORM outbox.enqueue_batch('a.do', '[81, 82]');
    SELECT DISTINCT claim_token INTO token FROM outbox.claim_batch(subscription => 'a');
    ASSERT outbox.settle_batch(token) = 2, 'both settled';
    COMMIT;
    PERFORM outbox.enqueue_batch('a.do', '[83]');
    BEGIN
        SELECT claim_token INTO token FROM outbox.claim_batch(subscription => 'a');
        RAISE 'no';
    EXCEPTION WHEN raise_exception THEN
        ASSERT NOT EXISTS (SELECT FROM outbox.leases WHERE subscription = 'a' AND NOT expired AND attempts > 1), 'undone';
    END;
    SELECT claim_token INTO token FROM outbox.claim_batch(subscription => 'a');
    ASSERT outbox.settle_batch(token) = 1, 'settled';
END
$$;
SELECT payload, status, attempts FROM outbox.messages WHERE subscription = 'a' AND name = 'a.do' ORDER BY payload;
-- several statements in one implicit transaction
SELECT outbox.enqueue('a.implicit', '91') IS NOT NULL\; SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload FROM outbox.claim_batch(subscription => 'all');
SELECT * FROM pg_temp.broken();

-- Every isolation level.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT outbox.enqueue('a.level', '101') IS NOT NULL;
DELETE FROM held;
INSERT INTO held SELECT * FROM outbox.claim_batch(subscription => 'a') RETURNING payload;
SELECT outbox.settle(pg_temp.id(101), pg_temp.token(101));
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox.enqueue('a.level', '102') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch(subscription => 'a') RETURNING payload;
SELECT outbox.settle(pg_temp.id(102), pg_temp.token(102));
COMMIT;
SELECT payload FROM outbox.claim_batch(subscription => 'a');

-- Prepared: claiming one's own is no routing of others' messages.
SELECT count(*) FROM outbox.claim_batch(1000);
SELECT count(*) FROM outbox.claim_batch(1000);
BEGIN;
SELECT outbox.enqueue('a.prepared', '111') IS NOT NULL;
SELECT outbox.enqueue('a.prepared', '112') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(1, subscription => 'a');
PREPARE TRANSACTION 'own claims';
SELECT outbox.enqueue('a.prepared', '113') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(subscription => 'a');
COMMIT PREPARED 'own claims';
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT payload, status FROM outbox.messages WHERE subscription = 'a' AND name = 'a.prepared' ORDER BY payload;
BEGIN;
SELECT outbox.enqueue('a.prepared', '114') IS NOT NULL;
SELECT payload FROM outbox.claim_batch(1, subscription => 'a');
PREPARE TRANSACTION 'own claims';
ROLLBACK PREPARED 'own claims';
SELECT payload FROM outbox.claim_batch(subscription => 'a');
SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'all');
SELECT count(*) FROM outbox.claim_batch(1000);
SELECT * FROM pg_temp.broken();
SELECT count(*) FROM outbox.self_routed;
