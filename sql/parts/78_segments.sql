-- 78_segments: the ring of the log for people; src/rotate.c turns it.  These functions run as
-- the owner, who sees all sessions and all runs; what they show is names and numbers.

CREATE FUNCTION outbox.clock()
RETURNS timestamptz
LANGUAGE C STABLE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_clock';
COMMENT ON FUNCTION outbox.clock() IS
    'the time that due times and leases are compared with';

-- Whose unsettled messages keep a segment that is old enough to go.
CREATE FUNCTION outbox.segment_holders()
RETURNS TABLE (segment integer, subscription_id bigint, subscription text, messages bigint)
LANGUAGE sql STABLE SECURITY DEFINER PARALLEL UNSAFE ROWS 3
SET search_path TO pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT g.number, d.subscription_id, s.name, CAST(sum(d.message_count) AS bigint)
      FROM outbox.segment g
     CROSS JOIN LATERAL (
           SELECT min(l."position") AS first, max(l."position") AS last FROM outbox.log_0 l WHERE g.number = 0
           HAVING min(l."position") IS NOT NULL
           UNION ALL
           SELECT min(l."position"), max(l."position") FROM outbox.log_1 l WHERE g.number = 1
           HAVING min(l."position") IS NOT NULL
           UNION ALL
           SELECT min(l."position"), max(l."position") FROM outbox.log_2 l WHERE g.number = 2
           HAVING min(l."position") IS NOT NULL) p
      JOIN outbox.delivery d ON d.low <= p.last AND upper(d.positions) > p.first
      JOIN outbox.subscription s ON s.id = d.subscription_id
     WHERE NOT g.writing
       AND g.condemned_at IS NULL
       AND g.closed_at < outbox.clock() - CAST(current_setting('outbox.retention') AS interval)
       AND d.state IN ('ready', 'leased', 'unhandled', 'dead')
     GROUP BY g.number, d.subscription_id, s.name;
END;
COMMENT ON FUNCTION outbox.segment_holders() IS
    'the subscriptions whose unsettled messages keep a segment of the log beyond its retention; behind the views segments and status';

-- Who looks at the database with a snapshot, or a transaction, from before a decision.  Of other
-- databases only who writes: every snapshot taken here meanwhile goes back to that.
CREATE FUNCTION outbox.oldest_viewer(before bigint)
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER PARALLEL UNSAFE
SET search_path TO pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT v.who || CASE WHEN v.database <> current_database() THEN format(', of database "%s"', v.database) ELSE '' END
      FROM (SELECT format('process %s, %s, in a transaction for %s seconds', a.pid, coalesce(a.state, a.backend_type),
                          CAST(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.backend_start)) AS bigint)) AS who,
                   a.datname AS database,
                   CASE WHEN a.datname <> current_database() THEN age(a.backend_xid)
                        ELSE greatest(age(a.backend_xid), age(a.backend_xmin)) END AS age,
                   a.backend_xid IS NOT NULL AS writes
              FROM pg_stat_activity a
             WHERE a.pid <> pg_backend_pid()
            UNION ALL
            SELECT format('prepared transaction "%s", for %s seconds', p.gid,
                          CAST(extract(epoch FROM clock_timestamp() - p.prepared) AS bigint)),
                   p.database, age(p.transaction), true
              FROM pg_prepared_xacts p
            UNION ALL
            SELECT format('replication slot "%s"', r.slot_name), NULL, age(r.xmin), false
              FROM pg_replication_slots r) v
     WHERE v.age > age(CAST(CAST(before % 4294967296 AS text) AS xid))
     ORDER BY v.age DESC, v.writes DESC
     LIMIT 1;
END;
COMMENT ON FUNCTION outbox.oldest_viewer(bigint) IS
    'the process, prepared transaction or replication slot with the oldest snapshot from before a transaction number; behind the view segments';

-- Whose lock keeps rotation off: that of whoever has written, or, where a segment is to be
-- truncated, of whoever has read.
CREATE FUNCTION outbox.user_of(log regclass, reading boolean)
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER PARALLEL UNSAFE
SET search_path TO pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT CASE WHEN p.gid IS NOT NULL THEN
                     format('prepared transaction "%s", for %s seconds', p.gid,
                            CAST(extract(epoch FROM clock_timestamp() - p.prepared) AS bigint))
                ELSE format('process %s, %s, in a transaction for %s seconds', a.pid, coalesce(a.state, a.backend_type),
                            CAST(extract(epoch FROM clock_timestamp() - a.xact_start) AS bigint)) END
      FROM pg_locks l
      LEFT JOIN pg_stat_activity a ON a.pid = l.pid
      LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
                          AND x.locktype = 'transactionid'
      LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
     WHERE l.relation = log
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND (reading OR l.mode NOT IN ('AccessShareLock', 'RowShareLock'))
       AND l.granted
       AND (l.pid <> pg_backend_pid() OR p.gid IS NOT NULL)
     ORDER BY coalesce(a.xact_start, p.prepared)
     LIMIT 1;
END;
COMMENT ON FUNCTION outbox.user_of(regclass, boolean) IS
    'the oldest open transaction that has written to a segment, or read it; behind the view segments';

CREATE VIEW outbox.segments AS
SELECT s.segment,
       s.state,
       s.bytes,
       s.oldest_message_at,
       s.closed_at,
       s.removable_at,
       CASE s.state
           WHEN 'condemned' THEN coalesce(outbox.oldest_viewer(s.condemned_at), outbox.user_of(s.log, true))
           WHEN 'closed' THEN CASE WHEN s.removable_at < outbox.clock() THEN
               coalesce(outbox.user_of(s.log, false),
                        (SELECT string_agg(format('subscription "%s": %s unsettled messages', h.subscription, h.messages), ', '
                                           ORDER BY h.messages DESC)
                           FROM outbox.segment_holders() h WHERE h.segment = s.number)) END
       END AS held_by
  FROM (SELECT x.number, x.segment, x.log,
               CASE WHEN x.number = 3 THEN 'kept'
                    WHEN coalesce(g.writing, x.number = 0 AND NOT EXISTS (SELECT FROM outbox.segment w WHERE w.writing)) THEN 'writing'
                    WHEN g.condemned_at IS NOT NULL THEN 'condemned'
                    WHEN x.oldest_message_at IS NULL THEN 'empty'
                    ELSE 'closed' END AS state,
               pg_total_relation_size(x.log) AS bytes,
               x.oldest_message_at,
               g.closed_at,
               -- the clock first: with it comes the library, and with that the setting
               CASE WHEN outbox.clock() IS NOT NULL
                    THEN g.closed_at + CAST(current_setting('outbox.retention') AS interval) END AS removable_at,
               g.condemned_at
          FROM (SELECT 0 AS number, 'log_0' AS segment, CAST('outbox.log_0' AS regclass) AS log,
                       (SELECT l.created_at FROM outbox.log_0 l ORDER BY l."position" LIMIT 1) AS oldest_message_at
                UNION ALL
                SELECT 1, 'log_1', CAST('outbox.log_1' AS regclass),
                       (SELECT l.created_at FROM outbox.log_1 l ORDER BY l."position" LIMIT 1)
                UNION ALL
                SELECT 2, 'log_2', CAST('outbox.log_2' AS regclass),
                       (SELECT l.created_at FROM outbox.log_2 l ORDER BY l."position" LIMIT 1)
                UNION ALL
                SELECT 3, 'log_kept', CAST('outbox.log_kept' AS regclass),
                       (SELECT l.created_at FROM outbox.log_kept l ORDER BY l."position" LIMIT 1)) x
          LEFT JOIN outbox.segment g ON g.number = x.number) s
 ORDER BY s.number;
COMMENT ON VIEW outbox.segments IS
    'the log, segment by segment: writing, closed (settled history that waits for its retention), condemned (goes as soon as nobody''s snapshot needs it), empty, kept (unsettled messages whose segment is gone); held_by: why one that could go is still there';
