/*
 * rotate.c
 *		The ring turns: settled history leaves, whole segments at a time.
 *
 * Messages go into one segment, the one that is written.  A segment lives like this:
 *
 *	 written	until its oldest message has half of outbox.retention, and another segment
 *				is empty: then that one is written (advance);
 *	 closed		until outbox.retention later.  If then all its messages are settled, but for
 *				a few stragglers, those are moved to log_kept and it is
 *	 condemned	until nobody's snapshot is older than that decision.  Then it is truncated
 *	 empty		and what is known of its messages is removed in bites (sweep.c).
 *
 * Nothing unsettled leaves: every clause of this file is there because leaving it out
 * loses a message.
 *
 *	 - The decision is made under the routing lock and after routing to the end: what has no
 *	   run yet is not old, it is new.
 *	 - The segment is locked against writers before that: a transaction that has enqueued
 *	   into it and is still open keeps it.  From then on nobody writes there, since all
 *	   have learned meanwhile that another segment is written.  Our own lock would not keep
 *	   us off: a transaction that has enqueued decides nothing.
 *	 - Whoever makes settled messages unsettled (requeue, subscribe, adopt) does it with a
 *	   writer's lock on the segments and strikes out the decision: segments_reprieve().
 *	 - TRUNCATE is not MVCC: for a snapshot that is older than it, pg_dump's for instance,
 *	   the messages would be gone while their runs, in an older state, are still there.  So
 *	   it waits for every transaction and snapshot of the database that is older than the
 *	   decision, those of prepared transactions, replication slots and standbys too.
 *	 - What was decided is compared again when the segment's lock is held.
 *
 * None of it makes anybody wait: locks are queued for at most 50 ms, the one that readers
 * wait for is taken when the rest of the work is done, and if a segment cannot go, the one
 * that is written just grows.  It delays disk, never speed.
 *
 * Locks: the routing lock; ShareRowExclusiveLock on outbox.segment; ShareLock and
 * RowExclusiveLock on a segment, and RowExclusiveLock on log_kept, to condemn it;
 * AccessExclusiveLock to truncate it; all to the end of the transaction.
 */
#include "rotate.h"

#include "catalog.h"
#include "deliver.h"
#include "log.h"
#include "route.h"
#include "run.h"
#include "segment.h"
#include "statement.h"

#include "access/table.h"
#include "access/transam.h"
#include "commands/trigger.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define LOCK_WAIT_MS	50
/* More unsettled messages than this keep their segment. */
#define STRAGGLERS_MAX	10000
#define MOVED_AT_ONCE	1000

PG_FUNCTION_INFO_V1(outbox_purge);

/* unsettled messages of a segment */
typedef struct Stragglers
{
	LogReader  *reader;
	int64		last_position;
	int64	   *positions;		/* of different subscriptions, so some are there twice */
	int			n;
	bool		too_many;
} Stragglers;

typedef struct LockRequest
{
	Oid			relation;
	LOCKMODE	mode;
} LockRequest;

static bool is_due(const SegmentState *states, TimestampTz now);
static bool is_ripe(TimestampTz oldest, TimestampTz before, TimestampTz now);
static bool is_old(const SegmentState *state, TimestampTz before);
static bool advance(SegmentState *states, TimestampTz before, TimestampTz now);
static TimestampTz oldest_message(int number);
static int64 last_position(int number);
static bool condemn(SegmentState *state);
static bool find_stragglers(int number, Stragglers *stragglers);
static bool visit_run(RunStore *store, Run *run, void *arg);
static void add_straggler(Stragglers *stragglers, int64 position);
static void move_to_kept(int number, const int64 *positions, int n);
static bool is_seen_by_nobody(const SegmentState *state);
static bool truncate_segment(SegmentState *state);
static bool is_in_use(Oid relation);
static bool lock_briefly(Oid relation, LOCKMODE mode);
static void lock_work(void *arg);

int
rotate(bool *wrote)
{
	SegmentState states[RING_SEGMENTS];
	TimestampTz now = clock_now();
	int			emptied = 0;

	*wrote = false;
	segments_read(states);
	if (!is_due(states, now) || !segments_lock(false))
		return 0;
	*wrote = true;
	segments_read(states);
	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		SegmentState *state = &states[i];

		if (state->closed_at > now)
		{
			/* the clock was set back: its retention begins anew */
			state->closed_at = now;
			segment_write(state);
		}
		if (state->condemned_at == 0 && is_old(state, now - outbox_retention * USECS_PER_SEC))
			(void) condemn(state);
	}
	/* last, since readers wait for it; what was just decided waits for this transaction's end */
	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		if (states[i].condemned_at != 0 && truncate_segment(&states[i]))
			emptied++;
	}
	(void) advance(states, now - outbox_retention * USECS_PER_SEC / 2, now);
	return emptied;
}

static bool
is_due(const SegmentState *states, TimestampTz now)
{
	TimestampTz retained_from = now - outbox_retention * USECS_PER_SEC;
	bool		due = is_ripe(oldest_message(segment_writing()), now - outbox_retention * USECS_PER_SEC / 2, now);

	for (int i = 0; i < RING_SEGMENTS; i++)
		due |= states[i].condemned_at != 0 || states[i].closed_at > now || is_old(&states[i], retained_from);
	return due;
}

/*
 * Whether a segment whose oldest message has that time is to be closed.  One of the
 * future is of before the clock was set back: nobody knows how old it is, nor would it
 * ever be old.
 */
static bool
is_ripe(TimestampTz oldest, TimestampTz before, TimestampTz now)
{
	return oldest < before || (oldest > now && oldest != DT_NOEND);
}

/* Nothing was written to it after that time.  One that was never closed is new, or restored. */
static bool
is_old(const SegmentState *state, TimestampTz before)
{
	return !state->writing && state->closed_at < before && last_position(state->number) >= 0;
}

/* Let another segment be written; false where none is empty, or it is not yet time. */
static bool
advance(SegmentState *states, TimestampTz before, TimestampTz now)
{
	SegmentState *writing = NULL;

	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		if (states[i].writing)
			writing = &states[i];
	}
	if (!is_ripe(oldest_message(writing->number), before, now))
		return false;
	for (int i = 1; i < RING_SEGMENTS; i++)
	{
		SegmentState *next = &states[(writing->number + i) % RING_SEGMENTS];

		if (next->condemned_at != 0 || last_position(next->number) >= 0)
			continue;
		writing->writing = false;
		writing->closed_at = now;
		next->writing = true;
		next->closed_at = 0;
		segment_write(writing);
		segment_write(next);
		return true;
	}
	return false;
}

/* About: that of its lowest position.  DT_NOEND for a segment that is empty. */
static TimestampTz
oldest_message(int number)
{
	LogReader  *reader = log_open_segment(snapshot_push(), number);
	TupleTableSlot *slot;
	TimestampTz time = DT_NOEND;

	log_range(reader, 0, PG_INT64_MAX);
	slot = log_next(reader);
	if (slot != NULL)
		time = log_created_at(slot);
	log_close(reader);
	snapshot_pop();
	return time;
}

/* -1: it is empty */
static int64
last_position(int number)
{
	LogReader  *reader = log_open_segment(snapshot_push(), number);
	int64		last = log_last_position(reader);

	log_close(reader);
	snapshot_pop();
	return last;
}

/*
 * The decision that a segment may go.  False: somebody writes to it, or too much of it
 * is not settled.  All locks come first: what follows waits for nobody.
 */
static bool
condemn(SegmentState *state)
{
	Oid			segment = log_segment(state->number);
	Stragglers	stragglers;

	if (enqueued_in_transaction() || !lock_briefly(segment, ShareLock) ||
		!lock_briefly(segment, RowExclusiveLock) || !lock_briefly(log_segment(LOG_KEPT), RowExclusiveLock))
		return false;
	(void) route(0);
	if (!find_stragglers(state->number, &stragglers))
		return false;
	move_to_kept(state->number, stragglers.positions, stragglers.n);
	pfree(stragglers.positions);

	/* with our own transaction, which has moved them, and all that have settled them, below */
	(void) GetTopTransactionId();
	state->condemned_at = (int64) U64FromFullTransactionId(ReadNextFullTransactionId());
	state->last_position = stragglers.last_position;
	segment_write(state);
	return true;
}

/*
 * False: too many.  Only the indexes of what is not settled are read, by one snapshot:
 * history may be a thousand times as much.
 */
static bool
find_stragglers(int number, Stragglers *stragglers)
{
	RunStore   *store = runs_open_for_reading();
	Snapshot	snapshot = snapshot_push();
	ListCell   *cell;

	memset(stragglers, 0, sizeof(*stragglers));
	stragglers->positions = palloc(2 * STRAGGLERS_MAX * sizeof(int64));
	stragglers->reader = log_open_segment(snapshot, number);
	stragglers->last_position = log_last_position(stragglers->reader);
	foreach(cell, subscription_list(snapshot))
	{
		int64		id = ((Subscription *) lfirst(cell))->id;

		runs_visit(store, runs_dead(store, snapshot, id), visit_run, stragglers);
		runs_visit(store, runs_unhandled(store, snapshot, id), visit_run, stragglers);
		runs_visit(store, runs_leased(store, snapshot, id, DT_NOBEGIN, DT_NOEND), visit_run, stragglers);
		runs_visit(store, runs_ready(store, snapshot, id, DT_NOBEGIN, DT_NOEND), visit_run, stragglers);
	}
	log_close(stragglers->reader);
	snapshot_pop();
	runs_close(store);
	stragglers->n = sort_unique_int64(stragglers->positions, stragglers->n);
	return !stragglers->too_many && stragglers->n <= STRAGGLERS_MAX;
}

static bool
visit_run(RunStore *store, Run *run, void *arg)
{
	Stragglers *stragglers = arg;

	if (run->low > stragglers->last_position)
		return !stragglers->too_many;
	for (int i = 0; i < run->positions->n && !stragglers->too_many; i++)
	{
		TupleTableSlot *slot;

		log_range(stragglers->reader, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
		while (!stragglers->too_many && (slot = log_next(stragglers->reader)) != NULL)
			add_straggler(stragglers, log_position(slot));
	}
	return !stragglers->too_many;
}

/* What several subscriptions have not settled counts once. */
static void
add_straggler(Stragglers *stragglers, int64 position)
{
	stragglers->positions[stragglers->n++] = position;
	if (stragglers->n < 2 * STRAGGLERS_MAX)
		return;
	stragglers->n = sort_unique_int64(stragglers->positions, stragglers->n);
	stragglers->too_many = (stragglers->n > STRAGGLERS_MAX);
}

static void
move_to_kept(int number, const int64 *positions, int n)
{
#define MOVE(segment) \
	"WITH moved AS (DELETE FROM outbox." segment " AS l" \
	" WHERE l.position OPERATOR(pg_catalog.=) ANY ($1) RETURNING l.*)" \
	" INSERT INTO outbox.log_kept SELECT m.* FROM moved m"
	static const char *const texts[RING_SEGMENTS] = {MOVE("log_0"), MOVE("log_1"), MOVE("log_2")};

	for (int i = 0; i < n; i += MOVED_AT_ONCE)
	{
		int			count = Min(MOVED_AT_ONCE, n - i);
		Statement	statement;

		statement_init(&statement, texts[number]);
		bind_int8_array(&statement, positions + i, count);
		if (statement_run(&statement) != count)
			elog(ERROR, "could not move messages out of segment %d", number);
	}
}

/* Every snapshot that is, or will be, taken in this database sees the decision. */
static bool
is_seen_by_nobody(const SegmentState *state)
{
	Relation	rel = table_open(log_segment(state->number), AccessShareLock);
	TransactionId oldest = GetOldestNonRemovableTransactionId(rel);

	table_close(rel, AccessShareLock);
	return full_transaction(oldest) >= state->condemned_at;
}

static bool
truncate_segment(SegmentState *state)
{
	static const char *const texts[RING_SEGMENTS] = {
		"TRUNCATE outbox.log_0", "TRUNCATE outbox.log_1", "TRUNCATE outbox.log_2"
	};
	Statement	statement;

	if (!is_seen_by_nobody(state) || is_in_use(log_segment(state->number)) ||
		!lock_briefly(log_segment(state->number), AccessExclusiveLock))
		return false;
	if (last_position(state->number) > state->last_position)
	{
		/* written to by somebody who does not ask which segment is written: decide again */
		state->condemned_at = 0;
		segment_write(state);
		return false;
	}
	statement_init(&statement, texts[state->number]);
	(void) statement_run(&statement);
	state->condemned_at = 0;
	state->closed_at = 0;
	state->sweep_to = Max(state->sweep_to, state->last_position);
	state->last_position = 0;
	state->sweep_subscription = 0;
	state->sweep_from = 0;
	segment_write(state);
	return true;
}

/* by our own session, a cursor over the log for instance: TRUNCATE would refuse */
static bool
is_in_use(Oid relation)
{
	Relation	rel = table_open(relation, AccessShareLock);
	bool		in_use = rel->rd_refcnt > 1 || AfterTriggerPendingOnRel(relation);

	table_close(rel, AccessShareLock);
	return in_use;
}

/* Without anybody queueing behind us for long. */
static bool
lock_briefly(Oid relation, LOCKMODE mode)
{
	LockRequest request = {relation, mode};
	ErrorData  *error;
	int			others = LockTimeout;

	if (ConditionalLockRelationOid(relation, mode))
		return true;
	LockTimeout = LOCK_WAIT_MS;
	error = subtransaction_try(lock_work, &request);
	LockTimeout = others;
	if (error == NULL)
		return true;
	if (error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE && error->sqlerrcode != ERRCODE_T_R_DEADLOCK_DETECTED)
		ReThrowError(error);
	return false;
}

static void
lock_work(void *arg)
{
	LockRequest *request = arg;

	LockRelationOid(request->relation, request->mode);
}

/* For callers that go on after an error in here. */
void
rotate_complain(const ErrorData *error)
{
	ereport(WARNING,
			(errcode(error->sqlerrcode),
			 errmsg("settled history could not be removed: %s", error->message),
			 error->detail != NULL ? errdetail_internal("%s", error->detail) : 0,
			 errhint("The log grows meanwhile; everything else goes on. See outbox.segments.")));
}

/*
 * purge(before): what was enqueued before that time shall not wait for its retention.
 * Returns how many messages were condemned with their segments.
 */
Datum
outbox_purge(PG_FUNCTION_ARGS)
{
	SegmentState states[RING_SEGMENTS];
	TimestampTz now;
	TimestampTz before;
	int64		messages = 0;

	session_begin("outbox.purge()");
	arg_required(fcinfo, 0, "before");
	before = PG_GETARG_TIMESTAMPTZ(0);

	routing_lock_wait();
	frontier_check();
	(void) segments_lock(true);
	segments_read(states);
	now = clock_now();
	(void) advance(states, Min(before, now + 1), now);
	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		SegmentState *state = &states[i];

		if (state->condemned_at != 0 || !is_old(state, before) || !condemn(state))
			continue;
		messages += log_count(state->number, snapshot_push());
		snapshot_pop();
	}
	PG_RETURN_INT64(messages);
}
