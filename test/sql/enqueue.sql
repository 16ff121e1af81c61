-- enqueue: the attributes of a message, their defaults, its id and times, and what is refused.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all

-- A name and a payload are enough. What is not said is null, or the default.
SELECT outbox.enqueue('order.created', '{"n": 1}') AS id \gset
SELECT name, kind, version, payload, headers, available_at, max_attempts, correlation_id, causation_id, aggregate_type,
       aggregate_id, tenant_id, owner_id, dedupe_key, ordering_key, occurred_at = created_at AS occurred_when_created
  FROM outbox.log WHERE id = :'id' \gx
-- An optional argument that is NULL means its default, and so does an empty text.
SELECT outbox.enqueue('order.created', '{}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                      NULL, NULL) AS id \gset
SELECT kind, version, available_at, max_attempts, occurred_at = created_at AS occurred_when_created
  FROM outbox.log WHERE id = :'id';
SELECT outbox.enqueue('order.created', '{}', kind => '', correlation_id => '', causation_id => '', aggregate_type => '',
                      aggregate_id => '', tenant_id => '', owner_id => '', dedupe_key => '', ordering_key => '') AS id \gset
SELECT kind, num_nulls(correlation_id, causation_id, aggregate_type, aggregate_id, tenant_id, owner_id, dedupe_key,
                       ordering_key) AS nulls
  FROM outbox.log WHERE id = :'id';
SELECT count(*) FROM outbox.dedupe;

-- All of them, as given.
SELECT outbox.enqueue(
    name => 'order.shipped',
    payload => '{"order": 7}',
    kind => 'job',
    version => 4,
    id => '01900000-0000-7000-8000-000000000001',
    available_at => '2999-12-31 23:59:59.123456+00',
    max_attempts => 12,
    headers => '{"x": [1, null, "y"]}',
    correlation_id => 'correlation',
    causation_id => 'causation',
    aggregate_type => 'order',
    aggregate_id => '7',
    tenant_id => 'tenant',
    owner_id => 'owner',
    dedupe_key => 'dedupe',
    occurred_at => '1999-01-01 00:00:00+00',
    ordering_key => 'key');
SET timezone = 'UTC';
SELECT id, name, payload, kind, version, available_at, max_attempts, headers, correlation_id, causation_id, aggregate_type,
       aggregate_id, tenant_id, owner_id, dedupe_key, occurred_at, ordering_key
  FROM outbox.log WHERE id = '01900000-0000-7000-8000-000000000001' \gx
-- and that is what a consumer gets
SELECT key, l.value AS in_log, m.value AS in_message
  FROM outbox.log CROSS JOIN LATERAL jsonb_each(to_jsonb(log)) l
  JOIN jsonb_each(to_jsonb(outbox.get('01900000-0000-7000-8000-000000000001'))) m USING (key)
 WHERE id = '01900000-0000-7000-8000-000000000001' AND key <> 'max_attempts' AND l.value <> m.value;
RESET timezone;

-- Every JSON value is a payload, null as well; the name stays as it was written.
SELECT count(outbox.enqueue(' padded ', payload))
  FROM (VALUES (CAST('null' AS jsonb)), ('true'), ('0'), ('-1.50'), ('""'), ('"text"'), ('[]'), ('[1, [2]]'), ('{}')) v (payload);
SELECT '[' || name || ']' AS name, payload FROM outbox.log WHERE name LIKE '%padded%' ORDER BY position;
SELECT jsonb_typeof(payload) FROM outbox.log WHERE name = ' padded ' AND payload = 'null';

-- An id that is not given is a UUIDv7 of created_at; both grow strictly, in one transaction and over many.
DO $$
BEGIN
    FOR i IN 1 .. 300 LOOP
        PERFORM outbox.enqueue('uuid', '{}');
        IF i % 10 = 0 THEN
            COMMIT;
        END IF;
    END LOOP;
END
$$;
SELECT count(*) AS messages,
       count(DISTINCT id) AS ids,
       count(DISTINCT created_at) AS times,
       bool_and(substr(CAST(id AS text), 15, 1) = '7') AS version_7,
       bool_and(substr(CAST(id AS text), 20, 1) IN ('8', '9', 'a', 'b')) AS variant,
       bool_and(CAST(CAST('x' || replace(left(CAST(id AS text), 13), '-', '') AS bit(48)) AS bigint)
                = CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint)) AS same_time
  FROM outbox.log WHERE name = 'uuid';
SELECT count(*) AS not_above_the_one_before
  FROM (SELECT id > lag(id) OVER w AS grows, created_at > lag(created_at) OVER w AS later
          FROM outbox.log WHERE name = 'uuid' WINDOW w AS (ORDER BY position)) o
 WHERE NOT (grows AND later);
-- It is the time of the call, not of the transaction or the statement.
BEGIN;
SELECT count(outbox.enqueue('wall', '{}')) FROM generate_series(1, 3);
SELECT bool_and(created_at > now()) AS after_begin, count(DISTINCT created_at) FROM outbox.log WHERE name = 'wall';
COMMIT;

-- A given id may be any, once.
SELECT outbox.enqueue('given', '{}', id => '00000000-0000-0000-0000-000000000000');
SELECT outbox.enqueue('given', '{}', id => 'ffffffff-ffff-ffff-ffff-ffffffffffff');
CALL pg_temp.try($$ SELECT outbox.enqueue('given', '{}', id => 'ffffffff-ffff-ffff-ffff-ffffffffffff') $$);
SELECT count(*) FROM outbox.log WHERE name = 'given';

-- headers.traceparent and causation_id come from settings where the call says nothing.
SET outbox.traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
SET outbox.causation = 'the cause';
SELECT outbox.enqueue('traced', '1') IS NOT NULL;
SELECT outbox.enqueue('traced', '2', headers => '{"a": 1}') IS NOT NULL;
SELECT outbox.enqueue('traced', '3', headers => '{"traceparent": "mine", "a": 1}', causation_id => 'mine') IS NOT NULL;
SET outbox.traceparent = '';
SET outbox.causation = '';
SELECT outbox.enqueue('traced', '4') IS NOT NULL;
RESET outbox.traceparent;
RESET outbox.causation;
SELECT payload, headers, causation_id FROM outbox.log WHERE name = 'traced' ORDER BY position;

-- Times: due now or in the past is due, later is scheduled.
SELECT outbox.enqueue('due', '{}', available_at => '1970-01-01', occurred_at => '4713-01-01 BC') IS NOT NULL;
SELECT outbox.enqueue('due', '{}', available_at => '9999-12-31') IS NOT NULL;
SELECT status, count(*) FROM outbox.messages WHERE name = 'due' GROUP BY status;
SELECT count(*) FROM outbox.claim_batch(1000) WHERE name = 'due';
SELECT status, count(*) FROM outbox.messages WHERE name = 'due' GROUP BY status ORDER BY status;

-- Lengths are counted in bytes.
SELECT outbox.enqueue(repeat('n', 255), '{}', kind => repeat('k', 255), correlation_id => repeat('c', 255),
                      causation_id => repeat('c', 255), aggregate_type => repeat('a', 255), aggregate_id => repeat('a', 255),
                      tenant_id => repeat('t', 255), owner_id => repeat('o', 255), dedupe_key => repeat('d', 1024),
                      ordering_key => repeat('o', 255)) IS NOT NULL;

-- What is refused is refused before anything is written.
SELECT count(*) AS before FROM outbox.log \gset
CALL pg_temp.try($$ SELECT outbox.enqueue(NULL, '{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('', '{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue(E' \t\n', '{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', NULL) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue(repeat('n', 256), '{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue(repeat('é', 128), '{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', kind => ' ') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', kind => repeat('k', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', version => 0) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', version => -1) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', max_attempts => 0) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', max_attempts => -1) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', available_at => 'infinity') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', available_at => '-infinity') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', occurred_at => 'infinity') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', occurred_at => '-infinity') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', headers => '[]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', headers => 'null') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', headers => '"x"') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', correlation_id => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', causation_id => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', aggregate_type => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', aggregate_id => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', tenant_id => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', owner_id => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', ordering_key => repeat('x', 256)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('bad', '{}', dedupe_key => repeat('x', 1025)) $$);
SELECT count(*) - :before AS more FROM outbox.log;

-- A transaction that may not write gets PostgreSQL's own error.
BEGIN READ ONLY;
SELECT outbox.enqueue('bad', '{}');
ROLLBACK;
