-- counters: each transition counts once, for its subscription, when its transaction commits.
-- (counters_1.out: without preloading nothing is counted.)
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
SELECT set_config('outbox.jitter', '0', false) \gset ignored_
-- what has been counted since the last call, those that are not zero
CREATE TEMPORARY TABLE seen (subscription text, counter text, n double precision);
CREATE FUNCTION pg_temp.counted() RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    CREATE TEMPORARY TABLE now_seen ON COMMIT DROP AS
    SELECT coalesce(c.subscription, '(database)') AS subscription, e.key AS counter, CAST(e.value AS double precision) AS n, ord
      FROM outbox.counters c CROSS JOIN json_each_text(row_to_json(c)) WITH ORDINALITY AS e (key, value, ord)
     WHERE e.key NOT IN ('subscription', 'stats_reset', 'hook_time_ms') AND e.value IS NOT NULL;
    RETURN QUERY
    SELECT format('%s: %s', a.subscription, string_agg(a.counter || ' ' || a.n - coalesce(b.n, 0), ', ' ORDER BY a.ord))
      FROM now_seen a LEFT JOIN seen b USING (subscription, counter)
     WHERE a.n <> coalesce(b.n, 0)
     GROUP BY a.subscription ORDER BY a.subscription;
    DELETE FROM seen;
    INSERT INTO seen SELECT s.subscription, s.counter, s.n FROM now_seen s;
END
$$;
\set ECHO all

-- A new installation has counted nothing.
SELECT outbox.enqueue('first', '0') IS NOT NULL;
SELECT * FROM pg_temp.counted();
SELECT count(*) FROM outbox.claim_batch();
SELECT * FROM pg_temp.counted();

-- Enqueue: what is committed; a dedupe key that is known writes nothing.
SELECT count(outbox.enqueue('a', to_jsonb(n))) FROM generate_series(1, 3) n;
SELECT count(*) FROM outbox.enqueue_batch('b', '[1, 2, 3, 4]');
SELECT outbox.enqueue('once', '1', dedupe_key => 'k') = outbox.enqueue('once', '2', dedupe_key => 'k') AS same;
SELECT * FROM pg_temp.counted();
BEGIN;
SELECT outbox.enqueue('gone', '1') IS NOT NULL;
ROLLBACK;
SELECT * FROM pg_temp.counted();
BEGIN;
SELECT outbox.enqueue('kept', '1') IS NOT NULL;
SAVEPOINT a;
SELECT outbox.enqueue('gone', '2') IS NOT NULL;
SAVEPOINT b;
SELECT outbox.enqueue('gone', '3') IS NOT NULL;
RELEASE SAVEPOINT b;
ROLLBACK TO SAVEPOINT a;
SAVEPOINT c;
SELECT outbox.enqueue('kept', '4') IS NOT NULL;
SELECT outbox.enqueue('kept', '5') IS NOT NULL;
RELEASE SAVEPOINT c;
SAVEPOINT d;
SELECT outbox.enqueue('gone', '6') IS NOT NULL;
ROLLBACK TO SAVEPOINT d;
SELECT outbox.enqueue('kept', '7') IS NOT NULL;
COMMIT;
SELECT * FROM pg_temp.counted();

-- Routing counts for each subscription that gets the message.
SET client_min_messages = warning;
SELECT outbox.subscribe('only b', 'b', from_earliest => true);
RESET client_min_messages;
SELECT routed FROM outbox.maintain();
SELECT * FROM pg_temp.counted();

-- Claim and settle: delivered, failed with budget left, dead; released is neither.
SELECT max(CAST(claim_token AS text)) AS token, count(*) FROM outbox.claim_batch(4, subscription => 'only b') \gset
SELECT * FROM pg_temp.counted();
SELECT array_agg(id) AS ids FROM outbox.messages WHERE subscription = 'only b' AND status = 'leased' \gset
SELECT outbox.settle((CAST(:'ids' AS uuid[]))[1], :'token');
SELECT outbox.settle((CAST(:'ids' AS uuid[]))[2], :'token', 'failed', 'broken');
SELECT outbox.settle((CAST(:'ids' AS uuid[]))[3], :'token', 'dead', 'hopeless');
SELECT outbox.settle((CAST(:'ids' AS uuid[]))[4], :'token', 'released');
SELECT * FROM pg_temp.counted();
BEGIN;
SELECT count(*) FROM outbox.claim_batch(4, subscription => 'only b');
SELECT outbox.requeue_all('only b');
ROLLBACK;
SELECT * FROM pg_temp.counted();

-- One that is not held: counted although the call fails; whose it was is known while its lease is there.
SELECT max(CAST(claim_token AS text)) AS token, count(*) FROM outbox.claim_batch(4, subscription => 'only b') \gset
CALL pg_temp.try(format('SELECT outbox.settle(%L, %L)', (CAST(:'ids' AS uuid[]))[1], :'token'));
CALL pg_temp.try('SELECT outbox.settle_batch(gen_random_uuid())');
BEGIN;
CALL pg_temp.try('SELECT outbox.renew_batch(gen_random_uuid())');
ROLLBACK;
SELECT * FROM pg_temp.counted();

-- A lease that ends: lost; with its last attempt abandoned, and dead.
SET outbox.clock_offset = '1h';
CALL pg_temp.try(format('SELECT outbox.settle_batch(%L)', :'token'));
SELECT * FROM pg_temp.counted();
SELECT expired FROM outbox.maintain();
SELECT * FROM pg_temp.counted();
SET outbox.clock_offset = '2h';
SELECT count(outbox.requeue(id, 'only b')) FROM outbox.dead_letters WHERE subscription = 'only b';
SET client_min_messages = warning;
SELECT outbox.subscribe('only b', 'b', max_attempts => 1, replace => true);
RESET client_min_messages;
SELECT outbox.enqueue('b', '5') IS NOT NULL;
SELECT sum(n) FROM (SELECT count(*) AS n FROM outbox.claim_batch(9, subscription => 'only b') UNION ALL
                    SELECT count(*) FROM outbox.claim_batch(9, subscription => 'only b') UNION ALL
                    SELECT count(*) FROM outbox.claim_batch(9, subscription => 'only b')) c;
SELECT * FROM pg_temp.counted();
SET outbox.clock_offset = '3h';
SELECT expired FROM outbox.maintain();
SELECT dead FROM outbox.status WHERE subscription = 'only b';
SELECT * FROM pg_temp.counted();

-- Pushed: a hook's time, also of one that fails; notified ones are delivered too.
SET client_min_messages = warning;
SELECT outbox.subscribe('pushed', 'p.#', from_earliest => false);
CREATE FUNCTION counted_hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM sum(n) FROM generate_series(1, 30000) n;
    IF m.name = 'p.fails' THEN RAISE 'broken'; END IF;
END $$;
SELECT outbox.register_hook('p.#', 'counted_hook', 'pushed'), outbox.register_notify('p.notify', 'counters', 'pushed');
RESET client_min_messages;
SELECT count(outbox.enqueue(name, '1')) FROM unnest(ARRAY['p.one', 'p.two', 'p.fails', 'p.notify', 'p.notify']) name;
SELECT * FROM pg_temp.counted();
BEGIN;
SELECT claimed, delivered, retried FROM outbox.deliver();
ROLLBACK;
SELECT * FROM pg_temp.counted();
SELECT claimed, delivered, retried FROM outbox.deliver();
SELECT * FROM pg_temp.counted();
SELECT subscription, hook_time_ms BETWEEN 0.1 AND 60000 AS plausible FROM outbox.counters WHERE hook_time_ms > 0;

-- What is not counted is null, so that sums over the view are right.
SELECT subscription, enqueued IS NULL AS enqueued, routed IS NULL AS routed, settlement_refused IS NULL AS settlement_refused,
       hook_time_ms IS NULL AS hook_time_ms, stats_reset <= now() AS stats_reset
  FROM outbox.counters;

-- Reset, of one and of all, at once.
SELECT coalesce(max(stats_reset), now()) AS before FROM outbox.counters \gset
BEGIN;
SELECT outbox.reset_counters('pushed');
ROLLBACK;
SELECT subscription, delivered, hook_time_ms FROM outbox.counters WHERE stats_reset > :'before';
SELECT outbox.reset_counters();
SELECT count(*), sum(enqueued + settlement_refused) AS of_database, sum(routed + claimed + delivered + dead + lease_lost) AS of_subscriptions
  FROM outbox.counters WHERE stats_reset > :'before';
CALL pg_temp.try('SELECT outbox.reset_counters(''nobody'')');

-- With its subscription an entry goes; one of the same name begins at zero, also if the other came back.
SELECT count(*) FROM outbox.claim_batch();
BEGIN;
SELECT outbox.unsubscribe('default', discard_pending => true) > 0;
ROLLBACK;
SELECT claimed FROM outbox.counters WHERE subscription = 'default';
SELECT outbox.unsubscribe('default', discard_pending => true) > 0;
SELECT outbox.subscribe('default');
SELECT subscription, claimed FROM outbox.counters;

-- So does a new installation.
SELECT outbox.enqueue('a', '1') IS NOT NULL;
SELECT outbox.maintain() IS NOT NULL;
SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
RESET client_min_messages;
SELECT * FROM outbox.counters WHERE stats_reset < :'before';
SELECT subscription, enqueued, settlement_refused FROM outbox.counters;
SELECT outbox.maintain() IS NOT NULL;
SELECT outbox.subscribe('default');
SELECT subscription, routed FROM outbox.counters;
