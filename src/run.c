/*
 * run.c
 *		Runs of messages and their state machine: the only writer of outbox.delivery.
 *
 *	   ready ──claim──▶ leased ──delivered──▶ delivered
 *		 ▲                │
 *		 ├── failed, budget left: due at the retry time ──┤
 *		 ├── expired, budget left: now, in pieces ────────┤
 *		 ├── released: uncharged ─────────────────────────┤
 *		 ├── unhandled ◀── no handler (uncharged) ────────┤
 *		 │                └── budget spent, or dead on request ──▶ dead
 *		 └───────────────────── requeue ────────────────────────────┘
 *
 * A row is a run: messages of one subscription in the same state.  Every transition
 * moves a whole row or, by run_take(), a part of it.  The part that moves is always the
 * new row; the rest keeps what it had, so somebody who waits for the row finds it under
 * the same id.  message_count is exact at all times.
 *
 * An attempt is charged when the lease begins, so that a crash counts.
 *
 * Lock order: the rows of a claim token in order of id.  Everybody else skips locked
 * rows or holds one at a time.
 */
#include "run.h"

#include "claim.h"
#include "floor.h"
#include "rows.h"

#include "access/tableam.h"
#include "commands/sequence.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

enum
{
	RUN_ID = 0,
	RUN_SUBSCRIPTION_ID,
	RUN_ORIGIN,
	RUN_LOW,
	RUN_AVAILABLE_AT,
	RUN_MESSAGE_COUNT,
	RUN_ATTEMPTS,
	RUN_MAX_ATTEMPTS,
	RUN_PIECE,
	RUN_STATE,
	RUN_POSITIONS,
	RUN_CLAIM_TOKEN,
	RUN_LOCKED_UNTIL,
	RUN_ACTIVE_UNTIL,
	RUN_CLAIMED_AT,
	RUN_SETTLED_AT,
	RUN_DELIVERED_ID,
	RUN_WORKER,
	RUN_LAST_ERROR,
	RUN_COLUMNS
};

struct RunStore
{
	Rows	   *rows;
	TimestampTz not_before;		/* no ready or leased row of this transaction lies below */
};

struct RunScan
{
	RowScan    *scan;
};

static const char *const state_names[] = {
	[RUN_READY] = "ready",
	[RUN_LEASED] = "leased",
	[RUN_UNHANDLED] = "unhandled",
	[RUN_DELIVERED] = "delivered",
	[RUN_DEAD] = "dead",
	[RUN_DISCARDED] = "discarded",
	[RUN_CANCELLED] = "cancelled",
};

/* a change of outbox.delivery is under way that is ours: see floor.c */
static bool writing = false;

static RunState state_from_name(const char *name);
static void run_read(TupleTableSlot *slot, Run *run);
static void run_write(RunStore *store, Run *run);
static void keep_above_floor(RunStore *store, Run *run);
static RunScan *scan_times(RunStore *store, OutboxObject index, Snapshot snapshot, int64 subscription_id,
						   TimestampTz from, TimestampTz until);
static void set_time(Datum *values, bool *nulls, int column, TimestampTz time);
static void leave_lease(Run *run, RunState state);
static RunScan *scan_index(RunStore *store, OutboxObject index, Snapshot snapshot,
						   ScanDirection direction, int n_keys, ScanKey keys);
static int64 next_id(void);

const char *
run_state_name(RunState state)
{
	return state_names[state];
}

static RunState
state_from_name(const char *name)
{
	for (int state = 0; state < (int) lengthof(state_names); state++)
	{
		if (strcmp(state_names[state], name) == 0)
			return state;
	}
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("unknown state \"%s\" of a delivery", name)));
}

RunStore *
runs_open(void)
{
	RunStore   *store = palloc(sizeof(RunStore));

	store->rows = rows_open(OB_DELIVERY, true);
	store->not_before = floor_pin();
	return store;
}

/* for views: on a standby too */
RunStore *
runs_open_for_reading(void)
{
	RunStore   *store = palloc(sizeof(RunStore));

	store->rows = rows_open(OB_DELIVERY, false);
	store->not_before = DT_NOBEGIN;
	return store;
}

void
runs_close(RunStore *store)
{
	rows_close(store->rows);
	pfree(store);
}

/* ---- rows to runs and back ---- */

static void
run_read(TupleTableSlot *slot, Run *run)
{
	Datum	   *values;
	bool	   *nulls;

	slot_getallattrs(slot);
	values = slot->tts_values;
	nulls = slot->tts_isnull;

	memset(run, 0, sizeof(*run));
	run->tid = slot->tts_tid;
	run->stored = true;
	run->id = DatumGetInt64(values[RUN_ID]);
	run->subscription_id = DatumGetInt64(values[RUN_SUBSCRIPTION_ID]);
	run->origin = DatumGetInt64(values[RUN_ORIGIN]);
	run->low = DatumGetInt64(values[RUN_LOW]);
	run->available_at = DatumGetTimestampTz(values[RUN_AVAILABLE_AT]);
	run->message_count = DatumGetInt32(values[RUN_MESSAGE_COUNT]);
	run->attempts = DatumGetInt32(values[RUN_ATTEMPTS]);
	run->max_attempts = DatumGetInt32(values[RUN_MAX_ATTEMPTS]);
	run->piece = DatumGetBool(values[RUN_PIECE]);
	run->state = state_from_name(TextDatumGetCString(values[RUN_STATE]));
	run->positions = cover_from_datum(values[RUN_POSITIONS]);
	run->indexed_at = DT_NOEND;
	if (run->state == RUN_READY)
		run->indexed_at = run->available_at;
	if (!nulls[RUN_CLAIM_TOKEN])
		run->claim_token = *DatumGetUUIDP(values[RUN_CLAIM_TOKEN]);
	if (!nulls[RUN_LOCKED_UNTIL])
		run->indexed_at = run->locked_until = DatumGetTimestampTz(values[RUN_LOCKED_UNTIL]);
	if (!nulls[RUN_ACTIVE_UNTIL])
		run->active_until = DatumGetTimestampTz(values[RUN_ACTIVE_UNTIL]);
	if (!nulls[RUN_CLAIMED_AT])
		run->claimed_at = DatumGetTimestampTz(values[RUN_CLAIMED_AT]);
	if (!nulls[RUN_SETTLED_AT])
		run->settled_at = DatumGetTimestampTz(values[RUN_SETTLED_AT]);
	if (!nulls[RUN_DELIVERED_ID])
		run->delivered_id = DatumGetInt64(values[RUN_DELIVERED_ID]);
	if (!nulls[RUN_WORKER])
		run->worker = TextDatumGetCString(values[RUN_WORKER]);
	if (!nulls[RUN_LAST_ERROR])
		run->last_error = DatumGetJsonbPCopy(values[RUN_LAST_ERROR]);
}

static void
set_time(Datum *values, bool *nulls, int column, TimestampTz time)
{
	values[column] = TimestampTzGetDatum(time);
	nulls[column] = (time == 0);
}

static int64
next_id(void)
{
	return nextval_internal(outbox_oid(OB_DELIVERY_ID_SEQ), false);
}

static void
run_write(RunStore *store, Run *run)
{
	Datum		values[RUN_COLUMNS] = {0};
	bool		nulls[RUN_COLUMNS] = {false};

	Assert(run->message_count > 0 && run->positions->n > 0);
	Assert(run->positions->ranges[0].lower >= run->low);
	if (!run->stored)
		run->id = next_id();
	keep_above_floor(store, run);

	values[RUN_ID] = Int64GetDatum(run->id);
	values[RUN_SUBSCRIPTION_ID] = Int64GetDatum(run->subscription_id);
	values[RUN_ORIGIN] = Int64GetDatum(run->origin);
	values[RUN_LOW] = Int64GetDatum(run->low);
	values[RUN_AVAILABLE_AT] = TimestampTzGetDatum(run->available_at);
	values[RUN_MESSAGE_COUNT] = Int32GetDatum(run->message_count);
	values[RUN_ATTEMPTS] = Int32GetDatum(run->attempts);
	values[RUN_MAX_ATTEMPTS] = Int32GetDatum(run->max_attempts);
	values[RUN_PIECE] = BoolGetDatum(run->piece);
	values[RUN_STATE] = CStringGetTextDatum(state_names[run->state]);
	values[RUN_POSITIONS] = cover_to_datum(run->positions);
	values[RUN_CLAIM_TOKEN] = UUIDPGetDatum(&run->claim_token);
	nulls[RUN_CLAIM_TOKEN] = (run->state != RUN_LEASED);
	set_time(values, nulls, RUN_LOCKED_UNTIL, run->locked_until);
	set_time(values, nulls, RUN_ACTIVE_UNTIL, run->active_until);
	set_time(values, nulls, RUN_CLAIMED_AT, run->claimed_at);
	set_time(values, nulls, RUN_SETTLED_AT, run->settled_at);
	values[RUN_DELIVERED_ID] = Int64GetDatum(run->delivered_id);
	nulls[RUN_DELIVERED_ID] = (run->delivered_id == 0);
	nulls[RUN_WORKER] = (run->worker == NULL);
	if (run->worker != NULL)
		values[RUN_WORKER] = CStringGetTextDatum(run->worker);
	nulls[RUN_LAST_ERROR] = (run->last_error == NULL);
	if (run->last_error != NULL)
		values[RUN_LAST_ERROR] = JsonbPGetDatum(run->last_error);

	writing = true;
	PG_TRY();
	{
		if (run->stored)
			rows_update(store->rows, &run->tid, values, nulls);
		else
			rows_insert(store->rows, values, nulls, &run->tid);
	}
	PG_FINALLY();
	{
		writing = false;
	}
	PG_END_TRY();
	run->stored = true;
}

bool
run_is_writing(void)
{
	return writing;
}

/* The rules for writers of floor.c. */
static void
keep_above_floor(RunStore *store, Run *run)
{
	if (run->stored)
		floor_pin_down_to(run->indexed_at);
	run->indexed_at = DT_NOEND;
	if (run->state == RUN_READY)
		run->indexed_at = run->available_at = Max(run->available_at, store->not_before);
	else if (run->state == RUN_LEASED)
		run->indexed_at = run->locked_until = Max(run->locked_until, store->not_before);
}

/* ---- finding and locking ---- */

static RunScan *
scan_index(RunStore *store, OutboxObject index, Snapshot snapshot,
		   ScanDirection direction, int n_keys, ScanKey keys)
{
	RunScan    *scan = palloc(sizeof(RunScan));

	scan->scan = rows_scan(store->rows, index, snapshot, direction, n_keys, keys);
	return scan;
}

static RunScan *
scan_times(RunStore *store, OutboxObject index, Snapshot snapshot, int64 subscription_id,
		   TimestampTz from, TimestampTz until)
{
	ScanKeyData keys[3];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(subscription_id));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE, TimestampTzGetDatum(from));
	ScanKeyInit(&keys[2], 2, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE, TimestampTzGetDatum(until));
	return scan_index(store, index, snapshot, ForwardScanDirection, 3, keys);
}

RunScan *
runs_ready(RunStore *store, Snapshot snapshot, int64 subscription_id,
		   TimestampTz from, TimestampTz until)
{
	return scan_times(store, OB_DELIVERY_READY_IDX, snapshot, subscription_id, from, until);
}

RunScan *
runs_leased(RunStore *store, Snapshot snapshot, int64 subscription_id,
			TimestampTz from, TimestampTz until)
{
	return scan_times(store, OB_DELIVERY_LEASE_IDX, snapshot, subscription_id, from, until);
}

RunScan *
runs_of_token(RunStore *store, Snapshot snapshot, const pg_uuid_t *token)
{
	ScanKeyData key;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_UUID_EQ, UUIDPGetDatum(token));
	return scan_index(store, OB_DELIVERY_TOKEN_IDX, snapshot, ForwardScanDirection, 1, &key);
}

static RunScan *
scan_subscription(RunStore *store, OutboxObject index, Snapshot snapshot, int64 subscription_id)
{
	ScanKeyData key;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(subscription_id));
	return scan_index(store, index, snapshot, ForwardScanDirection, 1, &key);
}

RunScan *
runs_dead(RunStore *store, Snapshot snapshot, int64 subscription_id)
{
	return scan_subscription(store, OB_DELIVERY_DEAD_IDX, snapshot, subscription_id);
}

RunScan *
runs_unhandled(RunStore *store, Snapshot snapshot, int64 subscription_id)
{
	return scan_subscription(store, OB_DELIVERY_UNHANDLED_IDX, snapshot, subscription_id);
}

RunScan *
runs_of_subscription(RunStore *store, Snapshot snapshot, int64 subscription_id)
{
	return scan_subscription(store, OB_DELIVERY_LOW_IDX, snapshot, subscription_id);
}

Run *
run_next(RunScan *scan)
{
	TupleTableSlot *slot = rows_next(scan->scan);
	Run		   *run;

	if (slot == NULL)
		return NULL;
	run = palloc(sizeof(Run));
	run_read(slot, run);
	return run;
}

void
run_scan_end(RunScan *scan)
{
	rows_scan_end(scan->scan);
	pfree(scan);
}

/*
 * Backwards from the position by "low", which is at or below every position of its row.
 * Routing's index ranges do not overlap (but for those of single transactions, whose
 * origin is negative, inside them), and no run leaves its range: so the first row of a
 * range says where the range begins, and nothing below can hold the position.
 */
Run *
run_of_position(RunStore *store, Snapshot snapshot, int64 subscription_id, int64 position)
{
	ScanKeyData keys[2];
	RunScan    *scan;
	Run		   *run;
	int64		bottom = PG_INT64_MIN;

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(subscription_id));
	ScanKeyInit(&keys[1], 2, BTLessEqualStrategyNumber, F_INT8LE, Int64GetDatum(position));
	scan = scan_index(store, OB_DELIVERY_LOW_IDX, snapshot, BackwardScanDirection, 2, keys);
	while ((run = run_next(scan)) != NULL)
	{
		if (cover_contains(run->positions, position))
			break;
		if (bottom == PG_INT64_MIN && run->origin >= 0)
			bottom = run->origin;
		if (run->low < bottom)
		{
			run = NULL;
			break;
		}
	}
	run_scan_end(scan);
	return run;
}

RunLock
run_lock(RunStore *store, Run *run, LockWaitPolicy wait)
{
	Rows	   *rows = store->rows;
	TM_FailureData failure;
	TM_Result	result;

	result = table_tuple_lock(rows->rel, &run->tid, GetActiveSnapshot(), rows->slot,
							  GetCurrentCommandId(false), LockTupleNoKeyExclusive, wait, 0, &failure);
	switch (result)
	{
		case TM_Ok:
			run_read(rows->slot, run);
			ExecClearTuple(rows->slot);
			return RUN_LOCKED;
		case TM_WouldBlock:
			return RUN_BUSY;
		case TM_SelfModified:
		case TM_Updated:
		case TM_Deleted:
			return RUN_GONE;
		default:
			elog(ERROR, "unexpected result %d of locking a delivery", result);
	}
}

/* ---- splitting ---- */

Run *
run_take(RunStore *store, Run *run, Cover *part, int32 count)
{
	Run		   *taken;

	Assert(count > 0 && count <= run->message_count);
	if (count == run->message_count)
		return run;

	taken = palloc(sizeof(Run));
	*taken = *run;
	taken->stored = false;
	taken->positions = part;
	taken->message_count = count;
	taken->low = part->ranges[0].lower;

	for (int i = 0; i < part->n; i++)
		cover_remove(run->positions, part->ranges[i].lower, part->ranges[i].upper);
	run->message_count -= count;
	run_write(store, run);
	return taken;
}

/* ---- transitions ---- */

void
run_file(RunStore *store, Run *run)
{
	run->state = RUN_READY;
	run->stored = false;
	run->low = run->positions->ranges[0].lower;
	run_write(store, run);
}

void
run_lease(RunStore *store, Run *run, const pg_uuid_t *token, const char *worker,
		  TimestampTz now, TimestampTz locked_until, TimestampTz active_until)
{
	Assert(run->state == RUN_READY);
	run->state = RUN_LEASED;
	run->attempts++;
	run->claim_token = *token;
	run->worker = worker != NULL ? pstrdup(worker) : NULL;
	run->claimed_at = now;
	run->locked_until = locked_until;
	run->active_until = active_until;
	run->delivered_id = 0;
	run_write(store, run);
}

void
run_renew(RunStore *store, Run *run, TimestampTz locked_until, TimestampTz active_until)
{
	Assert(run->state == RUN_LEASED);
	run->locked_until = locked_until;
	run->active_until = active_until;
	run_write(store, run);
}

static void
leave_lease(Run *run, RunState state)
{
	run->state = state;
	run->locked_until = 0;
	run->active_until = 0;
	run->delivered_id = 0;
}

/*
 * "rest" is the leased row that the part was taken from (the run itself where it was all
 * that was left).  The first part delivered of it becomes a row that collects the others,
 * whose "low" is the rest's: everything that will ever join it comes from there.
 */
void
run_deliver(RunStore *store, Run *run, Run *rest, TimestampTz now)
{
	bool		whole = (rest == run);

	if (!whole && rest->delivered_id != 0)
	{
		Run			joined = {0};

		if (run_find(store, rest->delivered_id, &joined) && run_lock(store, &joined, LockWaitBlock) == RUN_LOCKED)
		{
			for (int i = 0; i < run->positions->n; i++)
				cover_add(joined.positions, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
			joined.message_count += run->message_count;
			joined.settled_at = now;
			run_write(store, &joined);
			*run = joined;
			return;
		}
	}
	leave_lease(run, RUN_DELIVERED);
	run->settled_at = now;
	if (whole)
	{
		run_write(store, run);
		return;
	}
	run->low = rest->low;
	run_write(store, run);
	rest->delivered_id = run->id;
	run_write(store, rest);
}

/* by id; false where it is not there */
bool
run_find(RunStore *store, int64 id, Run *run)
{
	ScanKeyData key;
	Snapshot	snapshot = snapshot_push();
	RowScan    *scan;
	TupleTableSlot *slot;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(id));
	scan = rows_scan(store->rows, OB_DELIVERY_PKEY, snapshot, ForwardScanDirection, 1, &key);
	slot = rows_next(scan);
	if (slot != NULL)
		run_read(slot, run);
	rows_scan_end(scan);
	snapshot_pop();
	return slot != NULL;
}

void
run_fail(RunStore *store, Run *run, TimestampTz now, TimestampTz retry_at, Jsonb *error)
{
	if (run->attempts >= run->max_attempts)
	{
		run_kill(store, run, now, error);
		return;
	}
	leave_lease(run, RUN_READY);
	run->piece = false;
	run->available_at = retry_at;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_kill(RunStore *store, Run *run, TimestampTz now, Jsonb *error)
{
	leave_lease(run, RUN_DEAD);
	run->piece = false;
	run->settled_at = now;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_release(RunStore *store, Run *run, TimestampTz available_at)
{
	Assert(run->state == RUN_LEASED);
	leave_lease(run, RUN_READY);
	run->attempts--;
	run->available_at = available_at;
	run_write(store, run);
}

void
run_park(RunStore *store, Run *run, Jsonb *error)
{
	if (run->state == RUN_LEASED)
		run->attempts--;
	leave_lease(run, RUN_UNHANDLED);
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_unpark(RunStore *store, Run *run, TimestampTz available_at)
{
	Assert(run->state == RUN_UNHANDLED);
	run->state = RUN_READY;
	run->available_at = available_at;
	run_write(store, run);
}

/*
 * Nobody knows which of its messages the consumer had in its hands when it died: what
 * comes back is handed out in pieces from now on.
 */
void
run_expire(RunStore *store, Run *run, TimestampTz now)
{
	Assert(run->state == RUN_LEASED);
	if (run->attempts >= run->max_attempts)
	{
		run_kill(store, run, now,
				 error_record(OUTBOX_ABANDONED,
							  psprintf("attempts exhausted without a settlement: %d of %d",
									   run->attempts, run->max_attempts),
							  NULL, NULL, NULL, NULL));
		return;
	}
	run->last_error = error_record(OUTBOX_LEASE_LOST, "the lease ended without a settlement",
								   run->worker, NULL, NULL, NULL);
	leave_lease(run, RUN_READY);
	run->piece = true;
	run->available_at = now;
	run_write(store, run);
}

void
run_requeue(RunStore *store, Run *run, TimestampTz available_at, int attempts, int max_attempts)
{
	leave_lease(run, RUN_READY);
	run->settled_at = 0;
	run->piece = false;
	run->attempts = attempts;
	run->max_attempts = max_attempts;
	run->available_at = available_at;
	run_write(store, run);
}

void
run_discard(RunStore *store, Run *run, RunState state, TimestampTz now, Jsonb *error)
{
	Assert(state == RUN_DISCARDED || state == RUN_CANCELLED);
	leave_lease(run, state);
	run->settled_at = now;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_delete(RunStore *store, Run *run)
{
	floor_pin_down_to(run->indexed_at);
	writing = true;
	PG_TRY();
	{
		rows_delete(store->rows, &run->tid);
	}
	PG_FINALLY();
	{
		writing = false;
	}
	PG_END_TRY();
}
