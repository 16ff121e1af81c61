/*
 * wake.c
 *		Who is told what, and when.
 *
 * A transaction that made something to do says so in backend memory; its commit callback,
 * when the end is visible to others, sets an atomic flag of the database and the latch of
 * its coordinator, or of the launcher where there is none.  It costs producers no lock:
 * the number of the process is read without one, and waking a stranger does no harm.
 *
 * A wake-up may be lost (a prepared transaction, a crash): polling covers that.
 */
#include "worker.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

/*
 * In a full queue of notifications a commit fails, with all that it was about: routing,
 * and what other hooks have done.  What stays free is for others.
 */
#define QUEUE_USED_MAX	0.9

static uint32 work_at_commit = 0;
static DatabaseSlot *own_slot = NULL;

static DatabaseSlot *my_database(void);
static void transaction_end(XactEvent event, void *arg);

void
wake_register_callbacks(void)
{
	RegisterXactCallback(transaction_end, NULL);
}

/* Slots stay with their database, so it is looked up once. */
static DatabaseSlot *
my_database(void)
{
	if (own_slot == NULL)
		own_slot = database_slot(MyDatabaseId, true);
	return own_slot;
}

void
wake_at_commit(uint32 why)
{
	work_at_commit |= why;
}

static void
transaction_end(XactEvent event, void *arg)
{
	if (work_at_commit == 0)
		return;
	/* what the coordinator itself has filed it knows */
	if (event == XACT_EVENT_COMMIT && !worker_is(WORKER_COORDINATOR))
		wake_database(MyDatabaseId, work_at_commit);
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		work_at_commit = 0;
}

/*
 * Something was committed: whoever routes shall know.  A database that nobody knew of is
 * announced by this.
 */
void
wake_database(Oid database, uint32 why)
{
	DatabaseSlot *slot = (database == MyDatabaseId) ? my_database() : database_slot(database, true);
	bool		told;
	uint32		process;

	if (slot == NULL)
		return;
	/* who set the flag has woken somebody, who looks again by himself until he could do it */
	told = (pg_atomic_fetch_or_u32(&slot->work, why) != 0);
	if (!slot->wanted)
	{
		LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
		slot->wanted = true;
		LWLockRelease(worker_state->lock);
		told = false;
	}
	if (told)
		return;
	process = pg_atomic_read_u32(&slot->coordinator);
	if (process == PG_UINT32_MAX)
		wake_launcher();
	else
		wake_process((int) process);
}

void
wake_all_databases(uint32 why)
{
	for (int i = 0; i < DATABASES_MAX; i++)
	{
		DatabaseSlot *slot = &worker_state->databases[i];
		Oid			database;

		LWLockAcquire(worker_state->lock, LW_SHARED);
		database = slot->wanted ? slot->database : InvalidOid;
		LWLockRelease(worker_state->lock);
		if (OidIsValid(database))
			wake_database(database, why);
	}
}

void
request_probe(Oid database)
{
	if (worker_state == NULL)
		return;
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	if (worker_state->n_probes == PROBES_MAX)
		worker_state->probes[0] = InvalidOid;
	else
		worker_state->probes[worker_state->n_probes++] = database;
	LWLockRelease(worker_state->lock);
	wake_launcher();
}

bool
next_probe_request(Oid *database)
{
	bool		found;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	found = worker_state->n_probes > 0;
	if (found)
		*database = worker_state->probes[--worker_state->n_probes];
	LWLockRelease(worker_state->lock);
	return found;
}

/* Preloaded and switched on: a delivery worker comes when there is something to push. */
bool
workers_serve(void)
{
	return worker_state != NULL && worker_state->launcher_pid != 0 && outbox_enabled && outbox_workers > 0;
}

bool
coordinator_runs(void)
{
	DatabaseSlot *slot = my_database();

	return slot != NULL && pg_atomic_read_u32(&slot->coordinator) != PG_UINT32_MAX;
}

bool
wake_and_wait_for_pass(int wait_ms)
{
	DatabaseSlot *slot = my_database();
	TimestampTz give_up = clock_machine() + MSECS(wait_ms);
	uint32		process;
	uint64		begun;
	bool		done;

	if (!coordinator_runs())
		return false;

	begun = pg_atomic_read_u64(&slot->passes_begun);
	/* the flag first: who sees it wakes nobody, so whoever is there after it has to be woken */
	(void) pg_atomic_fetch_or_u32(&slot->work, WORK_ASKED);
	process = pg_atomic_read_u32(&slot->coordinator);
	if (process == PG_UINT32_MAX)
	{
		wake_launcher();
		return false;
	}
	wake_process((int) process);

	ConditionVariablePrepareToSleep(&slot->pass_ended);
	while (!(done = (pg_atomic_read_u64(&slot->passes_ended) > begun)) &&
		   pg_atomic_read_u32(&slot->coordinator) != PG_UINT32_MAX)
	{
		long		left = TimestampDifferenceMilliseconds(clock_machine(), give_up);

		if (left <= 0 || ConditionVariableTimedSleep(&slot->pass_ended, left,
													   outbox_wait_event(OUTBOX_WAIT_PASS)))
			break;
	}
	ConditionVariableCancelSleep();
	return done;
}

bool
notifications_have_room(void)
{
	return DatumGetFloat8(DirectFunctionCall1(pg_notification_queue_usage, (Datum) 0)) <= QUEUE_USED_MAX;
}
