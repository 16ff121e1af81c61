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
-- seconds from the first claim of message 1 to a time
CREATE FUNCTION pg_temp.at(t timestamptz) RETURNS integer LANGUAGE sql AS $$
    SELECT CAST(round(extract(epoch FROM t - locked_until + CAST('30 s' AS interval))) AS integer) FROM held WHERE payload = '1' ORDER BY nr LIMIT 1
$$;
-- the leases, as seconds from that claim
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
