-- access: what each kind of access may call and read, object by object.  The table below
-- is the contract; an object of the extension that is missing in it fails.
BEGIN;
SET client_min_messages = warning;
SELECT * FROM no_plan();

CREATE ROLE tap_producer;
CREATE ROLE tap_consumer;
CREATE ROLE tap_operator;
CREATE ROLE tap_reader;
CREATE ROLE tap_nobody;
SELECT ok(outbox.grant_access(CAST('tap_' || kind AS name), kind), 'access is granted to a ' || kind)
  FROM unnest(ARRAY['producer', 'consumer', 'operator', 'reader']) AS kind;

-- letters: producer, consumer, operator, reader; none: the owner and superusers only
CREATE TEMPORARY TABLE contract (object text PRIMARY KEY, kinds text NOT NULL);
INSERT INTO contract VALUES
    ('enqueue', 'p'), ('enqueue_batch', 'p'), ('enqueued', 'p'), ('outgoing', 'p'),
    ('claim_batch', 'c'), ('renew', 'c'), ('renew_batch', 'c'), ('settle', 'c'), ('settle_batch', 'c'),
    ('register_hook', 'c'), ('register_notify', 'c'), ('unregister', 'c'), ('get', 'c'),
    ('drain', 'co'), ('deliver', 'co'),
    ('subscribe', 'o'), ('unsubscribe', 'o'), ('pause', 'o'), ('resume', 'o'), ('skip', 'o'),
    ('requeue', 'o'), ('requeue_all', 'o'), ('discard', 'o'), ('discard_all', 'o'), ('cancel', 'o'),
    ('maintain', 'o'), ('purge', 'o'), ('adopt', 'o'), ('revoke_lease', 'o'), ('reset_counters', 'o'), ('start_worker', 'co'),
    ('status', 'or'), ('messages', 'or'), ('dead_letters', 'or'), ('leases', 'or'),
    ('subscriptions', 'or'), ('handlers', 'or'), ('workers', 'or'), ('segments', 'or'), ('segment_holders', 'or'), ('oldest_viewer', 'or'), ('user_of', 'or'), ('worker_rows', 'or'),
    ('counters', 'or'), ('counter_rows', 'or'), ('check', 'or'),
    ('conditions', ''), ('check_workers', ''), ('check_database', ''), ('check_subscriptions', ''), ('check_handlers', ''), ('check_settings', ''), ('subscribe_statement', ''),
    ('clock', 'or'), ('backlog', 'or'), ('deliveries_of', 'or'), ('log_of', 'or'), ('handler_states', 'or'),
    ('backoff', 'pcor'), ('cloudevent', 'pcor'),
    ('log', ''), ('reset', ''), ('grant_access', ''), ('revoke_access', ''),
    ('announce', ''), ('guard_role', ''), ('identity_changed', ''), ('delivery_changed', ''), ('outgoing_insert', '');

CREATE TEMPORARY VIEW objects AS
SELECT p.proname AS object, CAST(CAST(p.oid AS regprocedure) AS text) AS identity, 'f' AS sort, p.oid
  FROM pg_proc p
  JOIN pg_depend d ON d.classid = CAST('pg_proc' AS regclass) AND d.objid = p.oid AND d.deptype = 'e'
  JOIN pg_extension e ON d.refclassid = CAST('pg_extension' AS regclass) AND d.refobjid = e.oid AND e.extname = 'outbox'
UNION ALL
SELECT c.relname, CAST(CAST(c.oid AS regclass) AS text), CAST(c.relkind AS text), c.oid
  FROM pg_class c WHERE c.relnamespace = CAST('outbox' AS regnamespace) AND c.relkind IN ('r', 'v', 'S');
CREATE TEMPORARY VIEW roles AS
SELECT CAST('tap_' || kind AS name) AS role, left(kind, 1) AS letter
  FROM unnest(ARRAY['producer', 'consumer', 'operator', 'reader', 'nobody']) AS kind;

SELECT is((SELECT string_agg(o.identity, ', ') FROM objects o
            WHERE o.sort IN ('f', 'v') AND NOT EXISTS (SELECT FROM contract c WHERE c.object = o.object)),
          NULL, 'every function and view is in the contract');
SELECT is((SELECT string_agg(c.object, ', ') FROM contract c
            WHERE NOT EXISTS (SELECT FROM objects o WHERE o.object = c.object AND o.sort IN ('f', 'v'))),
          NULL, 'everything in the contract is there');

SELECT is(has_function_privilege(r.role, o.oid, 'EXECUTE'), position(r.letter IN c.kinds) > 0,
          format('%s: EXECUTE on %s', r.role, o.identity))
  FROM objects o JOIN contract c USING (object)
 CROSS JOIN roles r
 WHERE o.sort = 'f'
 ORDER BY o.identity, r.role;
SELECT is(has_table_privilege(r.role, o.oid, 'SELECT'), position(r.letter IN c.kinds) > 0,
          format('%s: SELECT on %s', r.role, o.identity))
  FROM objects o JOIN contract c USING (object)
 CROSS JOIN roles r
 WHERE o.sort = 'v'
 ORDER BY o.identity, r.role;
SELECT is(has_table_privilege(r.role, o.oid, 'INSERT'), o.object = 'outgoing' AND r.letter = 'p',
          format('%s: INSERT on %s', r.role, o.identity))
  FROM objects o
 CROSS JOIN roles r
 WHERE o.sort = 'v'
 ORDER BY o.identity, r.role;
SELECT ok(NOT has_table_privilege(r.role, o.oid, 'UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER'),
          format('%s: nothing else on %s', r.role, o.identity))
  FROM objects o
 CROSS JOIN roles r
 WHERE o.sort = 'v'
 ORDER BY o.identity, r.role;
SELECT ok(NOT has_table_privilege(r.role, o.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER'),
          format('%s: nothing on table %s', r.role, o.identity))
  FROM objects o
 CROSS JOIN roles r
 WHERE o.sort = 'r'
 ORDER BY o.identity, r.role;
SELECT ok(NOT has_sequence_privilege(r.role, o.oid, 'USAGE, SELECT, UPDATE'), format('%s: nothing on %s', r.role, o.identity))
  FROM objects o
 CROSS JOIN roles r
 WHERE o.sort = 'S'
 ORDER BY o.identity, r.role;
SELECT is(has_schema_privilege(role, 'outbox', 'USAGE'), role <> 'tap_nobody', role || ': USAGE on the schema')
  FROM roles;
SELECT ok(NOT has_schema_privilege(role, 'outbox', 'CREATE'), role || ': no CREATE in the schema')
  FROM roles;

-- Taken back, nothing is left.
SELECT ok(outbox.revoke_access(CAST('tap_' || kind AS name), kind), 'access is revoked from a ' || kind)
  FROM unnest(ARRAY['producer', 'consumer', 'operator', 'reader']) AS kind;
SELECT is((SELECT count(*)
             FROM (SELECT nspacl FROM pg_namespace WHERE nspname = 'outbox'
                   UNION ALL SELECT proacl FROM pg_proc WHERE pronamespace = CAST('outbox' AS regnamespace)
                   UNION ALL SELECT relacl FROM pg_class WHERE relnamespace = CAST('outbox' AS regnamespace)) o (acl)
            CROSS JOIN aclexplode(o.acl) a
            WHERE pg_get_userbyid(a.grantee) LIKE 'tap\_%'),
          CAST(0 AS bigint), 'no privilege is left after revoke_access()');
SELECT is_empty('SELECT FROM outbox.access WHERE role_name LIKE ''tap%''', 'nor a row');

SELECT * FROM finish();
ROLLBACK;
