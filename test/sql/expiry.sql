-- expiry: what becomes of leases that run out; how a message that kills its consumer ends as a
-- dead letter while its neighbours are delivered.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- the clock of the test goes on by so much
CREATE FUNCTION pg_temp.later(seconds integer DEFAULT 31) RETURNS text LANGUAGE sql AS $$
    SELECT set_config('outbox.clock_offset', CAST(setting + $1 * 1000 AS text), false) FROM
        (SELECT CAST(setting AS integer) FROM pg_settings WHERE name = 'outbox.clock_offset') s (setting)
$$;
-- claims, and lets the lease run out
CREATE FUNCTION pg_temp.lose(n integer, OUT messages bigint, OUT attempts integer) LANGUAGE plpgsql AS $$
BEGIN
    SELECT count(*), max(c.attempts) INTO messages, attempts FROM outbox.claim_batch(n, worker => 'doomed') c;
    PERFORM pg_temp.later();
END
$$;
\set ECHO all

-- A lease that ran out: the message is there again, its attempt counted, and the reason told.
SELECT outbox.enqueue('t', '1') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch(worker => 'first') RETURNING payload, attempts;
SELECT pg_temp.later(29);
SELECT count(*) FROM outbox.claim_batch();
SELECT pg_temp.later(2);
SELECT expired, worker FROM outbox.leases;
SELECT status, attempts FROM outbox.messages;
INSERT INTO held SELECT * FROM outbox.claim_batch(worker => 'second') RETURNING payload, attempts;
SELECT status, attempts, worker, last_error FROM outbox.messages;
SELECT pg_temp.later();
INSERT INTO held SELECT * FROM outbox.claim_batch(worker => 'third') RETURNING payload, attempts;
SELECT pg_temp.later();
-- The budget is spent: it is dead, abandoned, and no claim gets it again.
SELECT count(*) FROM outbox.claim_batch();
SELECT status, attempts, max_attempts, worker, last_error FROM outbox.messages;
SELECT count(*) FROM outbox.claim_batch();
SELECT attempts, last_error_sqlstate, worker FROM outbox.dead_letters;
SELECT * FROM pg_temp.broken();
-- the same without a claim, by maintain()
SELECT outbox.enqueue('t', '2', max_attempts => 1) IS NOT NULL;
SELECT * FROM pg_temp.lose(1);
SELECT expired FROM outbox.maintain();
SELECT expired FROM outbox.maintain();
SELECT status, attempts, last_error ->> 'sqlstate' AS sqlstate FROM outbox.messages WHERE payload = '2';

-- An error of an earlier attempt gives way to the newer one.
SELECT pg_temp.anew();
SET outbox.jitter = 0;
SELECT outbox.enqueue('t', '1') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1), 'failed', 'an error');
SELECT pg_temp.later(2);
SELECT attempts FROM pg_temp.lose(1);
SELECT count(*) FROM outbox.claim_batch() WHERE attempts = 3;
SELECT last_error ->> 'sqlstate' AS sqlstate FROM outbox.messages;

-- After an expiry a run is handed out in pieces of a tenth, each alone in its claim.
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 800) n));
SELECT routed FROM outbox.maintain();
SELECT count(*) FROM outbox.claim_batch(700, '300 s');
SELECT * FROM pg_temp.lose(100);
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1001, 1005) n));
-- what is new comes not with them
SELECT array_agg(payload) FROM outbox.claim_batch(3) WHERE attempts = 2;
SELECT count(*), min(CAST(payload AS integer)), max(CAST(payload AS integer)), max(attempts) AS attempts FROM outbox.claim_batch(100);
SELECT count(*), min(CAST(payload AS integer)), max(CAST(payload AS integer)), max(attempts) AS attempts FROM outbox.claim_batch(100);
SELECT count(*), min(CAST(payload AS integer)), max(CAST(payload AS integer)), max(attempts) AS attempts FROM outbox.claim_batch(100);
SELECT count(*), min(CAST(payload AS integer)), max(CAST(payload AS integer)), max(attempts) AS attempts FROM outbox.claim_batch(3);
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.broken();
-- of a run of fewer than ten it is one
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 56) n));
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.lose(7);
SELECT array_agg(payload) FROM outbox.claim_batch(100);
SELECT array_agg(payload) FROM outbox.claim_batch(100);
-- what comes back by a failure or a release is no piece
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 40) n));
SELECT routed FROM outbox.maintain();
INSERT INTO held SELECT * FROM outbox.claim_batch(40);
SELECT outbox.settle_batch(pg_temp.token(1), 'released', ids => array_agg(pg_temp.id(n))) FROM generate_series(1, 20) n;
SELECT outbox.settle_batch(pg_temp.token(21), 'failed', ids => array_agg(pg_temp.id(n))) FROM generate_series(21, 40) n;
SELECT pg_temp.later();
SELECT count(*) FROM outbox.claim_batch(40);
-- Partly settled before: only the rest comes back.
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 80) n));
SELECT routed FROM outbox.maintain();
INSERT INTO held SELECT * FROM outbox.claim_batch(10);
SELECT outbox.settle_batch(pg_temp.token(1), ids => array_agg(pg_temp.id(n))) FROM generate_series(1, 9) n;
SELECT pg_temp.later();
SELECT payload, attempts FROM outbox.claim_batch(1);
SELECT * FROM pg_temp.states();

-- A message that kills its consumer, at place 37 of a batch of 100: a consumer works on its claim in
-- order, settles one by one, and dies with everything it still holds.
CREATE FUNCTION pg_temp.consume(batch integer, poison integer[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    message record;
    claims integer := 0;
    deaths integer := 0;
    again boolean := true;
    got boolean;
BEGIN
    WHILE again AND claims < 1000 LOOP
        got := false;
        again := false;
        FOR message IN SELECT id, claim_token, CAST(payload AS integer) AS n FROM outbox.claim_batch(batch) LOOP
            again := true;
            IF NOT got THEN
                claims := claims + 1;
                got := true;
            END IF;
            IF message.n = ANY (poison) THEN
                deaths := deaths + 1;
                PERFORM pg_temp.later();
                EXIT;
            END IF;
            PERFORM outbox.settle(message.id, message.claim_token);
        END LOOP;
    END LOOP;
    RETURN format('%s deaths in %s claims', deaths, claims);
END
$$;
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 100) n));
SELECT pg_temp.consume(100, '{37}') LIKE '3 deaths%' AS three_deaths;
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.broken();
-- in one run, settled as a batch at the end: nothing of what dies with it is settled
CREATE FUNCTION pg_temp.consume_batches(batch integer, poison integer[]) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    claimed integer[];
    token uuid;
    deaths integer := 0;
BEGIN
    LOOP
        SELECT array_agg(CAST(payload AS integer)), min(CAST(claim_token AS text)) INTO claimed, token FROM outbox.claim_batch(batch);
        EXIT WHEN claimed IS NULL OR deaths > 100;
        IF claimed && poison THEN
            deaths := deaths + 1;
            PERFORM pg_temp.later();
        ELSE
            PERFORM outbox.settle_batch(token);
        END IF;
    END LOOP;
    RETURN deaths;
END
$$;
SELECT pg_temp.anew();
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 800) n));
SELECT routed FROM outbox.maintain();
SELECT count(*) FROM outbox.claim_batch(700) WHERE outbox.settle(id, claim_token) <> 'delivered';
SELECT pg_temp.consume_batches(100, '{737}');
SELECT status, attempts, messages FROM pg_temp.states() WHERE status <> 'delivered';
SELECT status, count(*) FROM outbox.messages GROUP BY status ORDER BY status;
SELECT * FROM pg_temp.broken();
-- several, and with a budget of two: the second attempt is the last, and one at a time
SELECT pg_temp.anew();
SET outbox.max_attempts = 2;
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 100) n));
SELECT pg_temp.consume_batches(100, '{1,37,38,100}');
SELECT status, attempts, messages FROM pg_temp.states() WHERE status <> 'delivered';
SELECT count(*) FROM outbox.messages WHERE status = 'delivered';
-- with a budget of one nobody is tried again
SELECT pg_temp.anew();
SET outbox.max_attempts = 1;
SELECT count(*) FROM outbox.enqueue_batch('t', (SELECT jsonb_agg(n) FROM generate_series(1, 16) n));
SELECT routed FROM outbox.maintain();
SELECT pg_temp.consume_batches(16, '{5}');
SELECT status, attempts, messages, error FROM pg_temp.states();
RESET outbox.max_attempts;
SELECT * FROM pg_temp.broken();

-- A batch over several runs: each comes back as it is.
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n), max_attempts => n)) FROM generate_series(1, 4) n;
SELECT * FROM pg_temp.lose(4);
SELECT expired FROM outbox.maintain();
SELECT payload, status, attempts, max_attempts, last_error ->> 'sqlstate' AS sqlstate FROM outbox.messages ORDER BY payload;
-- and with separate tokens
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 4) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(4, separate_tokens => true);
SELECT count(outbox.renew(pg_temp.id(n), pg_temp.token(n), '100 s')) FROM generate_series(1, 2) n;
SELECT pg_temp.later();
SELECT expired FROM outbox.maintain();
SELECT * FROM pg_temp.states();

-- Taken back in a transaction that is rolled back, it is still to be taken back.
SELECT pg_temp.anew();
SELECT outbox.enqueue('t', '1') IS NOT NULL;
SELECT * FROM pg_temp.lose(1);
BEGIN;
SELECT attempts FROM outbox.claim_batch();
ROLLBACK;
SELECT expired FROM outbox.leases;
SELECT attempts FROM outbox.claim_batch();
-- An operator ends the leases of a worker that is known to be gone.
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n), max_attempts => CASE n WHEN 2 THEN 1 END)) FROM generate_series(1, 4) n;
SELECT routed > 0 AS routed FROM outbox.maintain();
INSERT INTO held SELECT * FROM outbox.claim_batch(2, worker => 'gone') RETURNING payload;
INSERT INTO held SELECT * FROM outbox.claim_batch(2, worker => 'here') RETURNING payload;
SELECT outbox.revoke_lease('default', 'nobody');
SELECT outbox.revoke_lease('default', 'gone');
SELECT outbox.revoke_lease('default', 'gone');
SELECT payload, status, attempts, last_error ->> 'sqlstate' AS sqlstate FROM outbox.messages ORDER BY payload;
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1)) $$);
SELECT outbox.settle_batch(pg_temp.token(4));
CALL pg_temp.try($$ SELECT outbox.revoke_lease('nobody', 'gone') $$);
CALL pg_temp.try($$ SELECT outbox.revoke_lease(NULL, 'gone') $$);
CALL pg_temp.try($$ SELECT outbox.revoke_lease('default', NULL) $$);
-- Each subscription for itself.
SELECT pg_temp.anew();
SET client_min_messages = warning;
SELECT outbox.subscribe('other');
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 2) n;
SELECT count(*) FROM outbox.claim_batch();
SELECT count(*) FROM outbox.claim_batch(lease => '300 s', subscription => 'other');
SELECT pg_temp.later();
SELECT expired FROM outbox.maintain();
SELECT subscription, status, attempts, count(*) FROM outbox.messages GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
SELECT * FROM pg_temp.broken();
