/*
 * sweep.c
 *		After a segment was truncated: what is known of its messages goes too.
 *
 * First the settled runs of each subscription, in the order of "low": those that have no
 * message left in the log are deleted; one at the border of two segments keeps what is
 * left of it, so that counts agree with the log.  Then log_kept: a message that was moved
 * there goes when it has been settled for outbox.retention, with its runs.
 *
 * A bite is a transaction; outbox.segment says where the next one begins, so that none
 * walks over what others have deleted.  It ends before a settled run that another
 * transaction holds or has just changed: nobody would come back to it before the next
 * segment goes, and its count would be wrong so long.
 *
 * Locks: AccessShareLock on the log, before all others; ShareRowExclusiveLock on
 * outbox.segment and on log_kept, if they are free; rows of outbox.delivery, skipping
 * locked ones.
 */
#include "rotate.h"

#include "catalog.h"
#include "log.h"
#include "run.h"
#include "segment.h"
#include "statement.h"
#include "subscription.h"

#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/*
 * Runs, or messages of log_kept, looked at in one bite.  So many messages of runs that
 * are still in the log cost as much as a run that is not.
 */
#define BITE	1000
#define MESSAGES_PER_RUN	100

/* the turn of log_kept, after all subscriptions */
#define KEPT	PG_INT64_MAX

typedef struct Bite
{
	LogReader  *reader;
	int			seen;
	int64		last_low;
	int64		stopped_at;		/* "low" of the first that was left; -1: none */
} Bite;

/* what a kept message is for the subscriptions */
typedef struct Fate
{
	List	   *runs;
	bool		stays;
} Fate;

static Subscription *subscription_from(int64 id);
static bool sweep_runs(SegmentState *state);
static bool visit_run(RunStore *store, Run *run, void *arg);
static int	forget_what_left(RunStore *store, LogReader *reader, Run *run);
static bool sweep_kept(SegmentState *state);
static Fate *fate_of(RunStore *store, Snapshot snapshot, List *subscriptions, int64 position);
static bool let_go(RunStore *store, Fate *fate, int64 position);
static void delete_kept(const int64 *positions, int n);

bool
sweep(void)
{
	SegmentState states[RING_SEGMENTS];
	SegmentState *state = NULL;

	segments_read(states);
	for (int i = 0; i < RING_SEGMENTS && state == NULL; i++)
	{
		if (states[i].sweep_to != 0)
			state = &states[i];
	}
	if (state == NULL)
		return false;
	log_lock(AccessShareLock);
	if (!segments_lock(false))
		return false;
	segments_read(states);
	if (state->sweep_to == 0)
		return false;

	if (!(state->sweep_subscription != KEPT ? sweep_runs(state) : sweep_kept(state)))
		return false;
	segment_write(state);
	return true;
}

/* The one with the lowest id that is not below; NULL: there is none. */
static Subscription *
subscription_from(int64 id)
{
	Subscription *found = NULL;
	ListCell   *cell;

	foreach(cell, subscription_list(snapshot_push()))
	{
		Subscription *subscription = lfirst(cell);

		if (subscription->id >= id && (found == NULL || subscription->id < found->id))
			found = subscription;
	}
	snapshot_pop();
	return found;
}

/* False: no further than before, for a run that is not free.  Another time. */
static bool
sweep_runs(SegmentState *state)
{
	Subscription *subscription = subscription_from(state->sweep_subscription);
	Bite		bite = {.last_low = -1, .stopped_at = -1};
	RunStore   *store;
	Snapshot	snapshot;

	if (subscription == NULL)
	{
		state->sweep_subscription = KEPT;
		state->sweep_from = 0;
		return true;
	}
	if (subscription->id != state->sweep_subscription)
		state->sweep_from = 0;
	store = runs_open();
	snapshot = snapshot_push();
	bite.reader = log_open(snapshot);
	runs_visit(store, runs_by_low(store, snapshot, subscription->id, state->sweep_from, state->sweep_to),
			   visit_run, &bite);
	log_close(bite.reader);
	snapshot_pop();
	runs_close(store);

	if (bite.stopped_at >= 0 && subscription->id == state->sweep_subscription && bite.stopped_at == state->sweep_from)
		return false;
	state->sweep_subscription = bite.stopped_at < 0 ? subscription->id + 1 : subscription->id;
	state->sweep_from = Max(bite.stopped_at, 0);
	return true;
}

/* A bite ends between two values of "low": the next one begins with the second. */
static bool
visit_run(RunStore *store, Run *run, void *arg)
{
	Bite	   *bite = arg;

	if (++bite->seen > BITE && run->low != bite->last_low)
		bite->stopped_at = run->low;
	else if (run_is_settled(run) && run_lock(store, run, LockWaitSkip) != RUN_LOCKED)
		bite->stopped_at = run->low;
	else if (run_is_settled(run))
		bite->seen += forget_what_left(store, bite->reader, run) / MESSAGES_PER_RUN;
	bite->last_low = run->low;
	return bite->stopped_at < 0;
}

/* Returns how many are still there. */
static int
forget_what_left(RunStore *store, LogReader *reader, Run *run)
{
	int64		first = -1;
	int64		last = -1;
	int			count = 0;

	for (int i = 0; i < run->positions->n; i++)
	{
		TupleTableSlot *slot;

		log_range(reader, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
		while ((slot = log_next(reader)) != NULL)
		{
			last = log_position(slot);
			if (count++ == 0)
				first = last;
		}
	}
	if (count == run->message_count)
		return count;
	if (count > 0)
	{
		cover_remove(run->positions, PG_INT64_MIN, first);
		cover_remove(run->positions, last + 1, PG_INT64_MAX);
	}
	run_forget(store, run, count);
	return count;
}

/* False: somebody writes there, or vacuums.  Another time. */
static bool
sweep_kept(SegmentState *state)
{
	MemoryContext each;
	MemoryContext caller;
	List	   *subscriptions;
	RunStore   *store;
	Snapshot	snapshot;
	LogReader  *reader;
	TupleTableSlot *slot;
	int64	   *gone = palloc(BITE * sizeof(int64));
	int			n_gone = 0;
	int			seen = 0;

	/* nobody makes unsettled, or brings, what we look at */
	if (!ConditionalLockRelationOid(log_segment(LOG_KEPT), ShareRowExclusiveLock))
		return false;
	store = runs_open();
	snapshot = snapshot_push();
	subscriptions = subscription_list(snapshot);
	reader = log_open_segment(snapshot, LOG_KEPT);
	log_range(reader, state->sweep_from, PG_INT64_MAX);
	each = AllocSetContextCreate(CurrentMemoryContext, "outbox kept message", ALLOCSET_DEFAULT_SIZES);
	caller = MemoryContextSwitchTo(each);
	while (seen < BITE && (slot = log_next(reader)) != NULL)
	{
		int64		position = log_position(slot);

		CHECK_FOR_INTERRUPTS();
		seen++;
		state->sweep_from = position + 1;
		/* neighbours may be in one run, which has just been changed */
		if (let_go(store, fate_of(store, snapshot_push(), subscriptions, position), position))
			gone[n_gone++] = position;
		snapshot_pop();
		MemoryContextReset(each);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	if (seen < BITE)			/* done */
		state->sweep_to = state->sweep_subscription = state->sweep_from = 0;
	log_close(reader);
	snapshot_pop();
	runs_close(store);
	if (n_gone > 0)
		delete_kept(gone, n_gone);
	return true;
}

static Fate *
fate_of(RunStore *store, Snapshot snapshot, List *subscriptions, int64 position)
{
	Fate	   *fate = palloc0(sizeof(Fate));
	TimestampTz retained_from = clock_now() - outbox_retention * USECS_PER_SEC;
	ListCell   *cell;

	foreach(cell, subscriptions)
	{
		Subscription *subscription = lfirst(cell);
		Run		   *run = run_of_position(store, snapshot, subscription->id, position);

		if (run == NULL)
			continue;
		fate->runs = lappend(fate->runs, run);
		fate->stays |= !run_is_settled(run) || run->settled_at >= retained_from;
	}
	return fate;
}

/* All its runs or none: they are locked before the first is changed. */
static bool
let_go(RunStore *store, Fate *fate, int64 position)
{
	ListCell   *cell;

	if (fate->stays)
		return false;
	foreach(cell, fate->runs)
	{
		if (run_lock(store, lfirst(cell), LockWaitSkip) != RUN_LOCKED)
			return false;
	}
	foreach(cell, fate->runs)
	{
		Run		   *run = lfirst(cell);

		if (run->message_count > 1)
			cover_remove(run->positions, position, position + 1);
		run_forget(store, run, run->message_count - 1);
	}
	return true;
}

static void
delete_kept(const int64 *positions, int n)
{
	Statement	statement;

	statement_init(&statement,
				   "DELETE FROM outbox.log_kept AS l WHERE l.position OPERATOR(pg_catalog.=) ANY ($1)");
	bind_int8_array(&statement, positions, n);
	(void) statement_run(&statement);
}
