-- settle: every outcome of settle() and settle_batch(), what they return, and what they refuse.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- messages with the numbers first to last, claimed one batch a call
CREATE FUNCTION pg_temp.take(first integer, last integer, max_attempts integer DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.enqueue('t', to_jsonb(n), max_attempts => $3) FROM generate_series(first, last) n;
    INSERT INTO held SELECT * FROM outbox.claim_batch(last - first + 1);
    RETURN (SELECT count(*) FROM held WHERE payload BETWEEN to_jsonb(first) AND to_jsonb(last));
END
$$;
-- what became of some
CREATE FUNCTION pg_temp.became(first integer, last integer)
RETURNS TABLE (n jsonb, status text, attempts integer, worker text, due_in integer, settled boolean, last_error jsonb) LANGUAGE sql AS $$
    SELECT payload, status, attempts, worker, CAST(round(extract(epoch FROM available_at - outbox.clock())) AS integer),
           settled_at BETWEEN outbox.clock() - interval '1 min' AND outbox.clock(), last_error
      FROM outbox.messages WHERE payload BETWEEN to_jsonb($1) AND to_jsonb($2) ORDER BY payload
$$;
\set ECHO all
SET outbox.jitter = 0;
