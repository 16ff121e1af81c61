-- access: nothing for PUBLIC, four kinds of access, consumers of some subscriptions only.
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
CREATE ROLE regress_producer;
CREATE ROLE regress_consumer LOGIN;
CREATE ROLE regress_team;
CREATE ROLE regress_operator;
CREATE ROLE regress_reader;
CREATE ROLE "regress Röle";
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

-- Nothing for PUBLIC.
SELECT count(*) AS open_to_public
  FROM (SELECT nspacl FROM pg_namespace WHERE nspname = 'outbox'
        UNION ALL SELECT coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace
        UNION ALL SELECT relacl FROM pg_class WHERE relnamespace = 'outbox'::regnamespace) o (acl),
       aclexplode(o.acl) a
 WHERE a.grantee = 0;
SET ROLE regress_producer;
SELECT pg_temp.try($$ SELECT outbox.enqueue('a', '{}') $$);
RESET ROLE;

-- Each kind, granted once.
SELECT outbox.grant_access('regress_producer', 'producer'), outbox.grant_access('regress_producer', 'producer');
SELECT outbox.grant_access('regress_consumer', 'consumer'), outbox.grant_access('regress_consumer', 'consumer');
SELECT outbox.grant_access('regress_operator', 'operator'), outbox.grant_access('regress_reader', 'reader');
SELECT outbox.grant_access('regress Röle', 'producer'), outbox.revoke_access('regress Röle', 'producer'),
       outbox.revoke_access('regress Röle', 'producer');

-- A producer enqueues.
SET ROLE regress_producer;
SELECT outbox.enqueue('order.created', '{}') IS NOT NULL;
SELECT count(*) FROM outbox.enqueue_batch('order.paid', '[1, 2]');
BEGIN;
INSERT INTO outbox.outgoing (name, payload) VALUES ('order.sent', '{}');
SELECT name FROM outbox.outgoing;
SELECT name FROM outbox.enqueued();
COMMIT;
SELECT pg_temp.try(q) FROM unnest(ARRAY['SELECT outbox.claim_batch()', 'SELECT outbox.subscribe(''x'')', 'SELECT outbox.pause(''default'')',
    'SELECT * FROM outbox.status', 'SELECT * FROM outbox.log', 'SELECT * FROM outbox.delivery', 'DELETE FROM outbox.access',
    'SELECT outbox.grant_access(''regress_producer'', ''operator'')', 'SELECT outbox.reset()']) q;
RESET ROLE;

-- A consumer claims, renews, settles, and registers hooks elsewhere.
SET ROLE regress_consumer;
SELECT claim_token AS token, id FROM outbox.claim_batch(1) \gset
SELECT outbox.renew(:'id', :'token') IS NOT NULL, outbox.renew_batch(:'token') IS NOT NULL;
SELECT outbox.settle(:'id', :'token');
SELECT pg_temp.try(q) FROM unnest(ARRAY['SELECT outbox.enqueue(''a'', ''{}'')', 'SELECT outbox.subscribe(''x'')', 'SELECT outbox.skip(''default'', now())',
    'SELECT * FROM outbox.messages', 'SELECT * FROM outbox.log']) q;
RESET ROLE;

-- An operator operates and looks.
SET ROLE regress_operator;
SELECT outbox.subscribe('a', 'order.*');
SELECT outbox.subscribe('b', 'order.*');
SELECT outbox.pause('a'), outbox.resume('a'), outbox.skip('b', '-infinity');
SELECT outbox.maintain() IS NOT NULL;
SELECT subscription, ready, leased, delivered FROM outbox.status ORDER BY subscription;
SELECT name, payload IS NULL AS hidden, count(*) FROM outbox.messages WHERE subscription = 'a' GROUP BY 1, 2 ORDER BY 1;
SELECT count(*) FROM outbox.handlers;
SELECT pg_temp.try(q) FROM unnest(ARRAY['SELECT outbox.enqueue(''a'', ''{}'')', 'SELECT outbox.claim_batch()', 'SELECT outbox.reset()',
    'SELECT outbox.grant_access(''regress_operator'', ''producer'')', 'SELECT * FROM outbox.log', 'SELECT * FROM outbox.subscription']) q;
RESET ROLE;

-- A reader looks.
SET ROLE regress_reader;
SELECT count(*) > 0 FROM outbox.status;
SELECT count(*) > 0 FROM outbox.messages;
SELECT count(*) FROM outbox.dead_letters;
SELECT count(*) FROM outbox.leases;
SELECT count(*) FROM outbox.subscriptions;
SELECT count(*) FROM outbox.handlers;
SELECT pg_temp.try(q) FROM unnest(ARRAY['SELECT outbox.pause(''a'')', 'SELECT outbox.enqueue(''a'', ''{}'')', 'SELECT outbox.claim_batch()',
    'SELECT * FROM outbox.log']) q;
RESET ROLE;

-- A consumer of one subscription.
SELECT outbox.revoke_access('regress_consumer', 'consumer');
SELECT pg_temp.try($$ SELECT outbox.grant_access('regress_consumer', 'consumer', 'nobody') $$);
SELECT outbox.grant_access('regress_consumer', 'consumer', 'a'), outbox.grant_access('regress_consumer', 'consumer', 'a');
SET ROLE regress_consumer;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'a');
SELECT pg_temp.try(q) FROM unnest(ARRAY['SELECT outbox.claim_batch(1, subscription => ''b'')', 'SELECT outbox.claim_batch(1)',
    'SELECT outbox.claim_batch(1, subscription => ''unknown'')', 'SELECT outbox.register_hook(''#'', ''f'', ''b'')',
    'SELECT outbox.register_notify(''#'', ''c'', ''b'')', 'SELECT outbox.unregister(''#'', ''b'')']) q;
RESET ROLE;
SELECT outbox.grant_access('regress_consumer', 'consumer', 'b');
SET ROLE regress_consumer;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'b');
RESET ROLE;
SELECT role_name, role_oid = CAST('regress_consumer' AS regrole) AS same, subscription FROM outbox.access
 WHERE role_name = 'regress_consumer' ORDER BY subscription;

-- The right goes with the last of them, for no row would mean all.
SELECT outbox.revoke_access('regress_consumer', 'consumer', 'b'), outbox.revoke_access('regress_consumer', 'consumer', 'b');
SET ROLE regress_consumer;
SELECT pg_temp.try('SELECT outbox.claim_batch(1, subscription => ''b'')');
RESET ROLE;
SELECT outbox.revoke_access('regress_consumer', 'consumer', 'a');
SET ROLE regress_consumer;
SELECT pg_temp.try('SELECT outbox.claim_batch(1, subscription => ''a'')');
RESET ROLE;
-- nor does a subscription that goes widen anything
SELECT outbox.grant_access('regress_consumer', 'consumer', 'b');
SELECT outbox.unsubscribe('b', true) > 0;
SET ROLE regress_consumer;
SELECT pg_temp.try('SELECT outbox.claim_batch(1, subscription => ''a'')');
RESET ROLE;
-- all of them, or one taken away from all
SELECT outbox.grant_access('regress_consumer', 'consumer'), outbox.grant_access('regress_consumer', 'consumer', 'a');
SELECT subscription FROM outbox.access WHERE role_name = 'regress_consumer';
SELECT pg_temp.try($$ SELECT outbox.revoke_access('regress_consumer', 'consumer', 'a') $$);
SET ROLE regress_consumer;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'a');
RESET ROLE;

-- By membership: a team's limit holds for its members, a wider grant of their own widens it.
SELECT outbox.revoke_access('regress_consumer', 'consumer');
SELECT outbox.grant_access('regress_team', 'consumer', 'a');
GRANT regress_team TO regress_consumer;
SET ROLE regress_consumer;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'a');
SELECT pg_temp.try('SELECT outbox.claim_batch(1)');
RESET ROLE;
SELECT outbox.grant_access('regress_consumer', 'consumer');
SET ROLE regress_consumer;
SELECT count(*) FROM outbox.claim_batch(1);
RESET ROLE;
REVOKE regress_team FROM regress_consumer;
-- renamed, it is still the same role
ALTER ROLE regress_team RENAME TO regress_renamed;
SET ROLE regress_renamed;
SELECT count(*) FROM outbox.claim_batch(1, subscription => 'a');
SELECT pg_temp.try('SELECT outbox.claim_batch(1)') LIKE '42501%';
RESET ROLE;
ALTER ROLE regress_renamed RENAME TO regress_team;

-- Kinds share things: revoking one leaves what another includes.
SELECT outbox.grant_access('regress_reader', 'operator');
SELECT outbox.revoke_access('regress_reader', 'reader');
SET ROLE regress_reader;
SELECT count(*) > 0 FROM outbox.status;
RESET ROLE;
SELECT outbox.revoke_access('regress_reader', 'operator');
SET ROLE regress_reader;
SELECT pg_temp.try('SELECT * FROM outbox.status');
RESET ROLE;
SELECT outbox.grant_access('regress_reader', 'reader'), outbox.grant_access('regress_reader', 'producer');
SELECT outbox.revoke_access('regress_reader', 'producer');
SET ROLE regress_reader;
SELECT count(*) > 0 FROM outbox.status;
RESET ROLE;

-- DROP OWNED, and REVOKE, take the rights and leave the rows: those limit nothing later, and lift no limit.
SET client_min_messages = warning;
CREATE ROLE regress_again;
SELECT outbox.grant_access('regress_again', 'consumer');
DROP OWNED BY regress_again;
SELECT outbox.grant_access('regress_again', 'consumer', 'default');
SELECT subscription FROM outbox.access WHERE role_name = 'regress_again';
DROP OWNED BY regress_again;
DROP ROLE regress_again;
CREATE ROLE regress_again;
SELECT outbox.grant_access('regress_again', 'consumer');
SELECT subscription FROM outbox.access WHERE role_name = 'regress_again';
DROP OWNED BY regress_again;

-- A right to look at a view is none to write to it.
GRANT SELECT ON outbox.outgoing TO regress_again;
SELECT outbox.grant_access('regress_again', 'producer');
SET ROLE regress_again;
INSERT INTO outbox.outgoing (name, payload) VALUES ('a', '{}');
RESET ROLE;
DROP OWNED BY regress_again;
DROP ROLE regress_again;
RESET client_min_messages;

-- EXECUTE is not enough: a grant on all functions must not let a role lift its own limits.
GRANT USAGE ON SCHEMA outbox TO regress_operator;
GRANT EXECUTE ON FUNCTION outbox.grant_access, outbox.revoke_access TO regress_operator;
SET ROLE regress_operator;
SELECT outbox.grant_access('regress_team', 'producer');
RESET ROLE;
SELECT DISTINCT a.grantor = p.proowner AS by_owner
  FROM pg_proc p, aclexplode(p.proacl) a WHERE p.pronamespace = 'outbox'::regnamespace;

-- Bad arguments.
SELECT call, pg_temp.try('SELECT outbox.' || call)
  FROM unnest(ARRAY[$$grant_access(NULL, 'reader')$$, $$grant_access('regress_reader', NULL)$$, $$grant_access('regress_reader', '')$$,
       $$grant_access('regress_reader', 'Reader')$$, $$grant_access('regress_reader', 'admin')$$,
       $$grant_access('regress_nobody', 'reader')$$, $$grant_access('public', 'reader')$$,
       $$grant_access('regress_reader', 'reader', 'a')$$, $$grant_access('regress_reader', 'consumer', ' ')$$,
       $$revoke_access(NULL, 'reader')$$, $$revoke_access('regress_reader', 'admin')$$, $$revoke_access('regress_nobody', 'reader')$$,
       $$revoke_access('regress_reader', 'operator', 'a')$$]) AS call;

-- What is granted hangs on the role.
SELECT pg_temp.try('DROP ROLE regress_consumer') LIKE '2BP01%';
SET client_min_messages = warning;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
DROP ROLE regress_producer, regress_consumer, regress_team, regress_operator, regress_reader, "regress Röle";
