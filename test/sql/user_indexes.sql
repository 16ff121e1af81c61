-- user_indexes: what a superuser adds to the log (indexes, triggers, constraints, policies) works
-- for every row, whichever way enqueue is called.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- the four ways in
CREATE PROCEDURE pg_temp.enqueue_each_way(n integer) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.enqueue('one', to_jsonb(n));
    PERFORM outbox.enqueue_batch(jsonb_build_array(jsonb_build_object('name', 'objects', 'payload', n),
                                                   jsonb_build_object('name', 'objects', 'payload', n)));
    PERFORM outbox.enqueue_batch('payloads', jsonb_build_array(n, n, n));
    INSERT INTO outbox.outgoing (name, payload) VALUES ('outgoing', to_jsonb(n)), ('outgoing', to_jsonb(n));
END
$$;
\set ECHO all
-- What the table says of itself, with no index or trigger of the user's: NOT NULL on a column that is optional,
ALTER TABLE outbox.log_0 ALTER tenant_id SET NOT NULL;
\set VERBOSITY sqlstate
SELECT outbox.enqueue('one', '1');
SELECT outbox.enqueue_batch('one', '[1, 2]');
SELECT outbox.enqueue_batch('[{"name": "one", "payload": 1, "tenant_id": "t"}, {"name": "one", "payload": 2}]');
INSERT INTO outbox.outgoing (name, payload) VALUES ('one', '1');
\set VERBOSITY default
SELECT count(*) FROM outbox.log;
SELECT outbox.enqueue('one', '1', tenant_id => 't') IS NOT NULL;
SELECT payload, tenant_id FROM outbox.log;
ALTER TABLE outbox.log_0 ALTER tenant_id DROP NOT NULL;
-- or that it is a partition.
CREATE TABLE parent (LIKE outbox.log_0) PARTITION BY LIST (kind);
ALTER TABLE parent ATTACH PARTITION outbox.log_0 FOR VALUES IN ('event');
\set VERBOSITY sqlstate
SELECT outbox.enqueue('one', '1', kind => 'job');
\set VERBOSITY default
SELECT outbox.enqueue('one', '1', kind => 'event') IS NOT NULL;
ALTER TABLE parent DETACH PARTITION outbox.log_0;
DROP TABLE parent;
SELECT kind, count(*) FROM outbox.log GROUP BY kind;

-- Indexes: of another kind than btree alone (what brin keeps for the next row, since PostgreSQL 17, is let go at the end of
-- each call: otherwise there are warnings), on an expression, partial, unique.
CREATE INDEX log_brin ON outbox.log_0 USING brin (position, id);
CALL pg_temp.enqueue_each_way(1);
BEGIN;
CALL pg_temp.enqueue_each_way(1);
ROLLBACK;
SET enable_seqscan = off;
SELECT count(*) FROM outbox.log_0 WHERE id > '00000000-0000-0000-0000-000000000000';
RESET enable_seqscan;
CREATE FUNCTION doubled(payload jsonb) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN CAST(payload AS integer) * 2; END $$;
CREATE INDEX log_doubled ON outbox.log_0 (doubled(payload));
CREATE INDEX log_partial ON outbox.log_0 (aggregate_id) WHERE aggregate_id IS NOT NULL AND CAST(payload AS integer) > 2;
CREATE INDEX log_gin ON outbox.log_0 USING gin (payload);
CREATE UNIQUE INDEX log_unique ON outbox.log_0 (tenant_id, aggregate_id) WHERE tenant_id IS NOT NULL;
CALL pg_temp.enqueue_each_way(2);
SELECT outbox.enqueue('one', '3', aggregate_id => 'x', tenant_id => 't') IS NOT NULL;
SET enable_seqscan = off;
SET enable_indexscan = on;
SELECT doubled(payload) AS doubled, count(*) FROM outbox.log_0 WHERE doubled(payload) IN (2, 4, 6) GROUP BY 1 ORDER BY 1;
SELECT count(*) FROM outbox.log_0 WHERE payload @> '2';
SELECT count(*) FROM outbox.log_0 WHERE aggregate_id IS NOT NULL AND CAST(payload AS integer) > 2;
RESET enable_seqscan;
CALL pg_temp.try($$ SELECT outbox.enqueue('one', '4', aggregate_id => 'x', tenant_id => 't') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('one', '["no number"]') $$);
SELECT count(*) FROM outbox.log;

-- Triggers of a row; of a statement none.
CREATE TABLE seen (by text, name text, n integer);
CREATE FUNCTION see_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO seen VALUES (TG_WHEN || ' row', NEW.name, CAST(NEW.payload AS integer));
    RETURN NEW;
END
$$;
CREATE FUNCTION see_statement() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO seen SELECT 'statement', name, count(*) FROM added GROUP BY name;
    RETURN NULL;
END
$$;
CREATE TRIGGER before_row BEFORE INSERT ON outbox.log_0 FOR EACH ROW EXECUTE FUNCTION see_row();
CREATE TRIGGER after_row AFTER INSERT ON outbox.log_0 FOR EACH ROW EXECUTE FUNCTION see_row();
CALL pg_temp.enqueue_each_way(5);
SELECT by, name, n, count(*) FROM seen GROUP BY 1, 2, 3 ORDER BY 1, 2;
TRUNCATE seen;
DROP TRIGGER before_row ON outbox.log_0;
DROP TRIGGER after_row ON outbox.log_0;
-- one that changes the row
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.tenant_id := 'stamped'; RETURN NEW; END $$;
CREATE TRIGGER stamp BEFORE INSERT ON outbox.log_0 FOR EACH ROW EXECUTE FUNCTION stamp();
DROP INDEX outbox.log_unique;
CALL pg_temp.enqueue_each_way(6);
SELECT payload, tenant_id, count(*) FROM outbox.log WHERE payload >= '5' GROUP BY 1, 2 ORDER BY 1;
DROP TRIGGER stamp ON outbox.log_0;
-- A trigger of a statement is not fired: enqueue() is no INSERT of the executor. Documented; a row trigger is the way.
CREATE TRIGGER after_statement AFTER INSERT ON outbox.log_0 REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION see_statement();
CALL pg_temp.enqueue_each_way(6);
SELECT by, name, sum(n) FROM seen GROUP BY 1, 2 ORDER BY 1, 2;
DROP TRIGGER after_statement ON outbox.log_0;
-- one that raises refuses the message, and one that is deferred refuses it at the commit
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.payload = '7' THEN
        RAISE 'no sevens' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END
$$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON outbox.log_0 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
CALL pg_temp.enqueue_each_way(8);
\set VERBOSITY terse
SELECT outbox.enqueue('one', '7') IS NOT NULL;
SELECT count(*) FROM outbox.enqueue_batch('one', '[8, 7]');
\set VERBOSITY default
DROP TRIGGER late ON outbox.log_0;
CREATE TRIGGER at_once BEFORE INSERT ON outbox.log_0 FOR EACH ROW EXECUTE FUNCTION refuse();
CALL pg_temp.try($$ SELECT outbox.enqueue('one', '7') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('one', '[8, 7]') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload) VALUES ('one', '8'), ('one', '7') $$);
DROP TRIGGER at_once ON outbox.log_0;
SELECT count(*) FROM outbox.log WHERE payload = '7';
SELECT payload, count(*) FROM outbox.log GROUP BY 1 ORDER BY 1;

-- Constraints.
ALTER TABLE outbox.log_0 ADD CONSTRAINT no_nines CHECK (payload <> '9');
CREATE TABLE tenants (id text PRIMARY KEY);
INSERT INTO tenants VALUES ('known'), ('t'), ('stamped');
ALTER TABLE outbox.log_0 ADD CONSTRAINT of_a_tenant FOREIGN KEY (tenant_id) REFERENCES tenants;
CALL pg_temp.enqueue_each_way(10);
SELECT outbox.enqueue('one', '10', tenant_id => 'known') IS NOT NULL;
\set VERBOSITY sqlstate
SELECT outbox.enqueue('one', '9');
SELECT outbox.enqueue_batch('one', '[8, 9]');
INSERT INTO outbox.outgoing (name, payload) VALUES ('one', '8'), ('one', '9');
SELECT outbox.enqueue('one', '11', tenant_id => 'unknown');
SELECT outbox.enqueue_batch('[{"name": "one", "payload": 11, "tenant_id": "unknown"}]');
\set VERBOSITY default
SELECT payload, count(*) FROM outbox.log WHERE payload >= '8' GROUP BY 1 ORDER BY 1;
ALTER TABLE outbox.log_0 DROP CONSTRAINT no_nines, DROP CONSTRAINT of_a_tenant;

-- A policy for others does not blind our functions.
ALTER TABLE outbox.log_0 ENABLE ROW LEVEL SECURITY;
CREATE POLICY nobody ON outbox.log_0 USING (false) WITH CHECK (false);
CREATE ROLE regress_outbox_producer;
SELECT outbox.grant_access('regress_outbox_producer', 'producer');
SET ROLE regress_outbox_producer;
SELECT count(*) FROM outbox.enqueue_batch('policy', '[12, 13]');
SELECT outbox.enqueue('policy', '14') IS NOT NULL;
RESET ROLE;
ALTER TABLE outbox.log_0 DISABLE ROW LEVEL SECURITY;
DROP POLICY nobody ON outbox.log_0;
SELECT count(*) FROM outbox.log WHERE name = 'policy';
-- Dropped and rebuilt indexes, in a session that has them in its cache.
DROP INDEX outbox.log_doubled, outbox.log_partial, outbox.log_gin, outbox.log_brin;
CALL pg_temp.enqueue_each_way(15);
REINDEX TABLE outbox.log_0;
VACUUM FULL outbox.log_0;
CALL pg_temp.enqueue_each_way(16);
CREATE INDEX log_again ON outbox.log_0 (doubled(payload));
CALL pg_temp.enqueue_each_way(17);
SET enable_seqscan = off;
SELECT count(*) FROM outbox.log_0 WHERE doubled(payload) BETWEEN 30 AND 34;
RESET enable_seqscan;

-- Indexes and triggers on the deliveries.
CREATE INDEX delivery_worker ON outbox.delivery (worker, state, message_count);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen VALUES (TG_OP, NEW.state, NEW.message_count); RETURN NULL; END $$;
TRUNCATE seen;
CREATE TRIGGER note AFTER INSERT OR UPDATE ON outbox.delivery FOR EACH ROW EXECUTE FUNCTION note();
SELECT count(*) AS messages FROM outbox.log \gset
INSERT INTO held SELECT * FROM outbox.claim_batch(1000, worker => 'w');
SELECT count(*) = :messages AS all FROM held;
SET enable_seqscan = off;
SELECT sum(message_count) = :messages AS all FROM outbox.delivery WHERE worker = 'w' AND state = 'leased';
RESET enable_seqscan;
SELECT outbox.settle_batch((SELECT DISTINCT claim_token FROM held)) = :messages AS all;
SELECT by, name, sum(n) = :messages AS all FROM seen GROUP BY 1, 2 ORDER BY 1, 2;
SELECT * FROM pg_temp.broken();

-- Other columns do not work: an error, not a crash, whichever way the table is met.
CREATE FUNCTION pg_temp.altered(change text) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    way text;
    detail text;
BEGIN
    FOREACH way IN ARRAY ARRAY['outbox.enqueue(''a'', ''1'')', 'outbox.maintain()', 'outbox.claim_batch()', 'outbox.status',
                            'outbox.handler_states()'] LOOP
        BEGIN
            EXECUTE 'ALTER TABLE outbox.' || change;
            EXECUTE 'SELECT count(t) FROM ' || way || ' t';
            RETURN NEXT way || ' works';
            RAISE unique_violation;
        EXCEPTION
            WHEN object_not_in_prerequisite_state THEN
                GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
                RETURN NEXT format('%s: %s. %s', way, SQLERRM, detail);
            WHEN unique_violation THEN NULL;
        END;
    END LOOP;
END
$$;
SELECT * FROM pg_temp.altered('log_0 ADD COLUMN more text');
SELECT * FROM pg_temp.altered('delivery ADD COLUMN more text');
SELECT * FROM pg_temp.altered('frontier ADD COLUMN more text');
SELECT * FROM pg_temp.altered('frontier DROP COLUMN running');
SELECT * FROM pg_temp.altered('frontier RENAME COLUMN newest TO oldest');
SELECT * FROM pg_temp.altered('frontier ALTER COLUMN running DROP NOT NULL');
SELECT * FROM pg_temp.altered('frontier ALTER COLUMN newest TYPE text');
SELECT * FROM pg_temp.altered('subscription ADD COLUMN more text');
SELECT * FROM pg_temp.altered('identity DROP COLUMN in_use');
SELECT * FROM pg_temp.altered('segment ADD COLUMN more text');
SELECT * FROM pg_temp.altered('handler ADD COLUMN more text');
SELECT * FROM pg_temp.altered('self_routed ADD COLUMN more text NOT NULL DEFAULT $$q$$');

-- Dropped again they are no obstacle, with and without what the executor is needed for.
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['log_0', 'log_1', 'log_2', 'log_kept', 'segment', 'identity', 'frontier', 'subscription', 'handler',
                                'delivery', 'self_routed', 'access'] LOOP
        EXECUTE format('ALTER TABLE outbox.%I ADD COLUMN more text', name);
        EXECUTE format('ALTER TABLE outbox.%I DROP COLUMN more', name);
    END LOOP;
END
$$;
CREATE PROCEDURE pg_temp.works(n integer) LANGUAGE plpgsql AS $$
DECLARE
    claimed integer;
BEGIN
    CALL pg_temp.enqueue_each_way(n);
    SELECT count(*) INTO claimed FROM outbox.claim_batch(100) m WHERE outbox.settle(m.id, m.claim_token) = 'delivered';
    COMMIT;
    CALL pg_temp.enqueue_each_way(n);
    PERFORM outbox.maintain();
    SELECT claimed + count(*) INTO claimed FROM outbox.claim_batch(100) m WHERE outbox.settle(m.id, m.claim_token) = 'delivered';
    RAISE INFO '% claimed and settled', claimed;
    PERFORM outbox.maintain();
END
$$;
CALL pg_temp.works(30);
DROP INDEX outbox.log_again;
DROP INDEX outbox.delivery_worker;
DROP TRIGGER note ON outbox.delivery;
CALL pg_temp.works(31);
SELECT delivered FROM outbox.status;
SELECT * FROM pg_temp.broken();

SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
DROP TABLE seen, tenants;
DROP FUNCTION doubled, see_row, see_statement, stamp, refuse, note;
DROP ROLE regress_outbox_producer;
CREATE EXTENSION outbox;
