-- renew: renew() and renew_batch() extend a lease from now, progress keeps a batch alive, and
-- nothing keeps a stuck one.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
CREATE FUNCTION pg_temp.take(first integer, last integer, lease interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.enqueue('t', to_jsonb(n)) FROM generate_series(first, last) n;
    INSERT INTO held SELECT * FROM outbox.claim_batch(last - first + 1, lease);
    RETURN (SELECT count(*) FROM held WHERE payload BETWEEN to_jsonb(first) AND to_jsonb(last));
END
$$;
-- a time, in seconds after message 1 was enqueued and claimed
CREATE FUNCTION pg_temp.at(t timestamptz) RETURNS integer LANGUAGE sql AS $$
    SELECT CAST(round(extract(epoch FROM t - created_at)) AS integer) FROM held WHERE payload = '1' ORDER BY nr LIMIT 1
$$;
-- the leases, in the same seconds
CREATE FUNCTION pg_temp.leases(OUT messages bigint, OUT attempts integer, OUT locked_until integer, OUT active_until integer)
RETURNS SETOF record LANGUAGE sql AS $$
    SELECT sum(messages), attempts, pg_temp.at(locked_until), pg_temp.at(active_until)
      FROM outbox.leases GROUP BY 2, 3, 4 ORDER BY 3
$$;
\set ECHO all
-- From now: not from the old end. Settings move the clock by far more than this takes.
SELECT pg_temp.take(1, 1);
SELECT * FROM pg_temp.leases();
SET outbox.clock_offset = '20s';
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1)));
SELECT * FROM pg_temp.leases();
SET outbox.clock_offset = '40s';
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1), '200 s'));
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1), NULL));
SELECT * FROM pg_temp.leases();
-- at any distance from the old end
SET outbox.clock_offset = '69s';
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1), '100 s'));
RESET outbox.clock_offset;
-- the attempts are as they were, and the message is settled under the same token
SELECT attempts FROM outbox.messages;
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));

-- A batch as a whole, or some of it; the others keep at least what they had.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 10);
SET outbox.clock_offset = '10s';
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1)));
SELECT * FROM pg_temp.leases();
SET outbox.clock_offset = '20s';
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1), '100 s', ARRAY[pg_temp.id(2), pg_temp.id(3), pg_temp.id(2)]));
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1), '100 s', ARRAY[pg_temp.id(2), '01900000-0000-7000-8000-000000000000']));
SELECT min(pg_temp.at(locked_until)) >= 40 AS others_kept FROM outbox.messages;
SELECT bool_and(pg_temp.at(locked_until) = 120) AS renewed FROM outbox.messages WHERE payload IN ('2', '3');
SET outbox.clock_offset = '30s';
SELECT outbox.settle_batch(pg_temp.token(1), ids => ARRAY[pg_temp.id(1), pg_temp.id(2)]);
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1), '100 s'));
SELECT * FROM pg_temp.leases();
SELECT outbox.settle_batch(pg_temp.token(1));
RESET outbox.clock_offset;
-- also in one run, where a shorter lease for one message is no reason to take it from its neighbours
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 80) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(10);
SELECT outbox.renew(pg_temp.id(5), pg_temp.token(5), '1 s') IS NOT NULL;
SELECT min(pg_temp.at(locked_until)) >= 30 AS others_kept FROM outbox.messages WHERE payload IN ('1', '4', '6', '10');
SELECT outbox.renew_batch(pg_temp.token(5), '2 s', ARRAY[pg_temp.id(1), pg_temp.id(10)]) IS NOT NULL;
SELECT min(pg_temp.at(locked_until)) >= 30 AS others_kept FROM outbox.messages WHERE payload IN ('2', '4', '6', '9');
SELECT * FROM pg_temp.broken();

-- At most max_active after the claim.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 2);
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1), '300 s'));
SET outbox.clock_offset = '290s';
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1), '300 s'));
SELECT pg_temp.at(outbox.renew(pg_temp.id(1), pg_temp.token(1)));
SET outbox.clock_offset = '301s';
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1)) $$);
RESET outbox.clock_offset;
-- A settlement of one of its messages is progress: from there it counts anew, for all of the claim.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 4, '300 s');
SET outbox.clock_offset = '290s';
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));
SELECT pg_temp.at(outbox.renew(pg_temp.id(2), pg_temp.token(2), '300 s'));
SELECT pg_temp.at(outbox.renew(pg_temp.id(3), pg_temp.token(3), '300 s'));
SELECT pg_temp.at(outbox.renew(pg_temp.id(4), pg_temp.token(4), '300 s'));
SET outbox.clock_offset = '580s';
SELECT outbox.settle_batch(pg_temp.token(2), 'failed', ids => ARRAY[pg_temp.id(2)]);
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(3), '300 s'));
SELECT * FROM pg_temp.leases();
SET outbox.clock_offset = '870s';
SELECT outbox.settle(pg_temp.id(3), pg_temp.token(3), 'released');
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(4), '300 s'));
-- a renewal alone is none
SET outbox.clock_offset = '1169s';
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(4), '300 s'));
SET outbox.clock_offset = '1171s';
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(4)) $$);
RESET outbox.clock_offset;
-- each token has its own progress
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 2) n;
INSERT INTO held SELECT * FROM outbox.claim_batch(2, '30 s', separate_tokens => true);
SELECT count(outbox.renew(pg_temp.id(n), pg_temp.token(n), '300 s')) FROM generate_series(1, 2) n;
SET outbox.clock_offset = '200s';
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));
SELECT pg_temp.at(outbox.renew(pg_temp.id(2), pg_temp.token(2), '300 s'));
RESET outbox.clock_offset;
-- the subscription's own bounds
SET client_min_messages = warning;
SELECT outbox.subscribe('default', lease => '30 s', max_active => '60 s', replace => true);
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 2);
SET outbox.clock_offset = '25s';
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1)));
SET outbox.clock_offset = '50s';
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1)));
SELECT outbox.subscribe('default', replace => true);
RESET outbox.clock_offset;
RESET client_min_messages;

-- A renewal belongs to its transaction.
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 2);
BEGIN;
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1), '200 s'));
ROLLBACK;
SELECT * FROM pg_temp.leases();
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.at(outbox.renew_batch(pg_temp.token(1), '200 s'));
COMMIT;
SELECT * FROM pg_temp.leases();

-- What is refused.
CALL pg_temp.try($$ SELECT outbox.renew(NULL, pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), NULL) $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(NULL) $$);
CALL pg_temp.try($$ SELECT outbox.renew('01900000-0000-7000-8000-000000000000', pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), '01900000-0000-4000-8000-000000000000') $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch('01900000-0000-4000-8000-000000000000') $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(1), ids => '{01900000-0000-7000-8000-000000000000}') $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(1), ids => ARRAY[NULL, pg_temp.id(1)]) $$);
SELECT outbox.renew_batch(pg_temp.token(1), ids => '{}') IS NULL AS nothing_to_renew;
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1), '0') $$);
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1), '-1 s') $$);
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1), '301 s') $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(1), '100 years') $$);
-- after a settlement
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1)) $$);
SELECT outbox.settle_batch(pg_temp.token(1));
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(1)) $$);
-- after the end of the lease, taken over or not
SELECT pg_temp.anew();
SELECT pg_temp.take(1, 2);
SELECT pg_temp.token(1) AS old \gset
SET outbox.clock_offset = '31s';
CALL pg_temp.try($$ SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1)) $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(1)) $$);
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
CALL pg_temp.try(format($$ SELECT outbox.renew(pg_temp.id(1), %L) $$, :'old'));
CALL pg_temp.try(format($$ SELECT outbox.renew_batch(%L) $$, :'old'));
SELECT outbox.renew(pg_temp.id(1), pg_temp.token(1)) IS NOT NULL AS new_one;
RESET outbox.clock_offset;
BEGIN READ ONLY;
SELECT outbox.renew_batch('01900000-0000-4000-8000-000000000000');
ROLLBACK;
SELECT * FROM pg_temp.broken();
