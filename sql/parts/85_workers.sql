-- 85_workers: the background workers.  src/workers.c

CREATE FUNCTION outbox.worker_rows(
    OUT pid integer,
    OUT kind text,
    OUT database oid,
    OUT role oid,
    OUT started_at timestamptz,
    OUT busy boolean,
    OUT idle_since timestamptz,
    OUT handled bigint,
    OUT running boolean)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'outbox_worker_rows'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10;
COMMENT ON FUNCTION outbox.worker_rows() IS 'processes of outbox in the whole cluster; behind the view workers';

CREATE VIEW outbox.workers AS
    SELECT w.pid, w.kind, d.datname AS database, r.rolname AS role, w.running, w.busy, w.started_at, w.handled,
           a.state AS activity_state, a.query AS activity
      FROM outbox.worker_rows() AS w
      LEFT JOIN pg_catalog.pg_database AS d ON d.oid = w.database
      LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = w.role
      LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid;
COMMENT ON VIEW outbox.workers IS 'background workers: launcher, coordinators, delivery workers; empty without preloading';

CREATE FUNCTION outbox.announce()
RETURNS boolean
AS 'MODULE_PATHNAME', 'outbox_announce'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.announce() IS 'tell the background workers, at commit, that this database has the extension';

CREATE FUNCTION outbox.start_worker()
RETURNS integer
AS 'MODULE_PATHNAME', 'outbox_start_worker'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.start_worker()
    IS 'without preloading: start a worker for this database and the current role until the server stops; returns its pid, null where workers run already';

CREATE FUNCTION outbox.revoke_lease(subscription text, worker text)
RETURNS bigint
AS 'MODULE_PATHNAME', 'outbox_revoke_lease'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.revoke_lease(text, text)
    IS 'end the leases of a worker now, as if they had run out; returns messages';
