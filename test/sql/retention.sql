-- retention: the ring turns. Settled history leaves, whole segments at a time; what is not settled stays
-- and can be delivered, requeued and discarded wherever it lies.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
CREATE VIEW ring AS SELECT string_agg(state, ' ' ORDER BY segment) FILTER (WHERE segment <> 'log_kept') AS ring,
                           (SELECT count(*) FROM outbox.log_kept) AS kept,
                           string_agg(segment || ': ' || held_by, '; ' ORDER BY segment)
                               FILTER (WHERE held_by !~ '^process') AS held_by  -- autovacuum may look at any time
                      FROM outbox.segments;
-- which messages are stored where
CREATE VIEW stored AS
    SELECT log, string_agg(CAST(payload AS text), ' ' ORDER BY CAST(payload AS integer)) AS messages
      FROM (SELECT 0 AS log, payload FROM outbox.log_0 UNION ALL SELECT 1, payload FROM outbox.log_1
            UNION ALL SELECT 2, payload FROM outbox.log_2 UNION ALL SELECT 9, payload FROM outbox.log_kept) l
     GROUP BY log ORDER BY log;
CREATE VIEW counts AS
    SELECT subscription, pending, scheduled AS sched, ready, leased, unhandled AS unh, delivered AS deliv, dead, discarded AS disc,
           cancelled AS canc, holds
      FROM outbox.status ORDER BY subscription;
-- messages with payloads from one number to another, in a transaction
CREATE FUNCTION pg_temp.put(first integer, last integer DEFAULT NULL, name text DEFAULT 'm') RETURNS bigint LANGUAGE sql AS $$
    SELECT count(outbox.enqueue(name, to_jsonb(n))) FROM generate_series(first, coalesce(last, first)) n
$$;
-- claims so many and settles them, whole claims at once; how many
CREATE FUNCTION pg_temp.work(messages integer DEFAULT 1000, outcome text DEFAULT 'delivered', subscription text DEFAULT 'default')
RETURNS bigint LANGUAGE sql AS $$
    SELECT sum(outbox.settle_batch(t.claim_token, outcome))
      FROM (SELECT DISTINCT claim_token FROM outbox.claim_batch(messages, subscription => subscription)) t
$$;
CREATE FUNCTION pg_temp.message(n integer) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT id FROM outbox.log WHERE payload = to_jsonb(n)
$$;
-- What is condemned is truncated; an autovacuum worker may have a snapshot, so poll.
CREATE PROCEDURE pg_temp.truncated() LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        PERFORM outbox.maintain();
        COMMIT;
        EXIT WHEN NOT EXISTS (SELECT FROM outbox.segment WHERE condemned_at IS NOT NULL);
        PERFORM pg_sleep(0.01);     -- poll
    END LOOP;
END
$$;
-- The whole turn: decide, truncate, sweep, each in a transaction of its own.
CREATE PROCEDURE pg_temp.turn() LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox.maintain();
    COMMIT;
    CALL pg_temp.truncated();
    WHILE EXISTS (SELECT FROM outbox.segment WHERE sweep_to IS NOT NULL) LOOP
        PERFORM outbox.maintain();
        COMMIT;
    END LOOP;
END
$$;
CREATE FUNCTION pg_temp.refused(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE statement;
    RETURN 'not refused';
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;
SET client_min_messages = warning;
SET outbox.retention = '2h';
SET statement_timeout = '100s';
SET outbox.lease = '20d';
SET outbox.max_active = '20d';
\set ECHO all

-- The life of a segment: written for half of the retention, closed for the whole of it, condemned,
-- truncated, written again; what was known of its messages is swept in the end.
SELECT pg_temp.put(1, 3);
SELECT pg_temp.work();
SELECT rotated FROM outbox.maintain();
SELECT * FROM ring;
SET outbox.clock_offset = '59min';
SELECT rotated FROM outbox.maintain();
SELECT * FROM ring;
SET outbox.clock_offset = '61min';
SELECT rotated FROM outbox.maintain();
SELECT * FROM ring;
SELECT removable_at - closed_at AS retention FROM outbox.segments WHERE segment = 'log_0';
SELECT pg_temp.put(4);
SELECT * FROM stored;
SELECT pg_temp.work();
SET outbox.clock_offset = '180min';
SELECT rotated FROM outbox.maintain();
SELECT * FROM ring;
SET outbox.clock_offset = '182min';
SELECT rotated FROM outbox.maintain();
SELECT * FROM ring;
CALL pg_temp.truncated();
SELECT * FROM ring;
SELECT * FROM stored;
SELECT * FROM counts;
SELECT rotated FROM outbox.maintain();
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
-- the retention is what it is when the ring is looked at
SET outbox.retention = '30d';
CALL pg_temp.turn();
SELECT * FROM ring;
SET outbox.retention = '1s';
CALL pg_temp.turn();
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
SET outbox.retention = '2h';

-- The clock was set back: what was written or closed in the future goes a retention later.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
SET outbox.clock_offset = '10d';
SELECT pg_temp.put(1);
SELECT pg_temp.work();
SET outbox.clock_offset = '242h';
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT pg_temp.put(2);
SELECT pg_temp.work();
RESET outbox.clock_offset;
CALL pg_temp.turn();
SELECT * FROM ring;
SET outbox.clock_offset = '119min';
CALL pg_temp.turn();
SELECT * FROM ring;
SET outbox.clock_offset = '121min';
CALL pg_temp.turn();
SELECT * FROM ring;

-- While one segment is truncated, which readers of the log wait for, no other is decided about: that comes before.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
CREATE FUNCTION note_locks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE WARNING 'message % moves, % segments are locked', NEW.payload,
        (SELECT count(*) FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.mode = 'AccessExclusiveLock'
            AND l.relation IN ('outbox.log_0'::regclass, 'outbox.log_1'::regclass, 'outbox.log_2'::regclass));
    RETURN NEW;
END
$$;
CREATE TRIGGER note_locks BEFORE INSERT ON outbox.log_kept FOR EACH ROW EXECUTE FUNCTION note_locks();
SELECT pg_temp.put(1);
SELECT pg_temp.work();
SELECT outbox.purge('infinity');
SELECT pg_temp.put(2);
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SET outbox.clock_offset = '121min';
SELECT * FROM ring;
SELECT routed FROM outbox.maintain();
SELECT * FROM stored WHERE log > 0;
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
DROP FUNCTION note_locks CASCADE;
SELECT pg_temp.work();

-- What has no run yet is not old: a message that nobody has routed is not lost when its segment goes.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
SELECT * FROM ring;
SELECT pg_temp.put(1, 2);
SELECT pg_temp.work();
SELECT pg_temp.put(3);
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
SELECT name, payload, attempts FROM outbox.claim_batch();

-- What the transaction has itself enqueued is not old either.
SELECT pg_temp.anew();
SELECT pg_temp.put(1);
SELECT pg_temp.work();
BEGIN;
SELECT pg_temp.put(2);
SELECT outbox.purge('infinity');
COMMIT;
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
SELECT pg_temp.work();

-- purge(): what was closed before the time; what is written is closed, if it has older messages.
SELECT pg_temp.anew();
SELECT outbox.purge('infinity');
SELECT * FROM ring;
SELECT pg_temp.put(1, 3);
SELECT pg_temp.work();
SELECT outbox.purge('-infinity'), outbox.purge(now() - interval '1 hour');
SELECT * FROM ring;
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SELECT * FROM ring;
SELECT outbox.purge(:'before');
SELECT pg_temp.put(4);
SELECT outbox.purge(clock_timestamp());
SELECT * FROM ring;
SELECT outbox.purge(clock_timestamp());
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
SELECT pg_temp.refused('SELECT outbox.purge(NULL)');
BEGIN READ ONLY;
SELECT pg_temp.refused('SELECT outbox.purge(now())');
COMMIT;
-- twice in a transaction, and in the one that decides nothing is truncated
SELECT pg_temp.put(5);
BEGIN;
SELECT outbox.purge('infinity'), outbox.purge('infinity'), (outbox.maintain()).rotated;
COMMIT;
SELECT * FROM ring;
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
-- a cursor over the log does not stop maintain(), and keeps what it reads
SELECT pg_temp.anew();
SELECT pg_temp.put(1);
SELECT pg_temp.work();
SELECT outbox.purge('infinity');
BEGIN;
DECLARE reader CURSOR FOR SELECT payload FROM outbox.log;
SELECT rotated FROM outbox.maintain();
FETCH ALL FROM reader;
COMMIT;
CALL pg_temp.truncated();

-- what somebody has put there by hand meanwhile strikes the decision out
SELECT pg_temp.anew();
SELECT pg_temp.put(1);
SELECT pg_temp.work();
SELECT outbox.purge('infinity');
INSERT INTO outbox.log_0 (position, id, created_at, occurred_at, version, name, kind, payload)
SELECT position + 1, gen_random_uuid(), created_at, occurred_at, version, name, kind, '2' FROM outbox.log_0;
CALL pg_temp.truncated();
SELECT * FROM ring;
SELECT * FROM stored;

-- One message in each state, in one segment.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
SELECT outbox.subscribe('second', 'm'), outbox.subscribe('paused', 'paused'), outbox.subscribe('gone', 'gone'),
       outbox.subscribe('pushed', 'push.*');
CREATE FUNCTION pushed(outbox.message) RETURNS void LANGUAGE sql AS 'SELECT';
SELECT outbox.register_hook('push.known', 'pushed', 'pushed');
SELECT outbox.pause('paused');
BEGIN;
SELECT pg_temp.put(1, 5);
SAVEPOINT a;
SELECT pg_temp.put(6, 7);
ROLLBACK TO a;
SELECT pg_temp.put(8, 9);
COMMIT;
SELECT outbox.unsubscribe('default', discard_pending => true) IS NOT NULL;
SELECT outbox.subscribe('default', 'm');
INSERT INTO held SELECT * FROM outbox.claim_batch(7);
SELECT n, outbox.settle(pg_temp.id(n), pg_temp.token(n), outcome, retry_at => retry_at)
  FROM (VALUES (1, 'delivered', NULL), (2, 'failed', now() + interval '10 days'), (3, 'dead', NULL), (4, 'dead', NULL),
               (5, 'released', NULL)) v (n, outcome, retry_at);
SELECT outbox.discard(pg_temp.message(4), 'default', 'of no use');
SELECT pg_temp.put(10, name => 'paused'), pg_temp.put(11, name => 'gone'), pg_temp.put(12, name => 'nobody'),
       pg_temp.put(13, name => 'push.known'), pg_temp.put(14, name => 'push.unknown');
SELECT outbox.enqueue('m', '15', available_at => now() + interval '20 days') IS NOT NULL;
SELECT outbox.enqueue('m', '16') AS id \gset
SELECT outbox.cancel(:'id');
DO $$ BEGIN
    PERFORM pg_temp.put(17);
    PERFORM outbox.settle(c.id, c.claim_token) FROM outbox.claim_batch(1) c WHERE c.payload = '5';
    PERFORM outbox.settle(c.id, c.claim_token) FROM outbox.claim_batch(1) c;
END $$;
CALL outbox.drain();
SELECT pg_temp.work(1, subscription => 'second');
SELECT * FROM counts;
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.states('second');
-- all that nobody needs leaves; the rest is moved, and is as it was
SELECT outbox.purge('infinity');
SELECT * FROM ring;
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM stored;
SELECT * FROM counts;
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.states('second');
SELECT * FROM pg_temp.broken();
-- and goes on from there: delivered, requeued and delivered, discarded, handled, given up
SELECT outbox.settle(pg_temp.id(8), pg_temp.token(8));
SELECT outbox.requeue(pg_temp.message(3));
SELECT subscription, name, payload, attempts, last_error_message FROM outbox.dead_letters;
SELECT outbox.resume('paused');
INSERT INTO held SELECT * FROM outbox.claim_batch(subscription => 'paused');
SELECT outbox.settle(pg_temp.id(10), pg_temp.token(10), 'dead', 'it broke');
SELECT payload, last_error_message FROM outbox.dead_letters;
SELECT outbox.discard_all('paused');
SELECT outbox.register_hook('push.#', 'pushed', 'pushed');
CALL outbox.drain();
SELECT outbox.unsubscribe('gone', discard_pending => true);
SELECT pg_temp.work();
SELECT pg_temp.work(subscription => 'second');
SET outbox.clock_offset = '15d';
SELECT pg_temp.work();
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
-- a message of log_kept goes when all have settled it for the retention: with the next segment that goes
SELECT outbox.requeue(pg_temp.message(10), 'paused');
SELECT pg_temp.put(18);
SELECT pg_temp.work();
SELECT pg_temp.work(subscription => 'second');
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT * FROM counts;
SET outbox.clock_offset = '362h';
SELECT pg_temp.put(19);
SELECT pg_temp.work();
SELECT pg_temp.work(subscription => 'second');
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
SELECT outbox.unsubscribe(name, discard_pending => true) FROM outbox.subscriptions WHERE name <> 'default';

-- While a segment is condemned, what was discarded is wanted again: the decision is struck out.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
SELECT pg_temp.put(1, 3);
SELECT outbox.discard(pg_temp.message(2), 'default');
SELECT pg_temp.work();
SELECT outbox.purge('infinity');
SELECT outbox.requeue(pg_temp.message(2), 'default');
SELECT * FROM ring;
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT pg_temp.work();
-- a new subscription wants all of it
SELECT outbox.purge('infinity');
SELECT * FROM ring;
SELECT outbox.subscribe('late', 'm');
SELECT * FROM ring;
SELECT * FROM counts;
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT pg_temp.work(subscription => 'late');
-- or none
SELECT outbox.purge('infinity');
SELECT outbox.unsubscribe('late');
SELECT outbox.subscribe('late', 'm', from_earliest => false);
SELECT * FROM ring;
-- after the truncation it is too late
SELECT outbox.unsubscribe('late');
SELECT pg_temp.anew();
SELECT outbox.enqueue('m', '1', id => '00000000-0000-7000-8000-000000000009') AS id \gset
SELECT outbox.discard(:'id', 'default');
SELECT outbox.purge('infinity');
CALL pg_temp.truncated();
SELECT outbox.requeue(:'id', 'default');

-- More than 10,000 unsettled messages keep their segment, and the others of the ring turn meanwhile.
SELECT pg_temp.anew();
SELECT outbox.subscribe('stuck', 'm');
SELECT count(*) FROM outbox.enqueue_batch('m', (SELECT jsonb_agg(n) FROM generate_series(1, 10002) n));
SELECT pg_temp.work(20000);
SELECT pg_temp.work(1, subscription => 'stuck');
SELECT outbox.purge('infinity');
SELECT * FROM ring;
SET outbox.clock_offset = '3h';
SELECT * FROM ring;
SELECT subscription, holds FROM counts;
SELECT pg_temp.put(20000, name => 'other');
SELECT pg_temp.work();
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT pg_temp.put(20001, name => 'other');
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT count(*) FROM outbox.log;
-- one less, and it goes; what several subscriptions have not settled counts once
SELECT pg_temp.work(1, subscription => 'stuck');
SELECT outbox.subscribe('stuck too', 'm');
SELECT pg_temp.work(2, subscription => 'stuck too');
SELECT outbox.purge('infinity');
SELECT count(*) FROM outbox.log_0;
CALL pg_temp.turn();
SELECT * FROM ring;
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
SELECT pg_temp.work(20000, subscription => 'stuck'), pg_temp.work(20000, subscription => 'stuck too');
SELECT * FROM counts;
SELECT outbox.unsubscribe('stuck', discard_pending => true), outbox.unsubscribe('stuck too', discard_pending => true);

-- Ids that the caller gave are unique over all segments, for as long as the message is there.
RESET outbox.clock_offset;
SELECT pg_temp.anew();
SELECT outbox.enqueue('m', '1', id => '00000000-0000-7000-8000-000000000001');
SELECT pg_temp.work(outcome => 'dead');
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SELECT * FROM ring;
SELECT pg_temp.refused($$SELECT outbox.enqueue('m', '2', id => '00000000-0000-7000-8000-000000000001')$$);
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT pg_temp.refused($$SELECT outbox.enqueue('m', '2', id => '00000000-0000-7000-8000-000000000001')$$);
SELECT pg_temp.refused($$SELECT * FROM outbox.enqueue_batch('[{"name": "m", "payload": 2}, {"name": "m", "payload": 3, "id": "00000000-0000-7000-8000-000000000001"}]')$$);
SELECT pg_temp.anew();
SELECT outbox.enqueue('m', '2', id => '00000000-0000-7000-8000-000000000001');
-- in one transaction, of which a part was written before the ring moved on
BEGIN;
SELECT outbox.enqueue('m', '3', id => '00000000-0000-7000-8000-000000000003');
SELECT outbox.purge('infinity');
SELECT pg_temp.refused($$SELECT outbox.enqueue('m', '4', id => '00000000-0000-7000-8000-000000000003')$$);
SELECT outbox.enqueue('m', '5', id => '00000000-0000-7000-8000-000000000005');
SELECT * FROM stored;
SELECT payload FROM outbox.enqueued() ORDER BY 1;
SELECT payload FROM outbox.claim_batch() ORDER BY 1;
ROLLBACK;
SELECT * FROM ring;
SELECT outbox.enqueue('m', '3', id => '00000000-0000-7000-8000-000000000003');
SELECT * FROM stored;

-- A run over two segments: when one of them has gone, it covers what is left, and settling goes on.
SELECT pg_temp.anew();
SELECT pg_temp.put(1, 5);
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SELECT pg_temp.put(6, 10);
SELECT * FROM stored;
INSERT INTO held SELECT * FROM outbox.claim_batch(10);
SELECT count(DISTINCT claim_token), (SELECT count(*) FROM outbox.delivery) AS runs FROM held;
SELECT outbox.settle(pg_temp.id(n), pg_temp.token(n)) FROM generate_series(1, 3) n;
SELECT message_count, state FROM outbox.delivery ORDER BY state, message_count;
SELECT outbox.purge('infinity');
SELECT * FROM ring;
SELECT outbox.settle(pg_temp.id(4), pg_temp.token(4));
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT message_count, state FROM outbox.delivery ORDER BY state, message_count;
SELECT * FROM counts;
SELECT * FROM pg_temp.broken();
-- the run that collects what is delivered has gone in the meantime
SELECT pg_temp.anew();
SELECT pg_temp.put(1, 5);
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SELECT pg_temp.put(6, 10);
INSERT INTO held SELECT * FROM outbox.claim_batch(10);
SELECT outbox.settle(pg_temp.id(n), pg_temp.token(n)) FROM generate_series(1, 5) n;
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT * FROM stored;
SELECT message_count, state FROM outbox.delivery ORDER BY state, message_count;
SELECT outbox.settle(pg_temp.id(n), pg_temp.token(n)) FROM generate_series(6, 9) n;
SELECT message_count, state FROM outbox.delivery ORDER BY state, message_count;
SELECT * FROM pg_temp.broken();
-- it is shrunk, and goes on collecting
SELECT outbox.settle_batch(pg_temp.token(10));
SELECT clock_timestamp() AS before \gset
SELECT outbox.purge(:'before');
SELECT pg_temp.put(11, 20);
INSERT INTO held SELECT * FROM outbox.claim_batch(10);
SELECT outbox.settle(pg_temp.id(n), pg_temp.token(n)) FROM generate_series(11, 13) n;
SELECT outbox.purge('infinity');
CALL pg_temp.turn();
SELECT outbox.settle(pg_temp.id(n), pg_temp.token(n)) FROM generate_series(14, 20) n;
SELECT * FROM stored;
SELECT message_count, state FROM outbox.delivery ORDER BY state, message_count;
SELECT * FROM pg_temp.broken();

-- Sweeping in many bites, for several subscriptions; one that it is at is removed in between.
SELECT pg_temp.anew();
SELECT outbox.subscribe('second', 'm');
SET outbox.run_length = 1;
SELECT count(*) FROM outbox.enqueue_batch('m', (SELECT jsonb_agg(n) FROM generate_series(1, 2500) n));
SELECT pg_temp.work(3000), pg_temp.work(3000, subscription => 'second');
RESET outbox.run_length;
SELECT count(*) FROM outbox.delivery;
SELECT outbox.purge('infinity');
CALL pg_temp.truncated();
SELECT count(*) FROM outbox.delivery;
UPDATE outbox.segment SET sweep_from = CAST(1 AS bigint) << 62,
       sweep_subscription = (SELECT s.id FROM outbox.subscription s WHERE s.name = 'default')
 WHERE sweep_to IS NOT NULL;
SELECT outbox.unsubscribe('default');
CALL pg_temp.turn();
SELECT count(*) FROM outbox.delivery;
SELECT count(*) FROM outbox.log;
SELECT sweep_to IS NULL AS done FROM outbox.segment ORDER BY number;
SELECT outbox.subscribe('default', '#'), outbox.unsubscribe('second');

-- reset() begins anew, in the middle of a turn too
SELECT pg_temp.put(1, 5);
SELECT pg_temp.work(2);
SELECT outbox.purge('infinity');
SELECT outbox.reset();
SELECT * FROM ring;
SELECT pg_temp.put(6);
SELECT * FROM stored;
SELECT pg_temp.work();

-- Twenty times around: nothing grows, and after many passes routing remembers but the last.
SELECT pg_temp.anew();
DO $$ BEGIN
    FOR n IN 1 .. 700 LOOP
        PERFORM pg_temp.put(n);
        COMMIT;
        PERFORM outbox.maintain();
        COMMIT;
    END LOOP;
END $$;
SELECT count(*) BETWEEN 256 AND 2 * 256 AS few_frontiers FROM outbox.frontier;
SELECT pg_temp.work(1000);
CREATE TABLE sizes (round integer, relation text, pages bigint);
CREATE FUNCTION pg_temp.round() RETURNS bigint LANGUAGE sql AS $$
    SELECT pg_temp.put(1, 400);
    SELECT pg_temp.work(399);
    SELECT pg_temp.work(1, 'dead');
    SELECT outbox.discard_all('default') - 1
$$;
\set ECHO none
\o /dev/null
SELECT s.statement
  FROM generate_series(1, 20) n
 CROSS JOIN LATERAL (VALUES
       (1, format('SET outbox.clock_offset = ''%smin''', n * 90)),
       (2, 'SELECT pg_temp.round()'),
       (3, 'SELECT outbox.maintain()'), (4, 'SELECT outbox.maintain()'), (5, 'SELECT outbox.maintain()'),
       (6, 'VACUUM outbox.delivery, outbox.frontier, outbox.segment, outbox.log_kept, outbox.identity, outbox.self_routed'),
       (7, format('INSERT INTO sizes SELECT %s, relname, pg_relation_size(oid) / 8192 FROM pg_class'
                  ' WHERE relnamespace = ''outbox''::regnamespace AND relkind IN (''r'', ''i'') AND relname !~ ''log_[012]''', n))) s (k, statement)
 ORDER BY n, k
\gexec
\o
\set ECHO all
SELECT DISTINCT relation, l.pages AS late, e.pages AS early
  FROM sizes l JOIN (SELECT relation, max(pages) AS pages FROM sizes WHERE round <= 8 GROUP BY relation) e USING (relation)
 WHERE round > 8 AND l.pages > e.pages + 2;
SELECT count(*) <= 3 * 400 AS few_messages, (SELECT count(*) FROM outbox.log_kept) AS kept FROM outbox.log;
SELECT count(*) < 600 AS few_runs FROM outbox.delivery;
SELECT * FROM pg_temp.broken();

DROP VIEW ring, stored, counts;
DROP FUNCTION pushed(outbox.message);
DROP TABLE sizes;
