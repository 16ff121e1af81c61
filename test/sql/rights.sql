-- rights: what roles try who want more than they were given; each of these must stay in vain.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
SELECT current_user AS superuser \gset
CREATE ROLE regress_mallory LOGIN;
CREATE SCHEMA mallory AUTHORIZATION regress_mallory;
CREATE TABLE mallory.loot (what text);
ALTER TABLE mallory.loot OWNER TO regress_mallory;
CREATE FUNCTION mallory.take_loot() RETURNS text LANGUAGE sql AS $$
    WITH gone AS (DELETE FROM mallory.loot RETURNING what) SELECT string_agg(what, ', ' ORDER BY what) FROM gone
$$;
SELECT outbox.grant_access('regress_mallory', 'consumer');

-- A hook that becomes who the session has logged in as: nobody else's session calls it.
\c - regress_mallory
SET client_min_messages = warning;
CREATE FUNCTION mallory.climb(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        EXECUTE m.payload #>> '{}';
        INSERT INTO mallory.loot SELECT r.rolname FROM pg_roles r WHERE r.rolname = current_user AND r.rolsuper;
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    RESET ROLE;
END
$$;
SELECT outbox.register_hook('climb', 'mallory.climb');
\c - :superuser
SET client_min_messages = warning;
SELECT count(outbox.enqueue('climb', to_jsonb(way)))
  FROM unnest(ARRAY['RESET SESSION AUTHORIZATION', 'SET SESSION AUTHORIZATION DEFAULT', 'RESET ROLE',
                    format('SET LOCAL SESSION AUTHORIZATION %I', current_user), format('SET LOCAL ROLE %I', current_user)]) way;
SET SESSION AUTHORIZATION regress_mallory;
SELECT claimed, left_over FROM outbox.deliver();
CALL outbox.drain();
RESET SESSION AUTHORIZATION;
SET ROLE regress_mallory;
SELECT claimed, left_over FROM outbox.deliver();
RESET ROLE;
\c - regress_mallory
SET client_min_messages = warning;
SELECT claimed, delivered, left_over FROM outbox.deliver();
\c - :superuser
SET client_min_messages = warning;
SELECT mallory.take_loot();

-- What is taken away is taken from handlers too.
SELECT outbox.revoke_access('regress_mallory', 'consumer');
SELECT state FROM outbox.handlers WHERE role = 'regress_mallory';
-- from an operator's too, who may call drain() and has no limits to subscriptions any more
SELECT outbox.subscribe('other');
SELECT outbox.grant_access('regress_mallory', 'operator'), outbox.grant_access('regress_mallory', 'consumer', 'other');
SELECT state FROM outbox.handlers WHERE role = 'regress_mallory';
SELECT outbox.revoke_access('regress_mallory', 'consumer', 'other');
SELECT state FROM outbox.handlers WHERE role = 'regress_mallory';
SELECT what, remedy FROM outbox.check() WHERE subject = 'role "regress_mallory"';
SELECT FROM outbox.enqueue('climb', '"RESET ROLE"');
\c - regress_mallory
SET client_min_messages = warning;
SELECT claimed, left_over FROM outbox.deliver();
CALL outbox.drain();
\c - :superuser
SET client_min_messages = warning;
SELECT ready FROM outbox.status WHERE subscription = 'default';
SELECT outbox.discard(id), outbox.revoke_access('regress_mallory', 'operator') FROM outbox.messages WHERE subscription = 'default' AND status = 'ready';
SELECT outbox.unsubscribe('other', true);
GRANT USAGE ON SCHEMA outbox TO regress_mallory;
GRANT EXECUTE ON FUNCTION outbox.register_hook TO regress_mallory;
\c - regress_mallory
SET client_min_messages = warning;
CALL outbox.drain();
SELECT outbox.register_hook('other', 'mallory.climb');
\c - :superuser
SET client_min_messages = warning;
SELECT outbox.subscribe('theirs', 'their.*', from_earliest => false);
SELECT outbox.grant_access('regress_mallory', 'consumer', 'theirs');
SELECT state FROM outbox.handlers WHERE role = 'regress_mallory';
SELECT outbox.grant_access('regress_mallory', 'consumer', 'default');
SELECT state FROM outbox.handlers WHERE role = 'regress_mallory';

-- Readers and operators see no payload: not by get(), not by leaky functions, not in what errors quote.
SELECT outbox.reset() > 0;
CREATE TABLE mallory.unique_secret (secret text PRIMARY KEY);
CREATE FUNCTION mallory.fails(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('INSERT INTO mallory.unique_secret VALUES (%1$L), (%1$L)', m.payload);
END
$$;
SELECT outbox.subscribe('fails', 'fails'), outbox.register_hook('fails', 'mallory.fails', 'fails', max_attempts => 1);
SELECT outbox.enqueue('fails', '"the secret"', headers => '{"h": "the secret"}', id => '00000000-0000-7000-8000-00000000000a') IS NOT NULL;
SELECT dead FROM outbox.deliver('fails');
SELECT last_error::text LIKE '%the secret%' AS quoted FROM outbox.dead_letters;
SELECT outbox.revoke_access('regress_mallory', 'consumer');
CREATE FUNCTION mallory.leak(value text) RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS $$
BEGIN
    IF value LIKE '%secret"%' THEN
        RAISE WARNING 'leaked: %', value;
    END IF;
    RETURN true;
END
$$;
CREATE FUNCTION mallory.look() RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    seen text;
    view text;
    views integer := 0;
BEGIN
    FOR view IN SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('outbox') AND relkind = 'v' AND has_table_privilege(oid, 'SELECT') LOOP
        EXECUTE format('SELECT string_agg(to_jsonb(v)::text, E''\n'') FROM outbox.%I v WHERE mallory.leak(v::text)', view) INTO seen;
        views := views + 1;
        IF seen LIKE '%the secret%' THEN
            RETURN NEXT view || ' shows it';
        END IF;
    END LOOP;
    RETURN NEXT format('at least seven views: %s', views >= 7);
    SELECT string_agg(d::text, ' ') INTO seen FROM outbox.log_of('{[0,9223372036854775806]}') l, outbox.deliveries_of(l.position, l.name, l.kind) d WHERE mallory.leak(d::text);
    RETURN NEXT format('deliveries_of: %s', coalesce(seen LIKE '%the secret%', false));
    SELECT string_agg(l::text, ' ') INTO seen FROM outbox.log_of('{[0,9223372036854775806]}') l WHERE mallory.leak(l::text);
    RETURN NEXT format('log_of: %s', coalesce(seen LIKE '%the secret%', false));
    SELECT string_agg(p::text, ' ') INTO seen FROM pg_stats p WHERE schemaname = 'outbox';
    RETURN NEXT format('pg_stats: %s', seen IS NOT NULL);
    BEGIN
        SELECT m::text INTO seen FROM outbox.get('00000000-0000-7000-8000-00000000000a') m;
        RETURN NEXT 'get: ' || seen;
    EXCEPTION WHEN insufficient_privilege THEN
        RETURN NEXT SQLERRM;
    END;
END
$$;
ANALYZE outbox.log_0, outbox.delivery;
SELECT outbox.grant_access('regress_mallory', 'reader');
SET ROLE regress_mallory;
SELECT mallory.look();
RESET ROLE;
SELECT outbox.revoke_access('regress_mallory', 'reader'), outbox.grant_access('regress_mallory', 'operator');
SET ROLE regress_mallory;
SELECT mallory.look();
SELECT last_error_sqlstate, last_error_message, last_error - 'message' AS rest FROM outbox.dead_letters;
RESET ROLE;
-- granted, they do
GRANT SELECT ON outbox.log TO regress_mallory;
SET ROLE regress_mallory;
SELECT payload, headers, last_error ->> 'detail' AS detail FROM outbox.dead_letters;
SELECT payload, last_error ? 'context' AS context FROM outbox.messages WHERE subscription = 'fails';
RESET ROLE;
REVOKE SELECT ON outbox.log FROM regress_mallory;
-- nor do producers see what is stored
SELECT outbox.revoke_access('regress_mallory', 'operator'), outbox.grant_access('regress_mallory', 'producer');
SET ROLE regress_mallory;
SELECT count(*) FROM outbox.outgoing;
SELECT count(*) FROM outbox.enqueued();
SELECT outbox.enqueue('fails', '1', id => '00000000-0000-7000-8000-00000000000a');
INSERT INTO outbox.outgoing (name, payload, id) VALUES ('fails', '1', '00000000-0000-7000-8000-00000000000a');
UPDATE outbox.outgoing SET name = 'other';
RESET ROLE;
SELECT outbox.revoke_access('regress_mallory', 'producer');

-- A handler is shown as the role's that has it, whatever it was called once.
ALTER ROLE regress_mallory RENAME TO regress_renamed;
CREATE ROLE regress_mallory;
SELECT role FROM outbox.handlers WHERE subscription = 'default';
SELECT role FROM outbox.subscriptions WHERE name = 'default';
DROP ROLE regress_mallory;
ALTER ROLE regress_renamed RENAME TO regress_mallory;

-- What belongs to others is neither settled, renewed nor held up; what is held when a right ends is not settled either.
CREATE FUNCTION mallory.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE statement;
    RETURN 'done';
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;
SELECT outbox.reset() IS NOT NULL, outbox.unsubscribe('default', true) IS NOT NULL, outbox.subscribe('mine', '#');
SELECT outbox.grant_access('regress_mallory', 'consumer', 'theirs'), count(outbox.enqueue('their.s', '1')) FROM generate_series(1, 2);
SELECT id, claim_token AS token FROM outbox.claim_batch(1, subscription => 'mine') \gset mine_
SET ROLE regress_mallory;
SELECT id, claim_token AS token FROM outbox.claim_batch(1, subscription => 'theirs') \gset theirs_
SELECT mallory.try(format('SELECT outbox.%s', call)) FROM unnest(ARRAY[
    format('settle(%L, %L)', :'mine_id', :'mine_token'), format('settle_batch(%L)', :'mine_token'), format('renew(%L, %L)', :'mine_id', :'mine_token'),
    format('renew_batch(%L)', :'mine_token'), 'claim_batch(subscription => ''mine'')', format('settle(%L, %L)', :'theirs_id', gen_random_uuid()),
    'deliver(''mine'')', 'register_notify(''#'', ''c'', ''mine'')', 'register_notify(''#'', ''c'', ''mine'', replace => true)', 'unregister(''#'', ''mine'')',
    'pause(''mine'')', 'revoke_lease(''mine'', ''w'')']) call;
RESET ROLE;
SELECT leased FROM outbox.status WHERE subscription = 'mine';
SELECT outbox.settle(:'mine_id', :'mine_token');
SELECT outbox.revoke_access('regress_mallory', 'consumer', 'theirs');
SET ROLE regress_mallory;
SELECT mallory.try(format('SELECT outbox.%s', call)) FROM unnest(ARRAY[format('settle(%L, %L)', :'theirs_id', :'theirs_token'),
    format('renew_batch(%L)', :'theirs_token'), 'claim_batch(subscription => ''theirs'')', format('get(%L)', :'theirs_id')]) call;
RESET ROLE;
SELECT outbox.grant_access('regress_mallory', 'consumer', 'mine');
SET ROLE regress_mallory;
SELECT mallory.try(format('SELECT outbox.settle(%L, %L)', :'theirs_id', :'theirs_token'));
RESET ROLE;

-- A dedupe key is everybody's within its name: who comes second sees that nothing was queued, and does not see what was.
SELECT outbox.enqueue('shared', '"of the first"', dedupe_key => 'k') AS first \gset
SELECT outbox.revoke_access('regress_mallory', 'consumer', 'mine'), outbox.grant_access('regress_mallory', 'producer');
SET ROLE regress_mallory;
BEGIN;
SELECT outbox.enqueue('shared', '"of the second"', dedupe_key => 'k') = :'first' AS same, (SELECT count(*) FROM outbox.enqueued()) AS enqueued;
SELECT mallory.try(format('SELECT outbox.get(%L)', :'first'));
ROLLBACK;
RESET ROLE;
SELECT outbox.revoke_access('regress_mallory', 'producer');

-- Who may read all tables and is not given a kind of access sees a view's rows or an error, never an empty view that is none.
CREATE FUNCTION mallory.rows(view text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    n bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM outbox.%I', view) INTO n;
    RETURN CASE WHEN n > 0 THEN 'rows' ELSE 'empty' END;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE;
END
$$;
CREATE TABLE mallory.views AS SELECT relname AS view, mallory.rows(relname) AS here
  FROM pg_class WHERE relnamespace = to_regnamespace('outbox') AND relkind = 'v';
GRANT SELECT ON mallory.views TO regress_mallory;
GRANT pg_read_all_data TO regress_mallory;
SET ROLE regress_mallory;
SELECT view, here, mallory.rows(view) AS there FROM mallory.views WHERE mallory.rows(view) NOT IN (here, '42501') ORDER BY 1;
SELECT count(*) > 3 AS some_have_rows FROM mallory.views WHERE here = 'rows';
RESET ROLE;
REVOKE pg_read_all_data FROM regress_mallory;
DROP TABLE mallory.views;

-- With every kind of access the tables are closed, the views only for reading, and nothing of ours can be put to other use.
SELECT count(outbox.grant_access('regress_mallory', kind)) FROM unnest(ARRAY['producer', 'consumer', 'operator', 'reader']) kind;
SET ROLE regress_mallory;
CREATE TABLE mallory.own (id bigint, position bigint);
SELECT DISTINCT left(mallory.try(format(statement, c.relname)), 5) AS error, statement
  FROM pg_class c, unnest(ARRAY['SELECT FROM outbox.%I', 'SELECT FROM outbox.%I FOR UPDATE', 'INSERT INTO outbox.%I DEFAULT VALUES',
       'DELETE FROM outbox.%I', 'TRUNCATE outbox.%I', 'LOCK TABLE outbox.%I IN ACCESS SHARE MODE', 'LOCK TABLE outbox.%I',
       'CREATE INDEX ON outbox.%I ((true))', 'CREATE TRIGGER t BEFORE INSERT ON outbox.%I FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
       'CREATE RULE r AS ON INSERT TO outbox.%I DO INSTEAD NOTHING', 'CREATE POLICY p ON outbox.%I', 'ALTER TABLE outbox.%I DISABLE TRIGGER ALL',
       'ALTER TABLE outbox.%I ADD x integer', 'CREATE TABLE mallory.child () INHERITS (outbox.%I)', 'COPY outbox.%I TO PROGRAM ''cat''',
       'CREATE PUBLICATION p FOR TABLE outbox.%I', 'VACUUM outbox.%I', 'COMMENT ON TABLE outbox.%I IS ''x''', 'DROP TABLE outbox.%I']) AS statement
 WHERE c.relnamespace = CAST('outbox' AS regnamespace) AND c.relkind = 'r'
 ORDER BY 2, 1;
SELECT DISTINCT left(mallory.try(format(statement, c.relname)), 5) AS error, statement
  FROM pg_class c, unnest(ARRAY['SELECT FROM outbox.%I FOR UPDATE', 'DELETE FROM outbox.%I', 'LOCK TABLE outbox.%I IN ROW SHARE MODE',
       'LOCK TABLE outbox.%I', 'CREATE TRIGGER t INSTEAD OF INSERT ON outbox.%I FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
       'CREATE OR REPLACE VIEW outbox.%I AS SELECT 1', 'ALTER VIEW outbox.%I SET (security_barrier = on)']) AS statement
 WHERE c.relnamespace = CAST('outbox' AS regnamespace) AND c.relkind = 'v' AND c.relname NOT IN ('log', 'outgoing')
 ORDER BY 2, 1;
SELECT statement, left(mallory.try(statement), 5) AS error FROM unnest(ARRAY[
    'CREATE VIEW mallory.through AS SELECT * FROM outbox.delivery; SELECT FROM mallory.through',
    'CREATE FUNCTION outbox.enqueue(text, text) RETURNS uuid LANGUAGE sql AS ''SELECT NULL::uuid''',
    'CREATE TRIGGER t BEFORE INSERT ON mallory.own FOR EACH ROW EXECUTE FUNCTION outbox.guard_role()',
    'CREATE TRIGGER t BEFORE INSERT ON mallory.own FOR EACH ROW EXECUTE FUNCTION outbox.delivery_changed()',
    'CREATE TABLE mallory.referring (id bigint REFERENCES outbox.delivery)',
    'ALTER EXTENSION outbox DROP FUNCTION outbox.enqueue_batch(jsonb)', 'DROP EXTENSION outbox', 'ALTER EXTENSION outbox ADD FUNCTION mallory.look()',
    'SELECT outbox.grant_access(''regress_mallory'', ''reader'')', 'SELECT outbox.revoke_access(''regress_mallory'', ''reader'')',
    'SELECT outbox.announce()', 'SELECT outbox.reset()', 'SET outbox.clock_offset = 1', 'SET outbox.max_attempts = 1', 'SET outbox.enabled = off']) AS statement;
RESET ROLE;

-- Who may write all tables writes handlers for himself only, and no access.
GRANT pg_write_all_data TO regress_mallory;
SET ROLE regress_mallory;
SELECT mallory.try(format('INSERT INTO outbox.handler (subscription_id, name_pattern, function, role_name, role_oid, search_path, created_at)
                           VALUES (1, ''#'', ''mallory.climb'', %L, %s, '''', now())', r.rolname, s.oid))
  FROM pg_roles r, pg_roles s WHERE r.rolname IN ('pg_monitor') AND s.rolname IN ('regress_mallory', 'pg_monitor');
SELECT mallory.try('INSERT INTO outbox.access (role_name, role_oid) VALUES (''regress_mallory'', 0)'), mallory.try('DELETE FROM outbox.access'),
       mallory.try('UPDATE outbox.access SET subscription = NULL');
RESET ROLE;
REVOKE pg_write_all_data FROM regress_mallory;

-- What was granted before the extension was there, or is granted by default, is gone with its creation.
DROP EXTENSION outbox CASCADE;
CREATE SCHEMA outbox;
GRANT ALL ON SCHEMA outbox TO regress_mallory WITH GRANT OPTION;
SET ROLE regress_mallory;
GRANT CREATE ON SCHEMA outbox TO PUBLIC;
RESET ROLE;
BEGIN;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO regress_mallory, PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO regress_mallory WITH GRANT OPTION;
ALTER DEFAULT PRIVILEGES GRANT ALL ON ROUTINES TO regress_mallory;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO regress_mallory, PUBLIC;
CREATE FUNCTION mallory.grants() RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*)
      FROM (SELECT nspowner, nspacl FROM pg_namespace WHERE nspname = 'outbox'
            UNION ALL SELECT proowner, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE pronamespace = to_regnamespace('outbox')
            UNION ALL SELECT relowner, relacl FROM pg_class WHERE relnamespace = to_regnamespace('outbox')) o (owner, acl),
           aclexplode(o.acl) a
     WHERE a.grantee <> o.owner
$$;
SELECT mallory.grants() > 0;
CREATE EXTENSION outbox;
SELECT mallory.grants();
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
SELECT mallory.grants();
ROLLBACK;
DROP SCHEMA outbox;
-- somebody else's schema, or one that is not empty, is not taken over
\set SHOW_CONTEXT never
CREATE SCHEMA outbox AUTHORIZATION regress_mallory;
CREATE EXTENSION outbox;
DROP SCHEMA outbox;
CREATE SCHEMA outbox;
CREATE DOMAIN outbox.int8multirange AS text;
CREATE EXTENSION outbox;
DROP SCHEMA outbox CASCADE;
CREATE EXTENSION outbox;

-- The end.
SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
DROP OWNED BY regress_mallory CASCADE;
DROP ROLE regress_mallory;
\set SHOW_CONTEXT errors
CREATE EXTENSION outbox;
