/*
 * run_row.c
 *		Runs as rows of outbox.delivery: reading, finding, locking and writing them.
 *
 * The only file that writes the table.  What a run may become is decided in run.c.
 *
 * Locks: RowExclusiveLock on the table to the end of the transaction; rows as run.c says.
 */
#include "run.h"

#include "floor.h"
#include "rows.h"
#include "worker.h"

#include "access/tableam.h"
#include "access/xact.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
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

/* the end of a shorter lease must be told to the coordinator */
#define SHORT_LEASE (11 * USECS_PER_SEC)

struct RunStore
{
	Rows	   *rows;
	TimestampTz not_before;		/* no ready or leased row of this transaction lies below */
};

struct RunScan
{
	RowScan    *scan;
};

/*
 * Hints where the last row of a kind lies: of those that collect what was delivered, and the
 * first one of a token.  Whoever follows one looks whether it is the row.
 */
typedef struct RowHint
{
	int64		id;
	ItemPointerData tid;
} RowHint;

static RowHint last_delivered;
static RowHint first_of_token;
static pg_uuid_t first_token;	/* of which token that is the first */

/* a change of outbox.delivery is under way that is ours: see floor.c */
static bool writing = false;

static void run_read(TupleTableSlot *slot, Run *run);
static void keep_above_floor(RunStore *store, Run *run);
static RunScan *scan_times(RunStore *store, OutboxObject index, Snapshot snapshot, int64 subscription_id,
						   TimestampTz from, TimestampTz until);
static void set_time(Datum *values, bool *nulls, int column, TimestampTz time);
static RunScan *scan_index(RunStore *store, OutboxObject index, Snapshot snapshot,
						   ScanDirection direction, int n_keys, ScanKey keys);
static void forget_first(void);
static bool run_fetch(RunStore *store, Snapshot snapshot, RowHint *hint, Run *run);
static void transaction_end(XactEvent event, void *arg);
static void savepoint_end(SubXactEvent event, SubTransactionId mine, SubTransactionId parent, void *arg);
static int64 next_id(void);
static void check_row(const Run *run);

void
runs_register_callbacks(void)
{
	RegisterXactCallback(transaction_end, NULL);
	RegisterSubXactCallback(savepoint_end, NULL);
}

RunStore *
runs_open(void)
{
	RunStore   *store = palloc(sizeof(RunStore));

	store->rows = rows_open(OB_DELIVERY, true);
	store->not_before = floor_pin();
	return store;
}

RunStore *
runs_open_if_free(void)
{
	if (!ConditionalLockRelationOid(outbox_oid(OB_SUBSCRIPTION), AccessShareLock) ||
		!ConditionalLockRelationOid(outbox_oid(OB_DELIVERY), RowExclusiveLock))
		return NULL;
	return runs_open();
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
	run->state = run_state_from_name(TextDatumGetCString(values[RUN_STATE]));
	run->positions = cover_from_datum(values[RUN_POSITIONS]);
	run->indexed_at = DT_NOEND;
	run->indexed_as = run->state;
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

/* What the constraint delivery_check asks of other writers, in place of it: rows.c leaves it out. */
static void
check_row(const Run *run)
{
	bool		leased = (run->state == RUN_LEASED);
	bool		open = leased || run->state == RUN_READY || run->state == RUN_UNHANDLED;

	Assert(run->positions->n > 0 && run->positions->ranges[0].lower >= run->low);
	if (run->message_count <= 0 || run->attempts < 0 || (run->locked_until != 0) != leased ||
		(leased && run->active_until == 0) || (run->settled_at == 0) != open)
		elog(ERROR, "delivery %lld would be a %s one with %d messages, which is not possible",
			 (long long) run->id, run_state_name(run->state), run->message_count);
}

void
run_write(RunStore *store, Run *run)
{
	Datum		values[RUN_COLUMNS] = {0};
	bool		nulls[RUN_COLUMNS] = {false};

	check_row(run);
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
	values[RUN_STATE] = CStringGetTextDatum(run_state_name(run->state));
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
	if (run->state == RUN_DELIVERED)
		last_delivered = (RowHint) {run->id, run->tid};
	else if (run->id == first_of_token.id)
		first_of_token.tid = run->tid;
}

bool
run_is_writing(void)
{
	return writing;
}

/*
 * The rules for writers of floor.c.  What is left of a row that was split keeps its time:
 * whoever scans sees either version of it there.
 */
static void
keep_above_floor(RunStore *store, Run *run)
{
	TimestampTz was = run->stored ? run->indexed_at : DT_NOEND;
	bool		stays = (run->stored && run->indexed_as == run->state);

	floor_pin_down_to(was);
	run->indexed_at = DT_NOEND;
	run->indexed_as = run->state;
	if (run->state == RUN_READY)
	{
		if (!stays || run->available_at != was)
		{
			run->available_at = Max(run->available_at, store->not_before);
			/* one that is to come may be due when this commits, or when the coordinator looks */
			wake_at_commit(WORK_READY);
		}
		run->indexed_at = run->available_at;
	}
	else if (run->state == RUN_LEASED)
	{
		if (!stays || run->locked_until != was)
		{
			run->locked_until = Max(run->locked_until, store->not_before);
			/* a coordinator looks at least so often by itself */
			if (run->locked_until < clock_now() + SHORT_LEASE)
				wake_at_commit(WORK_LOOK);
		}
		run->indexed_at = run->locked_until;
	}
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
runs_ready_at(RunStore *store, Snapshot snapshot, int64 subscription_id,
			  TimestampTz due, int64 from, int64 to)
{
	ScanKeyData keys[4];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(subscription_id));
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ, TimestampTzGetDatum(due));
	ScanKeyInit(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	ScanKeyInit(&keys[3], 3, BTLessEqualStrategyNumber, F_INT8LE, Int64GetDatum(to));
	return scan_index(store, OB_DELIVERY_READY_IDX, snapshot, ForwardScanDirection, 4, keys);
}

RunScan *
runs_leased(RunStore *store, Snapshot snapshot, int64 subscription_id,
			TimestampTz from, TimestampTz until)
{
	return scan_times(store, OB_DELIVERY_LEASE_IDX, snapshot, subscription_id, from, until);
}

/* Not from before the first that was found: entries of rows that went may still be there. */
RunScan *
runs_of_token(RunStore *store, Snapshot snapshot, const pg_uuid_t *token)
{
	bool		known = (memcmp(&first_token, token, sizeof(pg_uuid_t)) == 0);
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_UUID_EQ, UUIDPGetDatum(token));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_INT8GE,
				Int64GetDatum(known ? first_of_token.id : PG_INT64_MIN));
	return scan_index(store, OB_DELIVERY_TOKEN_IDX, snapshot, ForwardScanDirection, 2, keys);
}

/*
 * The first of a token, by id, or NULL.  What a token holds only gets less: which row was the
 * first is so as long as it is one of them, and no other comes before it, unless something is
 * rolled back.
 */
Run *
run_first_of_token(RunStore *store, Snapshot snapshot, const pg_uuid_t *token)
{
	Run		   *run = palloc(sizeof(Run));
	RunScan    *scan;

	if (memcmp(&first_token, token, sizeof(pg_uuid_t)) == 0 &&
		run_fetch(store, snapshot, &first_of_token, run) && run->state == RUN_LEASED &&
		memcmp(&run->claim_token, token, sizeof(pg_uuid_t)) == 0)
		return run;
	scan = runs_of_token(store, snapshot, token);
	run = run_next(scan);
	run_scan_end(scan);
	if (run != NULL)
	{
		first_of_token = (RowHint) {run->id, run->tid};
		first_token = *token;
	}
	return run;
}

/* False where the row is not there any more. */
static bool
run_fetch(RunStore *store, Snapshot snapshot, RowHint *hint, Run *run)
{
	TupleTableSlot *slot = rows_fetch(store->rows, &hint->tid, snapshot);

	if (slot == NULL)
		return false;
	run_read(slot, run);
	ExecClearTuple(slot);
	return run->id == hint->id;
}

static void
forget_first(void)
{
	first_of_token = (RowHint) {0};
	memset(&first_token, 0, sizeof(first_token));
}

/* Rows that were before the first one of the token may be back. */
static void
transaction_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		forget_first();
}

static void
savepoint_end(SubXactEvent event, SubTransactionId mine, SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		forget_first();
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
	return scan_subscription(store, OB_DELIVERY_PKEY, snapshot, subscription_id);
}

RunScan *
runs_by_low(RunStore *store, Snapshot snapshot, int64 subscription_id, int64 from, int64 to)
{
	ScanKeyData keys[3];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(subscription_id));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	ScanKeyInit(&keys[2], 2, BTLessEqualStrategyNumber, F_INT8LE, Int64GetDatum(to));
	return scan_index(store, OB_DELIVERY_PKEY, snapshot, ForwardScanDirection, 3, keys);
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

void
runs_visit(RunStore *store, RunScan *scan, RunVisit visit, void *arg)
{
	MemoryContext each = AllocSetContextCreate(CurrentMemoryContext, "outbox run",
											   ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);
	Run		   *run;

	while ((run = run_next(scan)) != NULL && visit(store, run, arg))
	{
		MemoryContextReset(each);
		CHECK_FOR_INTERRUPTS();
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	run_scan_end(scan);
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
	scan = scan_index(store, OB_DELIVERY_PKEY, snapshot, BackwardScanDirection, 2, keys);
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

	result = table_tuple_lock(rows->rel, &run->tid, GetActiveSnapshot(), rows_slot(rows),
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

/* The row that collects what was delivered of "rest", with the same "low"; false where there is none. */
bool
run_find_collector(RunStore *store, const Run *rest, Run *run)
{
	ScanKeyData keys[3];
	Snapshot	snapshot = snapshot_push();
	bool		found = (rest->delivered_id == last_delivered.id && run_fetch(store, snapshot, &last_delivered, run) &&
						 run->subscription_id == rest->subscription_id && run->low == rest->low);

	if (!found)
	{
		RowScan    *scan;
		TupleTableSlot *slot;

		ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(rest->subscription_id));
		ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(rest->low));
		ScanKeyInit(&keys[2], 3, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(rest->delivered_id));
		scan = rows_scan(store->rows, OB_DELIVERY_PKEY, snapshot, ForwardScanDirection, 3, keys);
		slot = rows_next(scan);
		found = (slot != NULL);
		if (found)
			run_read(slot, run);
		rows_scan_end(scan);
	}
	snapshot_pop();
	return found && run->state == RUN_DELIVERED;
}

/* Whether anything is left to do for anybody. */
bool
runs_hold_messages(void)
{
	static const OutboxObject unsettled[] = {
		OB_DELIVERY_READY_IDX, OB_DELIVERY_LEASE_IDX, OB_DELIVERY_UNHANDLED_IDX, OB_DELIVERY_DEAD_IDX
	};
	RunStore   *store = runs_open_for_reading();
	Snapshot	snapshot = snapshot_push();
	bool		found = false;

	for (int i = 0; i < lengthof(unsettled) && !found; i++)
	{
		RowScan    *scan = rows_scan(store->rows, unsettled[i], snapshot, ForwardScanDirection, 0, NULL);

		found = (rows_next(scan) != NULL);
		rows_scan_end(scan);
	}
	snapshot_pop();
	runs_close(store);
	return found;
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
