-- 80_views: what operators look at; src/status.c.  No view has a column of a type that
-- drivers or pg_upgrade have trouble with (intervals, reg*, multiranges), and none shows
-- a claim token.  Ages and times left are in seconds, by the clock of outbox.

COMMENT ON VIEW outbox.log IS
    'every message as it was enqueued; the right to select from it is the right to see payloads, headers and details of errors in the other views';

CREATE FUNCTION outbox.backlog()
RETURNS TABLE (
    subscription_id bigint,
    subscription text,
    mode text,
    paused boolean,
    pending bigint,
    pending_is_lower_bound boolean,
    oldest_pending_at timestamptz,
    router_pid integer)
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 10
AS 'MODULE_PATHNAME', 'outbox_backlog';
COMMENT ON FUNCTION outbox.backlog() IS
    'each subscription with what is not yet routed to it; behind the view status';

CREATE FUNCTION outbox.deliveries_of("position" bigint, name text, kind text)
RETURNS TABLE (
    subscription text,
    status text,
    attempts integer,
    max_attempts integer,
    available_at timestamptz,
    claimed_at timestamptz,
    locked_until timestamptz,
    settled_at timestamptz,
    worker text,
    last_error jsonb)
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 2
AS 'MODULE_PATHNAME', 'outbox_deliveries_of';
COMMENT ON FUNCTION outbox.deliveries_of(bigint, text, text) IS
    'what a message is for each subscription; behind the view messages';

CREATE FUNCTION outbox.log_of(positions int8multirange)
RETURNS SETOF outbox.log
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 10
AS 'MODULE_PATHNAME', 'outbox_log_of';
COMMENT ON FUNCTION outbox.log_of(int8multirange) IS
    'the messages at these positions, without payload and headers for those who may not read outbox.log; behind the view dead_letters';

CREATE FUNCTION outbox.handler_states()
RETURNS TABLE (handler_id bigint, state text)
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 10
AS 'MODULE_PATHNAME', 'outbox_handler_states';
COMMENT ON FUNCTION outbox.handler_states() IS
    'whether each handler could be called now; behind the view handlers';

-- Counts are sums over runs: their cost grows with the number of runs, not of messages.
CREATE VIEW outbox.status AS
SELECT b.subscription,
       b.mode,
       b.paused,
       b.pending,
       b.pending_is_lower_bound,
       coalesce(d.scheduled, 0) AS scheduled,
       coalesce(d.ready, 0) AS ready,
       coalesce(d.leased, 0) AS leased,
       coalesce(d.unhandled, 0) AS unhandled,
       coalesce(d.delivered, 0) AS delivered,
       coalesce(d.dead, 0) AS dead,
       coalesce(d.discarded, 0) AS discarded,
       coalesce(d.cancelled, 0) AS cancelled,
       CAST(extract(epoch FROM c.now - b.oldest_pending_at) AS double precision) AS oldest_pending_age_seconds,
       CAST(extract(epoch FROM c.now - d.oldest_ready_at) AS double precision) AS oldest_ready_age_seconds,
       CAST(extract(epoch FROM c.now - d.oldest_lease_at) AS double precision) AS oldest_lease_age_seconds,
       d.last_claim,
       d.last_delivery,
       h.holds,
       b.router_pid
  FROM outbox.backlog() b
 CROSS JOIN (SELECT outbox.clock() AS now) c
  LEFT JOIN (
       SELECT r.subscription_id,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'ready' AND r.available_at > t.now) AS bigint) AS scheduled,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'ready' AND r.available_at <= t.now) AS bigint) AS ready,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'leased') AS bigint) AS leased,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'unhandled') AS bigint) AS unhandled,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'delivered') AS bigint) AS delivered,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'dead') AS bigint) AS dead,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'discarded') AS bigint) AS discarded,
              CAST(sum(r.message_count) FILTER (WHERE r.state = 'cancelled') AS bigint) AS cancelled,
              min(r.available_at) FILTER (WHERE r.state = 'ready' AND r.available_at <= t.now) AS oldest_ready_at,
              min(r.claimed_at) FILTER (WHERE r.state = 'leased') AS oldest_lease_at,
              max(r.claimed_at) AS last_claim,
              max(r.settled_at) FILTER (WHERE r.state = 'delivered') AS last_delivery
         FROM outbox.delivery r
        CROSS JOIN (SELECT outbox.clock() AS now) t
        GROUP BY r.subscription_id) d ON d.subscription_id = b.subscription_id
  LEFT JOIN (
       SELECT k.subscription_id, string_agg('log_' || k.segment, ', ' ORDER BY k.segment) AS holds
         FROM outbox.segment_holders() k
        GROUP BY k.subscription_id) h ON h.subscription_id = b.subscription_id
 ORDER BY b.subscription;
COMMENT ON VIEW outbox.status IS
    'each subscription with the number of its messages in each status, ages in seconds; holds: segments of the log that its unsettled messages keep beyond the retention';

-- Sorted by id it is read by the index on the id, page by page:
-- WHERE (id, subscription) > (x, y) ORDER BY id, subscription LIMIT n.
CREATE VIEW outbox.messages AS
SELECT l.id,
       d.subscription,
       d.status,
       l.name,
       l.kind,
       l.version,
       CASE WHEN (SELECT has_table_privilege('outbox.log', 'select')) THEN l.payload END AS payload,
       CASE WHEN (SELECT has_table_privilege('outbox.log', 'select')) THEN coalesce(l.headers, '{}') END AS headers,
       d.attempts,
       coalesce(d.max_attempts, l.max_attempts) AS max_attempts,
       coalesce(d.available_at, l.available_at, l.created_at) AS available_at,
       l.created_at,
       l.occurred_at,
       d.claimed_at,
       d.locked_until,
       d.settled_at,
       d.worker,
       d.last_error,
       l.correlation_id,
       l.causation_id,
       l.aggregate_type,
       l.aggregate_id,
       l.tenant_id,
       l.owner_id,
       l.dedupe_key,
       l.ordering_key
  FROM outbox.log l
 CROSS JOIN LATERAL outbox.deliveries_of(l."position", l.name, l.kind) d;
COMMENT ON VIEW outbox.messages IS
    'one row per message and subscription; page with WHERE (id, subscription) > (x, y) ORDER BY id, subscription LIMIT n; payload and headers only for those who may select from outbox.log';

CREATE VIEW outbox.dead_letters AS
SELECT s.name AS subscription,
       l.id,
       l.name,
       l.kind,
       l.version,
       l.payload,
       CASE WHEN l.payload IS NOT NULL THEN coalesce(l.headers, '{}') END AS headers,
       d.attempts,
       d.max_attempts,
       d.settled_at AS died_at,
       d.last_error ->> 'sqlstate' AS last_error_sqlstate,
       d.last_error ->> 'message' AS last_error_message,
       CASE WHEN (SELECT has_table_privilege('outbox.log', 'select')) THEN d.last_error
            ELSE d.last_error - CAST('{detail,hint,context,data}' AS text[]) END AS last_error,
       d.worker,
       l.created_at,
       l.occurred_at,
       l.correlation_id,
       l.causation_id,
       l.aggregate_type,
       l.aggregate_id,
       l.tenant_id,
       l.owner_id,
       l.dedupe_key,
       l.ordering_key
  FROM outbox.delivery d
  JOIN outbox.subscription s ON s.id = d.subscription_id
 CROSS JOIN LATERAL outbox.log_of(d.positions) l
 WHERE d.state = 'dead';
COMMENT ON VIEW outbox.dead_letters IS
    'messages that were given up after an error; requeue(), requeue_all(), discard() and discard_all() act on them';

CREATE VIEW outbox.leases AS
SELECT s.name AS subscription,
       d.worker,
       d.claimed_at,
       d.locked_until,
       d.active_until,
       d.message_count AS messages,
       d.attempts,
       d.max_attempts,
       d.locked_until <= c.now AS expired,
       CAST(extract(epoch FROM d.locked_until - c.now) AS double precision) AS seconds_left
  FROM outbox.delivery d
  JOIN outbox.subscription s ON s.id = d.subscription_id
 CROSS JOIN (SELECT outbox.clock() AS now) c
 WHERE d.state = 'leased';
COMMENT ON VIEW outbox.leases IS
    'what is being worked on: one row per run of messages under a lease; an expired one is taken back by the next claim';

CREATE VIEW outbox.subscriptions AS
SELECT s.name,
       s.pattern,
       s.kind,
       s.mode,
       s.paused,
       CAST(extract(epoch FROM s.lease) AS double precision) AS lease_seconds,
       CAST(extract(epoch FROM s.max_active) AS double precision) AS max_active_seconds,
       s.max_attempts,
       h.role,
       coalesce(h.handlers, 0) AS handlers,
       s.created_at
  FROM outbox.subscription s
  LEFT JOIN (SELECT r.subscription_id, CAST(min(coalesce(a.rolname, r.role_name)) AS text) AS role, count(*) AS handlers
               FROM outbox.handler r
               LEFT JOIN pg_roles a ON a.oid = r.role_oid
              GROUP BY r.subscription_id) h ON h.subscription_id = s.id
 UNION ALL
-- its row is made at the first use
SELECT 'default', '#', NULL, 'unused', false, NULL, NULL, NULL, NULL, 0, NULL
 WHERE NOT EXISTS (SELECT FROM outbox.identity)
   AND NOT EXISTS (SELECT FROM outbox.subscription);
COMMENT ON VIEW outbox.subscriptions IS
    'the subscriptions; where a number is null the setting applies';

CREATE VIEW outbox.handlers AS
SELECT s.name AS subscription,
       h.name_pattern,
       h.kind,
       h.version,
       h.function,
       h.channel,
       h.include_data,
       CAST(coalesce((SELECT r.rolname FROM pg_roles r WHERE r.oid = h.role_oid), h.role_name) AS text) AS role,
       h.search_path,
       CAST(extract(epoch FROM h.timeout) AS double precision) AS timeout_seconds,
       h.max_attempts,
       (SELECT array_agg(CAST(extract(epoch FROM u.delay) AS double precision) ORDER BY u.n)
          FROM unnest(h.retry) WITH ORDINALITY u (delay, n)) AS retry_seconds,
       coalesce(x.state, 'ok') AS state,
       h.broken_since,
       h.created_at
  FROM outbox.handler h
  JOIN outbox.subscription s ON s.id = h.subscription_id
  LEFT JOIN outbox.handler_states() x ON x.handler_id = h.id;
COMMENT ON VIEW outbox.handlers IS
    'what is called for the messages of a subscription; broken: the function is missing, forbidden: its role is gone, may not connect, may not consume it, may not call it or may not register any more';
