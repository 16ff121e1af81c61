-- drain: what drain() and deliver() do around the calls: commits, groups, cancels, handlers
-- that are missing or come back; and maintain().
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE SCHEMA shop;
\set VERBOSITY terse

CREATE TABLE shop.seen (n serial, name text, payload jsonb, xid xid8 DEFAULT pg_current_xact_id());
CREATE FUNCTION shop.hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (name, payload) VALUES (m.name, m.payload);
    IF m.name = 'cancel' THEN
        PERFORM pg_cancel_backend(pg_backend_pid());
        PERFORM pg_sleep(60); -- on purpose
    ELSIF m.name = 'fail' THEN
        RAISE EXCEPTION 'failed';
    END IF;
END
$$;
SELECT outbox.register_hook('#', 'shop.hook');

-- Fifty calls to a transaction; one, where constraints are initially deferred.
SELECT count(*) FROM outbox.enqueue_batch('many', (SELECT jsonb_agg(g) FROM generate_series(1, 120) g));
CALL outbox.drain();
SELECT count(*) AS calls FROM shop.seen GROUP BY xid ORDER BY xid;
CREATE TABLE shop.deferred (a int UNIQUE DEFERRABLE INITIALLY DEFERRED);
DELETE FROM shop.seen;
SELECT count(*) FROM outbox.enqueue_batch('many', '[1, 2, 3]');
CALL outbox.drain();
SELECT count(*) AS calls FROM shop.seen GROUP BY xid ORDER BY xid;
-- a group that is done again is undone first: each effect is there once
DELETE FROM shop.seen;
DROP TABLE shop.deferred;
CREATE FUNCTION shop.trap(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO shop.seen (name, payload) VALUES (m.name, m.payload);
    -- it snaps at the commit
    CREATE TEMP TABLE trap (a int PRIMARY KEY) ON COMMIT DELETE ROWS;
    CREATE TEMP TABLE refers (a int REFERENCES trap);
END
$$;
SELECT outbox.register_hook('trap', 'shop.trap', max_attempts => 1);
SELECT count(*) FROM outbox.enqueue_batch('many', '[1, 2]');
SELECT outbox.enqueue('trap', '3') IS NOT NULL;
SELECT count(*) FROM outbox.enqueue_batch('many', '[4, 5]');
CALL outbox.drain();
SELECT string_agg(payload::text, ' ' ORDER BY n), count(DISTINCT xid) FROM shop.seen;
SELECT name, status, attempts, last_error->>'message' AS error FROM outbox.messages WHERE status = 'dead';
SELECT outbox.unregister('trap');

-- A settlement that fails harms nobody else: the message is charged, or left to expiry if
-- not even that is possible; if nothing can be settled, nothing more is begun.
CREATE FUNCTION shop.allowed(state text, positions int8multirange, refused text, name text) RETURNS boolean LANGUAGE sql AS $$
    SELECT NOT ($1 = ANY (string_to_array($3, ' ')) AND EXISTS
                (SELECT FROM outbox.log l WHERE $2 @> l.position AND l.name LIKE $4))
$$;
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
ALTER TABLE outbox.delivery ADD CONSTRAINT refuse CHECK (shop.allowed(state, positions, 'delivered', 'bad')) NOT VALID;
CREATE FUNCTION shop.send() RETURNS void LANGUAGE sql AS $$
    SELECT FROM outbox.enqueue('good', '1');
    SELECT FROM outbox.enqueue('bad', '2');
    SELECT FROM outbox.enqueue('good', '3');
$$;
SELECT shop.send();
CALL outbox.drain();
SELECT name, status, attempts, last_error->>'message' AS error FROM outbox.messages ORDER BY id;
SELECT string_agg(payload::text, ' ' ORDER BY n) FROM shop.seen;
ALTER TABLE outbox.delivery DROP CONSTRAINT refuse;
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
SELECT shop.send();
SELECT routed FROM outbox.maintain();
ALTER TABLE outbox.delivery ADD CONSTRAINT refuse CHECK (shop.allowed(state, positions, 'delivered dead ready', 'bad')) NOT VALID;
CALL outbox.drain();
SELECT name, status, attempts FROM outbox.messages ORDER BY id;
SELECT string_agg(payload::text, ' ' ORDER BY n) FROM shop.seen;
ALTER TABLE outbox.delivery DROP CONSTRAINT refuse;
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
SELECT count(*) FROM outbox.enqueue_batch('many', '[1, 2, 3, 4]');
SET outbox.max_attempts = 1;
SELECT routed FROM outbox.maintain();
RESET outbox.max_attempts;
ALTER TABLE outbox.delivery ADD CONSTRAINT refuse CHECK (shop.allowed(state, positions, 'delivered dead', '%')) NOT VALID;
CALL outbox.drain();
SELECT payload, status, attempts FROM outbox.messages ORDER BY id;
SELECT count(*) FROM shop.seen;
ALTER TABLE outbox.delivery DROP CONSTRAINT refuse;

-- A cancel: what is done stays done, the one that was interrupted is charged, the rest given back.
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
SELECT outbox.enqueue('good', '1') IS NOT NULL;
SELECT outbox.enqueue('cancel', '2') IS NOT NULL;
SELECT outbox.enqueue('good', '3') IS NOT NULL;
SELECT outbox.enqueue('good', '4') IS NOT NULL;
CALL outbox.drain();
SELECT name, status, attempts, last_error->>'message' AS error FROM outbox.messages ORDER BY id;
SELECT string_agg(payload::text, ' ' ORDER BY n) FROM shop.seen;
SELECT outbox.cancel(id) FROM outbox.messages WHERE name = 'cancel';
CALL outbox.drain();
SELECT string_agg(payload::text, ' ' ORDER BY n) FROM shop.seen;
-- in the caller's transaction everything is undone
SELECT outbox.enqueue('good', '5') IS NOT NULL;
SELECT outbox.enqueue('cancel', '6') IS NOT NULL;
SELECT * FROM outbox.deliver();
SELECT name, payload, status, attempts FROM outbox.messages WHERE status <> 'delivered' ORDER BY id;
-- a statement timeout is the caller's too
CREATE FUNCTION shop.hang(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); END $$; -- on purpose
SELECT outbox.register_hook('hang', 'shop.hang');
SELECT outbox.reset() > 0;
SELECT outbox.enqueue('hang', '1') IS NOT NULL;
SELECT outbox.enqueue('good', '2') IS NOT NULL;
SET statement_timeout = '200 ms';
CALL outbox.drain();
RESET statement_timeout;
SELECT name, status, attempts, last_error->>'message' AS error FROM outbox.messages ORDER BY id;
SELECT outbox.unregister('hang');
SELECT outbox.reset() > 0;

-- Without a handler: kept, not charged, and delivered when there is one.
SELECT outbox.unregister('#');
SELECT outbox.register_hook('good', 'shop.hook');
SELECT outbox.enqueue('good', '1') IS NOT NULL;
SELECT count(*) FROM outbox.enqueue_batch('strange', '[2, 3]');
SELECT outbox.enqueue('good', '4') IS NOT NULL;
CALL outbox.drain();
CALL outbox.drain();
SELECT name, status, attempts, last_error FROM outbox.messages ORDER BY id;
SELECT unhandled FROM outbox.status WHERE subscription = 'default';
SELECT outbox.register_hook('strange', 'shop.hook');
SELECT * FROM outbox.deliver();

-- A function that is gone: the same, and the handler is shown as broken until it is back.
ALTER FUNCTION shop.hook(outbox.message) RENAME TO hidden;
SELECT outbox.enqueue('good', '5') IS NOT NULL;
SELECT count(*) FROM outbox.enqueue_batch('strange', '[6, 7]');
CALL outbox.drain();
SELECT name, status, attempts, last_error FROM outbox.messages WHERE status = 'unhandled' ORDER BY id;
SELECT name_pattern, state FROM outbox.handlers ORDER BY 1;
CREATE FUNCTION shop.hook(m text) RETURNS void LANGUAGE sql AS $$ SELECT $$; -- another one of that name is none of ours
CALL outbox.drain();
ALTER FUNCTION shop.hidden(outbox.message) RENAME TO hook;
CALL outbox.drain();
SELECT name_pattern, state FROM outbox.handlers ORDER BY 1;
SELECT status, count(*) FROM outbox.messages GROUP BY 1;
-- shown so also where the group is done again, one message at a time
SELECT outbox.register_hook('trap', 'shop.trap', max_attempts => 1);
ALTER FUNCTION shop.hook(outbox.message) RENAME TO hidden;
SELECT count(*) FROM outbox.enqueue_batch('good', '[8, 9]');
SELECT outbox.enqueue('trap', '10') IS NOT NULL;
CALL outbox.drain();
SELECT name_pattern, state FROM outbox.handlers ORDER BY 1;
ALTER FUNCTION shop.hidden(outbox.message) RENAME TO hook;
CALL outbox.drain();
SELECT status, count(*) FROM outbox.messages WHERE name <> 'trap' GROUP BY 1;
SELECT outbox.unregister('trap');
-- replaced while it is delivered, by itself
CREATE FUNCTION shop.replace_me(m outbox.message) RETURNS void LANGUAGE plpgsql AS $f$
BEGIN
    INSERT INTO shop.seen (name) VALUES ('old');
    CREATE OR REPLACE FUNCTION shop.replace_me(m outbox.message) RETURNS void LANGUAGE sql AS
        $$ INSERT INTO shop.seen (name) VALUES ('new') $$;
END
$f$;
SELECT outbox.register_hook('replace', 'shop.replace_me');
SELECT count(*) FROM outbox.enqueue_batch('replace', '[1, 2, 3]');
DELETE FROM shop.seen;
CALL outbox.drain();
SELECT string_agg(name, ' ' ORDER BY n) FROM shop.seen;

-- A batch of as many rows as messages, which have failed one by one: what a group needs it gives back.
SELECT outbox.reset() > 0;
CREATE FUNCTION shop.memory(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF m.attempts = 1 THEN
        RAISE EXCEPTION 'failed';
    ELSIF CAST(m.payload AS int) % 50 = 0 THEN
        INSERT INTO shop.seen (name, payload)
        SELECT 'memory', to_jsonb(sum(total_bytes)) FROM pg_backend_memory_contexts;
    END IF;
END
$$;
SELECT outbox.register_hook('memory', 'shop.memory', retry => '{1 ms}');
SELECT count(*) FROM outbox.enqueue_batch('memory', (SELECT jsonb_agg(g) FROM generate_series(1, 1000) g));
SET outbox.batch_size = 1000;
SELECT claimed, retried FROM outbox.deliver(max_messages => 1000);
SET outbox.clock_offset = 1000;
SELECT count(*) = 1000 AS rows FROM outbox.delivery WHERE state = 'ready';
DELETE FROM shop.seen;
CALL outbox.drain();
SELECT max(CAST(payload AS bigint)) - (array_agg(CAST(payload AS bigint) ORDER BY n))[1] < 500000 AS bounded FROM shop.seen HAVING count(*) = 20;
RESET outbox.clock_offset;
RESET outbox.batch_size;
SELECT outbox.unregister('memory');

-- What failed does not hold up the others, and what it did is undone.
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
SELECT outbox.register_hook('fail', 'shop.hook', max_attempts => 2, retry => '{0}');
SELECT outbox.register_hook('fail', 'shop.hook', max_attempts => 2, retry => '{1 ms}');
SELECT outbox.enqueue('good', '1') IS NOT NULL;
SELECT outbox.enqueue('fail', '2') IS NOT NULL;
SELECT outbox.enqueue('good', '3') IS NOT NULL;
SELECT claimed, delivered, retried FROM outbox.deliver(max_messages => 3);
SELECT string_agg(payload::text, ' ' ORDER BY n) FROM shop.seen;
SET outbox.clock_offset = 1000;
SELECT * FROM outbox.deliver();
RESET outbox.clock_offset;
SELECT name, status, attempts, last_error->>'message' AS error FROM outbox.messages ORDER BY id;

-- Several subscriptions of one message, each by itself.
SELECT outbox.reset() > 0;
DELETE FROM shop.seen;
SELECT outbox.subscribe('second', 'fail');
SELECT outbox.register_hook('#', 'shop.hook', 'second', max_attempts => 1);
SELECT outbox.unregister('fail');
CREATE FUNCTION shop.fine(m outbox.message) RETURNS void LANGUAGE sql AS $$ SELECT $$;
SELECT outbox.register_hook('fail', 'shop.fine');
SELECT outbox.enqueue('fail', '1') IS NOT NULL;
CALL outbox.drain();
SELECT subscription, status FROM outbox.messages ORDER BY 1;

-- maintain(): routes, takes back what has expired, forgets dedupe keys.
SELECT outbox.reset() > 0;
SELECT outbox.unregister('fail'), outbox.unregister('good'), outbox.unregister('strange'), outbox.unregister('replace');
SELECT * FROM outbox.maintain();
SELECT count(*) FROM outbox.enqueue_batch('m', '[1, 2, 3]');
SELECT outbox.enqueue('m', '4', dedupe_key => 'k') = outbox.enqueue('m', '5', dedupe_key => 'k') AS kept_out;
SELECT * FROM outbox.maintain();
SELECT pending, ready FROM outbox.status WHERE subscription = 'default';
SELECT count(*) FROM outbox.claim_batch(3);
SELECT * FROM outbox.maintain();
SET outbox.clock_offset = 31000;
SELECT * FROM outbox.maintain();
SELECT name, status, attempts, last_error->>'sqlstate' AS error FROM outbox.messages WHERE subscription = 'default' ORDER BY id;
SELECT count(*) FROM outbox.dedupe;
SET outbox.clock_offset = 300000000;
SELECT * FROM outbox.maintain();
RESET outbox.clock_offset;
SELECT count(*) FROM outbox.dedupe;
SET default_transaction_read_only = on;
SELECT * FROM outbox.maintain();
RESET default_transaction_read_only;

-- A batch is kept in memory while its hooks are called: of large messages it has fewer.
CREATE TABLE seen_large (name text, claimed bigint);
CREATE FUNCTION large(m outbox.message) RETURNS void LANGUAGE sql AS $$
    INSERT INTO seen_large SELECT m.name, sum(l.messages) FROM outbox.leases l WHERE l.subscription = 'large'
$$;
SELECT outbox.subscribe('large', 'large'), outbox.register_hook('large', 'large', subscription => 'large');
ALTER TABLE outbox.log_0 ALTER payload SET STORAGE EXTERNAL;
ALTER TABLE outbox.log_1 ALTER payload SET STORAGE EXTERNAL;
ALTER TABLE outbox.log_2 ALTER payload SET STORAGE EXTERNAL;
SELECT count(outbox.enqueue('large', to_jsonb(repeat('x', 35000000)))) FROM generate_series(1, 3);
CALL outbox.drain('large');
SELECT claimed, count(*) FROM seen_large GROUP BY 1 ORDER BY 1;
DROP FUNCTION large;
DROP TABLE seen_large;

SELECT outbox.reset() > 0;
DROP SCHEMA shop CASCADE;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
