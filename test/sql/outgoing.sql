-- outgoing: the view whose INSERT enqueues, and what it shows of the current transaction.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all

-- Its columns are the arguments of enqueue(), in their order.
SELECT (SELECT array_agg(CAST(attname AS text) ORDER BY attnum) FROM pg_attribute WHERE attrelid = CAST('outbox.outgoing' AS regclass))
       = (SELECT proargnames FROM pg_proc WHERE oid = CAST('outbox.enqueue' AS regproc)) AS same;

-- One row, many rows, by place or by name; RETURNING tells what became of it.
INSERT INTO outbox.outgoing VALUES ('a', '1');
INSERT INTO outbox.outgoing (payload, name, kind) VALUES ('2', 'b', 'job'), ('3', 'b', NULL), ('4', 'b', DEFAULT);
INSERT INTO outbox.outgoing (name, payload) VALUES ('c', '{"n": 5}'), ('c', 'null')
    RETURNING name, payload, kind, version, available_at, max_attempts, headers, dedupe_key, id IS NOT NULL AS has_id,
              occurred_at IS NOT NULL AS has_time;
INSERT INTO outbox.outgoing (name, payload, id, version, available_at, max_attempts, headers, correlation_id, causation_id,
                             aggregate_type, aggregate_id, tenant_id, owner_id, occurred_at, ordering_key)
    VALUES ('d', '6', '01900000-0000-7000-8000-000000000006', 2, '2999-01-01 00:00Z', 9, '{"h": 1}', 'co', 'ca', 'at', 'ai',
            't', 'o', '1999-01-01 00:00Z', 'k')
    RETURNING id, version, max_attempts, headers, correlation_id, causation_id, aggregate_type, aggregate_id, tenant_id,
              owner_id, ordering_key, available_at AT TIME ZONE 'UTC' AS available_at,
              occurred_at AT TIME ZONE 'UTC' AS occurred_at;
-- INSERT ... SELECT, in the order of the query
INSERT INTO outbox.outgoing (name, payload) SELECT 'e', to_jsonb(n) FROM generate_series(7, 9) n ORDER BY n DESC;
-- in a WITH beside the business change
CREATE TEMP TABLE orders (id integer PRIMARY KEY, total numeric);
WITH placed AS (INSERT INTO orders VALUES (1, 10), (2, 20) RETURNING *)
INSERT INTO outbox.outgoing (name, payload) SELECT 'order.placed', to_jsonb(placed) FROM placed;
-- COPY
COPY outbox.outgoing (name, payload, headers) FROM stdin;
f	10	\N
f	{"n": 11}	{"copied": true}
\.
COPY outbox.outgoing (name, payload) FROM stdin (FORMAT csv);
g,"{""n"": 12}"
\.
SELECT name, payload, kind, version, headers FROM outbox.log ORDER BY created_at;
-- A dedupe key that is taken gives back the first one's id, and nothing is written.
INSERT INTO outbox.outgoing (name, payload, dedupe_key) VALUES ('h', '1', 'k') RETURNING id AS first \gset
INSERT INTO outbox.outgoing (name, payload, dedupe_key) VALUES ('h', '2', 'k') RETURNING id = :'first' AS same;
SELECT payload FROM outbox.log WHERE name = 'h';

-- SELECT shows what this transaction has enqueued, and what of it was not rolled back.
SELECT count(*) FROM outbox.outgoing;
BEGIN;
INSERT INTO outbox.outgoing (name, payload, aggregate_id) VALUES ('order.placed', '20', 'x');
SELECT outbox.enqueue('order.paid', '21', dedupe_key => 'once') IS NOT NULL;
SELECT outbox.enqueue('order.paid', '22', dedupe_key => 'once') IS NOT NULL;
SAVEPOINT s;
SELECT count(*) FROM outbox.enqueue_batch('order.paid', '[23]');
SELECT name, payload, aggregate_id FROM outbox.outgoing;
ROLLBACK TO s;
SELECT count(*) FROM outbox.enqueue_batch('user.created', '[24]');
SELECT name, payload, kind, version, dedupe_key FROM outbox.outgoing;
-- enqueued() has the same as messages, by pattern
SELECT name, payload, attempts, subscription FROM outbox.enqueued();
SELECT name, payload FROM outbox.enqueued(NULL);
SELECT name, payload FROM outbox.enqueued('order.*');
SELECT name, payload FROM outbox.enqueued('#.created');
SELECT name, payload FROM outbox.enqueued('nothing');
-- ready to pass to a hook
CREATE FUNCTION pg_temp.hook(m outbox.message) RETURNS text LANGUAGE sql AS $$
    SELECT m.name || ' ' || m.payload || ' ' || m.version
$$;
SELECT pg_temp.hook(m) FROM outbox.enqueued('order.#') m;
-- what it has claimed and settled it still has enqueued
SELECT count(*) FROM outbox.claim_batch(1000) WHERE name = 'user.created';
SELECT count(*) FROM outbox.outgoing;
COMMIT;
SELECT count(*) FROM outbox.outgoing;
SELECT count(*) FROM outbox.enqueued();
-- each transaction of a procedure by itself
DO $$
BEGIN
    PERFORM outbox.enqueue('tx', '1');
    ASSERT (SELECT count(*) = 1 FROM outbox.outgoing);
    COMMIT;
    ASSERT (SELECT count(*) = 0 FROM outbox.outgoing);
    PERFORM outbox.enqueue('tx', '2');
    ASSERT (SELECT payload = '2' FROM outbox.outgoing);
    ROLLBACK;
    ASSERT (SELECT count(*) = 0 FROM outbox.outgoing);
END
$$;
-- an old snapshot sees its own
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM outbox.outgoing;
SELECT outbox.enqueue('order.placed', '30') IS NOT NULL;
SELECT name, payload FROM outbox.outgoing;
COMMIT;

-- One bad row and none is enqueued.
SELECT count(*) AS before FROM outbox.log \gset
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload) VALUES ('bad', '1'), ('bad', NULL) $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload) VALUES ('bad', '1'), (' ', '1') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (payload) VALUES ('1') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload, version) VALUES ('bad', '1', 0) $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload, id) VALUES ('bad', '1', '01900000-0000-7000-8000-000000000006') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing DEFAULT VALUES $$);
SELECT count(*) - :before AS more FROM outbox.log;
-- Once enqueued it stays as it is.
\set VERBOSITY sqlstate
UPDATE outbox.outgoing SET name = 'x';
DELETE FROM outbox.outgoing;
TRUNCATE outbox.outgoing;
\set VERBOSITY default
SELECT count(*) FROM outbox.claim_batch(1000);
SELECT * FROM pg_temp.broken();
