-- 86_counters: what has happened to messages.  src/counters.c

CREATE FUNCTION outbox.counter_rows()
RETURNS TABLE (
    subscription text,
    enqueued bigint,
    routed bigint,
    claimed bigint,
    delivered bigint,
    retried bigint,
    dead bigint,
    abandoned bigint,
    lease_lost bigint,
    settlement_refused bigint,
    notified bigint,
    hook_time_ms double precision,
    stats_reset timestamptz)
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 10
AS 'MODULE_PATHNAME', 'outbox_counter_rows';
COMMENT ON FUNCTION outbox.counter_rows() IS
    'counters of the database and of each subscription; behind the view counters';

CREATE VIEW outbox.counters AS
SELECT c.subscription, c.enqueued, c.routed, c.claimed, c.delivered, c.retried, c.dead, c.abandoned, c.lease_lost,
       c.settlement_refused, c.notified, c.hook_time_ms, c.stats_reset
  FROM outbox.counter_rows() c
 ORDER BY c.subscription NULLS FIRST;
COMMENT ON VIEW outbox.counters IS
    'what has happened since stats_reset, per subscription; in the row without one what belongs to the database; empty without preloading';

CREATE FUNCTION outbox.reset_counters(subscription text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_reset_counters';
COMMENT ON FUNCTION outbox.reset_counters(text) IS
    'set the counters of a subscription, or of all and of the database, to zero at once; returns how many rows';
