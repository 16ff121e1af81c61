-- deliver: what a hook gets and in which surroundings it runs; drain() and deliver().
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE SCHEMA shop;
SELECT current_user AS superuser \gset
\set VERBOSITY terse

CREATE TABLE shop.seen (n serial, what text);
CREATE FUNCTION shop.hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (what) VALUES (concat_ws(' ', m.name, m.payload, m.subscription, m.attempts || '/' || m.max_attempts));
END
$$;
CREATE FUNCTION shop.take_seen() RETURNS text LANGUAGE sql AS $$
    WITH gone AS (DELETE FROM shop.seen RETURNING n, what) SELECT string_agg(what, ', ' ORDER BY n) FROM gone
$$;

-- Nothing is pushed yet.
CALL outbox.drain();
SELECT * FROM outbox.deliver();
CALL outbox.drain('default');
CALL outbox.drain('unknown');

-- drain() commits as it goes; deliver() works in the caller's transaction.
SELECT outbox.register_hook('#', 'shop.hook');
SELECT outbox.enqueue('order.created', '1') IS NOT NULL;
CALL outbox.drain();
SELECT shop.take_seen();
BEGIN;
CALL outbox.drain();
ROLLBACK;
DO $$
BEGIN
    BEGIN
        CALL outbox.drain();
    EXCEPTION WHEN syntax_error THEN
        RAISE WARNING '%', SQLERRM;
    END;
END
$$;
CREATE FUNCTION shop.drain_in_function() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    claimed bigint; delivered bigint; retried bigint; dead bigint; unhandled bigint; left_over bigint;
BEGIN
    CALL outbox.drain(NULL, NULL, claimed, delivered, retried, dead, unhandled, left_over);
    RETURN claimed;
END
$$;
SELECT shop.drain_in_function();
-- outside of a transaction, from PL/pgSQL: with variables for the results
SELECT outbox.enqueue('order.paid', '2') IS NOT NULL;
DO $$
DECLARE
    claimed bigint; delivered bigint; retried bigint; dead bigint; unhandled bigint; left_over bigint;
BEGIN
    CALL outbox.drain(NULL, NULL, claimed, delivered, retried, dead, unhandled, left_over);
    RAISE WARNING 'claimed %, delivered %', claimed, delivered;
END
$$;
SELECT shop.take_seen();

BEGIN;
SELECT outbox.enqueue('order.shipped', '3') IS NOT NULL;
SELECT * FROM outbox.deliver();
SELECT * FROM outbox.deliver();
SELECT shop.take_seen();
ROLLBACK;
SELECT * FROM outbox.deliver();
-- what is rolled back to a savepoint was not delivered
BEGIN;
SELECT outbox.enqueue('order.shipped', '4') IS NOT NULL;
SAVEPOINT s;
SELECT claimed, delivered FROM outbox.deliver();
ROLLBACK TO s;
SELECT claimed, delivered FROM outbox.deliver();
COMMIT;
SELECT shop.take_seen();
SELECT name, status, attempts FROM outbox.messages ORDER BY id;
-- any isolation level
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM shop.seen;
SELECT outbox.enqueue('order.shipped', '5') IS NOT NULL;
SELECT claimed, delivered FROM outbox.deliver();
SELECT shop.take_seen();
COMMIT;
SET default_transaction_isolation = serializable;
SELECT outbox.enqueue('order.shipped', '6') IS NOT NULL;
CALL outbox.drain();
RESET default_transaction_isolation;
SELECT shop.take_seen();

-- Arguments.
CALL outbox.drain(max_messages => 0);
SELECT * FROM outbox.deliver(max_messages => -1);
CALL outbox.drain('', NULL);
SET default_transaction_read_only = on;
CALL outbox.drain();
SELECT * FROM outbox.deliver();
RESET default_transaction_read_only;

-- So many, a batch at a time, and what is left.
SELECT count(*) FROM outbox.enqueue_batch('many', (SELECT jsonb_agg(g) FROM generate_series(1, 230) g));
CALL outbox.drain(max_messages => 120);
SELECT * FROM outbox.deliver(max_messages => 1);
SET outbox.batch_size = 7;
CALL outbox.drain();
RESET outbox.batch_size;
SELECT count(*), count(DISTINCT what) FROM shop.seen;
SELECT shop.take_seen() IS NOT NULL;
-- a batch that fared alike is few rows, however it was cut into groups
SELECT sum(message_count), count(*) <= 80 AS few FROM outbox.delivery WHERE state = 'delivered';

-- What the hook gets is the message, whole.
CREATE FUNCTION shop.whole(m outbox.message) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (what) VALUES ((to_jsonb(m) - 'created_at' - 'available_at')::text);
    RETURN NULL;
END
$$;
SELECT outbox.register_hook('whole', 'shop.whole');
SELECT outbox.enqueue('whole', '{"a": [1, "ü"]}', kind => 'job', version => 7, id => '00000000-0000-7000-8000-000000000001',
                      max_attempts => 9, headers => '{"h": "v"}', correlation_id => 'cor', causation_id => 'cau',
                      aggregate_type => 'order', aggregate_id => '17', tenant_id => 'ten', owner_id => 'own',
                      dedupe_key => 'dk', occurred_at => '2020-01-01 00:00+00', ordering_key => 'ok');
SET timezone = 'UTC';
SELECT claimed, delivered FROM outbox.deliver();
RESET timezone;
SELECT shop.take_seen();

-- Its surroundings: settings that say what the message is, the search_path of the
-- registration or the function's own, and nothing of what the caller or the hook has set.
CREATE FUNCTION shop.surroundings(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (what)
    VALUES (concat_ws(' ', m.name, current_setting('outbox.causation'), current_setting('outbox.traceparent'),
                      current_setting('search_path'), current_setting('work_mem'), current_user));
    SET search_path = nowhere;
    SET work_mem = '1MB';
    SET ROLE pg_monitor;
    SET outbox.causation = 'changed';
END
$$;
CREATE FUNCTION shop.own_path(m outbox.message) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    INSERT INTO shop.seen (what) VALUES (concat_ws(' ', m.name, current_setting('search_path')));
END
$$;
CREATE ROLE regress_outbox_admin SUPERUSER LOGIN;
\c - regress_outbox_admin
SET client_min_messages = warning;
SELECT outbox.subscribe('surroundings', 'around.*');
SET search_path = shop, public;
SELECT outbox.register_hook('around.*', 'surroundings', 'surroundings');
SELECT outbox.register_hook('around.own', 'own_path', 'surroundings');
RESET search_path;
SET outbox.traceparent = 'the caller''s';
SET outbox.causation = 'the caller''s';
SELECT outbox.enqueue('around.a', '1', id => '00000000-0000-7000-8000-000000000002', headers => '{"traceparent": "00-a"}');
SELECT outbox.enqueue('around.b', '1', id => '00000000-0000-7000-8000-000000000003', headers => '{"traceparent": null}');
SELECT outbox.enqueue('around.own', '1', id => '00000000-0000-7000-8000-000000000004');
CALL outbox.drain('surroundings');
SELECT shop.take_seen();
SELECT current_setting('outbox.causation'), current_setting('outbox.traceparent'), current_setting('search_path'),
       current_setting('work_mem'), current_user;
RESET outbox.traceparent;
RESET outbox.causation;

-- What a hook enqueues is linked to its message, and delivered by the same call.
CREATE FUNCTION shop.chain(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (what) VALUES (concat_ws(' ', m.payload, m.causation_id IS NOT NULL, m.headers->>'traceparent'));
    IF m.payload::int > 0 THEN
        PERFORM outbox.enqueue('chain', to_jsonb(m.payload::int - 1));
    END IF;
END
$$;
SELECT outbox.subscribe('chain', 'chain');
SELECT outbox.register_hook('chain', 'shop.chain', 'chain');
SELECT outbox.enqueue('chain', '3', headers => '{"traceparent": "00-c"}') IS NOT NULL;
CALL outbox.drain('chain');
SELECT shop.take_seen();
BEGIN;
SELECT outbox.enqueue('chain', '2') IS NOT NULL;
SELECT * FROM outbox.deliver('chain');
ROLLBACK;

-- Each role's handlers are called in its own sessions only; others' messages are counted.
\c - :superuser
SET client_min_messages = warning;
CREATE ROLE regress_outbox_app LOGIN;
GRANT USAGE ON SCHEMA shop TO regress_outbox_app;
GRANT ALL ON TABLE shop.seen TO regress_outbox_app;
GRANT ALL ON SEQUENCE shop.seen_n_seq TO regress_outbox_app;
SELECT outbox.grant_access('regress_outbox_app', 'consumer');
SELECT outbox.subscribe('app', 'app.*');
\c - regress_outbox_app
SET client_min_messages = warning;
SELECT outbox.register_hook('app.*', 'shop.hook', 'app');
\c - :superuser
SET client_min_messages = warning;
CALL outbox.drain();
SELECT shop.take_seen() IS NOT NULL;
SELECT outbox.enqueue('app.x', '1') IS NOT NULL;
SET client_min_messages = notice;
\set VERBOSITY default
CALL outbox.drain();
CALL outbox.drain('app');
\set VERBOSITY terse
SET ROLE regress_outbox_app;
SELECT left_over FROM outbox.deliver('app');
RESET ROLE;
\c - regress_outbox_app
SET client_min_messages = warning;
CALL outbox.drain();
SET ROLE pg_monitor;
\c - :superuser
SET client_min_messages = warning;
SELECT shop.take_seen();
-- who may no longer consume it is told so, if he names it
SELECT outbox.enqueue('app.y', '2') IS NOT NULL;
SELECT outbox.subscribe('other', 'other.*');
SELECT outbox.revoke_access('regress_outbox_app', 'consumer');
SELECT outbox.grant_access('regress_outbox_app', 'consumer', 'other');
\c - regress_outbox_app
SET client_min_messages = warning;
CALL outbox.drain();
CALL outbox.drain('app');
\c - :superuser
SET client_min_messages = warning;
SELECT shop.take_seen();

-- A paused subscription is left alone.
SELECT outbox.pause('chain');
SELECT outbox.enqueue('chain', '0') IS NOT NULL;
\c - regress_outbox_admin
SET client_min_messages = warning;
SELECT claimed FROM outbox.deliver('chain');
SELECT outbox.resume('chain');
SELECT claimed, delivered FROM outbox.deliver('chain');
\c - :superuser
SET client_min_messages = warning;

SELECT outbox.reset() > 0;
DROP SCHEMA shop CASCADE;
DROP EXTENSION outbox;
DROP OWNED BY regress_outbox_app;
DROP ROLE regress_outbox_app, regress_outbox_admin;
CREATE EXTENSION outbox;
