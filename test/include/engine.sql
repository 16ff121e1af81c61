-- engine.sql: what the tests of the engine share. It makes the extension anew, so that each of
-- them stands alone, and some helpers that are gone with the session.
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS outbox CASCADE;
CREATE EXTENSION outbox;
RESET client_min_messages;

-- Runs a statement that should fail, and tells all of the error that is the same everywhere.
CREATE FUNCTION pg_temp.masked(INOUT line text) LANGUAGE sql AS $$
    SELECT regexp_replace(regexp_replace(line, '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', '<id>', 'g'),
                          '\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?[-+]\d+|\w{3} \w{3} \d\d \d\d:\d\d:\d\d(\.\d+)? \d{4} \w+', '<time>', 'g')
$$;
CREATE PROCEDURE pg_temp.try(statement text) LANGUAGE plpgsql AS $$
DECLARE
    line text;
    detail text;
    hint text;
    context text;
BEGIN
    EXECUTE statement;
    RAISE NOTICE 'no error';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT, context = PG_EXCEPTION_CONTEXT;
    line := pg_temp.masked(SQLSTATE || ': ' || SQLERRM);
    detail := pg_temp.masked(detail);
    IF context LIKE 'element %' THEN
        line := line || ' [' || split_part(context, E'\n', 1) || ']';
    END IF;
    IF detail <> '' AND hint <> '' THEN
        RAISE NOTICE '%', line USING DETAIL = detail, HINT = hint;
    ELSIF detail <> '' THEN
        RAISE NOTICE '%', line USING DETAIL = detail;
    ELSIF hint <> '' THEN
        RAISE NOTICE '%', line USING HINT = hint;
    ELSE
        RAISE NOTICE '%', line;
    END IF;
END
$$;

-- An AMQP pattern as a regular expression, written apart from the module's own matching.
CREATE FUNCTION pg_temp.matches(pattern text, name text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT '.' || name ~ ('^' || (
        SELECT string_agg(CASE word WHEN '#' THEN '(\.[^.]*)*' WHEN '*' THEN '\.[^.]*'
                               ELSE '\.' || regexp_replace(word, '([^[:alnum:]_ ])', '\\\1', 'g') END, '' ORDER BY place)
          FROM unnest(string_to_array(pattern, '.')) WITH ORDINALITY u (word, place)) || '$')
$$;

-- What must hold between log and deliveries once everything is routed: nothing is printed when it
-- does. Subscriptions from now on may lack messages; that is for their own tests.
CREATE FUNCTION pg_temp.broken(from_now text[] DEFAULT '{}') RETURNS SETOF text LANGUAGE sql AS $$
    WITH covered AS MATERIALIZED (
        SELECT d.id, d.subscription_id, l.position
          FROM outbox.delivery d
         CROSS JOIN LATERAL unnest(d.positions) r
          JOIN outbox.log l ON l.position >= lower(r) AND l.position < upper(r)
    ), found AS MATERIALIZED (
        SELECT s.name AS subscription, l.payload,
               pg_temp.matches(s.pattern, l.name) AND coalesce(s.kind = l.kind, true) AS matching,
               coalesce(c.runs, 0) AS runs
          FROM outbox.subscription s
         CROSS JOIN outbox.log l
          LEFT JOIN (SELECT subscription_id, position, count(*) AS runs FROM covered GROUP BY 1, 2) c
                 ON c.subscription_id = s.id AND c.position = l.position
    )
    SELECT format('%s: message %s is in %s runs', subscription, payload, runs)
      FROM found
     WHERE runs <> CASE WHEN matching THEN 1 ELSE 0 END
       AND NOT (runs = 0 AND subscription = ANY (from_now))
    UNION ALL
    SELECT format('a run counts %s messages and has %s', d.message_count, c.n)
      FROM outbox.delivery d
      LEFT JOIN (SELECT id, count(*) AS n FROM covered GROUP BY id) c USING (id)
     WHERE d.message_count IS DISTINCT FROM c.n
    UNION ALL
    SELECT format('two runs of subscription %s share positions', a.subscription_id)
      FROM outbox.delivery a
      JOIN outbox.delivery b ON a.subscription_id = b.subscription_id AND a.id < b.id AND a.positions && b.positions
    UNION ALL
    SELECT format('a run begins below its low position')
      FROM outbox.delivery d WHERE lower(d.positions) < d.low
    UNION ALL
    SELECT format('%s: the view counts %s messages in runs, the log has %s', s.subscription, v.n, w.n)
      FROM (SELECT subscription, count(*) FILTER (WHERE matching AND runs = 1) AS n FROM found GROUP BY subscription) w
      JOIN outbox.status s USING (subscription)
     CROSS JOIN LATERAL (SELECT s.scheduled + s.ready + s.leased + s.unhandled + s.delivered + s.dead + s.discarded
                                + s.cancelled AS n) v
     WHERE v.n <> w.n OR s.pending <> 0
    UNION ALL
    SELECT format('frontier %s has no predecessor', f.id)
      FROM outbox.frontier f
     WHERE f.id <> (SELECT min(id) FROM outbox.frontier)
       AND NOT EXISTS (SELECT FROM outbox.frontier p WHERE p.id = f.id - 1)
$$;

-- What is held: filled by INSERT INTO held SELECT * FROM outbox.claim_batch(...). The payload of a
-- message is its number; id() and token() find it again by that.
CREATE TEMP TABLE held (LIKE outbox.claimed_message);
ALTER TABLE held ADD nr bigint GENERATED ALWAYS AS IDENTITY;
CREATE FUNCTION pg_temp.id(n integer) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT id FROM held WHERE payload = to_jsonb(n) ORDER BY nr DESC LIMIT 1
$$;
CREATE FUNCTION pg_temp.token(n integer) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT claim_token FROM held WHERE payload = to_jsonb(n) ORDER BY nr DESC LIMIT 1
$$;

-- Begins again with no messages.
CREATE FUNCTION pg_temp.anew() RETURNS boolean LANGUAGE sql AS $$
    TRUNCATE held;
    SELECT outbox.reset() IS NOT NULL
$$;

-- Which messages are in which state, and how they got there.
CREATE FUNCTION pg_temp.states(subscription text DEFAULT 'default')
RETURNS TABLE (status text, attempts integer, messages text, error text) LANGUAGE sql AS $$
    SELECT m.status, m.attempts,
           (SELECT string_agg(concat_ws('-', lower(r), nullif(upper(r) - 1, lower(r))), ' ' ORDER BY lower(r))
              FROM unnest(range_agg(int4range(n, n, '[]'))) r) AS messages,
           m.last_error ->> 'message' AS error
      FROM outbox.messages m CROSS JOIN LATERAL (SELECT CAST(m.payload AS integer) AS n) p
     WHERE m.subscription = $1
     GROUP BY m.status, m.attempts, m.last_error ->> 'message'
     ORDER BY 1, 2, 3
$$;
