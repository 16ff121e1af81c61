-- handler: register_hook(), register_notify(), unregister(): what is accepted, whose it is,
-- which handler gets a message.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE ROLE regress_billing LOGIN;
CREATE ROLE regress_other LOGIN;
CREATE ROLE regress_nologin;
CREATE SCHEMA hooks;
GRANT USAGE ON SCHEMA hooks TO PUBLIC;
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

CREATE TABLE hooks.called (hook text, name text, n bigint GENERATED ALWAYS AS IDENTITY);
GRANT ALL ON hooks.called TO PUBLIC;
CREATE FUNCTION hooks.one(m outbox.message) RETURNS void LANGUAGE sql AS
    $$ INSERT INTO hooks.called VALUES ('one', m.name) $$;
CREATE FUNCTION hooks.two(m outbox.message) RETURNS integer LANGUAGE sql AS
    $$ INSERT INTO hooks.called VALUES ('two', m.name) RETURNING 2 $$;
CREATE FUNCTION hooks.two(m outbox.message, more integer) RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION hooks.two(m outbox.claimed_message) RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION hooks."a.b(c" (m outbox.message) RETURNS void LANGUAGE sql AS
    $$ INSERT INTO hooks.called VALUES ('quoted', m.name) $$;
CREATE PROCEDURE hooks.procedure(m outbox.message) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION hooks.set(m outbox.message) RETURNS SETOF integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION hooks.none() RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.wrong(m text) RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.optional(m outbox.message, more integer DEFAULT 1) RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.any_type(m anyelement) RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.many(VARIADIC m outbox.message[]) RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.with_out(m outbox.message, OUT r integer) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION hooks.step(integer, outbox.message) RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE AGGREGATE hooks.aggregate(outbox.message) (SFUNC = hooks.step, STYPE = integer);
CREATE FUNCTION pg_temp.temporary(m outbox.message) RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION hooks.private(m outbox.message) RETURNS void LANGUAGE sql AS $$ SELECT $$;
REVOKE ALL ON FUNCTION hooks.private FROM PUBLIC;

-- Nobody delivers without a worker: said once in a transaction, at its end.
BEGIN;
SELECT outbox.register_hook('first', 'hooks.one');
SELECT outbox.register_hook('second', 'hooks.one');
-- the hint depends on whether the library is preloaded
\set VERBOSITY terse
COMMIT;
\set VERBOSITY default
BEGIN;
SELECT outbox.register_hook('third', 'hooks.one');
ROLLBACK;
SELECT name_pattern, function, role = current_user AS mine, state FROM outbox.handlers ORDER BY name_pattern;
SELECT name, mode, handlers FROM outbox.subscriptions;
SELECT outbox.unregister('first'), outbox.unregister('second'), outbox.unregister('second');
SELECT name, mode, handlers FROM outbox.subscriptions;

-- The function: named with or without schema and arguments, found by the caller's search_path.
SET client_min_messages = warning;
SELECT outbox.register_hook('f1', 'hooks.two'), outbox.register_hook('f2', 'hooks.two(outbox.message)'),
       outbox.register_hook('f3', ' Hooks.Two ( outbox.message ) '), outbox.register_hook('f4', 'hooks."a.b(c"'),
       outbox.register_hook('f5', 'hooks.with_out');
SET search_path = outbox, hooks, public;
SELECT outbox.register_hook('f6', 'one'), outbox.register_hook('f7', '"a.b(c"(message)'),
       outbox.register_hook('f8', 'two(message)');
RESET search_path;
SELECT name_pattern, function, channel, search_path FROM outbox.handlers ORDER BY name_pattern;
SELECT function, pg_temp.try(format('SELECT outbox.register_hook(%L, %L)', 'refused', function))
  FROM unnest(ARRAY['one', 'hooks.missing', 'nowhere.one', 'hooks.one(text)', 'hooks.one()', 'hooks.one(', 'hooks..one',
                    'a.b.c.d', '', ' ', '-', '12345', 'hooks.procedure', 'hooks.procedure(outbox.message)', 'hooks.set',
                    'hooks.set(outbox.message)', 'hooks.none', 'hooks.wrong', 'hooks.wrong(text)', 'hooks.optional',
                    'hooks.any_type', 'hooks.any_type(anyelement)', 'hooks.many', 'hooks.aggregate', 'pg_temp.temporary',
                    'hooks.two(outbox.message, integer)', 'hooks.two(outbox.claimed_message)',
                    'rank', 'hooks.one; DROP TABLE x']) AS function;
SELECT pg_temp.try($$ SELECT outbox.register_hook('refused', NULL) $$);
SELECT count(*) FROM outbox.handlers WHERE name_pattern = 'refused';
SELECT outbox.unsubscribe('default');
SELECT outbox.subscribe('default');

-- The same again is unchanged; something else needs replace.
SELECT outbox.register_hook('order.*', 'hooks.one', timeout => '90 s', max_attempts => 4, retry => '{1 s, 1 min}');
SELECT outbox.register_hook('order.*', 'hooks.one', timeout => '1 min 30 s', max_attempts => 4, retry => '{1000 ms, 60 s}');
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.*', 'hooks.two') $$);
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.*', 'hooks.one') $$);
SELECT pg_temp.try($$ SELECT outbox.register_notify('order.*', 'orders') $$);
SELECT outbox.register_hook('order.*', 'hooks.two', replace => true);
SELECT outbox.register_notify('order.*', 'orders', include_data => true, replace => true);
SELECT outbox.register_notify('order.*', 'orders', include_data => true);
SELECT pg_temp.try($$ SELECT outbox.register_notify('order.*', 'orders') $$);
SELECT name_pattern, function, channel, include_data, timeout_seconds, max_attempts, retry_seconds FROM outbox.handlers;
SELECT outbox.register_hook('order.*', 'hooks.one', replace => true, retry => '{1 s, 1 min}', timeout => '1.5 s');
SELECT name_pattern, function, channel, include_data, timeout_seconds, max_attempts, retry_seconds FROM outbox.handlers;
-- another search_path alone is no other definition, but replace records it
SET search_path = hooks;
SELECT outbox.register_hook('order.*', 'one', retry => '{1 s, 1 min}', timeout => '1.5 s');
SELECT search_path FROM outbox.handlers;
SELECT outbox.register_hook('order.*', 'one', retry => '{1 s, 1 min}', timeout => '1.5 s', replace => true);
SELECT search_path FROM outbox.handlers;
RESET search_path;
SELECT outbox.unregister('order.*', kind => 'event'), outbox.unregister('order.*', version => 1),
       outbox.unregister('order.#'), outbox.unregister('order.*', NULL, NULL, NULL);

-- Only one handler gets a message: it is said where two match.
RESET client_min_messages;
BEGIN;
SELECT outbox.register_hook('#', 'hooks.one');
SELECT outbox.register_hook('order.created', 'hooks.one');
SELECT outbox.register_hook('order.*', 'hooks.one');
SELECT outbox.register_hook('order.*', 'hooks.one');
SELECT outbox.register_hook('order.#', 'hooks.one', kind => 'command');
SELECT outbox.register_hook('user.*', 'hooks.one', kind => 'event', version => 2);
SELECT outbox.register_hook('user.*', 'hooks.one', kind => 'command', version => 2);
ROLLBACK;

-- Which one: the version, the exact name, more words, the longer text, the kind.
SET client_min_messages = warning;
CREATE FUNCTION hooks.say(text, outbox.message) RETURNS void LANGUAGE sql AS
    $$ INSERT INTO hooks.called VALUES ($1, format('%s/%s/%s', ($2).name, ($2).kind, ($2).version)) $$;
DO $$
DECLARE
    h record;
BEGIN
    FOR h IN SELECT * FROM (VALUES
            ('any', '#', NULL, NULL), ('two_words', 'order.#', NULL, NULL), ('star', 'order.*', NULL, NULL),
            ('exact', 'order.created', NULL, NULL), ('exact_kind', 'order.created', 'command', NULL),
            ('version', '#', NULL, 7), ('exact_version', 'order.created', NULL, 7),
            ('three', 'order.*.paid', NULL, NULL), ('three_hash', '#.eu.paid', NULL, NULL),
            ('kind', '#', 'command', NULL)) v (label, pattern, kind, version) LOOP
        EXECUTE format('CREATE FUNCTION hooks.%I(m outbox.message) RETURNS void LANGUAGE sql AS %L',
                       'h_' || h.label, format('SELECT hooks.say(%L, m)', h.label));
        PERFORM outbox.register_hook(h.pattern, 'hooks.h_' || h.label, kind => h.kind, version => h.version);
    END LOOP;
END
$$;
SELECT count(outbox.enqueue(name, '{}', kind => kind, version => version))
  FROM (VALUES ('order.created', NULL, NULL), ('order.created', 'command', NULL), ('order.created', 'command', 7),
               ('order.sent', NULL, NULL), ('order.sent', 'command', NULL), ('order.sent', NULL, 7),
               ('order', NULL, NULL), ('order.eu.paid', NULL, NULL), ('x.eu.paid', NULL, NULL), ('order.us.paid', NULL, NULL),
               ('user', NULL, NULL), ('user', 'command', NULL)) m (name, kind, version);
SELECT outbox.deliver() IS NOT NULL AS delivered;
SELECT name, hook FROM hooks.called ORDER BY name COLLATE "C";
TRUNCATE hooks.called;

-- What is pushed is not claimed, and the other way round.
SELECT pg_temp.try($$ SELECT * FROM outbox.claim_batch() $$);
SELECT outbox.subscribe('pulled', 'order.*', kind => 'event');
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'pulled');
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.*', 'hooks.one', 'pulled') $$);
SELECT pg_temp.try($$ SELECT outbox.register_notify('order.*', 'orders', 'pulled') $$);
SELECT name, mode, handlers FROM outbox.subscriptions ORDER BY name;
-- a claim that finds nothing, or is rolled back, fixes nothing
SELECT outbox.subscribe('open', 'open.*');
SELECT count(*) FROM outbox.claim_batch(subscription => 'open');
SELECT outbox.enqueue('open.1', '{}') IS NOT NULL;
BEGIN;
SELECT count(*) FROM outbox.claim_batch(subscription => 'open');
SELECT pg_temp.try($$ SELECT outbox.register_hook('#', 'hooks.one', 'open') $$);
ROLLBACK;
SELECT outbox.register_hook('#', 'hooks.one', 'open');
SELECT pg_temp.try($$ SELECT * FROM outbox.claim_batch(subscription => 'open') $$);

-- Without a handler a message is kept, and ready again with the next registration.
SELECT outbox.unregister('#', 'open');
SELECT mode FROM outbox.subscriptions WHERE name = 'open';
SELECT outbox.register_hook('open.2', 'hooks.one', 'open');
SELECT count(outbox.enqueue('open.3', '{}')) FROM generate_series(1, 3);
SELECT outbox.deliver('open') IS NOT NULL AS delivered;
SELECT ready, unhandled, delivered FROM outbox.status WHERE subscription = 'open';
SELECT outbox.register_hook('open.3', 'hooks.one', 'open');
SELECT ready, unhandled, delivered FROM outbox.status WHERE subscription = 'open';
SELECT outbox.deliver('open') IS NOT NULL AS delivered;
SELECT ready, unhandled, delivered FROM outbox.status WHERE subscription = 'open';
SELECT name, hook FROM hooks.called ORDER BY n;
-- or with the last handler's end, which makes it free to be claimed
SELECT outbox.unregister('open.3', 'open'), outbox.unregister('open.2', 'open');
SELECT name, attempts FROM outbox.claim_batch(subscription => 'open');
SELECT mode FROM outbox.subscriptions WHERE name = 'open';

-- A function that goes and comes back.
SELECT outbox.subscribe('broken', 'broken', from_earliest => false);
CREATE FUNCTION hooks.fragile(m outbox.message) RETURNS void LANGUAGE sql AS $$ SELECT $$;
SELECT outbox.register_hook('broken', 'hooks.fragile', 'broken');
DROP FUNCTION hooks.fragile;
SELECT outbox.enqueue('broken', '{}') IS NOT NULL;
SELECT outbox.deliver('broken') IS NOT NULL AS delivered;
SELECT state, broken_since IS NOT NULL AS since FROM outbox.handlers WHERE subscription = 'broken';
SELECT unhandled, dead, delivered FROM outbox.status WHERE subscription = 'broken';
CREATE PROCEDURE hooks.fragile(m outbox.message) LANGUAGE sql AS $$ SELECT 1 $$;
SELECT state FROM outbox.handlers WHERE subscription = 'broken';
DROP PROCEDURE hooks.fragile;
CREATE FUNCTION hooks.fragile(m outbox.message) RETURNS void LANGUAGE sql AS $$ SELECT $$;
SELECT outbox.register_hook('broken', 'hooks.fragile', 'broken');
SELECT state, broken_since IS NOT NULL AS since FROM outbox.handlers WHERE subscription = 'broken';
SELECT outbox.deliver('broken') IS NOT NULL AS delivered;
SELECT unhandled, dead, delivered FROM outbox.status WHERE subscription = 'broken';

-- unregistered, it leaves what was parked for it to the others
DROP FUNCTION hooks.fragile;
SELECT outbox.register_hook('#', 'hooks.one', 'broken');
SELECT outbox.enqueue('broken', '{}') IS NOT NULL;
SELECT outbox.deliver('broken') IS NOT NULL AS delivered;
SELECT unhandled, ready, delivered FROM outbox.status WHERE subscription = 'broken';
SELECT outbox.unregister('broken', 'broken');
SELECT outbox.deliver('broken') IS NOT NULL AS delivered;
SELECT unhandled, ready, delivered FROM outbox.status WHERE subscription = 'broken';

-- Whose: the role of the first registration, who must be able to log in.
SELECT outbox.grant_access('regress_billing', 'consumer'), outbox.grant_access('regress_other', 'consumer'),
       outbox.grant_access('regress_nologin', 'consumer');
SELECT outbox.subscribe('billing', 'order.*', from_earliest => false);
SET ROLE regress_nologin;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.paid', 'hooks.one', 'billing') $$);
RESET ROLE;
DO $$ BEGIN EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', current_database()); END $$;
SET ROLE regress_billing;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.paid', 'hooks.one', 'billing') $$) LIKE '55000: role "regress_billing" cannot connect%';
RESET ROLE;
DO $$ BEGIN EXECUTE format('GRANT CONNECT ON DATABASE %I TO PUBLIC', current_database()); END $$;
SET ROLE regress_billing;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.paid', 'hooks.private', 'billing') $$);
SELECT outbox.register_hook('order.paid', 'hooks.one', 'billing');
SET ROLE regress_other;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.sent', 'hooks.one', 'billing') $$);
SELECT pg_temp.try($$ SELECT outbox.unregister('order.paid', 'billing') $$);
RESET ROLE;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.sent', 'hooks.one', 'billing') $$) LIKE '42501%';
GRANT regress_billing TO regress_other;
SET ROLE regress_other;
SELECT outbox.unregister('order.paid', 'billing');
SELECT outbox.register_hook('order.sent', 'hooks.one', 'billing');
RESET ROLE;
REVOKE regress_billing FROM regress_other;
SELECT subscription, name_pattern, role FROM outbox.handlers WHERE subscription = 'billing';

-- what it needs to connect it may lose, and its name it may change; a dump names it as it is called now
ALTER ROLE regress_other NOLOGIN;
SELECT role, state FROM outbox.handlers WHERE subscription = 'billing';
ALTER ROLE regress_other LOGIN;
DO $$ BEGIN EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', current_database()); END $$;
SELECT role, state FROM outbox.handlers WHERE subscription = 'billing';
DO $$ BEGIN EXECUTE format('GRANT CONNECT ON DATABASE %I TO PUBLIC', current_database()); END $$;
SELECT outbox.revoke_access('regress_other', 'consumer'), outbox.grant_access('regress_other', 'consumer', 'billing');
ALTER ROLE regress_other RENAME TO regress_renamed;
SELECT outbox.maintain() IS NOT NULL AS maintained;
SELECT role, state FROM outbox.handlers WHERE subscription = 'billing';
SELECT role_name FROM outbox.access WHERE subscription = 'billing';
ALTER ROLE regress_renamed RENAME TO regress_other;
SELECT outbox.maintain() IS NOT NULL AS maintained;
SELECT role, state FROM outbox.handlers WHERE subscription = 'billing';
SELECT outbox.grant_access('regress_other', 'consumer');

-- a role that is dropped leaves handlers that a superuser can remove
CREATE ROLE regress_dropped LOGIN;
SELECT outbox.grant_access('regress_dropped', 'consumer');
SELECT outbox.subscribe('dropped', from_earliest => false);
SET ROLE regress_dropped;
SELECT outbox.register_hook('#', 'hooks.one', 'dropped');
RESET ROLE;
DROP OWNED BY regress_dropped;
DROP ROLE regress_dropped;
SELECT name_pattern, state FROM outbox.handlers WHERE subscription = 'dropped';
SET ROLE regress_other;
SELECT pg_temp.try($$ SELECT outbox.register_hook('order.sent', 'hooks.one', 'dropped') $$);
SELECT pg_temp.try($$ SELECT outbox.unregister('#', 'dropped') $$);
RESET ROLE;
SELECT outbox.unregister('#', 'dropped');

-- Who can write the table by other means cannot make others run anything.
GRANT pg_write_all_data, pg_read_all_data TO regress_billing;
SET ROLE regress_billing;
SELECT pg_temp.try($$ UPDATE outbox.handler SET function = 'hooks.private' WHERE role_name = 'regress_other' $$);
SELECT pg_temp.try($$ DELETE FROM outbox.handler WHERE role_name = 'regress_other' $$);
SELECT pg_temp.try($$ INSERT INTO outbox.handler (subscription_id, name_pattern, function, role_name, role_oid, search_path, created_at)
    SELECT id, 'x', 'hooks.one', 'regress_other', CAST('regress_billing' AS regrole), '', now() FROM outbox.subscription WHERE name = 'billing' $$);
SELECT pg_temp.try($$ INSERT INTO outbox.access (role_name, role_oid) VALUES ('regress_billing', CAST('regress_billing' AS regrole)) $$);
SELECT pg_temp.try($$ DELETE FROM outbox.access $$);
RESET ROLE;
-- nor where triggers do not fire
SET session_replication_role = replica;
SET ROLE regress_billing;
SELECT pg_temp.try($$ DELETE FROM outbox.handler WHERE role_name = 'regress_other' $$);
RESET ROLE;
RESET session_replication_role;
-- a row that a superuser restores belongs to the role of its name, or to nobody
BEGIN;
INSERT INTO outbox.handler (subscription_id, name_pattern, function, role_name, role_oid, search_path, created_at)
    SELECT id, p, 'hooks.one', r, 10, '', now()
      FROM outbox.subscription, (VALUES ('x', 'regress_other'), ('y', 'regress_nobody')) v (p, r) WHERE name = 'billing';
UPDATE outbox.handler SET function = 'hooks.two' WHERE name_pattern IN ('x', 'y');
SELECT name_pattern, role_oid = coalesce(CAST(to_regrole(CAST(role_name AS text)) AS oid), 0) AS right_role
  FROM outbox.handler WHERE name_pattern IN ('x', 'y') ORDER BY name_pattern;
SELECT name_pattern, state FROM outbox.handlers WHERE name_pattern IN ('x', 'y') ORDER BY name_pattern;
-- and what it names need not make sense
DO $$
DECLARE
    f text;
BEGIN
    FOREACH f IN ARRAY ARRAY['one', 'a.b.c', '..', '"', '', 'hooks.', 'hooks.one(outbox.message)', 'hooks.one, hooks.two'] LOOP
        UPDATE outbox.handler SET function = f WHERE name_pattern = 'x';
        ASSERT (SELECT state FROM outbox.handlers WHERE name_pattern = 'x') = 'broken', f;
    END LOOP;
END
$$;
ROLLBACK;

-- Bad arguments: nothing changes.
SELECT call, pg_temp.try('SELECT outbox.' || call)
  FROM unnest(ARRAY[
       $$register_hook(NULL, 'hooks.one')$$, $$register_hook('', 'hooks.one')$$, $$register_hook('a..b', 'hooks.one')$$,
       $$register_hook('a*', 'hooks.one')$$, $$register_hook(repeat('a', 256), 'hooks.one')$$,
       $$register_hook('bad', 'hooks.one', 'nobody')$$, $$register_hook('bad', 'hooks.one', ' ')$$,
       $$register_hook('bad', 'hooks.one', kind => ' ')$$, $$register_hook('bad', 'hooks.one', version => 0)$$,
       $$register_hook('bad', 'hooks.one', version => -1)$$, $$register_hook('bad', 'hooks.one', timeout => '0')$$,
       $$register_hook('bad', 'hooks.one', timeout => '-1 s')$$, $$register_hook('bad', 'hooks.one', timeout => '1 year')$$,
       $$register_hook('bad', 'hooks.one', max_attempts => 0)$$, $$register_hook('bad', 'hooks.one', retry => '{}')$$,
       $$register_hook('bad', 'hooks.one', retry => '{NULL}')$$, $$register_hook('bad', 'hooks.one', retry => '{1 s, -1 s}')$$,
       $$register_hook('bad', 'hooks.one', retry => '{{1 s}, {2 s}}')$$,
       $$register_hook('bad', 'hooks.one', retry => array_fill(interval '1 s', '{101}'))$$,
       $$register_notify('bad', NULL)$$, $$register_notify('bad', '')$$, $$register_notify('bad', repeat('c', 64))$$,
       $$register_notify('bad', 'c', 'nobody')$$, $$register_notify(NULL, 'c')$$, $$register_notify('bad', 'c', version => 0)$$,
       $$unregister(NULL)$$, $$unregister('a', 'nobody')$$, $$unregister('a..b')$$, $$unregister('nothing')$$]) AS call;
SELECT count(*) FROM outbox.handlers WHERE name_pattern = 'bad';
BEGIN READ ONLY;
SELECT outbox.register_hook('bad', 'hooks.one');
ROLLBACK;

DROP SCHEMA hooks CASCADE;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
DROP ROLE regress_billing, regress_other, regress_nologin;
