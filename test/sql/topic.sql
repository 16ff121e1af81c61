-- topic: AMQP patterns: which names they match, which patterns are refused, and which
-- handlers overlap.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
RESET client_min_messages;

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    detail text;
    hint text;
BEGIN
    EXECUTE statement;
    RETURN 'done';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws(' | ', SQLSTATE || ': ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END
$$;

-- What a subscription gets is what its pattern matches.
SELECT outbox.subscribe('p' || n, pattern)
  FROM unnest(ARRAY['#', '*', '*.*', '*.*.*', 'order', 'order.created', 'order.*', 'order.#', '#.created',
                    '*.created', 'order.*.paid', 'order.#.paid', '#.#', '#.*', '*.#', '#.eu.#', '*.#.eu',
                    '#.a.#.a.#', '#.a.a', 'Order.*', 'größe.*'])
       WITH ORDINALITY p (pattern, n)
 ORDER BY n;
SELECT count(outbox.enqueue(name, '{}'))
  FROM unnest(ARRAY['order', 'order.created', 'order.eu.paid', 'order.eu.west.paid', 'order.paid', 'orders.created',
                    'order..paid', 'order.', '.order', 'a', 'a.a', 'a.b.a', 'b.a.a', 'a.a.b', 'eu', 'x.eu', 'x.eu.y',
                    'Order.created', 'größe.xl', '*', '#', 'order.*', 'C# order', '.']) AS name;
SELECT outbox.maintain() IS NOT NULL AS routed;
SELECT s.pattern, string_agg(format('"%s"', m.name), ' ' ORDER BY m.name COLLATE "C")
  FROM outbox.subscriptions s
  LEFT JOIN outbox.messages m ON m.subscription = s.name
 WHERE s.name <> 'default'
 GROUP BY s.name, s.pattern
 ORDER BY CAST(substr(s.name, 2) AS integer);

-- A transaction sees what it has enqueued by the same rules.
BEGIN;
SELECT count(outbox.enqueue(name, '{}')) FROM unnest(ARRAY['order.created', 'order.eu.paid', 'user.created']) AS name;
SELECT p.pattern, string_agg(m.name, ' ' ORDER BY m.name COLLATE "C")
  FROM unnest(ARRAY['#', 'order.#', 'order.*', '*.created', 'nobody']) WITH ORDINALITY p (pattern, n)
  LEFT JOIN LATERAL outbox.enqueued(p.pattern) m ON true
 GROUP BY p.pattern, p.n ORDER BY p.n;
ROLLBACK;

-- Many # do not make it slow.
SELECT outbox.subscribe('many', repeat('#.a.', 60) || 'b');
SELECT outbox.enqueue(rtrim(repeat('a.', 127), '.'), '{}') IS NOT NULL;
SELECT outbox.enqueue(repeat('a.', 120) || 'b', '{}') IS NOT NULL;
SELECT count(*) FROM outbox.claim_batch(subscription => 'many');

-- Patterns that are refused.
SELECT left(pattern, 12) AS pattern, pg_temp.try(format('SELECT outbox.subscribe(%L, %L)', 'refused', pattern))
  FROM unnest(ARRAY['order.', '.order', '.', 'order..paid', 'order*', 'order.#paid', '**', '##', 'a.*b.c', ' ',
                    repeat('x', 256)]) AS pattern;
SELECT count(*) FROM outbox.subscriptions WHERE name = 'refused';

SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
