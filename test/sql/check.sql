-- check: each finding of outbox.check() is provoked, and goes when its remedy is carried out.
-- What concerns processes, other sessions and standbys is in test/t/050_check.pl.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
SET outbox.jitter = 0;
SET client_min_messages = warning;
-- what the server of this test has to say of itself is not asked for
CREATE VIEW findings AS
SELECT * FROM outbox.check() WHERE subject NOT IN ('outbox.enabled', 'shared_preload_libraries', 'max_worker_processes');
CREATE VIEW remedies AS SELECT remedy FROM findings;
\set ECHO all

-- Nothing is wrong with a new installation, nor with one that is in use.
SELECT * FROM findings;
SELECT outbox.enqueue('a', to_jsonb(n)) IS NOT NULL FROM generate_series(1, 4) n;
SELECT * FROM findings;
SELECT outbox.settle(id, claim_token) FROM outbox.claim_batch(1);
SELECT * FROM findings;

\x on
-- paused
SELECT outbox.pause('default');
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;

-- what is due waits: a pulled one, one that nobody has used
SELECT outbox.subscribe('never', 'a');
SET outbox.clock_offset = '290s';
SELECT * FROM findings;
SET outbox.clock_offset = '400s';
SELECT severity, subject, regexp_replace(what, '\d+ seconds', 'n seconds') AS what, why, remedy FROM findings;
SELECT remedy FROM remedies WHERE remedy ~ 'never' \gexec
-- a paused one is late for a known reason, what is not due yet is not late
SELECT outbox.pause('default');
SELECT subject, what FROM findings;
SELECT outbox.resume('default'), outbox.skip('default', outbox.clock());
SELECT outbox.enqueue('a', '5', available_at => outbox.clock() + interval '1 day') IS NOT NULL;
SELECT * FROM outbox.maintain();
SELECT * FROM findings;
RESET outbox.clock_offset;

-- "default" keeps everything, and others are used
SELECT outbox.reset() > 0, outbox.unsubscribe('default', discard_pending => true), outbox.subscribe('default'), outbox.subscribe('used', 'a');
SELECT outbox.enqueue('a', '1') IS NOT NULL;
SELECT * FROM findings;
SELECT outbox.settle(id, claim_token) FROM outbox.claim_batch(subscription => 'used');
SELECT * FROM findings;
-- that it is late, too, says nothing new
SET outbox.clock_offset = '400s';
SELECT subject, what FROM findings;
RESET outbox.clock_offset;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;

-- dead letters
SELECT outbox.enqueue('a', '1') IS NOT NULL;
SELECT outbox.settle(id, claim_token, 'dead') FROM outbox.claim_batch(subscription => 'used');
SELECT * FROM findings;
SELECT outbox.requeue_all('used');
SELECT * FROM findings;

-- leases that are lost: not the first one, the second one in a row; also while it is claimed again
SELECT count(*) FROM outbox.claim_batch(subscription => 'used', worker => 'slow');
SELECT outbox.revoke_lease('used', 'slow');
SELECT * FROM findings;
SELECT count(*) FROM outbox.claim_batch(subscription => 'used', worker => 'slow');
SELECT * FROM findings;
SELECT outbox.revoke_lease('used', 'slow');
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT pattern, lease_seconds, max_active_seconds FROM outbox.subscriptions WHERE name = 'used';
SELECT claim_token AS token FROM outbox.claim_batch(subscription => 'used', worker => 'slow') \gset
SELECT remedy FROM findings;
-- no lease can be longer: look at the message
SELECT outbox.subscribe('used', 'a', lease => '300 s', max_active => '300 s', max_attempts => 9, replace => true);
SELECT remedy FROM findings;
SELECT outbox.settle_batch(:'token');
SELECT * FROM findings;

-- leases that have ended, and nobody takes them back
SELECT outbox.enqueue('a', '2') IS NOT NULL;
SELECT count(*) FROM outbox.claim_batch(subscription => 'used', lease => '30 s');
SET outbox.clock_offset = '70s';
SELECT * FROM findings;
SET outbox.clock_offset = '120s';
SELECT severity, subject, regexp_replace(what, '\d+ seconds', 'n seconds') AS what, why, remedy FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
RESET outbox.clock_offset;
SELECT outbox.unsubscribe('used', discard_pending => true);

-- names without a handler
SELECT outbox.subscribe('push', 'p.#');
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS '';
SELECT outbox.register_hook('p.known', 'hook', 'push');
SELECT count(outbox.enqueue(name, '1')) FROM unnest(ARRAY['p.known', 'p.new', 'p.new', 'p.it''s']) name;
SELECT claimed, delivered, unhandled FROM outbox.deliver();
SELECT * FROM findings;
SELECT count(outbox.enqueue('p.' || n, '1')) FROM generate_series(1, 5) n;
SELECT claimed, unhandled FROM outbox.deliver();
SELECT what FROM findings;
SELECT outbox.register_hook('p.#', 'hook', 'push');
SELECT claimed, delivered FROM outbox.deliver();
SELECT * FROM findings;

-- what is pushed waits
SELECT outbox.enqueue('p.known', '2') IS NOT NULL;
SET outbox.clock_offset = '400s';
SELECT severity, subject, regexp_replace(what, '\d+ seconds', 'n seconds') AS what, why, remedy FROM findings;
SELECT claimed, delivered FROM outbox.deliver();
SELECT * FROM findings;
RESET outbox.clock_offset;

-- a function that is missing; its messages are not those without a handler
ALTER FUNCTION hook RENAME TO hook_away;
SELECT outbox.enqueue('p.known', '3') IS NOT NULL;
SELECT claimed, unhandled FROM outbox.deliver();
SELECT * FROM findings;
ALTER FUNCTION hook_away RENAME TO hook;
SELECT claimed, delivered FROM outbox.deliver();
SELECT * FROM findings;
ALTER FUNCTION hook RENAME TO hook_away;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
ALTER FUNCTION hook_away RENAME TO hook;
SELECT name_pattern, state FROM outbox.handlers;

-- a function that its role may not execute, or a role that is gone
CREATE ROLE check_hooks LOGIN;
SELECT outbox.grant_access('check_hooks', 'consumer'), outbox.subscribe('role', 'r');
SET ROLE check_hooks;
SELECT outbox.register_hook('r', 'public.hook', 'role', kind => 'event', version => 2, timeout => '400 s');
RESET ROLE;
SELECT * FROM findings;
-- (its timeout)
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
REVOKE EXECUTE ON FUNCTION hook FROM PUBLIC;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
-- what the role itself lacks; one row, however many handlers it has
SET ROLE check_hooks;
SELECT outbox.register_notify('r', 'news', 'role');
RESET ROLE;
ALTER ROLE check_hooks NOLOGIN;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT outbox.revoke_access('check_hooks', 'consumer');
SELECT * FROM findings;
SELECT outbox.grant_access('check_hooks', 'consumer', 'push');
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
SELECT outbox.revoke_access('check_hooks', 'consumer');
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
CREATE ROLE check_owner;
ALTER TABLE outbox.delivery OWNER TO check_owner;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
SELECT CAST(current_user AS text) AS me \gset
ALTER TABLE outbox.delivery OWNER TO :"me";
DROP ROLE check_owner;
DROP OWNED BY check_hooks;
DROP ROLE check_hooks;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;

-- settings at odds
SET outbox.max_active = '20s';
SELECT * FROM findings;
SET outbox.hook_timeout = '20s';
SET outbox.lease = '20s';
SELECT * FROM findings;
RESET outbox.max_active;
RESET outbox.hook_timeout;
RESET outbox.lease;
SET outbox.backoff_max = '100ms';
SELECT * FROM findings;
RESET outbox.backoff_max;
SELECT outbox.subscribe('cut', kind => 'k', lease => '250 s', max_attempts => 7);
SELECT * FROM findings;
SET outbox.max_active = '200 s';
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
RESET outbox.max_active;
SELECT outbox.unsubscribe('cut'), outbox.unsubscribe('role');

-- triggers that were disabled
ALTER TABLE outbox.delivery DISABLE TRIGGER delivery_changed;
ALTER TABLE outbox.handler ENABLE REPLICA TRIGGER guard_role;
ALTER TABLE outbox.access DISABLE TRIGGER ALL;
ALTER TABLE outbox.identity ENABLE TRIGGER identity_changed;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;

-- a prepared transaction
BEGIN;
SELECT outbox.enqueue('p.known', '4') IS NOT NULL;
PREPARE TRANSACTION 'it''s';
SELECT * FROM findings;
SET outbox.clock_offset = '400s';
SELECT severity, subject, regexp_replace(what, '\d+ seconds', 'n seconds') AS what, why, remedy FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;
RESET outbox.clock_offset;

-- a copy
SELECT outbox.enqueue('p.known', '5') IS NOT NULL;
SELECT routed FROM outbox.maintain();
UPDATE outbox.frontier SET system_identifier = 1;
UPDATE outbox.identity SET system_identifier = 1;
SELECT * FROM findings;
SELECT remedy FROM remedies \gexec
SELECT * FROM findings;

-- a segment of the log that could go, and does not
SET outbox.retention = '100s';
SELECT outbox.subscribe('slow', 'p.slow');
SELECT count(outbox.enqueue('p.slow', to_jsonb(n))) FROM generate_series(1, 10001) n;
SET outbox.clock_offset = '60s';
SELECT routed > 0 AS routed FROM outbox.maintain();
SET outbox.clock_offset = '161s';
SELECT rotated FROM outbox.maintain();
SELECT severity, subject FROM findings WHERE subject ~ 'segment';
SET outbox.clock_offset = '470s';
SELECT severity, subject, regexp_replace(what, '\d+ seconds', 'n seconds') AS what, why, remedy FROM findings WHERE subject ~ 'segment';
SELECT outbox.unsubscribe('slow', discard_pending => true), outbox.skip('push', 'infinity');
SELECT severity, subject FROM findings WHERE subject ~ 'segment';
RESET outbox.clock_offset;
RESET outbox.retention;

\x off
-- The worst first.
ALTER TABLE outbox.delivery DISABLE TRIGGER delivery_changed;
SET outbox.max_active = '20s';
SELECT outbox.subscribe('dead');
SELECT outbox.settle(id, claim_token, 'dead') FROM outbox.claim_batch(1, subscription => 'dead');
SELECT severity, subject FROM findings;
RESET outbox.max_active;

-- Operators and readers see the same, others nothing; whatever their search_path.
CREATE ROLE check_operator;
CREATE ROLE check_reader;
CREATE ROLE check_producer;
SELECT outbox.grant_access('check_operator', 'operator'), outbox.grant_access('check_reader', 'reader'), outbox.grant_access('check_producer', 'producer');
CREATE SCHEMA trap;
CREATE FUNCTION trap.format(text, VARIADIC "any") RETURNS text LANGUAGE internal AS 'text_format';
CREATE FUNCTION trap.never(bigint, integer) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE ''trapped''; END';
CREATE OPERATOR trap.> (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = trap.never);
GRANT USAGE ON SCHEMA trap TO PUBLIC;
SET search_path = trap, pg_catalog, public;
SET ROLE check_reader;
SELECT severity, subject FROM outbox.check() WHERE subject ~ '^(table|subscription)';
SET ROLE check_operator;
SELECT severity, subject FROM outbox.check() WHERE subject ~ '^(table|subscription)';
SET ROLE check_producer;
SELECT severity, subject FROM outbox.check();
SELECT * FROM outbox.counters;
RESET ROLE;
RESET search_path;
DROP OWNED BY check_operator, check_reader, check_producer;
DROP ROLE check_operator, check_reader, check_producer;
DROP SCHEMA trap CASCADE;

-- It only reads.
BEGIN READ ONLY;
SELECT severity, subject FROM findings;
COMMIT;
DROP VIEW remedies, findings;
