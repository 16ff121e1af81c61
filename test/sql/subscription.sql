-- subscription: subscribe(), unsubscribe(), pause(), resume(), skip(), and what the first
-- use makes of a subscription.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
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
-- claims everything of a subscription, and says what it was
CREATE FUNCTION pg_temp.take(subscription text, settled boolean DEFAULT true) RETURNS text LANGUAGE sql AS $$
    WITH claimed AS MATERIALIZED (SELECT * FROM outbox.claim_batch(1000, subscription => $1)),
         done AS MATERIALIZED (SELECT t.claim_token, CASE WHEN $2 THEN outbox.settle_batch(t.claim_token) END
                    FROM (SELECT DISTINCT claim_token FROM claimed) t)
    SELECT string_agg(c.name, ' ' ORDER BY c.created_at)
      FROM claimed c JOIN done d USING (claim_token)
$$;

-- "default" is there before anything happened.
SELECT name, pattern, mode, paused FROM outbox.subscriptions;
SELECT outbox.enqueue('order.created', '{}') IS NOT NULL;
SELECT pg_temp.take('default');
SELECT name, pattern, mode, paused FROM outbox.subscriptions;

-- The same again is unchanged; something else must be asked for.
SELECT outbox.subscribe('billing', 'order.*');
SELECT outbox.subscribe('billing', 'order.*');
SELECT outbox.subscribe('billing', 'order.*', from_earliest => false);
SELECT pg_temp.try($$ SELECT outbox.subscribe('billing', 'order.#') $$);
SELECT pg_temp.try($$ SELECT outbox.subscribe('billing', 'order.*', max_attempts => 5) $$);
SELECT outbox.subscribe('billing', 'order.#', kind => 'event', lease => '1 min', max_active => '2 days',
                        max_attempts => 5, replace => true);
SELECT outbox.subscribe('billing', 'order.#', kind => 'event', lease => '60 s', max_active => '48:00',
                        max_attempts => 5, replace => true);
SELECT pg_temp.try($$ SELECT outbox.subscribe('billing') $$);
SELECT pattern, kind, lease_seconds, max_active_seconds, max_attempts FROM outbox.subscriptions WHERE name = 'billing';
-- NULL and '' mean the default
SELECT outbox.subscribe('all', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
SELECT outbox.subscribe('all', '', '');
SELECT outbox.subscribe('default');
SELECT pattern, kind, max_attempts FROM outbox.subscriptions WHERE name = 'all';

-- Each gets what it asked for, with progress of its own: from the earliest, or from now.
SELECT outbox.subscribe('late', from_earliest => false);
SELECT outbox.enqueue('order.paid', '{}') IS NOT NULL;
SELECT outbox.enqueue('order.paid', '{}', kind => 'command') IS NOT NULL;
SELECT outbox.enqueue('user.created', '{}') IS NOT NULL;
SELECT pg_temp.take('billing') AS billing, pg_temp.take('all') AS all, pg_temp.take('late') AS late,
       pg_temp.take('default') AS default;
SELECT pg_temp.take('billing') AS billing, pg_temp.take('all') AS all, pg_temp.take('late') AS late;
SELECT subscription, pending, ready, leased, delivered FROM outbox.status ORDER BY subscription;

-- An altered pattern holds for what is routed later: what is committed stays with the old one.
SELECT outbox.subscribe('narrow', 'user.*', from_earliest => false);
SELECT outbox.enqueue('user.deleted', '{}') IS NOT NULL;
SELECT outbox.subscribe('narrow', 'order.*', replace => true);
SELECT outbox.enqueue('user.renamed', '{}') IS NOT NULL;
SELECT outbox.enqueue('order.sent', '{}') IS NOT NULL;
SELECT pg_temp.take('narrow');

-- One transaction: a subscription made in it gets what was enqueued before and after.
BEGIN;
SELECT outbox.enqueue('tx.before', '{}') IS NOT NULL;
SELECT outbox.subscribe('tx', 'tx.#');
SELECT outbox.enqueue('tx.after', '{}') IS NOT NULL;
SELECT pg_temp.take('tx');
COMMIT;
SELECT pg_temp.take('tx');
SELECT subscription, delivered FROM outbox.status WHERE subscription = 'tx';
-- As a rollback leaves nothing, so it says nothing.
BEGIN;
SAVEPOINT s;
SELECT outbox.subscribe('gone');
ROLLBACK TO s;
CREATE TABLE something_else ();
DROP TABLE something_else;
COMMIT;
SELECT count(*) FROM outbox.subscriptions WHERE name = 'gone';
-- Whatever the isolation level, it is what is committed that counts.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox.subscribe('serial', 'order.*');
COMMIT;
SELECT pg_temp.take('serial');

-- Pause.
SELECT outbox.enqueue('order.held', '{}') IS NOT NULL;
SELECT outbox.pause('billing');
SELECT outbox.pause('billing');
SELECT pg_temp.take('billing');
SELECT name, paused FROM outbox.subscriptions WHERE name IN ('billing', 'all') ORDER BY name;
SELECT outbox.resume('billing');
SELECT outbox.resume('billing');
SELECT pg_temp.take('billing');
-- what is leased may be settled during a pause
SELECT outbox.enqueue('order.leased', '{}') IS NOT NULL;
SELECT claim_token AS token FROM outbox.claim_batch(subscription => 'billing') \gset
SELECT outbox.pause('billing');
SELECT outbox.settle_batch(:'token');
SELECT outbox.resume('billing');

-- Skip: by the time of enqueueing, whatever has been routed, and within runs.
SELECT outbox.subscribe('skipped', 'skip.*', from_earliest => false);
SELECT count(outbox.enqueue('skip.old', '{}')) FROM generate_series(1, 5);
SET outbox.clock_offset = 60000;
SELECT count(outbox.enqueue('skip.new', '{}')) FROM generate_series(1, 4);
SELECT outbox.enqueue('skip.scheduled', '{}', available_at => '2999-01-01') IS NOT NULL;
SELECT outbox.skip('skipped', '-infinity');
SELECT outbox.skip('skipped', min(created_at)) FROM outbox.messages WHERE name = 'skip.new';
SELECT outbox.skip('skipped', min(created_at)) FROM outbox.messages WHERE name = 'skip.new';
SELECT ready, scheduled, discarded FROM outbox.status WHERE subscription = 'skipped';
SELECT name, status, count(*) FROM outbox.messages WHERE subscription = 'skipped' GROUP BY name, status ORDER BY name;
-- old and new in one run: the clock goes to and fro within a transaction
SET outbox.clock_offset = 0;
SELECT outbox.subscribe('mixed', 'mixed.*', from_earliest => false);
DO $$
BEGIN
    FOR n IN 1 .. 40 LOOP
        PERFORM set_config('outbox.clock_offset', CASE WHEN n % 3 = 0 OR n > 36 THEN '0' ELSE '60000' END, true);
        PERFORM outbox.enqueue(format('mixed.%s', n), '{}');
    END LOOP;
END
$$;
SELECT outbox.skip('mixed', outbox.clock() + '30 s');
SELECT status, count(*), string_agg(substr(name, 7), ' ' ORDER BY created_at) AS n
  FROM outbox.messages WHERE subscription = 'mixed' GROUP BY status ORDER BY status;
SELECT sum(message_count) FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id WHERE s.name = 'mixed';
SET outbox.clock_offset = 60000;
SELECT replace(pg_temp.take('mixed'), 'mixed.', '') AS n;
-- leased ones are left to whoever has them
SELECT outbox.enqueue('skip.new', '{}') IS NOT NULL;
SELECT count(*) FROM outbox.claim_batch(2, subscription => 'skipped');
SELECT outbox.skip('skipped', 'infinity');
SELECT ready, scheduled, leased, discarded FROM outbox.status WHERE subscription = 'skipped';
RESET outbox.clock_offset;

-- Unsubscribe: refused while something is open, counted when it goes.
SELECT outbox.subscribe('ending', 'ending.*', max_attempts => 1);
SELECT count(outbox.enqueue('ending.' || n, '{}')) FROM generate_series(1, 4) n;
SELECT claim_token AS dead FROM outbox.claim_batch(1, subscription => 'ending') \gset
SELECT outbox.settle_batch(:'dead', 'dead', error => 'no');
SELECT claim_token AS done FROM outbox.claim_batch(1, subscription => 'ending') \gset
SELECT outbox.settle_batch(:'done');
SELECT claim_token AS leased FROM outbox.claim_batch(1, subscription => 'ending') \gset
SELECT outbox.enqueue('ending.unrouted', '{}') IS NOT NULL;
SELECT pg_temp.try($$ SELECT outbox.unsubscribe('ending') $$);
SELECT outbox.unsubscribe('ending', discard_pending => true);
-- also where nothing but that is left
SELECT outbox.subscribe('ended', 'ended');
SELECT outbox.enqueue('ended', '{}') IS NOT NULL;
SELECT pg_temp.try($$ SELECT outbox.unsubscribe('ended') $$);
SELECT outbox.unsubscribe('ended', discard_pending => true);
SELECT pg_temp.try(format('SELECT outbox.settle_batch(%L)', :'leased')) LIKE 'OB003%';
SELECT count(*) FROM outbox.delivery d WHERE NOT EXISTS (SELECT FROM outbox.subscription s WHERE s.id = d.subscription_id);
SELECT pg_temp.try($$ SELECT outbox.unsubscribe('ending') $$);
-- a new one of the same name begins anew
SELECT outbox.subscribe('ending', 'ending.*');
SELECT pg_temp.take('ending');
SELECT outbox.unsubscribe('ending');
-- what a transaction filed itself goes too
BEGIN;
SELECT outbox.enqueue('own.1', '{}') IS NOT NULL;
SELECT outbox.subscribe('own', 'own.*');
SELECT pg_temp.take('own', settled => false);
SELECT outbox.unsubscribe('own', true);
COMMIT;
SELECT count(*) FROM outbox.self_routed r WHERE NOT EXISTS (SELECT FROM outbox.subscription s WHERE s.id = r.subscription_id);
-- "default" can go, and does not come back by itself
SELECT outbox.unsubscribe('default', true) >= 0;
SELECT pg_temp.try($$ SELECT * FROM outbox.claim_batch() $$);
SELECT outbox.subscribe('default', from_earliest => false);
-- an unused one is worth a word, to whoever makes another
SELECT outbox.subscribe('another', 'x');
SELECT outbox.subscribe('another', 'y', replace => true);

-- said once, and not where it goes in the same transaction
BEGIN;
SELECT outbox.subscribe('one', 'x'), outbox.subscribe('two', 'x');
COMMIT;
BEGIN;
SELECT outbox.subscribe('three', 'x'), outbox.unsubscribe('default');
COMMIT;
SELECT outbox.subscribe('default', from_earliest => false);

-- Bad arguments: nothing changes.
SELECT call, pg_temp.try('SELECT outbox.' || call)
  FROM unnest(ARRAY[
       $$subscribe(NULL)$$, $$subscribe('')$$, $$subscribe(E' \t')$$, $$subscribe(repeat('n', 256))$$,
       $$subscribe(repeat('ä', 128))$$, $$subscribe('bad', kind => ' ')$$,
       $$subscribe('bad', kind => repeat('k', 256))$$, $$subscribe('bad', lease => '0')$$,
       $$subscribe('bad', lease => '-1 s')$$, $$subscribe('bad', lease => '1 mon')$$,
       $$subscribe('bad', lease => '301 s')$$, $$subscribe('bad', lease => '2 min', max_active => '1 min')$$,
       $$subscribe('bad', max_active => '5000 years')$$, $$subscribe('bad', max_active => '178000000 days')$$,
       $$subscribe('bad', max_attempts => 0)$$, $$subscribe('bad', max_attempts => -1)$$,
       $$unsubscribe(NULL)$$, $$unsubscribe('nobody')$$, $$unsubscribe('no''body')$$, $$unsubscribe('')$$,
       $$pause(NULL)$$, $$pause('nobody')$$, $$resume('nobody')$$, $$resume(' ')$$,
       $$skip('default', NULL)$$, $$skip(NULL, 'now')$$, $$skip('nobody', 'now')$$]) AS call;
SELECT count(*) FROM outbox.subscriptions WHERE name = 'bad';
BEGIN READ ONLY;
SELECT outbox.subscribe('bad');
ROLLBACK;
BEGIN READ ONLY;
SELECT outbox.pause('default');
ROLLBACK;
-- the longest name that is allowed
SELECT outbox.subscribe(repeat('n', 255), repeat('x', 255), from_earliest => false);
SELECT outbox.unsubscribe(repeat('n', 255));

SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
