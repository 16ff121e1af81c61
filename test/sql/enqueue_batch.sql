-- enqueue_batch: an array of messages, or one name and an array of payloads.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all

-- Messages are objects with the arguments of enqueue() as keys.
SELECT count(*) FROM outbox.enqueue_batch('[
    {"name": "a", "payload": {"n": 1}},
    {"payload": null, "name": "b", "kind": null, "version": null, "headers": null, "id": null, "available_at": null,
     "max_attempts": null, "correlation_id": null, "causation_id": "", "aggregate_type": "", "occurred_at": null},
    {"name": "c", "payload": 3, "kind": "job", "version": 2, "id": "01900000-0000-7000-8000-000000000003",
     "available_at": "2999-01-01T00:00:00Z", "max_attempts": 5, "headers": {"h": 1}, "correlation_id": "co",
     "causation_id": "ca", "aggregate_type": "at", "aggregate_id": "ai", "tenant_id": "t", "owner_id": "o",
     "dedupe_key": "d", "occurred_at": "1999-12-31 23:00:00-01", "ordering_key": "k"}]');
SET timezone = 'UTC';
SELECT name, payload, kind, version, available_at, max_attempts, headers, correlation_id, causation_id, aggregate_type,
       aggregate_id, tenant_id, owner_id, dedupe_key, ordering_key,
       CASE WHEN occurred_at <> created_at THEN occurred_at END AS occurred_at
  FROM outbox.log ORDER BY position \gx
RESET timezone;
-- One name, many payloads; every JSON value is one.
SELECT count(*) FROM outbox.enqueue_batch('fast', '[{"n": 1}, 2, "3", null, [5], true]');
SELECT name, payload, kind, version, occurred_at = created_at AS occurred_when_created
  FROM outbox.log WHERE name = 'fast' ORDER BY position;
-- An empty array is a batch of none.
SELECT count(*) FROM outbox.enqueue_batch('[]');
SELECT count(*) FROM outbox.enqueue_batch('fast', '[]');

-- The ids come in the order of the array, which is the order of created_at.
CREATE TEMP TABLE ids AS
    SELECT 'objects' AS form, b.id, b.place
      FROM outbox.enqueue_batch((SELECT jsonb_agg(jsonb_build_object('name', 'order', 'payload', n) ORDER BY n)
                                   FROM generate_series(1, 50) n)) WITH ORDINALITY b (id, place)
    UNION ALL
    SELECT 'payloads', b.id, b.place
      FROM outbox.enqueue_batch('order', (SELECT jsonb_agg(n ORDER BY n) FROM generate_series(1, 50) n))
           WITH ORDINALITY b (id, place);
SELECT i.form, count(*), bool_and(l.payload = to_jsonb(i.place)) AS same_place
  FROM ids i JOIN outbox.log l USING (id) GROUP BY i.form ORDER BY i.form;
SELECT form, bool_and(later) AS later
  FROM (SELECT i.form, l.created_at > lag(l.created_at, 1, '-infinity') OVER (PARTITION BY i.form ORDER BY i.place) AS later
          FROM ids i JOIN outbox.log l USING (id)) o GROUP BY form ORDER BY form;
-- Called in a SELECT list, or cut by LIMIT, it enqueues all the same.
SELECT outbox.enqueue_batch('limit', '[1, 2, 3]') IS NOT NULL AS id LIMIT 1;
SELECT b IS NOT NULL AS id FROM outbox.enqueue_batch('limit', '[4, 5, 6]') b LIMIT 1;
SELECT count(*) FROM outbox.log WHERE name = 'limit';

-- Settings and dedupe keys work as in enqueue(), within a batch too.
SET outbox.traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
SELECT count(*), count(DISTINCT b)
  FROM outbox.enqueue_batch('[{"name": "key", "payload": 1, "dedupe_key": "k"}, {"name": "key", "payload": 2},
                              {"name": "key", "payload": 3, "dedupe_key": "k"}]') b;
SELECT count(*) FROM outbox.enqueue_batch('key', '[4]');
RESET outbox.traceparent;
SELECT payload, dedupe_key, headers ->> 'traceparent' IS NOT NULL AS traced FROM outbox.log WHERE name = 'key' ORDER BY position;

-- Both are in the fast lane: a few thousand messages, each found again once.
SELECT count(*) FROM outbox.enqueue_batch('many', (SELECT jsonb_agg(n) FROM generate_series(1, 3000) n));
SELECT count(*), count(DISTINCT payload) FROM outbox.claim_batch(10000) WHERE name = 'many';
SELECT * FROM pg_temp.broken();

-- One bad element and nothing is enqueued; the error tells which element it is.
SELECT count(*) AS before FROM outbox.log \gset
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(NULL) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('{}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('null') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[1]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[[]]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1}, null]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1}, {"name": "bad"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": null, "payload": 1}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": " ", "payload": 1}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": 1, "payload": 1}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1}, {"name": "bad", "payload": 1, "delay": 3}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"Name": "bad", "payload": 1}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "created_at": "2020-01-01"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "id": "x"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "id": {}}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "available_at": "soon"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "available_at": "infinity"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "version": "x"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "version": 0}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "version": true}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "max_attempts": 0}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "max_attempts": 1e10}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "headers": [1]}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1, "tenant_id": 7}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(jsonb_build_array(jsonb_build_object('name', repeat('n', 256), 'payload', 1))) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1},
                        {"name": "bad", "payload": 1, "id": "01900000-0000-7000-8000-000000000003"}]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "bad", "payload": 1},
                        {"name": "bad", "payload": 1, "id": "01900000-0000-7000-8000-000000000003"},
                        {"name": "bad", "payload": 1}, {"name": "bad", "payload": 1}]') $$);
-- of those that were gathered and are being written, too, in the second thousand as well;
CALL pg_temp.try($$ SELECT outbox.enqueue_batch((SELECT jsonb_agg(jsonb_build_object('name', 'bad', 'payload', n,
                        'id', CASE WHEN n = 1234 THEN '01900000-0000-7000-8000-000000000003' END) ORDER BY n)
                      FROM generate_series(1, 1500) n)) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch((SELECT jsonb_agg(jsonb_build_object('name', 'bad', 'payload', n,
                        'version', CASE WHEN n = 1234 THEN 0 END) ORDER BY n) FROM generate_series(1, 1500) n)) $$);
-- and none where it is not known: what looks at all of them comes at the end of the statement
BEGIN;
CREATE FUNCTION refuse_two() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.payload = '2' THEN
        RAISE 'no twos';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER at_the_end AFTER INSERT ON outbox.log_0 FOR EACH ROW EXECUTE FUNCTION refuse_two();
DO $$
DECLARE
    context text;
BEGIN
    PERFORM outbox.enqueue_batch('bad', '[1, 2, 3]');
EXCEPTION WHEN raise_exception THEN
    GET STACKED DIAGNOSTICS context = PG_EXCEPTION_CONTEXT;
    RAISE NOTICE '%: %', SQLERRM, CASE WHEN context LIKE '%element%' THEN context ELSE 'no element' END;
END
$$;
ROLLBACK;
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(NULL, '[]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(' ', '[1]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(' ', '[]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch(repeat('n', 256), '[1]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('bad', NULL) $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('bad', '{"n": 1}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('bad', '1') $$);
SELECT count(*) - :before AS more FROM outbox.log;
BEGIN READ ONLY;
SELECT outbox.enqueue_batch('bad', '[1]');
ROLLBACK;
