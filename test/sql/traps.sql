-- traps: objects that hide PostgreSQL's own and ours, in a schema that comes first in the victim's search_path and among
-- his temporary ones: functions, operators, domains, tables. All of outbox works as if they were not there.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE SCHEMA traps;

CREATE FUNCTION traps.spring(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    RAISE EXCEPTION 'sprung: %', what;
END
$$;
-- Types that a trap for an expression can have.
CREATE VIEW traps.plain AS
SELECT t.oid FROM pg_type t WHERE t.typtype <> 'p' AND t.typnamespace = CAST('pg_catalog' AS regnamespace);

-- Each function of pg_catalog that a statement could mean. Those of a pseudotype cannot be written in PL/pgSQL.
DO $$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT p.proname, p.proretset, p.prorettype,
                    (SELECT string_agg(format_type(a, NULL), ', ' ORDER BY n) FROM unnest(p.proargtypes) WITH ORDINALITY u (a, n)) AS arguments
               FROM pg_proc p
              WHERE p.pronamespace = CAST('pg_catalog' AS regnamespace) AND p.prokind = 'f' AND p.provariadic = 0
                AND p.proname !~ '(^(pg_(stat|logical|replication|lo_|ls_)|RI_|bt|gin|gist|hash|brin|spg|box|circle|line|lseg|path|point|poly|inet|cidr|mac|ts))|(in|out|recv|send)$'
                AND p.prorettype IN (SELECT oid FROM traps.plain)
                AND NOT EXISTS (SELECT FROM unnest(p.proargtypes) a WHERE a NOT IN (SELECT oid FROM traps.plain))
    LOOP
        EXECUTE format('CREATE FUNCTION traps.%I(%s) RETURNS %s %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM traps.spring(%L); RETURN%s; END $f$',
                       f.proname, f.arguments, CASE WHEN f.proretset THEN 'SETOF' ELSE '' END, format_type(f.prorettype, NULL),
                       f.proname, CASE WHEN f.proretset THEN '' ELSE ' NULL' END);
    END LOOP;
    -- and each operator
    FOR f IN SELECT o.oid, o.oprname, format_type(o.oprleft, NULL) AS l, format_type(o.oprright, NULL) AS r, format_type(o.oprresult, NULL) AS result
               FROM pg_operator o
              WHERE o.oprnamespace = CAST('pg_catalog' AS regnamespace) AND o.oprkind = 'b' AND o.oprleft IN (SELECT oid FROM traps.plain)
                AND o.oprright IN (SELECT oid FROM traps.plain) AND o.oprresult IN (SELECT oid FROM traps.plain)
    LOOP
        EXECUTE format('CREATE FUNCTION traps.operator_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM traps.spring(%L); RETURN NULL; END $f$',
                       f.oid, f.l, f.r, f.result, f.oprname);
        EXECUTE format('CREATE OPERATOR traps.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = traps.operator_%s)', f.oprname, f.l, f.r, f.oid);
    END LOOP;
END
$$;
SELECT count(*) > 1000 AS functions FROM pg_proc WHERE pronamespace = CAST('traps' AS regnamespace);
SELECT count(*) > 300 AS operators FROM pg_operator WHERE oprnamespace = CAST('traps' AS regnamespace);

-- Aggregates, types and tables, of PostgreSQL and of ours; temporary ones are found even before pg_catalog.
CREATE FUNCTION traps.step(bigint, "any") RETURNS bigint LANGUAGE internal AS 'int8inc_any';
CREATE AGGREGATE traps.count("any") (SFUNC = traps.step, STYPE = bigint, INITCOND = 41);
CREATE AGGREGATE traps.count(*) (SFUNC = int8inc, STYPE = bigint, INITCOND = 41);
CREATE FUNCTION traps.no(anyelement) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM traps.spring('a domain'); RETURN false; END $$;
DO $$
DECLARE
    schema text;
    name text;
BEGIN
    FOREACH schema IN ARRAY ARRAY['traps', 'pg_temp'] LOOP
        FOREACH name IN ARRAY ARRAY['uuid', 'name', 'oid', 'jsonb', 'bytea', 'timestamptz', 'int8multirange'] LOOP
            EXECUTE format('CREATE DOMAIN %I.%I AS text CHECK (traps.no(VALUE))', schema, name);
        END LOOP;
        FOREACH name IN ARRAY ARRAY['pg_class', 'pg_proc', 'pg_namespace', 'pg_depend', 'pg_extension', 'pg_roles', 'pg_authid', 'pg_type',
                                    'log', 'log_0', 'delivery', 'subscription', 'handler', 'access', 'identity', 'frontier', 'dedupe', 'message',
                                    'claimed_message', 'status', 'messages'] LOOP
            EXECUTE format('CREATE TABLE %I.%I (id integer CHECK (traps.no(id)))', schema, name);
        END LOOP;
    END LOOP;
END
$$;
CREATE ROLE regress_victim LOGIN;

SET search_path = pg_temp, traps, pg_catalog;
SELECT count(*) = 42 AS armed FROM (VALUES (1)) v;
SELECT 1 = 1;
SELECT now();

-- Everything, in this order of things.
CREATE EXTENSION outbox;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE FUNCTION traps.hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$ BEGIN IF m.name IS NULL THEN RETURN; END IF; RAISE 'no'; END $$;
SELECT outbox.grant_access('regress_victim', 'consumer'), outbox.grant_access('regress_victim', 'operator'),
       outbox.revoke_access('regress_victim', 'consumer'), outbox.revoke_access('regress_victim', 'operator');
SELECT outbox.subscribe('pulled'), outbox.subscribe('pushed', 'push.*'), outbox.subscribe('pushed', 'push.#', replace => true), outbox.subscribe('notified', 'push.*');
SELECT outbox.grant_access('regress_victim', 'consumer', 'pulled'), outbox.grant_access('regress_victim', 'consumer', 'pushed'),
       outbox.revoke_access('regress_victim', 'consumer', 'pulled');
SELECT outbox.register_hook('push.a', 'traps.hook', 'pushed', timeout => '1 s', max_attempts => 1, retry => '{1 s}'),
       outbox.register_hook('push.a', 'hook(outbox.message)', 'pushed', max_attempts => 2, replace => true),
       outbox.register_hook('push.b', 'traps.hook', 'pushed'), outbox.unregister('push.b', 'pushed'),
       outbox.register_notify('push.*', 'channel', 'notified', include_data => true);
SELECT outbox.enqueue('push.a', '{"a": [1]}', headers => '{"traceparent": "00-a"}', dedupe_key => 'k', id => '00000000-0000-7000-8000-000000000001',
                      available_at => '2020-01-01 00:00+00', correlation_id => 'c', aggregate_type => 't', aggregate_id => 'i', max_attempts => 1);
SELECT outbox.enqueue('push.a', '2', dedupe_key => 'k');
SELECT outbox.enqueue_batch('[{"name": "pull", "payload": 1, "version": 2, "id": "00000000-0000-7000-8000-000000000002"}]');
SELECT FROM outbox.enqueue_batch('pull', '[1, 2, 3]');
BEGIN;
INSERT INTO outbox.outgoing (name, payload, id) VALUES ('pull', '1', '00000000-0000-7000-8000-000000000003') RETURNING name, payload, kind, version, id;
SELECT name, payload FROM outbox.outgoing;
SELECT name, payload FROM outbox.enqueued('pull');
COMMIT;
SELECT routed, expired FROM outbox.maintain();
SELECT claimed, delivered, dead, left_over FROM outbox.deliver();
CALL outbox.drain();
SELECT outbox.pause('pulled'), outbox.resume('pulled'), outbox.backoff(2);
SELECT id, claim_token FROM outbox.claim_batch(1, subscription => 'pulled') LIMIT 1 \gset
SELECT outbox.renew(:'id', :'claim_token') IS NOT NULL, outbox.renew_batch(:'claim_token', '10 s', ARRAY[CAST(:'id' AS pg_catalog.uuid)]) IS NOT NULL;
SELECT outbox.settle(:'id', :'claim_token', 'dead', 'e', '{"d": 1}');
SELECT claim_token FROM outbox.claim_batch(2, subscription => 'pulled', worker => 'w') LIMIT 1 \gset
SELECT outbox.settle_batch(:'claim_token', 'failed', 'e', retry_at => '2100-01-01 00:00+00');
SELECT FROM outbox.claim_batch(1, subscription => 'pulled', worker => 'w');
SELECT outbox.revoke_lease('pulled', 'w');
SELECT name, payload FROM outbox.get('00000000-0000-7000-8000-000000000001');
SELECT outbox.cloudevent(g) IS NOT NULL FROM outbox.get('00000000-0000-7000-8000-000000000001') g;
SELECT subscription, dead, delivered, ready, scheduled, leased FROM outbox.status;
SELECT subscription, name, payload, last_error_message FROM outbox.dead_letters ORDER BY subscription USING OPERATOR(pg_catalog.<);
SELECT subscription, name, status, attempts FROM outbox.messages ORDER BY id USING OPERATOR(pg_catalog.<), subscription USING OPERATOR(pg_catalog.<);
SELECT FROM outbox.leases;
SELECT name, pattern, mode, handlers FROM outbox.subscriptions ORDER BY name USING OPERATOR(pg_catalog.<);
SELECT name_pattern, function, channel, search_path, retry_seconds, state FROM outbox.handlers ORDER BY subscription USING OPERATOR(pg_catalog.<);
SELECT FROM outbox.workers LIMIT 0;
SELECT segment, state, held_by FROM outbox.segments ORDER BY segment USING OPERATOR(pg_catalog.<);
SELECT FROM outbox.counters LIMIT 0;
SELECT outbox.oldest_viewer(1) IS NULL OR true, outbox.user_of('outbox.log_0', true) IS NULL OR true;
SELECT FROM outbox.segment_holders();
SELECT outbox.requeue_all('pulled', error_like => 'e%', spread_over => '1 s'), outbox.requeue('00000000-0000-7000-8000-000000000001', 'pushed');
SELECT outbox.discard_all('pulled', name_pattern => '#'), outbox.discard('00000000-0000-7000-8000-000000000003', 'default', 'reason'),
       outbox.cancel('00000000-0000-7000-8000-000000000001');
SELECT outbox.skip('pulled', '2100-01-01 00:00+00') IS NOT NULL;
SET outbox.clock_offset = 432000000;
SELECT routed, expired FROM outbox.maintain();
RESET outbox.clock_offset;
UPDATE outbox.identity SET database_oid = '1';
UPDATE outbox.frontier SET database_oid = '1';
SELECT outbox.claim_batch();
SELECT outbox.adopt(), outbox.adopt();
SELECT outbox.purge('2000-01-01 00:00+00') IS NOT NULL, outbox.reset_counters() IS NOT NULL;
SELECT outbox.unsubscribe('pushed', true) IS NOT NULL, outbox.unsubscribe('default', true) IS NOT NULL;
SELECT outbox.reset() IS NOT NULL;
DROP EXTENSION outbox CASCADE;
RESET search_path;
DROP SCHEMA traps CASCADE;
DISCARD TEMP;
DROP ROLE regress_victim;
CREATE EXTENSION outbox;
