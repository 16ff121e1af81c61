/*
 * check.c
 *		What outbox.check() asks that SQL cannot see: shared memory, whose data this is, and
 *		settings, which a session knows only once the library is loaded.
 *
 * The findings themselves are SQL, see sql/parts/88_check.sql.
 *
 * Locks: the LWLock of worker_state.c, for a moment.
 */
#include "outbox.h"

#include "route.h"
#include "worker.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(outbox_conditions);

static void read_workers(bool *launcher, bool *slots_short);

/*
 * outbox.conditions() → preloaded, launcher, served, slots_short, copied, and settings:
 * enabled, workers, max_coordinators, lease_ms, max_active_ms, hook_timeout_ms, backoff_base_ms,
 * backoff_max_ms
 */
Datum
outbox_conditions(PG_FUNCTION_ARGS)
{
	Datum		values[13];
	bool		nulls[13] = {false};
	TupleDesc	desc;
	Frontier	frontier;
	bool		launcher = false;
	bool		slots_short = false;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	if (worker_state != NULL)
		read_workers(&launcher, &slots_short);
	frontier_read(&frontier, GetActiveSnapshot());

	values[0] = BoolGetDatum(worker_state != NULL);
	values[1] = BoolGetDatum(launcher);
	values[2] = BoolGetDatum(own_database_is_served());
	values[3] = BoolGetDatum(slots_short);
	values[4] = BoolGetDatum(frontier_is_copy(&frontier));
	values[5] = BoolGetDatum(outbox_enabled);
	values[6] = Int32GetDatum(outbox_workers);
	values[7] = Int32GetDatum(outbox_max_coordinators);
	values[8] = Int32GetDatum(outbox_lease);
	values[9] = Int32GetDatum(outbox_max_active);
	values[10] = Int32GetDatum(outbox_hook_timeout);
	values[11] = Int32GetDatum(outbox_backoff_base);
	values[12] = Int32GetDatum(outbox_backoff_max);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}

/* Starts are tried again every few seconds: what was short a minute ago is so no longer. */
static void
read_workers(bool *launcher, bool *slots_short)
{
	LWLockAcquire(worker_state->lock, LW_SHARED);
	*launcher = (worker_state->launcher_pid != 0);
	*slots_short = (clock_machine() + MSECS(outbox_clock_offset) - worker_state->no_slot_at < USECS_PER_MINUTE);
	LWLockRelease(worker_state->lock);
}
