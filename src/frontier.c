/*
 * frontier.c
 *		How far routing has come: outbox.frontier, a row for each pass that found something.
 *
 * A frontier is a snapshot in the transaction numbers that positions have: everything
 * below horizon was complete, but for the transactions in running.  "seen" is where the
 * pass would have ended had it not been cut short: what was in progress below it has
 * been seen running once.
 *
 * The id of each is its predecessor's plus one, and unique: two passes from the same
 * frontier cannot both commit, whatever happened to the routing lock.
 */
#include "route.h"

#include "catalog.h"
#include "log.h"
#include "rows.h"
#include "run.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/timestamp.h"

enum
{
	FRONTIER_ID = 0,
	FRONTIER_HORIZON,
	FRONTIER_RUNNING,
	FRONTIER_SEEN,
	FRONTIER_OFFSET,
	FRONTIER_SYSTEM_IDENTIFIER,
	FRONTIER_DATABASE_OID,
	FRONTIER_CREATED_AT,
	FRONTIER_NEWEST,
	FRONTIER_COLUMNS
};

/* Old rows are of no use but to people: so many are kept. */
#define FRONTIERS_KEPT 256

static void append_row(int64 id, const Frontier *frontier);
pg_noreturn static void refuse_copy(void);
static void delete_range(Rows *rows, Snapshot snapshot, int64 from, int64 to);

/* The newest row; id 0 and everything else empty where there is none. */
void
frontier_read(Frontier *frontier, Snapshot snapshot)
{
	Rows	   *rows = rows_open(OB_FRONTIER, false);
	RowScan    *scan = rows_scan(rows, OB_FRONTIER_PKEY, snapshot, BackwardScanDirection, 0, NULL);
	TupleTableSlot *slot = rows_next(scan);

	memset(frontier, 0, sizeof(*frontier));
	if (slot != NULL)
	{
		ArrayType  *running;

		slot_getallattrs(slot);
		frontier->id = DatumGetInt64(slot->tts_values[FRONTIER_ID]);
		frontier->horizon = DatumGetInt64(slot->tts_values[FRONTIER_HORIZON]);
		frontier->seen = DatumGetInt64(slot->tts_values[FRONTIER_SEEN]);
		frontier->offset = DatumGetInt64(slot->tts_values[FRONTIER_OFFSET]);
		frontier->system_identifier = DatumGetInt64(slot->tts_values[FRONTIER_SYSTEM_IDENTIFIER]);
		frontier->database = DatumGetObjectId(slot->tts_values[FRONTIER_DATABASE_OID]);
		frontier->created_at = DatumGetTimestampTz(slot->tts_values[FRONTIER_CREATED_AT]);
		frontier->newest = DatumGetTimestampTz(slot->tts_values[FRONTIER_NEWEST]);

		running = DatumGetArrayTypePCopy(slot->tts_values[FRONTIER_RUNNING]);
		if (ARR_HASNULL(running) || ARR_NDIM(running) > 1 || ARR_ELEMTYPE(running) != INT8OID)
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("frontier %lld is damaged", (long long) frontier->id)));
		frontier->running = (int64 *) ARR_DATA_PTR(running);
		frontier->n_running = sort_unique_int64(frontier->running,
												ArrayGetNItems(ARR_NDIM(running), ARR_DIMS(running)));
	}
	rows_scan_end(scan);
	rows_close(rows);
}

/* routed here */
void
frontier_sign(Frontier *frontier)
{
	frontier->system_identifier = system_identifier();
	frontier->database = MyDatabaseId;
}

int64
frontier_append(const Frontier *predecessor, const Frontier *frontier)
{
	int64		id = Max(predecessor->id, 0) + 1;

	append_row(id, frontier);
	return id;
}

/*
 * Nobody's frontier, with nothing behind it: it stops routing where nothing was routed.
 * Data that is being restored may yet bring frontiers, which it must not collide with:
 * their ids are positive.
 */
void
frontier_append_stop(void)
{
	Frontier	nothing = {0};

	append_row(-1, &nothing);
}

static void
append_row(int64 id, const Frontier *frontier)
{
	Rows	   *rows = rows_open(OB_FRONTIER, true);
	Datum		values[FRONTIER_COLUMNS];
	bool		nulls[FRONTIER_COLUMNS] = {false};

	values[FRONTIER_ID] = Int64GetDatum(id);
	values[FRONTIER_HORIZON] = Int64GetDatum(frontier->horizon);
	values[FRONTIER_RUNNING] = int64_array(frontier->running, frontier->n_running);
	values[FRONTIER_SEEN] = Int64GetDatum(frontier->seen);
	values[FRONTIER_OFFSET] = Int64GetDatum(frontier->offset);
	values[FRONTIER_SYSTEM_IDENTIFIER] = Int64GetDatum(frontier->system_identifier);
	values[FRONTIER_DATABASE_OID] = ObjectIdGetDatum(frontier->database);
	values[FRONTIER_CREATED_AT] = TimestampTzGetDatum(clock_unshifted());
	values[FRONTIER_NEWEST] = TimestampTzGetDatum(frontier->newest);
	rows_insert(rows, values, nulls, NULL);

	/* a bite with a lower bound: each range of ids is deleted once, by the pass that made this row */
	if (id % FRONTIERS_KEPT == 0 && id > FRONTIERS_KEPT)
	{
		Snapshot	snapshot = snapshot_push();

		delete_range(rows, snapshot, id - 2 * FRONTIERS_KEPT, id - FRONTIERS_KEPT);
		snapshot_pop();
	}
	rows_close(rows);
}

static void
delete_range(Rows *rows, Snapshot snapshot, int64 from, int64 to)
{
	ScanKeyData keys[2];
	RowScan    *scan;
	TupleTableSlot *slot;

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessStrategyNumber, F_INT8LT, Int64GetDatum(to));
	scan = rows_scan(rows, OB_FRONTIER_PKEY, snapshot, ForwardScanDirection, 2, keys);
	while ((slot = rows_next(scan)) != NULL)
	{
		ItemPointerData tid = slot->tts_tid;

		rows_delete(rows, &tid);
	}
	rows_scan_end(scan);
}

/* Locked before the snapshot: a table that was rewritten in between has no rows to an older one. */
void
frontier_read_now(Frontier *frontier)
{
	LockRelationOid(outbox_oid(OB_FRONTIER), AccessShareLock);
	frontier_read(frontier, snapshot_push());
	snapshot_pop();
}

bool
log_has_messages(void)
{
	LogReader  *reader = log_open(snapshot_push());
	bool		found = (log_last_position(reader) >= 0);

	log_close(reader);
	snapshot_pop();
	return found;
}

/* Written by another cluster or database. */
bool
frontier_is_foreign(const Frontier *frontier)
{
	return frontier->id != 0 && !identity_is_here(frontier->system_identifier, frontier->database);
}

/* Routed elsewhere, and something is stored. */
bool
frontier_is_copy(const Frontier *frontier)
{
	bool		foreign = frontier_is_foreign(frontier);

	if (frontier->id == 0)
	{
		Identity	identity;

		identity_read(&identity);
		foreign = identity_is_copy(&identity);
	}
	return foreign && (log_has_messages() || runs_hold_messages());
}

/*
 * Asked where the rows of another cluster are and no message is to be seen: is it an empty
 * outbox, which adopts itself?  Not while somebody writes to the log.  Who restores it has
 * not committed yet; and an application that has enqueued before the rows came has done
 * so behind their frontier, which is for adopt() to mend.
 */
bool
frontier_may_take_over(void)
{
	return log_lock_if_free(ShareLock) && !log_has_messages();
}

/*
 * A copy of production on a test machine must not deliver production's messages: what
 * was routed elsewhere stops here until an operator says so.  Nothing stored, nothing to
 * protect.
 */
void
frontier_check_identity(const Frontier *frontier)
{
	if (frontier_is_copy(frontier))
		refuse_copy();
}

/* For who takes over an outbox that looks empty. */
void
frontier_take_over_check(void)
{
	if (!frontier_may_take_over())
		refuse_copy();
}

static void
refuse_copy(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("the messages in this database are a copy that was not adopted"),
			 errdetail("They were routed by another cluster or database; delivering them here"
					   " could deliver them twice."),
			 errhint("If they shall be delivered from here, run SELECT outbox.adopt().")));
}

void
frontier_check(void)
{
	Frontier	frontier;

	frontier_read_now(&frontier);
	frontier_check_identity(&frontier);
}

bool
frontier_is_running(const Frontier *frontier, int64 transaction)
{
	return frontier->n_running > 0 &&
		bsearch(&transaction, frontier->running, frontier->n_running, sizeof(int64), compare_int64) != NULL;
}
