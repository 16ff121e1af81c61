-- hook_errors: whatever a hook does costs its own message only.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE SCHEMA shop;
SELECT current_user AS superuser \gset
\set VERBOSITY terse

CREATE TABLE shop.parent (id int PRIMARY KEY);
CREATE TABLE shop.seen (n serial, name text, parent int REFERENCES shop.parent);
CREATE SEQUENCE shop.calls;
CREATE FUNCTION shop.hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    claimed bigint; delivered bigint; retried bigint; dead bigint; unhandled bigint; left_over bigint;
    held refcursor;
BEGIN
    PERFORM nextval('shop.calls');
    INSERT INTO shop.seen (name) VALUES (m.name);
    CASE m.name
        WHEN 'raise' THEN
            RAISE EXCEPTION 'boom' USING ERRCODE = 'P0777', DETAIL = 'The detail.', HINT = 'The hint.';
        WHEN 'division' THEN PERFORM 1 / 0;
        WHEN 'assert' THEN ASSERT false, 'asserted';
        WHEN 'fake_cancel' THEN RAISE EXCEPTION 'not a cancel' USING ERRCODE = 'query_canceled';
        WHEN 'dead' THEN RAISE EXCEPTION 'hopeless' USING ERRCODE = 'OB010';
        WHEN 'later' THEN RAISE EXCEPTION 'not now' USING ERRCODE = 'OB011', DETAIL = '5 minutes';
        WHEN 'later_unclear' THEN RAISE EXCEPTION 'not now' USING ERRCODE = 'OB011', DETAIL = 'soon';
        WHEN 'later_never' THEN RAISE EXCEPTION 'not now' USING ERRCODE = 'OB011';
        WHEN 'recurse' THEN PERFORM shop.hook(m);
        WHEN 'hang' THEN PERFORM pg_sleep(60); -- on purpose
        WHEN 'hang_and_catch' THEN
            BEGIN
                PERFORM pg_sleep(60); -- on purpose
            EXCEPTION WHEN query_canceled THEN NULL;
            END;
        WHEN 'hang_twice' THEN
            BEGIN
                PERFORM pg_sleep(60); -- on purpose
            EXCEPTION WHEN query_canceled THEN
                PERFORM pg_sleep(60); -- on purpose
            END;
        WHEN 'commit' THEN COMMIT;
        WHEN 'execute_commit' THEN EXECUTE 'COMMIT';
        WHEN 'drop_table' THEN DROP TABLE shop.seen;
        WHEN 'drop_extension' THEN DROP EXTENSION outbox CASCADE;
        WHEN 'alter' THEN ALTER TABLE outbox.delivery ADD x int;
        WHEN 'truncate' THEN TRUNCATE outbox.delivery;
        WHEN 'lock' THEN LOCK TABLE outbox.delivery, outbox.log_0;
        WHEN 'delete_lease' THEN DELETE FROM outbox.delivery WHERE state = 'leased';
        WHEN 'end_lease' THEN UPDATE outbox.delivery SET locked_until = '2000-01-01' WHERE state = 'leased';
        WHEN 'settle' THEN
            PERFORM outbox.settle_batch(t.claim_token)
               FROM (SELECT DISTINCT claim_token FROM outbox.delivery WHERE state = 'leased') t;
        WHEN 'claim' THEN PERFORM outbox.claim_batch();
        WHEN 'unsubscribe' THEN PERFORM outbox.unsubscribe('default', true);
        WHEN 'discard' THEN PERFORM outbox.discard(m.id);
        WHEN 'drain' THEN CALL outbox.drain(NULL, NULL, claimed, delivered, retried, dead, unhandled, left_over);
        WHEN 'deliver' THEN PERFORM outbox.deliver();
        WHEN 'read_only' THEN SET TRANSACTION READ ONLY;
        WHEN 'set_role' THEN
            SET ROLE pg_monitor;
            SET SESSION AUTHORIZATION pg_monitor;
        WHEN 'cursor' THEN OPEN held FOR SELECT 1;
        WHEN 'named_cursor' THEN EXECUTE 'DECLARE named CURSOR FOR SELECT 1';
        WHEN 'trap' THEN EXECUTE 'DECLARE trap CURSOR WITH HOLD FOR SELECT 1 / (random() * 0)::int';
        WHEN 'temp_table' THEN CREATE TEMP TABLE shop_temp (a int) ON COMMIT DROP;
        WHEN 'orphan' THEN UPDATE shop.seen SET parent = 17 WHERE name = 'orphan';
        WHEN 'set_deferred' THEN
            SET CONSTRAINTS ALL DEFERRED;
            UPDATE shop.seen SET parent = 18 WHERE name = 'set_deferred';
        WHEN 'parent_late' THEN
            UPDATE shop.seen SET parent = 19 WHERE name = 'parent_late';
            INSERT INTO shop.parent VALUES (19) ON CONFLICT DO NOTHING;
        WHEN 'notify' THEN PERFORM pg_notify('shop', 'x');
        WHEN 'long_error' THEN RAISE EXCEPTION '%', repeat('é', 1000000);
        ELSE NULL;
    END CASE;
END
$$;
SELECT outbox.register_hook('#', 'shop.hook', timeout => '200 ms', max_attempts => 1);

-- Before and after each bad message a good one; what became of them, and what is left of it.
CREATE FUNCTION shop.send(bad text) RETURNS void LANGUAGE sql AS $$
    SELECT FROM outbox.enqueue('good', '1');
    SELECT FROM outbox.enqueue(bad, '1');
    SELECT FROM outbox.enqueue(bad, '2');
    SELECT FROM outbox.enqueue('good', '2');
$$;
CREATE FUNCTION shop.fate() RETURNS TABLE (statuses text, seen text, calls bigint, error text) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT (SELECT string_agg(m.status, ' ' ORDER BY m.id) FROM outbox.messages m),
           (SELECT string_agg(s.name, ' ' ORDER BY s.n) FROM shop.seen s),
           (SELECT last_value FROM shop.calls),
           (SELECT string_agg(DISTINCT m.last_error->>'sqlstate' || ' ' || (m.last_error->>'message'), '; ') FROM outbox.messages m);
    PERFORM outbox.reset();
    DELETE FROM shop.seen;
    DELETE FROM shop.parent;
    ALTER SEQUENCE shop.calls RESTART;
END
$$;

-- Errors, and what of them is kept.
SELECT shop.send('raise');
CALL outbox.drain();
SELECT DISTINCT last_error - 'context' AS last_error, last_error->>'context' LIKE 'PL/pgSQL function shop.hook(%' AS context
  FROM outbox.dead_letters;
SELECT * FROM shop.fate();
SELECT shop.send('division');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT * FROM shop.fate();
SELECT shop.send('assert');
CALL outbox.drain();
SELECT * FROM shop.fate();
-- a small stack is used up before the time is, on a busy machine too
SET max_stack_depth = '300kB';
SELECT shop.send('recurse');
CALL outbox.drain();
RESET max_stack_depth;
SELECT statuses, seen, error FROM shop.fate();
SELECT shop.send('long_error');
CALL outbox.drain();
SELECT octet_length(last_error->>'message') FROM outbox.dead_letters;
SELECT statuses, seen FROM shop.fate();
-- the code of a cancel does not make one
SELECT shop.send('fake_cancel');
CALL outbox.drain();
SELECT * FROM shop.fate();

-- Requests of the hook: dead now; later, uncharged.
SELECT outbox.register_hook('#', 'shop.hook', timeout => '200 ms', max_attempts => 3, replace => true);
SELECT shop.send('dead');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('later');
CALL outbox.drain();
SELECT name, status, attempts, last_error->>'detail' AS detail FROM outbox.messages WHERE name = 'later';
SET outbox.clock_offset = 299000;
CALL outbox.drain();
SET outbox.clock_offset = 302000;
CALL outbox.drain();
RESET outbox.clock_offset;
SELECT * FROM shop.fate();
SELECT shop.send('later_unclear');
CALL outbox.drain();
SELECT DISTINCT status, attempts FROM outbox.messages WHERE name = 'later_unclear';
SELECT * FROM shop.fate();
SELECT shop.send('later_never');
CALL outbox.drain();
SELECT * FROM shop.fate();

-- A failed message is tried again when its time has come, so often and no oftener.
SELECT outbox.register_hook('#', 'shop.hook', timeout => '200 ms', max_attempts => 4, retry => '{1 s, 10 s}', replace => true);
SET outbox.jitter = 0;
SELECT outbox.enqueue('raise', '1') IS NOT NULL;
CALL outbox.drain();
SET outbox.clock_offset = 1500;
CALL outbox.drain();
CALL outbox.drain();
SET outbox.clock_offset = 9000;
CALL outbox.drain();
SET outbox.clock_offset = 13000;
CALL outbox.drain();
SET outbox.clock_offset = 25000;
CALL outbox.drain();
SET outbox.clock_offset = 400000;
CALL outbox.drain();
RESET outbox.clock_offset;
RESET outbox.jitter;
SELECT attempts FROM outbox.messages;
SELECT * FROM shop.fate();
SELECT outbox.register_hook('#', 'shop.hook', timeout => '200 ms', max_attempts => 1, replace => true);

-- Hanging.
SELECT shop.send('hang');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('hang_and_catch');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT * FROM shop.fate();
SELECT shop.send('hang_twice');
CALL outbox.drain();
SELECT * FROM shop.fate();

-- Transactions.
SELECT shop.send('commit');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('execute_commit');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('read_only');
CALL outbox.drain();
SELECT * FROM shop.fate();

-- What one leaves behind in the transaction is not in the way of the next: drain() gives
-- that one a transaction of its own, deliver() has none to give.
SELECT shop.send('cursor');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('named_cursor');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('temp_table');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('temp_table');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT * FROM shop.fate();

-- A trap that snaps at the commit: the group is done again, one by one.
SELECT shop.send('trap');
CALL outbox.drain();
SELECT * FROM shop.fate();

-- Our own tables and functions.
SELECT shop.send('lock');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('alter');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('truncate');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('drop_extension');
CALL outbox.drain();
SELECT statuses, seen, calls FROM shop.fate();
SELECT shop.send('delete_lease');
CALL outbox.drain();
SELECT statuses, seen FROM shop.fate();
SELECT shop.send('end_lease');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT statuses, seen FROM shop.fate();
SELECT shop.send('settle');
CALL outbox.drain();
SELECT statuses, seen FROM shop.fate();
SELECT shop.send('unsubscribe');
CALL outbox.drain();
SELECT statuses, seen FROM shop.fate();
SELECT shop.send('claim');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('discard');
CALL outbox.drain();
SELECT statuses, seen FROM shop.fate();
SELECT shop.send('drain');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('deliver');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT * FROM shop.fate();

-- Roles: none survives the call.
SELECT shop.send('set_role');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT current_user = session_user AS same, current_user = 'pg_monitor' AS changed;

-- Constraints: checked at the end of each call, deferred or not.
SELECT shop.send('orphan');
CALL outbox.drain();
SELECT * FROM shop.fate();
ALTER TABLE shop.seen ALTER CONSTRAINT seen_parent_fkey DEFERRABLE INITIALLY IMMEDIATE;
SELECT shop.send('set_deferred');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('set_deferred');
SELECT claimed, delivered, dead FROM outbox.deliver();
SELECT * FROM shop.fate();
ALTER TABLE shop.seen ALTER CONSTRAINT seen_parent_fkey DEFERRABLE INITIALLY DEFERRED;
SELECT shop.send('orphan');
CALL outbox.drain();
SELECT * FROM shop.fate();
-- whoever relies on their being deferred can, in each call, and after deliver() too
SELECT shop.send('parent_late');
CALL outbox.drain();
SELECT * FROM shop.fate();
SELECT shop.send('parent_late');
SELECT shop.send('orphan');
BEGIN;
SELECT claimed, delivered, dead FROM outbox.deliver();
INSERT INTO shop.seen (name, parent) VALUES ('after', 20);
INSERT INTO shop.parent VALUES (20);
COMMIT;
SELECT * FROM shop.fate();
-- what the caller has violated is his error, and nothing was delivered
SELECT shop.send('fine');
BEGIN;
INSERT INTO shop.seen (name, parent) VALUES ('before', 21);
SELECT claimed, delivered, dead FROM outbox.deliver();
ROLLBACK;
SELECT * FROM shop.fate();
ALTER TABLE shop.seen ALTER CONSTRAINT seen_parent_fkey NOT DEFERRABLE;

-- A table of its own that is gone: from the next call on, and as that one's fault.
SELECT shop.send('drop_table');
CALL outbox.drain();
SELECT string_agg(status, ' ' ORDER BY id) FROM outbox.messages;
SELECT DISTINCT last_error->>'message' AS message FROM outbox.dead_letters;
SELECT outbox.reset();
CREATE TABLE shop.seen (n serial, name text, parent int REFERENCES shop.parent);

-- The right to call it.
CREATE ROLE regress_outbox_app LOGIN;
GRANT USAGE ON SCHEMA shop TO regress_outbox_app;
GRANT ALL ON ALL TABLES IN SCHEMA shop TO regress_outbox_app;
GRANT ALL ON ALL SEQUENCES IN SCHEMA shop TO regress_outbox_app;
SELECT outbox.unregister('#');
SELECT outbox.grant_access('regress_outbox_app', 'consumer');
\c - regress_outbox_app
SET client_min_messages = warning;
SELECT outbox.register_hook('#', 'shop.hook', max_attempts => 1);
\c - :superuser
SET client_min_messages = warning;
SELECT shop.send('fine');
REVOKE EXECUTE ON FUNCTION shop.hook FROM PUBLIC;
\c - regress_outbox_app
SET client_min_messages = warning;
CALL outbox.drain(max_messages => 2);
\c - :superuser
SET client_min_messages = warning;
GRANT EXECUTE ON FUNCTION shop.hook TO regress_outbox_app;
\c - regress_outbox_app
SET client_min_messages = warning;
CALL outbox.drain();
\c - :superuser
SET client_min_messages = warning;
SELECT * FROM shop.fate();

SELECT outbox.reset();
DROP SCHEMA shop CASCADE;
DROP EXTENSION outbox;
DROP OWNED BY regress_outbox_app;
DROP ROLE regress_outbox_app;
CREATE EXTENSION outbox;
