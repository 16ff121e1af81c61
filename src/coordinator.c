/*
 * coordinator.c
 *		The coordinator of a database: routes, takes back what has expired, tells pulling
 *		consumers and delivery workers that there is something for them.
 *
 * It never runs user code, but for what the owner of our tables has put on them, and
 * that with his rights.  All it does can be done again, so its commits wait for no
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
#include "filing.h"
#include "floor.h"
#include "route.h"
#include "run.h"
#include "statement.h"

#include "commands/async.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define CHANNEL			"outbox_ready"
/* Messages routed in one transaction. */
#define ROUTE_AT_ONCE	10000
#define EXPIRE_AT_ONCE	1000
#define DEDUPE_AT_ONCE	1000
#define POLL_MAX		(10 * USECS_PER_SEC)
/* The same for a database whose coordinator has made room for another's. */
#define POLL_AWAY		(60 * USECS_PER_SEC)
/* So long one may go on working while other databases wait. */
#define SLICE			(1 * USECS_PER_SEC)
/*
 * Commits that follow a turn are gathered for so long, and longer while they keep coming.
 * Who pulls asks for a turn when he finds nothing, and is notified less often anyway; so
 * if nothing is pushed, producers are hardly disturbed.
 */
#define GATHER_FIRST	(2 * 1000)
#define GATHER_PUSHED	(10 * 1000)
#define GATHER_PULLED	(50 * 1000)
/*
 * While messages keep coming, runs are not cut shorter than most claims are: each costs a
 * row, and another turn will soon bring runs that nobody has locked.
 */
#define RUN_LEAST		10
#define SOON			(50 * 1000)
/* Somebody else routes, or alters the extension: look again soon. */
#define BUSY_PAUSE		(20 * 1000)
#define HELD_PAUSE		(1 * USECS_PER_SEC)
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
	TimestampTz lease_end;		/* of the first lease, when last looked */
} Told;

typedef struct Coordinator
{
	WorkerSlot *slot;
	DatabaseSlot *database;
	MemoryContext context;		/* lives as long as the process */
	MemoryContext turn_context; /* reset after each turn */
	List	   *told;
	TimestampTz deadline;		/* of the turn: when to look again at the latest */
	bool		more;			/* there is more to do right now */
	TimestampTz began_at;
	TimestampTz turn_began;
	TimestampTz routed_at;		/* when the last turn that found messages began */
	TimestampTz dedupe_at;
	TimestampTz history_at;
	bool		enqueued;		/* messages were enqueued here since we began */
	TimestampTz foreign_since;	/* rows of another cluster and no messages; 0: not so */
	bool		ready;			/* something was given back, retried at once, resumed */
	bool		roles;			/* some may have been renamed */
	bool		pushes;			/* some subscription has hooks */
	bool		asked;			/* it was a commit that asked for this turn */
	LeaseLook	leases;
	int64		poll;
	int64		gather;
} Coordinator;

static bool gather(Coordinator *coordinator);
static void turn(Coordinator *coordinator);
static bool work(Coordinator *coordinator, List **ready_roles);
static void forget_database(Coordinator *coordinator);
static bool tell_of_copy(Coordinator *coordinator, bool copy);
static bool may_make_first_rows(Coordinator *coordinator, const Frontier *frontier);
static void look_after(Coordinator *coordinator, Subscription *subscription, bool news,
					   List **ready_roles);
static void look_at_leases(Coordinator *coordinator, Told *told, RunStore *store, Snapshot snapshot);
static void forget_removed(Coordinator *coordinator);
static bool is_mended(const Subscription *subscription);
static Told *told_of(Coordinator *coordinator, int64 subscription_id);
static void tell(Coordinator *coordinator, Told *told, const char *name);
static void again_by(Coordinator *coordinator, TimestampTz deadline);
static void meet(Coordinator *coordinator, TimestampTz time);
static void do_again(Coordinator *coordinator);
static TimestampTz first_time(RunScan *scan, bool lease);
static bool may_leave(Coordinator *coordinator);

void
outbox_coordinator_main(Datum argument)
{
	static Coordinator state;
	Coordinator *coordinator = &state;
	sigjmp_buf	local_sigjmp_buf;
	volatile int64 pause = PAUSE_FIRST;

	coordinator->slot = worker_attach(argument, WORKER_COORDINATOR);
	coordinator->database = database_slot(coordinator->slot->database, false);
	if (coordinator->database == NULL || worker_should_leave(coordinator->slot))
		proc_exit(0);
	session_process_start("outbox coordinator", coordinator->slot->database, InvalidOid);
	coordinator->context = AllocSetContextCreate(TopMemoryContext, "outbox coordinator",
												 ALLOCSET_DEFAULT_SIZES);
	coordinator->turn_context = AllocSetContextCreate(coordinator->context, "outbox coordinator turn",
													  ALLOCSET_DEFAULT_SIZES);
	coordinator->poll = MSECS(outbox_poll_interval);
	coordinator->gather = GATHER_FIRST;
	coordinator->roles = true;
	coordinator->began_at = clock_machine();
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	coordinator->database->first_served_at = Min(coordinator->database->first_served_at, coordinator->began_at);
	LWLockRelease(worker_state->lock);
	floor_reset();				/* whatever was done to the tables behind our back */
	pg_atomic_write_u32(&coordinator->database->coordinator, (uint32) OUTBOX_MY_PROC_NUMBER);

	if (sigsetjmp(local_sigjmp_buf, 1) != 0)
	{
		session_recover();
		MemoryContextSwitchTo(coordinator->context);
		MemoryContextReset(coordinator->turn_context);
		do_again(coordinator);
		PG_exception_stack = &local_sigjmp_buf;
		/* a turn that fails for good must not keep others from theirs */
		if (session_pause(coordinator->slot, pause))
			proc_exit(1);
		pause = Min(pause * 2, PAUSE_MAX);
	}
	PG_exception_stack = &local_sigjmp_buf;

	for (;;)
	{
		TimestampTz now;

		turn(coordinator);
		if (!coordinator->more && !worker_should_leave(coordinator->slot))
			coordinator->history_at = history_turn(coordinator->history_at);
		pause = PAUSE_FIRST;
		again_by(coordinator, end_stuck_hooks(MyDatabaseId));
		if (may_leave(coordinator))
			proc_exit(0);

		now = clock_machine();
		pg_atomic_write_u32(&coordinator->slot->busy, 0);
		if (coordinator->more || gather(coordinator))
		{
			CHECK_FOR_INTERRUPTS();
			session_reload();
		}
		else if (session_wait(Min(Min(coordinator->deadline, coordinator->history_at) - now, coordinator->poll)))
			coordinator->poll = MSECS(outbox_poll_interval);
		else
			coordinator->poll = Min(coordinator->poll * 2, Max(POLL_MAX, MSECS(outbox_poll_interval)));
		pg_atomic_write_u32(&coordinator->slot->busy, 1);
	}
}

/* What a turn that failed has done was rolled back, and so were its notifications. */
static void
do_again(Coordinator *coordinator)
{
	ListCell   *cell;

	coordinator->roles = true;
	foreach(cell, coordinator->told)
		((Told *) lfirst(cell))->owed = true;
}

/*
 * Under load a turn for each commit would cost more than it brings, and file many small
 * runs: commits that follow a turn closely are gathered for a moment, unless a claim asks.
 * Where hooks wait, only those that came while it went on.  True: time for a turn.
 */
static bool
gather(Coordinator *coordinator)
{
	TimestampTz until = Min(coordinator->turn_began + coordinator->gather, coordinator->deadline);
	uint32		work;
	int64		left;

	for (;;)
	{
		left = until - clock_machine();
		work = pg_atomic_read_u32(&coordinator->database->work);
		if (left <= 0 || (work & WORK_ASKED) != 0)
			break;
		if (work == 0 && (coordinator->pushes || !coordinator->asked))
			break;
		(void) session_wait(left);
	}
	if (work == 0)
		coordinator->gather = GATHER_FIRST;
	else if (left <= 0)
		coordinator->gather = Min(coordinator->gather * 2, coordinator->pushes ? GATHER_PUSHED : GATHER_PULLED);
	return work != 0;
}

static void
again_by(Coordinator *coordinator, TimestampTz deadline)
{
	coordinator->deadline = Min(coordinator->deadline, deadline);
}

/* Times of the queue are those of its clock; the deadline is one of the machine's. */
static void
meet(Coordinator *coordinator, TimestampTz time)
{
	int64		left;

	if (TIMESTAMP_NOT_FINITE(time))
		return;
	left = time - clock_now();
	again_by(coordinator, clock_machine() + Max(left, 0) + 1000);
}

static void
turn(Coordinator *coordinator)
{
	MemoryContext caller = MemoryContextSwitchTo(coordinator->turn_context);
	DatabaseSlot *database = coordinator->database;
	uint64		passes = pg_atomic_read_u64(&database->passes_begun) + 1;
	List	   *ready_roles = NIL;
	uint32		why;
	bool		complete;

	coordinator->turn_began = clock_machine();
	coordinator->more = false;
	pg_atomic_write_u64(&database->passes_begun, passes);
	/* what is committed from here on sets it again */
	why = pg_atomic_exchange_u32(&database->work, 0);
	coordinator->enqueued |= ((why & WORK_ENQUEUED) != 0);
	coordinator->ready |= ((why & WORK_READY) != 0);
	coordinator->roles |= ((why & WORK_ROLES) != 0);
	coordinator->asked = (why != 0);
	coordinator->deadline = lease_look_plan(&coordinator->leases, coordinator->turn_began, coordinator->asked,
											(why & WORK_LOOK) != 0, worker_should_make_room(coordinator->slot));
	if (coordinator->asked)
		pg_atomic_write_u64(&coordinator->slot->idle_since, (uint64) coordinator->turn_began);

	filing_run_least = (coordinator->turn_began - coordinator->routed_at < SOON) ? RUN_LEAST : 1;
	session_transaction_begin("routing messages");
	complete = work(coordinator, &ready_roles);
	session_transaction_commit();
	MemoryContextSwitchTo(coordinator->turn_context);

	if (complete)
	{
		pg_atomic_write_u64(&database->passes_ended, passes);
		ConditionVariableBroadcast(&database->pass_ended);
	}
	if (!worker_should_leave(coordinator->slot))
		again_by(coordinator, start_pushers(MyDatabaseId, ready_roles));
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
	bool		wrote;
	bool		complete = false;

	if (!session_extension_lock())
	{
		if (OidIsValid(get_extension_oid("outbox", true)))
		{
			again_by(coordinator, clock_machine() + BUSY_PAUSE);
			return false;
		}
		forget_database(coordinator);
		return false;
	}
	session_become_owner();
	if (!own_database_is_served())
	{
		(void) workers_ask_to_leave(MyDatabaseId, InvalidOid);
		return false;
	}

	frontier_read_now(&frontier);
	if (tell_of_copy(coordinator, frontier_is_copy(&frontier)))
		return false;

	if (coordinator->roles)
		guard_rename_roles();
	coordinator->roles = false;
	if (!may_make_first_rows(coordinator, &frontier))
		again_by(coordinator, clock_machine() + FIRST_ROWS_GRACE / 4);
	else if (routing_lock(0))
	{
		routed = route_for(0, ROUTE_AT_ONCE, &wrote, &coordinator->more);
		complete = !coordinator->more;
		if (routed > 0)
			coordinator->routed_at = coordinator->turn_began;
	}
	else
		again_by(coordinator, clock_machine() + BUSY_PAUSE);

	MemoryContextSwitchTo(lasting);
	subscriptions = subscription_list(snapshot_push());
	snapshot_pop();
	coordinator->pushes = false;
	foreach(cell, subscriptions)
		look_after(coordinator, lfirst(cell), routed > 0 || coordinator->ready, ready_roles);
	coordinator->ready = false;
	again_by(coordinator, lease_look_done(&coordinator->leases));
	forget_removed(coordinator);
	if (coordinator->turn_began - coordinator->dedupe_at > USECS_PER_SEC)
	{
		(void) dedupe_delete_expired(DEDUPE_AT_ONCE);
		coordinator->dedupe_at = coordinator->turn_began;
	}
	return complete;
}

/*
 * The extension is gone.  It may be there again already, and its announcement have come
 * before we forget: so look once more after that.
 */
static void
forget_database(Coordinator *coordinator)
{
	bool		again;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	coordinator->database->wanted = false;
	coordinator->slot->leave = LEAVE_NOW;
	LWLockRelease(worker_state->lock);
	again = OidIsValid(get_extension_oid("outbox", true));

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	coordinator->database->wanted |= again;
	LWLockRelease(worker_state->lock);
	/* those of hooks have nothing to call any more */
	(void) workers_ask_to_leave(MyDatabaseId, InvalidOid);
}

/* Once, whichever process it is that sees it. */
static bool
tell_of_copy(Coordinator *coordinator, bool copy)
{
	bool		told;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	told = coordinator->database->told_copy;
	coordinator->database->told_copy = copy;
	LWLockRelease(worker_state->lock);
	if (copy && !told)
		ereport(WARNING,
				(errmsg("the messages in this database are a copy that was not adopted; nothing is delivered"),
				 errdetail("The database is \"%s\".", get_database_name(MyDatabaseId)),
				 errhint("If they shall be delivered from here, run SELECT outbox.adopt() in the database.")));
	return copy;
}

/*
 * Where there is no identity yet, routing would make one, and a restore that is under
 * way would meet it.  So only if something was enqueued here; or after a while, for what
 * was enqueued before a restart.
 *
 * Where the rows of another cluster are and no messages, routing would take the outbox for
 * an empty one, which adopts itself.  But of several tables that are restored side by
 * side, or replicated, the log may be the last.
 */
static bool
may_make_first_rows(Coordinator *coordinator, const Frontier *frontier)
{
	Identity	identity;
	TimestampTz now = clock_machine();

	identity_read(&identity);
	if (identity.foreign || frontier_is_foreign(frontier))
	{
		if (coordinator->foreign_since == 0)
			coordinator->foreign_since = now;
		return now - coordinator->foreign_since > FIRST_ROWS_GRACE && frontier_may_take_over();
	}
	coordinator->foreign_since = 0;
	if (identity.exists || coordinator->enqueued)
		return true;
	return log_has_messages() && now - coordinator->database->first_served_at > FIRST_ROWS_GRACE;
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
	look_at_leases(coordinator, told, store, snapshot);
	snapshot_pop();
	runs_close(store);

	if (subscription->paused)
		return;
	if (subscription->mode != MODE_PUSHED)
	{
		told->owed |= (news && ready_at != DT_NOEND);
		if (told->owed && ready_at != DT_NOEND)
			tell(coordinator, told, subscription->name);
		return;
	}
	coordinator->pushes = true;
	subscription_handlers(subscription, snapshot_push());
	snapshot_pop();
	if (subscription->handlers != NIL && (ready_at != DT_NOEND || is_mended(subscription)))
	{
		Oid			role = ((Handler *) linitial(subscription->handlers))->role;

		if (role_may_push(role) && role_may_consume(role, subscription->name))
			*ready_roles = list_append_unique_oid(*ready_roles, role);
	}
}

/*
 * When the first lease ends.  Behind an open snapshot the leases that were settled in time
 * stay in the index until they would have ended, and no floor is above the clock: so the
 * walk over them is not for each turn, and not to their end.
 */
static void
look_at_leases(Coordinator *coordinator, Told *told, RunStore *store, Snapshot snapshot)
{
	TimestampTz now = clock_now();
	FloorScan	floor;

	if (coordinator->leases.now || told->lease_end <= now)
	{
		floor_begin(&floor, told->subscription_id, FLOOR_LEASE);
		told->lease_end = first_time(runs_leased(store, snapshot, told->subscription_id, floor.start,
												   coordinator->leases.until), true);
	}
	/* one that has ended and is still there is held by a settlement that goes on */
	meet(coordinator, told->lease_end <= now ? now + HELD_PAUSE : told->lease_end);
}

/* A function that was missing is there again: who delivers makes ready what was parked for it. */
static bool
is_mended(const Subscription *subscription)
{
	ListCell   *cell;

	foreach(cell, subscription->handlers)
	{
		Handler    *handler = lfirst(cell);

		if (handler->broken && OidIsValid(handler_function(handler)))
			return true;
	}
	return false;
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
	told->lease_end = DT_NOBEGIN;
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
	TimestampTz now = clock_machine();
	TimestampTz next;

	if (outbox_notify_interval == 0)
		return;
	next = (told->notified_at == DT_NOBEGIN) ? now : told->notified_at + MSECS(outbox_notify_interval);
	if (next > now)
	{
		again_by(coordinator, next);
		return;
	}
	told->notified_at = now;
	if (!notifications_have_room())
	{
		again_by(coordinator, now + Max(HELD_PAUSE, MSECS(outbox_notify_interval)));
		return;
	}
	Async_Notify(CHANNEL, name);
	told->owed = false;
}

/*
 * Leave behind when the next one is needed: also for a hook that is to be watched, which
 * end_stuck_hooks() has put into the deadline.
 */
static bool
may_leave(Coordinator *coordinator)
{
	DatabaseSlot *database = coordinator->database;
	TimestampTz now = clock_machine();

	if (!worker_should_leave(coordinator->slot) &&
		(!worker_should_make_room(coordinator->slot) ||
		 ((coordinator->more || pg_atomic_read_u32(&database->work) != 0) && now < coordinator->began_at + SLICE)))
		return false;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	database->deadline = coordinator->more ? DT_NOBEGIN : Min(coordinator->deadline, now + POLL_AWAY);
	LWLockRelease(worker_state->lock);
	return true;
}
