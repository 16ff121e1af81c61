-- views: each status a message can have, in every view that shows it; counts, ages,
-- pages, rights.
SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
CREATE SCHEMA views;
GRANT USAGE ON SCHEMA views TO PUBLIC;
SET search_path = views, public;
SET outbox.jitter = 0;

CREATE FUNCTION m(n integer) RETURNS uuid LANGUAGE sql IMMUTABLE
RETURN CAST('00000000-0000-7000-8000-' || lpad(CAST(n AS text), 12, '0') AS uuid);
CREATE VIEW state AS
SELECT CAST(right(CAST(id AS text), 4) AS integer) AS m, subscription, status, attempts, max_attempts AS max
  FROM outbox.messages;
CREATE VIEW counts AS
SELECT subscription, pending, scheduled, ready, leased, unhandled, delivered, dead, discarded, cancelled
  FROM outbox.status;

-- before anything was used: "default" is there, and what it will get is pending
SELECT subscription, mode, paused, pending, pending_is_lower_bound, oldest_pending_age_seconds, router_pid FROM outbox.status;
SELECT * FROM outbox.subscriptions;
SELECT count(outbox.enqueue('order.placed', to_jsonb(n), id => m(n))) FROM generate_series(1, 3) n;
SELECT * FROM counts;
SELECT oldest_pending_age_seconds BETWEEN 0 AND 60 AS just_now FROM outbox.status;
SELECT * FROM state ORDER BY m;
SELECT count(*) FROM outbox.dead_letters;
SELECT count(*) FROM outbox.leases;
SELECT count(*) FROM outbox.handlers;

-- the life of messages, all of them for "default", orders also for "audit"
SELECT outbox.subscribe('audit', 'order.#');
SELECT * FROM counts;
SELECT outbox.enqueue('invoice.sent', '{}', id => m(4), kind => 'job', version => 2, max_attempts => 5,
                      available_at => outbox.clock() + interval '1 h', headers => '{"a": 1}',
                      correlation_id => 'co', causation_id => 'ca', aggregate_type => 'invoice', aggregate_id => '77',
                      tenant_id => 't', owner_id => 'o', dedupe_key => 'd', ordering_key => 'k') = m(4) AS enqueued;
SELECT * FROM counts;
SELECT id = m(1) AS claimed FROM outbox.claim_batch(1, worker => 'w1', lease => '20 s');
SELECT * FROM counts;
SELECT * FROM state ORDER BY m, subscription;
SELECT id, subscription, status, name, kind, version, payload, headers, attempts, max_attempts,
       available_at - created_at BETWEEN '59 min' AND '61 min' AS in_an_hour, created_at = occurred_at AS now,
       claimed_at, locked_until, settled_at, worker, last_error, correlation_id, causation_id,
       aggregate_type, aggregate_id, tenant_id, owner_id, dedupe_key, ordering_key
  FROM outbox.messages WHERE id = m(4) \gx
SELECT subscription, worker, messages, attempts, max_attempts, expired, round(seconds_left / 10) AS tens_of_seconds_left,
       locked_until - claimed_at AS lease, active_until - claimed_at AS active
  FROM outbox.leases;
SELECT status, worker, locked_until - claimed_at AS lease FROM outbox.messages WHERE id = m(1) ORDER BY subscription;
SELECT subscription, mode, oldest_pending_age_seconds IS NULL AS no_pending, oldest_ready_age_seconds BETWEEN 0 AND 60 AS ready,
       oldest_lease_age_seconds BETWEEN 0 AND 60 AS leased, last_claim IS NOT NULL AS claimed, last_delivery
  FROM outbox.status;
-- a lease that has ended is shown until somebody takes it back
SET outbox.clock_offset = 20001;
SELECT worker, expired, seconds_left <= 0 AS over FROM outbox.leases;
SELECT status FROM outbox.messages WHERE id = m(1) AND subscription = 'default';
SELECT round(oldest_lease_age_seconds / 10) AS tens_of_seconds FROM outbox.status WHERE subscription = 'default';
SELECT count(*) FROM outbox.claim_batch(2, worker => 'w2');
SELECT * FROM state WHERE subscription = 'default' ORDER BY m;
SELECT worker, sum(messages) FROM outbox.leases GROUP BY worker;
SELECT last_error ->> 'sqlstate' AS lost FROM outbox.messages WHERE id = m(1) AND subscription = 'default';
SELECT count(*) FROM outbox.claim_batch(2, worker => 'w3');
SELECT * FROM state WHERE subscription = 'default' ORDER BY m;
RESET outbox.clock_offset;
-- delivered, dead, retried, discarded, cancelled
SET outbox.clock_offset = 21000;
SELECT c.id = m(1) AS m1, outbox.settle(c.id, c.claim_token) FROM outbox.claim_batch(1, subscription => 'audit') c;
SELECT c.id = m(2) AS m2, outbox.settle(c.id, c.claim_token, 'dead', 'no such product', '{"product": 7}')
  FROM outbox.claim_batch(1, subscription => 'audit', worker => 'w3') c;
SELECT c.id = m(3) AS m3, outbox.settle(c.id, c.claim_token, 'failed', 'come back later', retry_at => outbox.clock() + interval '1 h')
  FROM outbox.claim_batch(1, subscription => 'audit') c;
SELECT outbox.discard(m(3), 'audit'), outbox.cancel(m(4));
SELECT * FROM counts;
SELECT * FROM state WHERE subscription = 'audit' ORDER BY m;
SELECT subscription, id = m(2) AS m2, name, payload, headers, attempts, max_attempts, died_at <= outbox.clock() AS died,
       last_error_sqlstate, last_error_message, last_error, worker
  FROM outbox.dead_letters;
SELECT last_delivery = settled_at AS same FROM outbox.status s JOIN outbox.messages m ON m.status = 'delivered' AND m.subscription = s.subscription;
SELECT outbox.pause('audit');
SELECT subscription, mode, paused FROM outbox.status;

-- pushed: unhandled; what handlers are worth
CREATE FUNCTION hook(m outbox.message) RETURNS integer LANGUAGE sql RETURN 1;
CREATE ROLE regress_hooker LOGIN;
SELECT outbox.subscribe('hooks', 'order.#');
SELECT outbox.register_hook('order.paid', 'views.hook', 'hooks', timeout => '5 s', max_attempts => 4, retry => '{1 s,2.5 s,1 min}');
SELECT outbox.register_notify('order.paid', 'channel', 'hooks', kind => 'job');
SELECT claimed, unhandled FROM outbox.deliver('hooks');
SELECT * FROM counts WHERE subscription = 'hooks';
SELECT status, attempts FROM outbox.messages WHERE subscription = 'hooks' ORDER BY id;
SELECT subscription, name_pattern, kind, version, function, channel, include_data, role = CURRENT_USER AS mine,
       timeout_seconds, max_attempts, retry_seconds, state, broken_since IS NOT NULL AS broken
  FROM outbox.handlers ORDER BY kind NULLS FIRST;
DROP FUNCTION hook;
SELECT function, channel, state FROM outbox.handlers ORDER BY kind NULLS FIRST;
CREATE FUNCTION hook(m outbox.message) RETURNS integer LANGUAGE sql RETURN 1;
SELECT function, channel, state FROM outbox.handlers ORDER BY kind NULLS FIRST;
-- another role's: without the right to call it, and then without the role
SELECT outbox.grant_access('regress_hooker', 'consumer'), outbox.grant_access('regress_hooker', 'operator');
SET ROLE regress_hooker;
SELECT outbox.subscribe('theirs', 'order.#');
SELECT outbox.register_hook('order.paid', 'views.hook', 'theirs');
RESET ROLE;
SELECT role, state FROM outbox.handlers WHERE subscription = 'theirs';
REVOKE EXECUTE ON FUNCTION hook FROM PUBLIC;
SELECT role, state FROM outbox.handlers WHERE subscription = 'theirs';
SELECT outbox.revoke_access('regress_hooker', 'consumer'), outbox.revoke_access('regress_hooker', 'operator');
GRANT EXECUTE ON FUNCTION hook TO PUBLIC;
SELECT role, state FROM outbox.handlers WHERE subscription = 'theirs';
DROP ROLE regress_hooker;
SELECT role, state FROM outbox.handlers WHERE subscription = 'theirs';
SELECT outbox.subscribe('audit', 'order.#', lease => '1 min', max_active => '2 min', max_attempts => 9, replace => true);
SELECT name, pattern, kind, mode, paused, lease_seconds, max_active_seconds, max_attempts, role = CURRENT_USER AS mine, handlers,
       created_at IS NOT NULL AS created
  FROM outbox.subscriptions ORDER BY name;

-- rights: who may not read the log sees no payload
CREATE ROLE regress_reader;
SET ROLE regress_reader;
SELECT count(*) FROM outbox.status;
RESET ROLE;
SELECT outbox.grant_access('regress_reader', 'reader');
SET ROLE regress_reader;
SELECT DISTINCT payload, headers FROM outbox.messages;
SELECT name, payload, headers, last_error_message FROM outbox.dead_letters;
SELECT payload FROM outbox.log_of('{[0,9223372036854775807)}') LIMIT 1;
SELECT count(*) FROM outbox.status;
SELECT count(*) FROM outbox.leases;
SELECT count(*) FROM outbox.subscriptions;
SELECT count(*) FROM outbox.handlers;
SELECT payload FROM outbox.log;
SELECT id FROM outbox.get(m(1));
RESET ROLE;
GRANT SELECT ON outbox.log TO regress_reader;
SET ROLE regress_reader;
SELECT id, payload, headers FROM outbox.messages WHERE id > m(2) AND subscription = 'default' ORDER BY id;
SELECT payload, headers FROM outbox.dead_letters;
RESET ROLE;
REVOKE SELECT ON outbox.log FROM regress_reader;
SELECT outbox.revoke_access('regress_reader', 'reader');
DROP ROLE regress_reader;

-- a transaction sees what it has done itself, whoever has filed it
BEGIN;
SELECT outbox.enqueue('order.placed', '{}', id => m(5)) = m(5) AS enqueued;
SELECT * FROM state WHERE m = 5 ORDER BY subscription;
SELECT subscription, pending, leased FROM outbox.status;
SELECT count(*) FROM outbox.claim_batch(10) WHERE id = m(5);
SELECT * FROM state WHERE m = 5 ORDER BY subscription;
SELECT subscription, pending, leased FROM outbox.status;
COMMIT;
SELECT subscription, pending, leased FROM outbox.status;
SELECT * FROM state WHERE m = 5 ORDER BY subscription;
-- and read-only transactions see all of it
BEGIN READ ONLY;
SELECT count(*) FROM outbox.messages;
SELECT count(*) FROM outbox.dead_letters;
SELECT count(*) FROM outbox.status;
SELECT count(*) FROM outbox.handlers;
COMMIT;

-- pages by id: the same rows in the same order as all at once, by an index
SELECT count(outbox.enqueue('page', to_jsonb(n), id => m(1000 + n))) FROM generate_series(1, 1000) n;
CREATE FUNCTION plan(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    line text;
    lines text = '';
BEGIN
    FOR line IN EXECUTE 'EXPLAIN (COSTS off) ' || query LOOP
        lines = lines || line;
    END LOOP;
    RETURN lines;
END
$$;
SELECT plan($$SELECT * FROM outbox.messages WHERE id > views.m(1000) ORDER BY id LIMIT 20$$)
       ~ 'Limit.*Index Scan using log_0_id_key.*Index Cond' AS by_index,
       plan($$SELECT * FROM outbox.messages WHERE id > views.m(1000) ORDER BY id LIMIT 20$$) ~ '-> *Sort' AS sorted;
SELECT count(*), min(payload :: int), max(payload :: int)
  FROM (SELECT * FROM outbox.messages WHERE id > m(1500) AND subscription = 'default' ORDER BY id LIMIT 20) x;

-- nothing is left out: every status there is, and counts are those of the messages
SELECT outbox.discard(m(1001)), outbox.requeue(m(3), 'audit', outbox.clock() + interval '1 day');
SELECT outbox.enqueue('order.cancelled', '{}') IS NOT NULL AS enqueued;
SELECT string_agg(DISTINCT status, ' ' ORDER BY status) FROM outbox.messages;
SELECT count(*) AS wrong
  FROM counts c
 CROSS JOIN LATERAL jsonb_each_text(to_jsonb(c) - 'subscription') s
  LEFT JOIN (SELECT subscription, status, count(*) AS n FROM outbox.messages GROUP BY 1, 2) x
    ON x.subscription = c.subscription AND x.status = s.key
 WHERE s.value::bigint <> coalesce(x.n, 0);

-- who routes
BEGIN;
SELECT router_pid IS NULL AS nobody FROM outbox.status LIMIT 1;
SELECT outbox.skip('default', 'epoch');
SELECT router_pid = pg_backend_pid() AS me FROM outbox.status LIMIT 1;
COMMIT;

-- not meant for people, and still no trap
SELECT count(*) FROM outbox.deliveries_of(NULL, NULL, NULL);
SELECT subscription, status FROM outbox.deliveries_of(9223372036854775807, 'order.x', 'event') ORDER BY 1;
SELECT count(*) FROM outbox.deliveries_of(-1, 'order.x', 'event');
SELECT count(*) FROM outbox.log_of(NULL);
SELECT count(*) FROM outbox.log_of('{}');

RESET outbox.clock_offset;
DROP SCHEMA views CASCADE;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
