-- 88_check: outbox.check() explains what is wrong, row by row.  One function for each subject; a
-- finding is one SELECT with the condition for it.  A new one needs nothing else but to be there, or, if
-- it is a function, to be named in check(), which alone has the owner's rights: it sees all
-- sessions, and shows names and numbers.  Times are by the clock of outbox.  src/check.c

CREATE TYPE outbox.finding AS (
    severity text,
    subject text,
    what text,
    why text,
    remedy text
);
COMMENT ON TYPE outbox.finding IS 'something that check() has found';

CREATE FUNCTION outbox.conditions(
    OUT preloaded boolean,
    OUT launcher boolean,
    OUT served boolean,
    OUT slots_short boolean,
    OUT copied boolean,
    OUT enabled boolean,
    OUT workers integer,
    OUT max_coordinators integer,
    OUT lease_ms integer,
    OUT max_active_ms integer,
    OUT hook_timeout_ms integer,
    OUT backoff_base_ms integer,
    OUT backoff_max_ms integer)
LANGUAGE C STABLE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_conditions';
COMMENT ON FUNCTION outbox.conditions() IS
    'what outbox.check() needs to know of processes, copies and settings';

-- Who delivers, and what keeps them from it.  None of it is wrong on a standby.
CREATE FUNCTION outbox.check_workers()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
    WITH c AS (
        SELECT x.preloaded, x.launcher, x.served, x.slots_short, x.enabled, x.workers,
               2 + x.max_coordinators + x.workers * (SELECT count(DISTINCT h.role_name) FROM outbox.handler h) AS processes,
               CAST(current_setting('max_worker_processes') AS integer) AS allowed,
               EXISTS (SELECT FROM outbox.subscription s WHERE s.mode = 'pushed') AS pushed,
               EXISTS (SELECT FROM pg_stat_activity a WHERE a.backend_type = 'outbox worker' AND a.datname = current_database()) AS standalone,
               d.datistemplate AS template
          FROM outbox.conditions() x
          JOIN pg_database d ON d.datname = current_database()
         WHERE NOT pg_is_in_recovery())
    SELECT CASE WHEN c.pushed AND NOT c.standalone THEN 'warning' ELSE 'notice' END,
           'shared_preload_libraries',
           'the library is not preloaded',
           'No worker starts by itself, claims become slow behind an old snapshot, and nothing is counted.',
           format('ALTER SYSTEM SET shared_preload_libraries = %s; -- and restart the server',
                  (SELECT string_agg(quote_literal(btrim(u.library, ' "')), ', ' ORDER BY u.n)
                     FROM unnest(string_to_array(concat_ws(',', nullif(current_setting('shared_preload_libraries'), ''), 'outbox'), ','))
                          WITH ORDINALITY u (library, n)))
      FROM c WHERE NOT c.preloaded
    UNION ALL
    SELECT CASE WHEN c.pushed THEN 'warning' ELSE 'notice' END, 'outbox.enabled',
           'the workers are switched off',
           'Messages wait until somebody claims, or calls drain() and maintain().',
           'ALTER SYSTEM SET outbox.enabled = on; SELECT pg_reload_conf();'
      FROM c WHERE c.preloaded AND NOT c.enabled
    UNION ALL
    SELECT 'error', 'launcher',
           'the launcher does not run',
           'Without it no worker is started. PostgreSQL starts it again within seconds, unless there was no slot for it when the server started.',
           format('ALTER SYSTEM SET max_worker_processes = %s; -- and restart the server', c.allowed + c.processes)
      FROM c WHERE c.preloaded AND c.enabled AND NOT c.launcher
    UNION ALL
    SELECT 'warning', 'outbox.databases',
           format('the workers do not serve this database; outbox.databases is "%s"', current_setting('outbox.databases')),
           'Messages wait until somebody claims, or calls drain() and maintain().',
           CASE WHEN c.template THEN format('ALTER DATABASE %I IS_TEMPLATE false;', current_database())
                ELSE format('ALTER SYSTEM SET outbox.databases = %L; SELECT pg_reload_conf();',
                            concat_ws(', ', nullif(current_setting('outbox.databases'), ''), quote_ident(current_database()))) END
      FROM c WHERE c.preloaded AND c.enabled AND NOT c.served
    UNION ALL
    SELECT 'warning', 'outbox.workers',
           'no delivery worker may be started',
           'Hooks are not called, and channels not notified, unless somebody calls drain().',
           'ALTER SYSTEM SET outbox.workers = 1; SELECT pg_reload_conf();'
      FROM c WHERE c.preloaded AND c.enabled AND c.pushed AND c.workers = 0
    UNION ALL
    SELECT CASE WHEN c.slots_short THEN 'warning' ELSE 'notice' END,
           'max_worker_processes',
           CASE WHEN c.slots_short THEN 'a process could not be started: no free slot for background workers'
                ELSE format('%s background workers are allowed, outbox alone may start %s for this database', c.allowed, c.processes) END,
           'Deliveries wait for a slot, or databases for each other.',
           format('ALTER SYSTEM SET max_worker_processes = %s; -- and restart the server',
                  CASE WHEN c.slots_short THEN c.allowed + c.processes ELSE c.processes END)
      FROM c WHERE c.preloaded AND c.enabled AND c.launcher AND (c.slots_short OR c.allowed < c.processes);
END;
COMMENT ON FUNCTION outbox.check_workers() IS 'findings about workers; a part of check()';

-- The call that changes lease or max_active of a subscription, where given, and keeps the rest.
CREATE FUNCTION outbox.subscribe_statement(subscription outbox.subscription, lease_ms bigint, max_active_ms bigint)
RETURNS text
LANGUAGE sql STABLE PARALLEL UNSAFE
BEGIN ATOMIC
    SELECT format('SELECT outbox.subscribe(%L, %L%s%s%s%s, replace => true);',
                  (subscription).name, (subscription).pattern,
                  ', kind => ' || quote_literal((subscription).kind),
                  ', lease => ' || quote_literal(coalesce(lease_ms, CAST(extract(epoch FROM (subscription).lease) * 1000 AS bigint)) || ' ms'),
                  ', max_active => ' || quote_literal(coalesce(max_active_ms, CAST(extract(epoch FROM (subscription).max_active) * 1000 AS bigint)) || ' ms'),
                  ', max_attempts => ' || (subscription).max_attempts);
END;
COMMENT ON FUNCTION outbox.subscribe_statement(outbox.subscription, bigint, bigint) IS
    'a remedy of check(): subscribe() with another lease or max_active';

-- What waits, and why.
CREATE FUNCTION outbox.check_subscriptions()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
    WITH s AS (
        SELECT t.subscription AS name, format('subscription "%s"', t.subscription) AS subject, t.mode, t.paused,
               t.dead,
               t.pending + t.ready + t.scheduled AS waiting,
               CAST(greatest(t.oldest_pending_age_seconds, t.oldest_ready_age_seconds) AS bigint) AS age,
               t.mode = 'unused' AND t.subscription = 'default'
               AND EXISTS (SELECT FROM outbox.subscription o WHERE o.mode <> 'unused') AS superfluous
          FROM outbox.status t),
    -- but for those whose handler is there and its function is not: see check_handlers()
    unhandled AS (
        SELECT q.name, d.positions, d.message_count
          FROM outbox.delivery d
          JOIN outbox.subscription q ON q.id = d.subscription_id
         WHERE d.state = 'unhandled' AND d.last_error ->> 'sqlstate' IS DISTINCT FROM '42883'),
    lost AS (
        SELECT q.name, sum(d.message_count) AS messages, max(d.attempts) AS attempts
          FROM outbox.delivery d
          JOIN outbox.subscription q ON q.id = d.subscription_id
         WHERE d.piece AND d.attempts - CASE d.state WHEN 'leased' THEN 1 ELSE 0 END >= 2
           AND d.state IN ('ready', 'leased')
         GROUP BY q.name),
    expired AS (
        SELECT q.name, sum(d.message_count) AS messages,
               CAST(extract(epoch FROM outbox.clock() - min(d.locked_until)) AS bigint) AS age
          FROM outbox.delivery d
          JOIN outbox.subscription q ON q.id = d.subscription_id
         WHERE d.state = 'leased' AND d.locked_until < outbox.clock() - interval '1 minute'
         GROUP BY q.name)
    SELECT 'notice', s.subject,
           format('it is paused; messages waiting: %s', s.waiting),
           'Nobody gets its messages until it is resumed.',
           format('SELECT outbox.resume(%L);', s.name)
      FROM s WHERE s.paused
    UNION ALL
    SELECT 'warning', s.subject,
           format('nobody has ever used it; messages kept: %s', s.waiting),
           'It is there from the start and matches everything: what it keeps never leaves the log.',
           format('SELECT outbox.unsubscribe(%L, discard_pending => true);', s.name)
      FROM s WHERE s.superfluous AND s.waiting > 0
    UNION ALL
    SELECT 'warning', s.subject,
           format('messages wait: %s, the oldest has been due for %s seconds', s.waiting, s.age),
           CASE s.mode WHEN 'pushed' THEN 'No worker delivers, or its hooks are slow.'
                       WHEN 'pulled' THEN 'Its consumers are gone, or slower than what comes in.'
                       ELSE 'Nobody has ever used it.' END,
           CASE s.mode WHEN 'pushed' THEN 'SELECT * FROM outbox.workers; -- none: CALL outbox.drain();'
                       WHEN 'pulled' THEN format('SELECT * FROM outbox.leases WHERE subscription = %L; -- none: start a consumer', s.name)
                       ELSE format('SELECT outbox.unsubscribe(%L, discard_pending => true); -- or start a consumer', s.name) END
      FROM s WHERE s.age > 300 AND NOT s.paused AND NOT s.superfluous
    UNION ALL
    SELECT 'warning', s.subject,
           format('dead messages: %s', s.dead),
           'They were given up after an error, and keep until somebody decides.',
           format('SELECT * FROM outbox.dead_letters WHERE subscription = %L; SELECT outbox.requeue_all(%L);', s.name, s.name)
      FROM s WHERE s.dead > 0
    UNION ALL
    SELECT 'warning', s.subject,
           format('messages that no handler matches: %s (%s)', u.messages, u.names),
           'They are kept, uncharged, until a handler is registered.',
           format('SELECT outbox.register_hook(%L, ''the function'', subscription => %L);', u.name, s.name)
      FROM s
     CROSS JOIN LATERAL (
           SELECT min(n.name) AS name, (SELECT sum(k.message_count) FROM unhandled k WHERE k.name = s.name) AS messages,
                  string_agg(n.name, ', ' ORDER BY n.name) FILTER (WHERE n.number <= 5)
                  || CASE WHEN count(*) > 5 THEN ', ...' ELSE '' END AS names
             FROM (SELECT m.name, row_number() OVER (ORDER BY m.name) AS number
                     FROM (SELECT l.name FROM unhandled k CROSS JOIN LATERAL outbox.log_of(k.positions) l
                            WHERE k.name = s.name LIMIT 1000) m
                    GROUP BY m.name) n) u
     WHERE u.name IS NOT NULL
    UNION ALL
    SELECT 'warning', s.subject,
           format('messages that have lost their lease again and again: %s', l.messages),
           'Their consumers die, or take longer than the lease; the attempts are used up meanwhile.',
           CASE WHEN s.mode = 'pulled' AND q.lease_ms < q.max_active_ms
                THEN outbox.subscribe_statement(p, least(2 * q.lease_ms, q.max_active_ms), NULL)
                ELSE format('SELECT * FROM outbox.messages WHERE subscription = %L AND status IN (''ready'', ''leased'') AND attempts > 1;', s.name) END
      FROM s
      JOIN lost l USING (name)
      JOIN outbox.subscription p USING (name)
     CROSS JOIN LATERAL (
           SELECT coalesce(CAST(extract(epoch FROM p.lease) * 1000 AS bigint), c.lease_ms) AS lease_ms,
                  coalesce(CAST(extract(epoch FROM p.max_active) * 1000 AS bigint), c.max_active_ms) AS max_active_ms
             FROM outbox.conditions() c) q
    UNION ALL
    SELECT 'warning', s.subject,
           format('messages under leases that ended up to %s seconds ago: %s', e.age, e.messages),
           'Their consumer is gone, and nobody takes them back: no worker runs, and nobody claims.',
           'SELECT outbox.maintain();'
      FROM s
      JOIN expired e USING (name);
END;
COMMENT ON FUNCTION outbox.check_subscriptions() IS 'findings about subscriptions; a part of check()';

-- A handler is forbidden (src/rights.c) for what its role lacks, or for what it lacks itself.
CREATE FUNCTION outbox.check_handlers()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
    WITH r AS (
        SELECT a.oid, a.rolname AS name, o.rolname AS owner,
               CASE WHEN NOT a.rolcanlogin THEN 'login'
                    WHEN NOT has_database_privilege(a.oid, current_database(), 'connect') THEN 'connect'
                    WHEN NOT EXISTS (SELECT FROM pg_proc p
                                      WHERE p.proname = 'drain' AND p.pronamespace = CAST('outbox' AS regnamespace)
                                        AND has_function_privilege(a.oid, p.oid, 'execute')) THEN 'drain'
                    WHEN NOT EXISTS (SELECT FROM pg_proc p
                                      WHERE p.proname IN ('register_hook', 'register_notify')
                                        AND p.pronamespace = CAST('outbox' AS regnamespace)
                                        AND has_function_privilege(a.oid, p.oid, 'execute')) THEN 'register'
                    WHEN NOT (o.rolsuper OR pg_has_role(o.oid, a.oid, 'usage')) THEN 'trust' END AS lacks
          FROM pg_roles a
          JOIN pg_roles o ON o.oid = (SELECT c.relowner FROM pg_class c WHERE c.oid = CAST('outbox.delivery' AS regclass))
         WHERE a.oid IN (SELECT d.role_oid FROM outbox.handler d)),
    h AS (
        SELECT x.*, format('handler "%s" of subscription "%s"', x.name_pattern, x.subscription) AS subject,
               format('SELECT outbox.unregister(%L, %L%s%s);', x.name_pattern, x.subscription,
                      ', kind => ' || quote_literal(x.kind), ', version => ' || x.version) AS unregister,
               CASE WHEN r.oid IS NULL THEN 'role'
                    WHEN r.lacks IS NOT NULL THEN r.lacks
                    WHEN NOT has_function_privilege(r.oid, CAST(to_regprocedure(x.function || '(outbox.message)') AS oid), 'execute') THEN 'execute'
                    ELSE 'consume' END AS lacks
          FROM outbox.handlers x
          LEFT JOIN r ON r.name = x.role)
    SELECT 'warning', h.subject,
           format('its function %s(outbox.message) is missing', h.function),
           'Its messages are kept, uncharged, until the function is there again.',
           h.unregister || ' -- or create the function'
      FROM h WHERE h.state = 'broken'
    UNION ALL
    SELECT 'warning', h.subject,
           CASE h.lacks WHEN 'role' THEN format('role "%s" does not exist', h.role)
                        WHEN 'execute' THEN format('role "%s" may not execute %s(outbox.message)', h.role, h.function)
                        ELSE format('role "%s" may use other subscriptions only', h.role) END,
           CASE h.lacks WHEN 'execute' THEN 'Its messages fail until their attempts are used up.' ELSE 'Its messages wait.' END,
           CASE h.lacks WHEN 'role' THEN h.unregister || ' -- and register it as another role'
                        WHEN 'execute' THEN format('GRANT EXECUTE ON FUNCTION %s(outbox.message) TO %I;', h.function, h.role)
                        ELSE format('SELECT outbox.grant_access(%L, ''consumer'', %L);', h.role, h.subscription) END
      FROM h WHERE h.state = 'forbidden' AND h.lacks IN ('role', 'execute', 'consume')
    UNION ALL
    SELECT 'warning', format('role "%s"', r.name),
           CASE r.lacks WHEN 'login' THEN 'it may not log in'
                        WHEN 'connect' THEN 'it may not connect to this database'
                        WHEN 'drain' THEN 'it may not call outbox.drain()'
                        WHEN 'register' THEN 'it may not register handlers, and is no consumer any more'
                        ELSE format('the owner of the extension, "%s", has not its privileges', r.owner) END,
           'Workers connect as the role whose handlers they serve, and do what it could do itself. Its messages wait.',
           CASE r.lacks WHEN 'login' THEN format('ALTER ROLE %I LOGIN;', r.name)
                        WHEN 'connect' THEN format('GRANT CONNECT ON DATABASE %I TO %I;', current_database(), r.name)
                        WHEN 'trust' THEN format('GRANT %I TO %I; -- or make a superuser the owner', r.name, r.owner)
                        ELSE (SELECT string_agg(DISTINCT format('SELECT outbox.grant_access(%L, ''consumer'', %L);', r.name, h.subscription), ' ')
                                FROM h WHERE h.role = r.name) END
      FROM r WHERE r.lacks IS NOT NULL
    UNION ALL
    SELECT 'notice', h.subject,
           format('its timeout of %s seconds is longer than max_active, %s seconds', h.timeout_seconds, a.seconds),
           'Hooks are stopped at max_active.',
           outbox.subscribe_statement(s, NULL, CAST(h.timeout_seconds * 1000 AS bigint))
      FROM h
      JOIN outbox.subscription s ON s.name = h.subscription
     CROSS JOIN LATERAL (
           SELECT coalesce(CAST(extract(epoch FROM s.max_active) AS double precision), c.max_active_ms / 1000.0) AS seconds
             FROM outbox.conditions() c) a
     WHERE h.timeout_seconds > a.seconds;
END;
COMMENT ON FUNCTION outbox.check_handlers() IS 'findings about handlers; a part of check()';

CREATE FUNCTION outbox.check_settings()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
    WITH c AS (SELECT x.* FROM outbox.conditions() x),
    s AS (
        SELECT q AS row, format('subscription "%s"', q.name) AS subject,
               coalesce(CAST(extract(epoch FROM q.lease) * 1000 AS bigint), c.lease_ms) AS lease_ms,
               coalesce(CAST(extract(epoch FROM q.max_active) * 1000 AS bigint), c.max_active_ms) AS max_active_ms
          FROM outbox.subscription q CROSS JOIN c
         WHERE q.lease IS NOT NULL OR q.max_active IS NOT NULL)
    SELECT 'notice', 'outbox.lease',
           format('a lease of %s ms is longer than outbox.max_active, %s ms', c.lease_ms, c.max_active_ms),
           'Leases are cut to max_active.',
           format('ALTER SYSTEM SET outbox.max_active = %s; SELECT pg_reload_conf();', c.lease_ms)
      FROM c WHERE c.lease_ms > c.max_active_ms
    UNION ALL
    SELECT 'notice', s.subject,
           format('its lease of %s ms is longer than its max_active, %s ms', s.lease_ms, s.max_active_ms),
           'Leases are cut to max_active.',
           outbox.subscribe_statement(s.row, NULL, s.lease_ms)
      FROM s WHERE s.lease_ms > s.max_active_ms
    UNION ALL
    SELECT 'notice', 'outbox.hook_timeout',
           format('a timeout of %s ms is longer than outbox.max_active, %s ms', c.hook_timeout_ms, c.max_active_ms),
           'Hooks are stopped at max_active.',
           format('ALTER SYSTEM SET outbox.max_active = %s; SELECT pg_reload_conf();', c.hook_timeout_ms)
      FROM c WHERE c.hook_timeout_ms > c.max_active_ms
    UNION ALL
    SELECT 'notice', 'outbox.backoff_base',
           format('the first retry after %s ms would be later than outbox.backoff_max, %s ms, allows', c.backoff_base_ms, c.backoff_max_ms),
           'Every retry comes after outbox.backoff_max.',
           format('ALTER SYSTEM SET outbox.backoff_max = %s; SELECT pg_reload_conf();', c.backoff_base_ms)
      FROM c WHERE c.backoff_base_ms > c.backoff_max_ms;
END;
COMMENT ON FUNCTION outbox.check_settings() IS 'findings about settings; a part of check()';

-- Whose data it is, and what others do to it.
CREATE FUNCTION outbox.check_database()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
    SELECT 'error', 'copy',
           'the messages are a copy that was not adopted',
           'They were routed in another cluster or database. Nothing is claimed or delivered, so that they are not delivered twice.',
           'SELECT outbox.adopt(); -- to deliver them from here; SELECT outbox.reset() begins empty'
      FROM outbox.conditions() c WHERE c.copied
    UNION ALL
    SELECT 'error', format('table outbox.%s', t.relname),
           format('its trigger %s does not always fire', g.tgname),
           'It keeps others who write the table (a restore, replication, a superuser) from doing harm.',
           format('ALTER TABLE outbox.%I ENABLE ALWAYS TRIGGER %I;', t.relname, g.tgname)
      FROM pg_trigger g
      JOIN pg_class t ON t.oid = g.tgrelid
      JOIN pg_proc p ON p.oid = g.tgfoid
     WHERE t.relnamespace = CAST('outbox' AS regnamespace) AND t.relkind = 'r'
       AND p.pronamespace = t.relnamespace
       AND g.tgenabled <> 'A'
    UNION ALL
    SELECT 'warning', format('segment %s', g.segment),
           format('it could have left the log %s seconds ago, but for %s',
                  CAST(extract(epoch FROM outbox.clock() - g.removable_at) AS bigint), g.held_by),
           'The log grows until it goes. Nothing is lost, and nothing gets slower.',
           'SELECT * FROM outbox.segments; -- Retention in the operations guide says what to do for each reason'
      FROM outbox.segments g
     WHERE g.held_by IS NOT NULL AND g.removable_at < outbox.clock() - interval '5 minutes'
    UNION ALL
    SELECT 'warning', 'NOTIFY',
           format('%s %% of the queue of notifications are used', round(CAST(100 * q.usage AS numeric))),
           'When it is full every transaction fails that notifies, deliveries to channels included. A session that listens and stays in a transaction keeps it from being emptied.',
           coalesce((SELECT format('SELECT pg_terminate_backend(%s);', a.pid) FROM pg_stat_activity a
                      WHERE a.backend_type = 'client backend' AND a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
                      ORDER BY a.xact_start LIMIT 1),
                    'SELECT * FROM pg_stat_activity ORDER BY xact_start;')
      FROM (SELECT pg_notification_queue_usage() AS usage) q WHERE q.usage > 0.5
    UNION ALL
    SELECT 'warning', format('process %s', a.pid),
           format('it has been in a transaction for %s seconds (%s)',
                  CAST(extract(epoch FROM outbox.clock() - a.xact_start) AS bigint),
                  concat_ws(', ', a.state, a.usename, nullif(a.application_name, ''))),
           'What it has enqueued waits for its end, and VACUUM and the removal of history for its snapshot.',
           format('SELECT pg_terminate_backend(%s);', a.pid)
      FROM pg_stat_activity a
     WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
       AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL)
       AND a.backend_type NOT IN ('autovacuum worker', 'walsender')
       AND a.xact_start < outbox.clock() - interval '5 minutes'
    UNION ALL
    SELECT 'warning', format('prepared transaction "%s"', p.gid),
           format('it was prepared %s seconds ago', CAST(extract(epoch FROM outbox.clock() - p.prepared) AS bigint)),
           'What it has enqueued waits for its end, and VACUUM and the removal of history too.',
           format('ROLLBACK PREPARED %L; -- or COMMIT PREPARED', p.gid)
      FROM pg_prepared_xacts p
     WHERE p.database = current_database() AND p.prepared < outbox.clock() - interval '5 minutes'
    UNION ALL
    SELECT 'warning', format('replication slot "%s"', r.slot_name),
           format('it holds the snapshot of %s transactions ago', age(r.xmin)),
           'VACUUM and the removal of history wait for a query on a standby, or for a standby that is gone.',
           CASE WHEN r.active THEN 'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE xact_start < now() - interval ''5 minutes''; -- on the standby'
                ELSE format('SELECT pg_drop_replication_slot(%L); -- if its standby does not come back', r.slot_name) END
      FROM pg_replication_slots r WHERE age(r.xmin) > 100000
    UNION ALL
    SELECT 'warning', format('standby "%s"', r.application_name),
           format('it holds the snapshot of %s transactions ago', age(r.backend_xmin)),
           'VACUUM and the removal of history wait for a query on the standby.',
           'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE xact_start < now() - interval ''5 minutes''; -- on the standby'
      FROM pg_stat_replication r WHERE age(r.backend_xmin) > 100000;
END;
COMMENT ON FUNCTION outbox.check_database() IS
    'findings about the data and about what others hold; a part of check()';

CREATE FUNCTION outbox.check()
RETURNS SETOF outbox.finding
LANGUAGE sql STABLE SECURITY DEFINER PARALLEL UNSAFE ROWS 3
SET search_path TO pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT f.severity, f.subject, f.what, f.why, f.remedy
      FROM (SELECT w.* FROM outbox.check_workers() w
            UNION ALL SELECT d.* FROM outbox.check_database() d
            UNION ALL SELECT s.* FROM outbox.check_subscriptions() s
            UNION ALL SELECT h.* FROM outbox.check_handlers() h
            UNION ALL SELECT g.* FROM outbox.check_settings() g) f
     ORDER BY array_position(ARRAY['error', 'warning', 'notice'], f.severity), f.subject, f.what;
END;
COMMENT ON FUNCTION outbox.check() IS
    'what is wrong, why it matters, and the statement that mends it; no rows: nothing was found';
