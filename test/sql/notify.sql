-- notify: the CloudEvents envelope, and delivery to a NOTIFY channel.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
\set VERBOSITY terse
SET timezone = 'Asia/Tokyo';

-- The envelope of a message that has everything, as a message and as a claimed one.
SELECT outbox.enqueue('order.created', '{"total": 12.50, "lines": [1, 2]}', kind => 'job', version => 7,
                      id => '00000000-0000-7000-8000-000000000001', correlation_id => 'cor', causation_id => 'cau',
                      aggregate_type => 'order', aggregate_id => '17', tenant_id => 'ten', owner_id => 'own',
                      ordering_key => 'key', occurred_at => '2020-02-29 12:34:56.789+00',
                      headers => '{"source": "https://shop.example/orders", "traceparent": "00-t", "tracestate": "s=1",
                                   "dataschema": "https://shop.example/schema", "retries": 3, "urgent": true,
                                   "id": "no", "type": "no", "kind": "no", "data": "no", "datatruncated": true,
                                   "X-Header": "no", "dotted.name": "no", "ratio": 0.5, "big": 3000000000,
                                   "nothing": null, "list": [1], "object": {"a": 1},
                                   "alongernamethanallowed": "no"}');
BEGIN;
SELECT jsonb_pretty(outbox.cloudevent(m)) FROM outbox.claim_batch() m;
ROLLBACK;
CREATE SCHEMA shop;
CREATE TABLE shop.seen (envelope jsonb);
CREATE FUNCTION shop.hook(m outbox.message) RETURNS void LANGUAGE sql AS $$ INSERT INTO shop.seen VALUES (outbox.cloudevent(m)) $$;
SELECT outbox.register_hook('#', 'shop.hook');
BEGIN;
SELECT claimed, delivered FROM outbox.deliver();
SELECT envelope = (SELECT outbox.cloudevent(outbox.get('00000000-0000-7000-8000-000000000001'))) AS same FROM shop.seen;
ROLLBACK;

-- One that has nothing: the source is the database; any JSON is data.
CREATE FUNCTION shop.event(payload jsonb, occurred_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL,
                           aggregate_type text DEFAULT NULL, aggregate_id text DEFAULT NULL) RETURNS jsonb LANGUAGE sql AS $$
    SELECT outbox.cloudevent(m) - 'id' FROM outbox.get(outbox.enqueue('n', $1, occurred_at => $2, headers => $3,
                                                                      aggregate_type => $4, aggregate_id => $5)) m
$$;
SELECT shop.event('"text"') - 'time' - 'source', shop.event('null') - 'time' - 'source';
SELECT e->'time' IS NOT NULL AS time, e->>'source' = '/outbox/' || current_database() AS source FROM shop.event('1') e;
SELECT shop.event('1', headers => '{"source": ""}')->>'source' = '/outbox/' || current_database() AS source;
SELECT shop.event('1', headers => '{"source": 5}')->>'source' = '/outbox/' || current_database() AS source;
SELECT shop.event('1', aggregate_type => 'order')->>'subject', shop.event('1', aggregate_id => '17')->>'subject';
SELECT shop.event('1', '0001-01-01 00:00+00')->>'time', shop.event('1', '9999-12-31 23:59:59.999999+00')->>'time',
       shop.event('1', '10000-01-01 00:00+00')->>'time', shop.event('1', '0044-03-15 00:00+00 BC')->>'time';
SELECT outbox.cloudevent(NULL::outbox.message), outbox.cloudevent(NULL::outbox.claimed_message);
SELECT outbox.cloudevent(ROW(NULL, 'n', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::outbox.message);
SELECT outbox.cloudevent(ROW('00000000-0000-7000-8000-000000000001', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::outbox.message);
SELECT outbox.cloudevent(ROW('00000000-0000-7000-8000-000000000001', 'n', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::outbox.message) - 'source';

-- To a channel: without data, with data, and cut down where it would be too long.
SELECT outbox.reset() > 0;
SELECT outbox.subscribe('listeners');
SELECT outbox.register_notify('#', 'shop_events', 'listeners');
SELECT outbox.register_notify('full.#', 'shop_full', 'listeners', include_data => true);
CREATE FUNCTION shop.send(name text, n int, payload jsonb, headers jsonb DEFAULT NULL) RETURNS void LANGUAGE sql AS $$
    SELECT FROM outbox.enqueue($1, $3, id => ('00000000-0000-7000-8000-00000000000' || $2)::uuid, occurred_at => '2020-01-01 00:00+00',
                               headers => coalesce($4, '{}') || '{"source": "s"}')
$$;
SELECT shop.send('brief', 2, '{"a": "not sent"}');
SELECT shop.send('full', 3, '{"a": "sent"}');
SELECT shop.send('full.long', 4, to_jsonb(repeat('x', 8000)), '{"traceparent": "00-t"}');
SELECT shop.send('full.headers', 5, '1', jsonb_build_object('x', repeat('x', 8000)));
SELECT shop.send('brief.headers', 6, '1', jsonb_build_object('x', repeat('ü', 4000)));
SELECT FROM outbox.enqueue('brief.source', '1', id => '00000000-0000-7000-8000-00000000000a',
                           headers => jsonb_build_object('source', repeat('s', 8000)));
LISTEN shop_events;
LISTEN shop_full;
\set ECHO none
\o | sed 's/PID [0-9]*/PID/; s|/outbox/[^"]*"|/outbox/DATABASE"|'
CALL outbox.drain('listeners');
\o
\set ECHO all
SELECT name, status, attempts, last_error FROM outbox.messages WHERE subscription = 'listeners' ORDER BY id;

-- The longest that goes whole, and the first that does not.
CREATE FUNCTION shop.padded(n int, bytes int) RETURNS void LANGUAGE sql AS $$
    SELECT shop.send('full', n, to_jsonb(repeat('x', bytes - octet_length((outbox.cloudevent(m) || '{"data": ""}')::text))))
      FROM outbox.get('00000000-0000-7000-8000-000000000003') m
$$;
SELECT shop.padded(7, 7999);
SELECT shop.padded(8, 8000);
\set ECHO none
\o | sed 's/PID [0-9]*/PID/; s/x\{100,\}/xxx/'
CALL outbox.drain('listeners');
\o
\set ECHO all

-- deliver() sends at the caller's commit, or not at all.
SELECT shop.send('brief', 9, '1');
\set ECHO none
\o | sed 's/PID [0-9]*/PID/'
BEGIN;
SELECT claimed, delivered FROM outbox.deliver('listeners');
ROLLBACK;
BEGIN;
SELECT claimed, delivered FROM outbox.deliver('listeners');
SELECT 'nothing yet' AS heard;
COMMIT;
SELECT 'now' AS heard;
\o
\set ECHO all
UNLISTEN *;

SELECT outbox.reset() > 0;
DROP SCHEMA shop CASCADE;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
