-- text_values: texts that have broken other queues: NUL, half surrogate pairs, emoji, right to
-- left, odd and long names, quotes, backslashes.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all

-- What PostgreSQL cannot keep is refused where it is, and nothing is enqueued; the session goes on.
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '{"a": "\u0000"}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '{"\u0000": 1}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '["x\u0000y"]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '{}', headers => '{"h": "\u0000"}') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('t', '[1, "\u0000"]') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '"\ud83d"') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '"\ude00"') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '"\ud83dx"') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '"\ude00\ud83d"') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '{}', headers => '{"h": "\ud83d"}') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload) VALUES ('t', '1'), ('t', '"\u0000"') $$);
SELECT count(*) FROM outbox.log;

-- Everything else comes out as it went in.
CREATE TEMP TABLE texts (n serial, t text);
INSERT INTO texts (t) VALUES
    ('\u0000'), ('\\u0000'), ('a\nb'), (E'a\nb\tc\r\x01\x1f\x7f'), ('"'), (''''), ('\'), ('\\'), ('$1'), ('%s%n'), ('{"a": "b"}'),
    ('é'), (U&'e\0301'), (U&'\+01f600'), (U&'\+01f468\200d\+01f469\200d\+01f467'), (U&'\05e9\05dc\05d5\05dd'), (U&'\202eabc\202c'),
    (U&'\feffbom'), (U&'\fffe\ffff'), (U&'\+10ffff'), (U&'\00a0\2028\2029'), ('null'), (' padded '), ('.'), ('..'), ('a..b'), ('*'), ('#'),
    ('a.*'), ('; DROP TABLE outbox.log_0; --'), ('ﷺ'), (repeat('x', 255)), (left(repeat(U&'\+01f600', 64), 63)), (E'\n.\n');
SELECT count(*), count(outbox.enqueue('t.' || n, to_jsonb(t))) FROM texts;
SELECT count(outbox.enqueue('o.' || n, jsonb_build_object(t, t), headers => jsonb_build_object(t, t))) FROM texts;
SELECT count(outbox.enqueue(t, to_jsonb(n), kind => t, correlation_id => t, causation_id => t, aggregate_type => t, aggregate_id => t,
                            tenant_id => t, owner_id => t, dedupe_key => t, ordering_key => t)) FROM texts;
INSERT INTO held SELECT * FROM outbox.claim_batch(1000);
SELECT count(*) FROM held;
SELECT count(*) AS changed FROM texts JOIN held ON name = 't.' || n WHERE payload IS DISTINCT FROM to_jsonb(t) OR payload #>> '{}' <> t;
SELECT count(*) AS changed FROM texts JOIN held ON name = 'o.' || n
 WHERE payload ->> t IS DISTINCT FROM t OR headers ->> t IS DISTINCT FROM t;
SELECT count(*) AS kept FROM texts
  JOIN held ON payload = to_jsonb(n) AND (name, kind, correlation_id, causation_id, aggregate_type, aggregate_id, tenant_id, owner_id,
                                          dedupe_key, ordering_key) = (t, t, t, t, t, t, t, t, t, t);
-- as they would come out of JSON text with escapes
SELECT outbox.enqueue('escaped', '"\ud83d\ude00 \u0065\u0301 \\u0000 \/"') IS NOT NULL;
SELECT payload #>> '{}' = U&'\+01f600 e\0301 \\u0000 /' AS same FROM outbox.claim_batch();

-- They are no patterns, and no SQL: a subscription may have any name, a worker and an error any text.
SET client_min_messages = warning;
SELECT count(*) FROM (SELECT outbox.subscribe(t, pattern => 'sub') FROM texts) s;
RESET client_min_messages;
SELECT outbox.enqueue('sub', '1') IS NOT NULL;
SELECT count(*), sum((SELECT count(*) FROM outbox.claim_batch(worker => t, subscription => t) c WHERE c.subscription = t)) AS claimed
  FROM texts;
SELECT count(*) FROM outbox.leases l JOIN texts ON l.subscription = t AND l.worker = t;
SELECT count(outbox.unsubscribe(t, true)) FROM texts;
DO $$
DECLARE
    message record;
BEGIN
    FOR message IN SELECT n, t, h.id, h.claim_token FROM texts JOIN held h ON name = 't.' || n LOOP
        ASSERT outbox.settle(message.id, message.claim_token, 'dead', message.t, to_jsonb(message.t)) = 'dead';
    END LOOP;
END
$$;
SELECT count(*) FROM outbox.dead_letters d JOIN texts ON d.name = 't.' || n AND last_error_message = t;

-- Names are as they were given, within 255 bytes.
SELECT outbox.enqueue(repeat(U&'\+01f600', 63), '1') IS NOT NULL;
CALL pg_temp.try($$ SELECT outbox.enqueue(repeat(U&'\+01f600', 64), '1') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue(U&' \0009\000a\000b\000c\000d', '1') $$);
SELECT outbox.enqueue(U&'\00a0', '1') IS NOT NULL AS not_blank;
CALL pg_temp.try($$ SELECT outbox.enqueue('t', '1', correlation_id => E' \n ') $$);
-- a large payload
SELECT outbox.enqueue('large', to_jsonb(repeat('0123456789', 1000000))) IS NOT NULL;
SELECT outbox.enqueue('large', to_jsonb(string_agg(md5(CAST(n AS text)), ''))) IS NOT NULL FROM generate_series(1, 100000) n;
SELECT length(payload #>> '{}'), left(md5(payload #>> '{}'), 8) FROM outbox.claim_batch() WHERE name = 'large';
-- deep and wide ones
SELECT outbox.enqueue('deep', CAST(repeat('[', 1000) || repeat(']', 1000) AS jsonb)) IS NOT NULL;
SELECT outbox.enqueue('wide', (SELECT jsonb_object_agg('k' || n, n) FROM generate_series(1, 10000) n)) IS NOT NULL;
SELECT outbox.enqueue('number', '[1e400, -0.0, 12345678901234567890.123456789]') IS NOT NULL;
SELECT name, length(CAST(payload AS text)) FROM outbox.claim_batch();
SELECT * FROM pg_temp.broken();
