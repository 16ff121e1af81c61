/*
 * workers.c
 *		SQL functions about the processes: the view outbox.workers, start_worker(),
 *		the announcement at CREATE EXTENSION.
 */
#include "worker.h"

#include "catalog.h"
#include "counters.h"
#include "notice.h"

#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_announce);
PG_FUNCTION_INFO_V1(outbox_worker_rows);

/*
 * The install script's last statement: at the commit our processes learn of the database,
 * and what an earlier installation has counted is gone.
 */
Datum
outbox_announce(PG_FUNCTION_ARGS)
{
	wake_at_commit(WORK_LOOK);
	counters_forget(OF_DATABASE);
	notice_no_worker();
	PG_RETURN_BOOL(worker_state != NULL);
}

static void
put_worker(ReturnSetInfo *rsinfo, const WorkerSlot *slot, const char *kind)
{
	Datum		values[9];
	bool		nulls[9] = {false};
	TimestampTz idle_since = (TimestampTz) pg_atomic_read_u64(unconstify(pg_atomic_uint64 *, &slot->idle_since));
	int64		to_wall_clock = GetCurrentTimestamp() - clock_machine();

	values[0] = Int32GetDatum((int32) slot->pid);
	values[1] = CStringGetTextDatum(kind);
	values[2] = ObjectIdGetDatum(slot->database);
	nulls[2] = !OidIsValid(slot->database);
	values[3] = ObjectIdGetDatum(slot->role);
	nulls[3] = !OidIsValid(slot->role);
	values[4] = TimestampTzGetDatum(slot->started_at + to_wall_clock);
	nulls[4] = (slot->started_at == 0);
	values[5] = BoolGetDatum(pg_atomic_read_u32(unconstify(pg_atomic_uint32 *, &slot->busy)) != 0);
	values[6] = TimestampTzGetDatum(idle_since + to_wall_clock);
	nulls[6] = (idle_since == 0);
	values[7] = Int64GetDatum((int64) pg_atomic_read_u64(unconstify(pg_atomic_uint64 *, &slot->handled)));
	values[8] = BoolGetDatum(slot->pid != 0);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * outbox.worker_rows() → pid, kind, database, role, started_at, busy, idle_since, handled, running:
 * a copy is made under the lock and formatted after it.
 */
Datum
outbox_worker_rows(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	WorkerSlot *copies = palloc(WORKERS_MAX * sizeof(WorkerSlot));
	WorkerSlot	launcher = {0};
	int			n = 0;

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	if (worker_state == NULL)
		return (Datum) 0;
	LWLockAcquire(worker_state->lock, LW_SHARED);
	launcher.pid = worker_state->launcher_pid;
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		if (worker_state->workers[i].used)
			copies[n++] = worker_state->workers[i];
	}
	LWLockRelease(worker_state->lock);

	if (launcher.pid != 0)
		put_worker(rsinfo, &launcher, "launcher");
	for (int i = 0; i < n; i++)
		put_worker(rsinfo, &copies[i], worker_kind_name(copies[i].kind));
	return (Datum) 0;
}
