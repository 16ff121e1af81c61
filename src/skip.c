/*
 * skip.c
 *		skip(): give up what is older than a time and was not begun.
 *
 * Routes to the end first, so that what is skipped does not depend on who has routed
 * what.  A run whose messages lie on both sides of the time is split: its messages are
 * read from the log, because neither their positions nor their run tell their age.
 *
 * Rows that somebody else holds are being claimed, and left to him.
 *
 * Locks: the routing lock to the end of the transaction; rows one at a time.
 */
#include "subscription.h"

#include "log.h"
#include "notice.h"
#include "route.h"
#include "run.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

typedef RunScan *(*Scan) (RunStore *store, Snapshot snapshot, const Subscription *subscription);

static RunScan *scan_ready(RunStore *store, Snapshot snapshot, const Subscription *subscription);
static RunScan *scan_unhandled(RunStore *store, Snapshot snapshot,
							   const Subscription *subscription);
static bool skip_scan(const Subscription *subscription, Scan begin, TimestampTz before,
					  int64 *skipped);
static int	older_messages(LogReader *reader, const Run *run, TimestampTz before, Cover *older);

PG_FUNCTION_INFO_V1(outbox_skip);

/* skip(subscription, before) */
Datum
outbox_skip(PG_FUNCTION_ARGS)
{
	char	   *name;
	TimestampTz before;
	Subscription *subscription;
	int64		skipped = 0;

	session_begin("outbox.skip()");
	name = arg_required_text(fcinfo, 0, "subscription");
	arg_required(fcinfo, 1, "before");
	before = PG_GETARG_TIMESTAMPTZ(1);

	routing_lock_wait();
	frontier_check();
	subscription = subscription_get(name);
	(void) route(0);
	while (!skip_scan(subscription, scan_ready, before, &skipped) ||
		   !skip_scan(subscription, scan_unhandled, before, &skipped))
		CHECK_FOR_INTERRUPTS();
	notice_routing_held("outbox.skip()");
	PG_RETURN_INT64(skipped);
}

static RunScan *
scan_ready(RunStore *store, Snapshot snapshot, const Subscription *subscription)
{
	return runs_ready(store, snapshot, subscription->id, DT_NOBEGIN, DT_NOEND);
}

static RunScan *
scan_unhandled(RunStore *store, Snapshot snapshot, const Subscription *subscription)
{
	return runs_unhandled(store, snapshot, subscription->id);
}

/* False where a row changed meanwhile, and what is left of it may still be skipped. */
static bool
skip_scan(const Subscription *subscription, Scan begin, TimestampTz before, int64 *skipped)
{
	RunStore   *store = runs_open();
	Snapshot	snapshot = snapshot_push();
	RunScan    *scan = begin(store, snapshot, subscription);
	LogReader  *reader = log_open(snapshot);
	MemoryContext each = AllocSetContextCreate(CurrentMemoryContext, "outbox skip",
											   ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);
	TimestampTz now = clock_now();
	bool		all = true;
	Run		   *run;

	while ((run = run_next(scan)) != NULL)
	{
		Cover	   *older = cover_make();
		RunLock		lock = run_lock(store, run, LockWaitSkip);
		int			count = 0;

		CHECK_FOR_INTERRUPTS();
		if (lock == RUN_LOCKED)
			count = older_messages(reader, run, before, older);
		if (count > 0)
			run_discard(store, run_take(store, run, older, count), RUN_DISCARDED, now, NULL);
		*skipped += count;
		all = all && lock != RUN_GONE;
		MemoryContextReset(each);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	log_close(reader);
	run_scan_end(scan);
	snapshot_pop();
	runs_close(store);
	return all;
}

/* Neighbours go into one range: nobody else's position lies between them. */
static int
older_messages(LogReader *reader, const Run *run, TimestampTz before, Cover *older)
{
	int			count = 0;

	for (int i = 0; i < run->positions->n; i++)
	{
		int64		from = -1;	/* where the range of neighbours begins */
		TupleTableSlot *slot;

		log_range(reader, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
		while ((slot = log_next(reader)) != NULL)
		{
			int64		position = log_position(slot);

			if (log_created_at(slot) >= before)
				from = -1;
			else
			{
				if (from < 0)
					from = position;
				cover_add(older, from, position + 1);
				count++;
			}
		}
	}
	return count;
}
