-- enqueue_tx: a message exists exactly when the transaction that enqueued it does: savepoints,
-- exception blocks, triggers, deferred ones, prepared transactions, the most of one transaction.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all
-- the ordinal within the transaction is in the low 20 bits of a position
CREATE FUNCTION pg_temp.stored() RETURNS TABLE (name text, payload jsonb, ordinal bigint, transaction bigint) LANGUAGE sql AS $$
    SELECT name, payload, position & 1048575, position >> 20 FROM outbox.log
$$;

-- Committed and rolled back.
BEGIN;
SELECT count(outbox.enqueue('plain', to_jsonb(n))) FROM generate_series(1, 3) n;
COMMIT;
BEGIN;
SELECT count(outbox.enqueue('plain', to_jsonb(n))) FROM generate_series(4, 6) n;
ROLLBACK;
BEGIN;
SELECT count(outbox.enqueue('plain', to_jsonb(n))) FROM generate_series(7, 8) n;
SELECT 1 / 0;
COMMIT;
SELECT count(*), count(DISTINCT transaction) AS transactions, array_agg(payload ORDER BY ordinal) AS payloads
  FROM pg_temp.stored() WHERE name = 'plain';

-- Savepoints: what is rolled back to leaves a hole, and no ordinal is used twice.
BEGIN;
SELECT outbox.enqueue('savepoint', '1') IS NOT NULL;
SAVEPOINT a;
SELECT outbox.enqueue('savepoint', '2') IS NOT NULL;
ROLLBACK TO a;
SELECT outbox.enqueue('savepoint', '3') IS NOT NULL;
SAVEPOINT b;
SELECT outbox.enqueue('savepoint', '4') IS NOT NULL;
SAVEPOINT c;
SELECT outbox.enqueue('savepoint', '5') IS NOT NULL;
RELEASE c;
ROLLBACK TO b;
ROLLBACK TO a;
SELECT outbox.enqueue('savepoint', '6') IS NOT NULL;
SAVEPOINT d;
SELECT outbox.enqueue('savepoint', '7') IS NOT NULL;
RELEASE d;
COMMIT;
SELECT payload, ordinal - min(ordinal) OVER () AS ordinal, count(*) OVER (PARTITION BY transaction) AS same_transaction
  FROM pg_temp.stored() WHERE name = 'savepoint' ORDER BY ordinal;
-- the first message in a subtransaction
BEGIN;
SAVEPOINT a;
SELECT outbox.enqueue('savepoint', '8') IS NOT NULL;
RELEASE a;
COMMIT;
BEGIN;
SAVEPOINT a;
SELECT outbox.enqueue('savepoint', '9') IS NOT NULL;
ROLLBACK TO a;
COMMIT;
SELECT payload FROM pg_temp.stored() WHERE name = 'savepoint' AND payload IN ('8', '9');

-- Exception blocks are subtransactions.
DO $$
BEGIN
    FOR n IN 1 .. 6 LOOP
        BEGIN
            PERFORM outbox.enqueue('block', to_jsonb(n));
            IF n % 2 = 0 THEN
                RAISE 'no';
            END IF;
        EXCEPTION WHEN raise_exception THEN
            PERFORM outbox.enqueue('block', to_jsonb(-n));
        END;
    END LOOP;
END
$$;
SELECT array_agg(payload ORDER BY ordinal) AS payloads FROM pg_temp.stored() WHERE name = 'block';
-- a bad message, caught, does no harm
DO $$
BEGIN
    PERFORM outbox.enqueue('caught', '1');
    BEGIN
        PERFORM outbox.enqueue_batch('[{"name": "caught", "payload": 2}, {"name": "caught"}]');
    EXCEPTION WHEN null_value_not_allowed THEN
        PERFORM outbox.enqueue('caught', '3');
    END;
END
$$;
SELECT array_agg(payload ORDER BY ordinal) AS payloads FROM pg_temp.stored() WHERE name = 'caught';
-- transactions within one call have their own
DO $$
BEGIN
    FOR n IN 1 .. 6 LOOP
        PERFORM outbox.enqueue('commits', to_jsonb(n));
        IF n % 3 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
    END LOOP;
END
$$;
SELECT array_agg(payload ORDER BY transaction) AS payloads, count(DISTINCT transaction) AS transactions,
       count(DISTINCT ordinal) AS ordinals
  FROM pg_temp.stored() WHERE name = 'commits';

-- Triggers, at once and at the commit.
CREATE TABLE orders (id integer PRIMARY KEY, state text NOT NULL);
CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.enqueue(TG_ARGV[0], jsonb_build_object('id', NEW.id, 'state', NEW.state, 'at', TG_WHEN));
    RETURN NEW;
END
$$;
CREATE TRIGGER before BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION announce('trigger.before');
CREATE TRIGGER after AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION announce('trigger.after');
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION announce('trigger.late');
BEGIN;
INSERT INTO orders VALUES (1, 'new'), (2, 'new');
UPDATE orders SET state = 'paid' WHERE id = 2;
SAVEPOINT s;
INSERT INTO orders VALUES (3, 'new');
ROLLBACK TO s;
SELECT count(*) FROM outbox.outgoing WHERE name = 'trigger.late';
COMMIT;
INSERT INTO orders VALUES (2, 'twice');
INSERT INTO orders VALUES (4, 'new') ON CONFLICT DO NOTHING;
SELECT name, payload ->> 'id' AS id, payload ->> 'state' AS state FROM outbox.log WHERE name LIKE 'trigger.%' ORDER BY created_at;
-- SET CONSTRAINTS brings it forward
BEGIN;
INSERT INTO orders VALUES (5, 'new');
SET CONSTRAINTS late IMMEDIATE;
SELECT count(*) FROM outbox.outgoing WHERE name = 'trigger.late';
ROLLBACK;
-- a deferred trigger that fails at the commit takes everything along
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION refuse();
BEGIN;
INSERT INTO orders VALUES (6, 'new');
SELECT outbox.enqueue('refused', '{}') IS NOT NULL;
\set VERBOSITY terse
COMMIT;
\set VERBOSITY default
DROP TABLE orders;
SELECT count(*) FROM outbox.log WHERE name = 'refused' OR payload ->> 'id' = '6';

-- Prepared transactions: nothing is seen before COMMIT PREPARED, whatever happened in between.
SELECT count(*) AS before FROM outbox.claim_batch(1000) \gset
BEGIN;
SELECT count(outbox.enqueue('prepared', to_jsonb(n))) FROM generate_series(1, 3) n;
PREPARE TRANSACTION 'enqueue_tx 1';
BEGIN;
SELECT outbox.enqueue('prepared', '4') IS NOT NULL;
SAVEPOINT s;
SELECT outbox.enqueue('prepared', '5') IS NOT NULL;
ROLLBACK TO s;
PREPARE TRANSACTION 'enqueue_tx 2';
BEGIN;
SELECT outbox.enqueue('prepared', '6') IS NOT NULL;
PREPARE TRANSACTION 'enqueue_tx 3';
SELECT count(*) FROM outbox.outgoing;
SELECT outbox.enqueue('prepared', '7') IS NOT NULL;
SELECT payload FROM outbox.claim_batch();
SELECT payload FROM outbox.claim_batch();
COMMIT PREPARED 'enqueue_tx 2';
SELECT payload FROM outbox.claim_batch();
ROLLBACK PREPARED 'enqueue_tx 3';
COMMIT PREPARED 'enqueue_tx 1';
SELECT payload FROM outbox.claim_batch();
SELECT payload FROM outbox.claim_batch();
SELECT array_agg(payload ORDER BY payload) AS payloads FROM pg_temp.stored() WHERE name = 'prepared';
SELECT count(*) AS positions, count(DISTINCT l.position) AS distinct FROM outbox.log l;
SELECT * FROM pg_temp.broken();

-- At most 1,048,576 messages in one transaction, those of rolled back savepoints counted.
BEGIN;
SELECT sum(n) AS messages
  FROM (SELECT (SELECT count(*) FROM outbox.enqueue_batch('million', p) WHERE r > 0) AS n
          FROM generate_series(1, 15) r, (SELECT jsonb_agg(0) FROM generate_series(1, 65536)) a (p)) b;
SAVEPOINT s;
SELECT count(*) FROM outbox.enqueue_batch('million', (SELECT jsonb_agg(0) FROM generate_series(1, 65535)));
ROLLBACK TO s;
SELECT outbox.enqueue('million', '1') IS NOT NULL;
CALL pg_temp.try($$ SELECT outbox.enqueue('million', '2') $$);
CALL pg_temp.try($$ SELECT outbox.enqueue_batch('[{"name": "million", "payload": 2}]') $$);
CALL pg_temp.try($$ INSERT INTO outbox.outgoing (name, payload) VALUES ('million', '2') $$);
ROLLBACK TO s;
CALL pg_temp.try($$ SELECT outbox.enqueue('million', '3') $$);
ROLLBACK;
BEGIN;
SELECT outbox.enqueue('million', '4') IS NOT NULL;
COMMIT;
SELECT payload, ordinal < 2 AS counted_anew FROM pg_temp.stored() WHERE name = 'million';
DROP FUNCTION announce, refuse;
