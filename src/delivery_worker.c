/*
 * delivery_worker.c
 *		A delivery worker: calls the hooks of one role in one database.
 *
 * It is connected as that role, so a hook has that role's rights and nothing else, and
 * everything a session can do works as usual.  It reaches our tables the way every client
 * does.  What it does is drain(), again and again: claim in a transaction of its own, then
 * hooks and settlements together (drain.c, group.c).
 *
 * At a clean stop (SIGTERM) an exit callback gives back what was claimed and not started,
 * uncharged, and charges the message whose hook was stopped.  After a crash the leases
 * end by themselves.
 *
 * What a hook leaves behind in the session and would be in others' way is given back:
 * settings after each call (deliver.c), advisory locks after each turn.  LISTEN core
 * refuses in background processes.
 *
 * Locks: as in drain.c; none while it waits.
 */
#include "worker.h"

#include "deliver.h"

#include "executor/spi.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* Nothing to push for so long: it leaves, the coordinator starts another when needed. */
#define IDLE_MAX		(30 * USECS_PER_SEC)
/* Under load it looks so often for settings, and tells autovacuum what it has done. */
#define TURN_MAX		(1 * USECS_PER_SEC)
#define PAUSE_FIRST		(1 * USECS_PER_SEC)
#define PAUSE_MAX		(60 * USECS_PER_SEC)

static WorkerSlot *slot = NULL;
static TimestampTz turn_until;
static bool turn_cut;			/* there was more to do */

static int64 turn(MemoryContext context);
static bool stop_asked(bool in_batch);

void
outbox_delivery_main(Datum argument)
{
	sigjmp_buf	local_sigjmp_buf;
	MemoryContext context;
	TimestampTz busy_at;
	volatile int64 pause = PAUSE_FIRST;

	slot = worker_attach(argument, WORKER_DELIVERY);
	if (worker_should_leave(slot))
		proc_exit(0);
	session_process_start("outbox delivery", slot->database, slot->role);
	/* registered last, so it runs while transactions are still possible */
	before_shmem_exit(delivery_give_back, (Datum) 0);
	context = AllocSetContextCreate(TopMemoryContext, "outbox delivery", ALLOCSET_DEFAULT_SIZES);
	PortalContext = context;	/* SPI keeps there what outlives a commit */
	busy_at = clock_machine();

	if (sigsetjmp(local_sigjmp_buf, 1) != 0)
	{
		session_recover();
		LockReleaseAll(USER_LOCKMETHOD, true);
		delivery_give_back(0, (Datum) 0);
		MemoryContextSwitchTo(context);
		MemoryContextReset(context);
		PG_exception_stack = &local_sigjmp_buf;
		(void) session_pause(slot, pause);
		pause = Min(pause * 2, PAUSE_MAX);
	}
	PG_exception_stack = &local_sigjmp_buf;

	for (;;)
	{
		int64		handled;

		if (worker_should_leave(slot))
			proc_exit(0);
		handled = turn(context);
		pause = PAUSE_FIRST;
		if (handled > 0)
		{
			busy_at = clock_machine();
			pg_atomic_fetch_add_u64(&slot->handled, handled);
		}
		else if (clock_machine() - busy_at > IDLE_MAX)
			proc_exit(0);
		CHECK_FOR_INTERRUPTS();
		session_reload();
		if (turn_cut)
			continue;
		pg_atomic_write_u64(&slot->idle_since, (uint64) busy_at);
		pg_atomic_write_u32(&slot->busy, 0);
		(void) session_wait(Min(IDLE_MAX, 10 * MSECS(outbox_poll_interval)));
		pg_atomic_write_u32(&slot->busy, 1);
	}
}

/* Deliver until nothing is ready, or the turn is over; returns messages claimed. */
static int64
turn(MemoryContext context)
{
	int64		claimed = 0;

	turn_cut = false;
	turn_until = clock_machine() + TURN_MAX;
	session_transaction_begin("delivering messages");
	MemoryContextSwitchTo(context);
	/* there may be no coordinator just now that would tell */
	if (!own_database_is_served())
		proc_exit(0);
	if (session_extension_lock())
	{
		SPI_connect_ext(SPI_OPT_NONATOMIC);
		claimed = drain_for_worker(stop_asked);
		SPI_finish();
	}
	session_transaction_commit();
	LockReleaseAll(USER_LOCKMETHOD, true);
	MemoryContextSwitchTo(context);
	MemoryContextReset(context);
	return claimed;
}

/* In the middle of a batch only for those who want it to leave. */
static bool
stop_asked(bool in_batch)
{
	if (in_batch)
	{
		session_reload();
		return worker_should_leave(slot);
	}
	turn_cut = (ConfigReloadPending || clock_machine() > turn_until);
	return turn_cut || worker_should_leave(slot);
}

/*
 * The transaction that was interrupted is undone first; what this one cannot do, the end
 * of the lease will.
 */
void
delivery_give_back(int code, Datum argument)
{
	MemoryContext caller = CurrentMemoryContext;
	uint32		holdoff = InterruptHoldoffCount;

	worker_hook_until(0);
	if (!drain_has_batch())
		return;
	PG_TRY();
	{
		HOLD_INTERRUPTS();
		AbortOutOfAnyTransaction();
		StartTransactionCommand();
		drain_give_back();
		CommitTransactionCommand();
		RESUME_INTERRUPTS();
	}
	PG_CATCH();
	{
		/* an error has set it to 0, whatever was held */
		InterruptHoldoffCount = holdoff;
		MemoryContextSwitchTo(caller);
		FlushErrorState();
		AbortOutOfAnyTransaction();
	}
	PG_END_TRY();
}
