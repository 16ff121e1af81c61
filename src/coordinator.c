/*
 * coordinator.c
 *		The coordinator of a database: routes, takes back what has expired, tells pulling
 *		consumers and delivery workers that there is something for them.
 *
 * It never runs user code.  All it does can be done again, so its commits wait for no
 * disk.  A turn is one transaction (a few, behind a big backlog), and none is open while
 * it waits: for its latch, which a commit sets, or for the next deadline: a message that
 * becomes due, a lease that ends, a notification that was held back, a hook that does not
 * come back.  A slow poll covers what a lost wake-up would miss.
 *
 * Notifications on the channel outbox_ready carry the subscription's name.  They are
 * hints, at most one for each subscription and outbox.notify_interval.
 *
 * Locks: the extension, shared, for the turn; the routing lock; rows as in claim.c.
 */
#include "worker.h"

#include "catalog.h"
#include "claim.h"
#include "enqueue.h"
#include "floor.h"
#include "route.h"
#include "run.h"

#include <signal.h>

#include "commands/async.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define CHANNEL			"outbox_ready"
/* Messages routed in one transaction. */
#define ROUTE_AT_ONCE	10000
#define EXPIRE_AT_ONCE	1000
#define POLL_MAX		(10 * USECS_PER_SEC)
/* Somebody else routes, or alters the extension: look again soon. */
#define GATHER			(2 * 1000)
#define BUSY_PAUSE		(20 * 1000)
#define HELD_PAUSE		(1 * USECS_PER_SEC)
#define COPY_PAUSE		(10 * USECS_PER_SEC)
#define FIRST_ROWS_GRACE (60 * USECS_PER_SEC)
#define PAUSE_FIRST		(1 * USECS_PER_SEC)
#define PAUSE_MAX		(60 * USECS_PER_SEC)

/* what is remembered of a subscription from turn to turn */
typedef struct Told
{
	int64		subscription_id;
	TimestampTz notified_at;
	bool		seen;			/* in this turn */
	bool		owed;			/* a notification was held back */
	TimestampTz due_at;			/* first due time in the future, when last looked */
} Told;

/* and of a role with hooks */
typedef struct Pusher
{
	Oid			role;
	TimestampTz started_at;
	int64		pause;			/* back-off: not started again before */
} Pusher;

typedef struct Coordinator
{
	WorkerSlot *slot;
	DatabaseSlot *database;
	MemoryContext context;		/* lives as long as the process */
	MemoryContext turn_context; /* reset after each turn */
	List	   *told;
	List	   *pushers;
	TimestampTz deadline;		/* of the turn: when to look again at the latest */
	bool		more;			/* there is more to do right now */
	bool		told_copy;
	TimestampTz began_at;
	TimestampTz turn_began;
	bool		enqueued;		/* messages were enqueued here since we began */
	int64		poll;
} Coordinator;

static bool gather(Coordinator *coordinator);
static void turn(Coordinator *coordinator);
static bool work(Coordinator *coordinator, List **ready_roles);
static bool may_make_first_rows(Coordinator *coordinator);
static void look_after(Coordinator *coordinator, Subscription *subscription, bool news,
					   List **ready_roles);
static void forget_removed(Coordinator *coordinator);
static Told *told_of(Coordinator *coordinator, int64 subscription_id);
static void tell(Coordinator *coordinator, Told *told, const char *name);
static void meet(Coordinator *coordinator, TimestampTz deadline);
static TimestampTz first_time(RunScan *scan, bool lease);
static void start_pushers(Coordinator *coordinator, List *roles);
static void wake_delivery(Oid database, Oid role);
static void end_stuck_hooks(Coordinator *coordinator);
static bool may_leave(Coordinator *coordinator);

void
outbox_coordinator_main(Datum argument)
{
	static Coordinator state;
	Coordinator *coordinator = &state;
	sigjmp_buf	local_sigjmp_buf;
	volatile int64 pause = PAUSE_FIRST;

	coordinator->slot = worker_attach(argument, WORKER_COORDINATOR);
	coordinator->database = database_slot(coordinator->slot->database, true);
	if (coordinator->database == NULL || worker_should_leave(coordinator->slot))
		proc_exit(0);
	session_process_start("outbox coordinator", coordinator->slot->database, InvalidOid);
	coordinator->context = AllocSetContextCreate(TopMemoryContext, "outbox coordinator",
												 ALLOCSET_DEFAULT_SIZES);
	coordinator->turn_context = AllocSetContextCreate(coordinator->context, "outbox coordinator turn",
													  ALLOCSET_DEFAULT_SIZES);
	coordinator->poll = MSECS(outbox_poll_interval);
	coordinator->began_at = GetCurrentTimestamp();
	pg_atomic_write_u32(&coordinator->database->coordinator, (uint32) OUTBOX_MY_PROC_NUMBER);

	if (sigsetjmp(local_sigjmp_buf, 1) != 0)
	{
		session_recover();
		MemoryContextSwitchTo(coordinator->context);
		MemoryContextReset(coordinator->turn_context);
		PG_exception_stack = &local_sigjmp_buf;
		(void) session_wait(pause);
		pause = Min(pause * 2, PAUSE_MAX);
	}
	PG_exception_stack = &local_sigjmp_buf;

	for (;;)
	{
		TimestampTz now;

		turn(coordinator);
		pause = PAUSE_FIRST;
		end_stuck_hooks(coordinator);
		if (worker_should_leave(coordinator->slot) && may_leave(coordinator))
			proc_exit(0);

		now = GetCurrentTimestamp();
		pg_atomic_write_u32(&coordinator->slot->busy, 0);
		if (coordinator->more)
			CHECK_FOR_INTERRUPTS();
		else if (gather(coordinator))
			continue;
		else if (session_wait(Min(coordinator->deadline - now, coordinator->poll)))
			coordinator->poll = MSECS(outbox_poll_interval);
		else
			coordinator->poll = Min(coordinator->poll * 2, Max(POLL_MAX, MSECS(outbox_poll_interval)));
		pg_atomic_write_u32(&coordinator->slot->busy, 1);
	}
}

/*
 * Under load a turn for each commit would cost more than it brings: commits that follow a
 * turn closely are gathered for a moment, unless a claim asks.  True: time for a turn.
 */
static bool
gather(Coordinator *coordinator)
{
	TimestampTz until = coordinator->turn_began + GATHER;
	uint32		work = 0;
	int64		left;

	while ((left = until - GetCurrentTimestamp()) > 0)
	{
		work = pg_atomic_read_u32(&coordinator->database->work);
		if (work == 0 || (work & WORK_ASKED) != 0)
			break;
		(void) session_wait(left);
	}
	return pg_atomic_read_u32(&coordinator->database->work) != 0;
}

/* Times of the queue are those of its clock; the deadline is one of the machine's. */
static void
meet(Coordinator *coordinator, TimestampTz time)
{
	int64		left;

	if (TIMESTAMP_NOT_FINITE(time))
		return;
	left = Max(time - clock_now(), 0);
	coordinator->deadline = Min(coordinator->deadline, GetCurrentTimestamp() + left + 1000);
}

static void
turn(Coordinator *coordinator)
{
	MemoryContext caller = MemoryContextSwitchTo(coordinator->turn_context);
	DatabaseSlot *database = coordinator->database;
	uint64		passes = pg_atomic_read_u64(&database->passes_begun) + 1;
	List	   *ready_roles = NIL;
	bool		complete;

	coordinator->turn_began = GetCurrentTimestamp();
	coordinator->deadline = coordinator->turn_began + POLL_MAX;
	coordinator->more = false;
	pg_atomic_write_u64(&database->passes_begun, passes);
	/* what is committed from here on sets it again */
	if (pg_atomic_exchange_u32(&database->work, 0) & WORK_ENQUEUED)
		coordinator->enqueued = true;

	session_transaction_begin("routing messages");
	complete = work(coordinator, &ready_roles);
	session_transaction_commit();
	MemoryContextSwitchTo(coordinator->turn_context);

	if (complete)
	{
		pg_atomic_write_u64(&database->passes_ended, passes);
		ConditionVariableBroadcast(&database->pass_ended);
	}
	start_pushers(coordinator, ready_roles);
	MemoryContextSwitchTo(caller);
	MemoryContextReset(coordinator->turn_context);
}

/*
 * In a transaction.  True: everything that was committed before is filed.  The roles of
 * pushed subscriptions with something ready outlive the transaction.
 */
static bool
work(Coordinator *coordinator, List **ready_roles)
{
	MemoryContext lasting = coordinator->turn_context;
	List	   *subscriptions;
	ListCell   *cell;
	Frontier	frontier;
	int64		routed = 0;
	bool		complete = false;

	if (!session_extension_lock())
	{
		if (OidIsValid(get_extension_oid("outbox", true)))
		{
			coordinator->deadline = GetCurrentTimestamp() + BUSY_PAUSE;
			return false;
		}
		LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
		coordinator->database->wanted = false;
		coordinator->slot->leave = true;
		LWLockRelease(worker_state->lock);
		return false;
	}

	frontier_read(&frontier, snapshot_push());
	snapshot_pop();
	if (frontier_is_copy(&frontier))
	{
		if (!coordinator->told_copy)
			ereport(WARNING,
					(errmsg("the messages in this database are a copy that was not adopted; nothing is delivered"),
					 errhint("If they shall be delivered from here, run SELECT outbox.adopt() in the database.")));
		coordinator->told_copy = true;
		coordinator->deadline = GetCurrentTimestamp() + COPY_PAUSE;
		return false;
	}
	coordinator->told_copy = false;

	if (!may_make_first_rows(coordinator))
		coordinator->deadline = GetCurrentTimestamp() + FIRST_ROWS_GRACE / 4;
	else if (routing_lock(0))
	{
		routed = route(ROUTE_AT_ONCE);
		coordinator->more = (routed >= ROUTE_AT_ONCE);
		complete = !coordinator->more;
	}
	else
		coordinator->deadline = GetCurrentTimestamp() + BUSY_PAUSE;

	MemoryContextSwitchTo(lasting);
	subscriptions = subscription_list(snapshot_push());
	snapshot_pop();
	foreach(cell, subscriptions)
		look_after(coordinator, lfirst(cell), routed > 0, ready_roles);
	forget_removed(coordinator);
	(void) dedupe_delete_expired(100);
	return complete;
}

/*
 * Where there is no identity yet, routing would make one, and a restore that is under
 * way would meet it.  So only if something was enqueued here; or after a while, for what
 * was enqueued before a restart.
 */
static bool
may_make_first_rows(Coordinator *coordinator)
{
	Identity	identity;

	identity_read(&identity);
	if (identity.exists || coordinator->enqueued)
		return true;
	return log_has_messages() && GetCurrentTimestamp() - coordinator->began_at > FIRST_ROWS_GRACE;
}

static void
look_after(Coordinator *coordinator, Subscription *subscription, bool news, List **ready_roles)
{
	Told	   *told = told_of(coordinator, subscription->id);
	TimestampTz now = clock_now();
	RunStore   *store;
	Snapshot	snapshot;
	FloorScan	floor;
	TimestampTz ready_at;
	TimestampTz lease_end;
	int64		expired;

	expired = claim_expire(subscription, EXPIRE_AT_ONCE);
	if (expired > 0)
		news = true;
	if (expired >= EXPIRE_AT_ONCE)
		coordinator->more = true;
	told->seen = true;
	if (told->due_at <= now)
		news = true;

	store = runs_open();
	floor_begin(&floor, subscription->id, FLOOR_READY);
	snapshot = snapshot_push();
	ready_at = first_time(runs_ready(store, snapshot, subscription->id, floor.start, now), false);
	told->due_at = first_time(runs_ready(store, snapshot, subscription->id, now + 1, DT_NOEND), false);
	meet(coordinator, told->due_at);
	floor_begin(&floor, subscription->id, FLOOR_LEASE);
	lease_end = first_time(runs_leased(store, snapshot, subscription->id, floor.start, DT_NOEND), true);
	/* one that has ended and is still there is held by a settlement that goes on */
	meet(coordinator, lease_end <= now ? now + HELD_PAUSE : lease_end);
	snapshot_pop();
	runs_close(store);

	if (ready_at == DT_NOEND || subscription->paused)
		return;
	if (subscription->mode != MODE_PUSHED)
	{
		told->owed |= news;
		if (told->owed)
			tell(coordinator, told, subscription->name);
		return;
	}
	subscription_handlers(subscription, snapshot_push());
	snapshot_pop();
	if (subscription->handlers != NIL)
		*ready_roles = list_append_unique_oid(*ready_roles, ((Handler *) linitial(subscription->handlers))->role);
}

/* The time of the first row; ends the scan. */
static TimestampTz
first_time(RunScan *scan, bool lease)
{
	Run		   *run = run_next(scan);
	TimestampTz time = (run == NULL) ? DT_NOEND : lease ? run->locked_until : run->available_at;

	run_scan_end(scan);
	return time;
}

static Told *
told_of(Coordinator *coordinator, int64 subscription_id)
{
	MemoryContext caller;
	Told	   *told;
	ListCell   *cell;

	foreach(cell, coordinator->told)
	{
		told = lfirst(cell);
		if (told->subscription_id == subscription_id)
			return told;
	}
	caller = MemoryContextSwitchTo(coordinator->context);
	told = palloc0(sizeof(Told));
	told->subscription_id = subscription_id;
	told->notified_at = DT_NOBEGIN;
	told->due_at = DT_NOEND;
	told->owed = true;			/* what was ready before we began */
	coordinator->told = lappend(coordinator->told, told);
	MemoryContextSwitchTo(caller);
	return told;
}

/* Subscriptions that were not there in this turn. */
static void
forget_removed(Coordinator *coordinator)
{
	ListCell   *cell;

	foreach(cell, coordinator->told)
	{
		Told	   *told = lfirst(cell);

		if (told->seen)
			told->seen = false;
		else
		{
			coordinator->told = foreach_delete_current(coordinator->told, cell);
			pfree(told);
		}
	}
}

static void
tell(Coordinator *coordinator, Told *told, const char *name)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz next;

	if (outbox_notify_interval == 0)
		return;
	next = (told->notified_at == DT_NOBEGIN) ? now : told->notified_at + MSECS(outbox_notify_interval);
	if (next > now)
	{
		coordinator->deadline = Min(coordinator->deadline, next);
		return;
	}
	Async_Notify(CHANNEL, name);
	told->notified_at = now;
	told->owed = false;
}

/* ---- delivery workers ---- */

static Pusher *
pusher_of(Coordinator *coordinator, Oid role)
{
	MemoryContext caller;
	Pusher	   *pusher;
	ListCell   *cell;

	foreach(cell, coordinator->pushers)
	{
		pusher = lfirst(cell);
		if (pusher->role == role)
			return pusher;
	}
	caller = MemoryContextSwitchTo(coordinator->context);
	pusher = palloc0(sizeof(Pusher));
	pusher->role = role;
	pusher->started_at = DT_NOBEGIN;
	coordinator->pushers = lappend(coordinator->pushers, pusher);
	MemoryContextSwitchTo(caller);
	return pusher;
}

/*
 * A worker that ends while there is something to push has failed: it is started again
 * after a pause that doubles, until one has stayed for longer than its pause.
 */
static void
start_pushers(Coordinator *coordinator, List *roles)
{
	Oid			database = coordinator->slot->database;
	ListCell   *cell;

	if (worker_should_leave(coordinator->slot))
		return;
	foreach(cell, roles)
	{
		Oid			role = lfirst_oid(cell);
		Pusher	   *pusher = pusher_of(coordinator, role);
		TimestampTz now = GetCurrentTimestamp();
		int			running = workers_of(WORKER_DELIVERY, database, role);

		wake_delivery(database, role);
		if (running > 0 && now - pusher->started_at > 10 * USECS_PER_SEC + pusher->pause)
			pusher->pause = 0;
		if (running >= outbox_workers)
			continue;
		if (running == 0 && pusher->started_at != DT_NOBEGIN && now < pusher->started_at + pusher->pause)
		{
			coordinator->deadline = Min(coordinator->deadline, pusher->started_at + pusher->pause);
			continue;
		}
		pusher->started_at = now;
		pusher->pause = Min(Max(pusher->pause * 2, PAUSE_FIRST), PAUSE_MAX);
		for (int i = running; i < outbox_workers; i++)
		{
			WorkerSlot *slot = worker_reserve(WORKER_DELIVERY, database, role);

			if (slot == NULL || !worker_start(slot))
			{
				if (pusher->pause == PAUSE_FIRST)
					ereport(WARNING,
							(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
							 errmsg("outbox could not start a delivery worker: no free slot for background workers"),
							 errhint("Raise max_worker_processes. It is tried again.")));
				break;
			}
		}
		/* if it does not come, or goes at once, we shall see it then */
		coordinator->deadline = Min(coordinator->deadline, now + pusher->pause);
	}
}

static void
wake_delivery(Oid database, Oid role)
{
	int			processes[WORKERS_MAX];
	int			n = 0;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (slot->used && slot->pid != 0 && slot->kind == WORKER_DELIVERY &&
			slot->database == database && slot->role == role)
			processes[n++] = slot->process;
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
		wake_process(processes[i]);
}

/* A hook can catch the cancels of its timer, but not this. */
static void
end_stuck_hooks(Coordinator *coordinator)
{
	TimestampTz now = GetCurrentTimestamp();
	pid_t		stuck[WORKERS_MAX];
	int			n = 0;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];
		TimestampTz until = (TimestampTz) pg_atomic_read_u64(&slot->hook_until);

		if (!slot->used || slot->pid == 0 || slot->database != coordinator->slot->database || until == 0)
			continue;
		if (until <= now)
			stuck[n++] = slot->pid;
		else
			coordinator->deadline = Min(coordinator->deadline, until);
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
	{
		ereport(LOG,
				(errmsg("terminating outbox delivery worker with PID %d", (int) stuck[i]),
				 errdetail("Its hook went on for twice its time limit.")));
		(void) kill(stuck[i], SIGTERM);
		coordinator->deadline = Min(coordinator->deadline, now + USECS_PER_SEC);
	}
}

/* Leave behind when the next one is needed; stay while a hook is to be watched. */
static bool
may_leave(Coordinator *coordinator)
{
	DatabaseSlot *database = coordinator->database;
	bool		suspended;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	suspended = (database->suspended_by != 0 || !database->wanted);
	database->deadline = coordinator->deadline;
	coordinator->slot->leave = false;
	LWLockRelease(worker_state->lock);
	if (suspended || !outbox_enabled)
		return true;
	return !coordinator->more && pg_atomic_read_u32(&database->work) == 0 &&
		workers_of(WORKER_DELIVERY, database->database, InvalidOid) == 0;
}
