/*
 * log.c
 *		Reading the log: by ranges of positions and by id, over all segments.
 *
 * The log is a set of identical tables: the ring of segments that enqueue writes to, one
 * after the other (segment.c), and log_kept, where a segment that is to be emptied leaves
 * what is still needed (rotate.c).  A range of positions may lie in several, so log_next()
 * merges them by position.
 *
 * Locks: AccessShareLock on each segment, until log_close().
 */
#include "log.h"

#include "catalog.h"
#include "rows.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_am.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

/* the ring, in its order, and what was moved out of it */
static const OutboxObject segments[] = {OB_LOG_0, OB_LOG_1, OB_LOG_2, OB_LOG_KEPT};

#define N_SEGMENTS ((int) lengthof(segments))

typedef struct Segment
{
	Relation	rel;			/* NULL: left out */
	bool		empty;
	TupleTableSlot *slot;		/* this and the following made when needed */
	Relation	index;			/* on position */
	IndexScanDesc scan;
	bool		loaded;			/* slot holds the next row of this segment */
	bool		done;
} Segment;

struct LogReader
{
	MemoryContext context;
	Snapshot	snapshot;
	Segment		segments[lengthof(segments)];
};

static LogReader *reader_open(Snapshot snapshot, int first, int last);
static void segment_close(Segment *segment);
static bool segment_prepare(LogReader *reader, Segment *segment, bool by_position);
static bool segment_peek(LogReader *reader, Segment *segment);
static bool find_id(Relation rel, Snapshot snapshot, const pg_uuid_t *id, TupleTableSlot *slot);
static bool find_id_anyhow(Oid segment, const pg_uuid_t *id, TransactionId *other);
static bool is_whole_unique(Relation index, AttrNumber column);
static Relation open_index_on(Relation rel, AttrNumber column);
static Datum empty_headers(void);

/* Where a segment is, by its number; the last is log_kept. */
Oid
log_segment(int number)
{
	return outbox_oid(segments[number]);
}

/*
 * Held to the end of the transaction: nothing that is in a segment goes, or nobody writes
 * to one, as the mode says.
 */
void
log_lock(LOCKMODE mode)
{
	for (int i = 0; i < N_SEGMENTS; i++)
		LockRelationOid(outbox_oid(segments[i]), mode);
}

/* The same without waiting; false where somebody is in the way. */
bool
log_lock_if_free(LOCKMODE mode)
{
	for (int i = 0; i < N_SEGMENTS; i++)
	{
		if (!ConditionalLockRelationOid(outbox_oid(segments[i]), mode))
			return false;
	}
	return true;
}

LogReader *
log_open(Snapshot snapshot)
{
	return reader_open(snapshot, 0, N_SEGMENTS - 1);
}

/* of a single segment */
LogReader *
log_open_segment(Snapshot snapshot, int number)
{
	return reader_open(snapshot, number, number);
}

/*
 * A table that was rewritten (ALTER TABLE, pg_repack) seems empty to a snapshot that is
 * older than that; and whoever took one and then waited for the lock has such a snapshot.
 * So the reader takes its own, once it has the locks.  That it is newer than the caller's
 * changes nothing: the caller asks for ranges of transactions that were complete in his.
 */
static LogReader *
reader_open(Snapshot snapshot, int first, int last)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox log reader",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	LogReader  *reader = palloc0(sizeof(LogReader));

	reader->context = context;
	for (int i = first; i <= last; i++)
		reader->segments[i].rel = table_open(outbox_oid(segments[i]), AccessShareLock);
	reader->snapshot = snapshot_after_lock(snapshot);
	/* what has no page has no row that a snapshot, taken before, could see */
	for (int i = 0; i < N_SEGMENTS; i++)
	{
		Segment    *segment = &reader->segments[i];

		segment->done = true;
		segment->empty = (segment->rel == NULL || RelationGetNumberOfBlocks(segment->rel) == 0);
		if (segment->rel != NULL)
			(void) outbox_check_columns(OB_LOG_KEPT, segment->rel);
	}
	MemoryContextSwitchTo(caller);
	return reader;
}

/* Most segments are empty most of the time, and need nothing.  False: this one is. */
static bool
segment_prepare(LogReader *reader, Segment *segment, bool by_position)
{
	MemoryContext caller;

	if (segment->empty)
		return false;
	caller = MemoryContextSwitchTo(reader->context);
	if (segment->slot == NULL)
		segment->slot = table_slot_create(segment->rel, NULL);
	if (by_position && segment->index == NULL)
	{
		segment->index = open_index_on(segment->rel, LOG_POSITION);
		segment->scan = outbox_index_beginscan(segment->rel, segment->index, reader->snapshot, 2, 0);
	}
	MemoryContextSwitchTo(caller);
	return true;
}

static void
segment_close(Segment *segment)
{
	if (segment->index != NULL)
	{
		index_endscan(segment->scan);
		index_close(segment->index, AccessShareLock);
	}
	if (segment->slot != NULL)
		ExecDropSingleTupleTableSlot(segment->slot);
	if (segment->rel != NULL)
		table_close(segment->rel, AccessShareLock);
}

void
log_close(LogReader *reader)
{
	for (int i = 0; i < N_SEGMENTS; i++)
		segment_close(&reader->segments[i]);
	UnregisterSnapshot(reader->snapshot);
	MemoryContextDelete(reader->context);
}

void
log_range(LogReader *reader, int64 lower, int64 upper)
{
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(lower));
	ScanKeyInit(&keys[1], 1, BTLessStrategyNumber, F_INT8LT, Int64GetDatum(upper));
	for (int i = 0; i < N_SEGMENTS; i++)
	{
		Segment    *segment = &reader->segments[i];

		if (!segment_prepare(reader, segment, true))
			continue;
		index_rescan(segment->scan, keys, 2, NULL, 0);
		segment->loaded = false;
		segment->done = false;
	}
}

/*
 * Bring the next row of a segment into its slot.  The scan keeps what it allocates: it
 * must not lie in a context that the caller resets.
 */
static bool
segment_peek(LogReader *reader, Segment *segment)
{
	if (!segment->loaded && !segment->done)
	{
		MemoryContext caller = MemoryContextSwitchTo(reader->context);

		segment->loaded = index_getnext_slot(segment->scan, ForwardScanDirection, segment->slot);
		segment->done = !segment->loaded;
		MemoryContextSwitchTo(caller);
	}
	return segment->loaded;
}

TupleTableSlot *
log_next(LogReader *reader)
{
	Segment    *first = NULL;

	for (int i = 0; i < N_SEGMENTS; i++)
	{
		Segment    *segment = &reader->segments[i];

		if (segment_peek(reader, segment) &&
			(first == NULL || log_position(segment->slot) < log_position(first->slot)))
			first = segment;
	}
	if (first == NULL)
		return NULL;
	first->loaded = false;
	return first->slot;
}

int64
log_last_position(LogReader *reader)
{
	int64		last = -1;

	log_range(reader, 0, PG_INT64_MAX);
	for (int i = 0; i < N_SEGMENTS; i++)
	{
		Segment    *segment = &reader->segments[i];

		segment->done = true;
		if (!segment->empty &&
			index_getnext_slot(segment->scan, BackwardScanDirection, segment->slot))
		{
			int64		position = log_position(segment->slot);

			last = Max(last, position);
		}
	}
	return last;
}

/* in one segment */
int64
log_count(int number, Snapshot snapshot)
{
	LogReader  *reader = log_open_segment(snapshot, number);
	int64		count = 0;

	log_range(reader, 0, PG_INT64_MAX);
	while (log_next(reader) != NULL)
	{
		CHECK_FOR_INTERRUPTS();
		count++;
	}
	log_close(reader);
	return count;
}

TupleTableSlot *
log_find(LogReader *reader, const pg_uuid_t *id)
{
	TupleTableSlot *found = NULL;

	for (int i = 0; i < N_SEGMENTS && found == NULL; i++)
	{
		Segment    *segment = &reader->segments[i];

		segment->loaded = false;
		segment->done = true;
		if (segment_prepare(reader, segment, false) &&
			find_id(segment->rel, reader->snapshot, id, segment->slot))
			found = segment->slot;
	}
	return found;
}

/*
 * Where only one message is asked for, mostly a new one, the segments are looked at one
 * after the other, each by a snapshot that is newer than its lock.  Messages move to the
 * last one only, so one that is moved meanwhile is found there.
 */
int64
log_position_of(const pg_uuid_t *id)
{
	int			writing = segment_writing();
	int64		position = -1;

	for (int i = 0; i < N_SEGMENTS && position < 0; i++)
	{
		int			number = (i == LOG_KEPT) ? i : (writing + i) % RING_SEGMENTS;
		LogReader  *reader = log_open_segment(GetActiveSnapshot(), number);
		TupleTableSlot *slot = log_find(reader, id);

		if (slot != NULL)
			position = log_position(slot);
		log_close(reader);
	}
	return position;
}

static bool
find_id(Relation rel, Snapshot snapshot, const pg_uuid_t *id, TupleTableSlot *slot)
{
	Relation	index = open_index_on(rel, LOG_ID);
	IndexScanDesc scan = outbox_index_beginscan(rel, index, snapshot, 1, 0);
	ScanKeyData key;
	bool		found;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_UUID_EQ, UUIDPGetDatum(id));
	index_rescan(scan, &key, 1, NULL, 0);
	found = index_getnext_slot(scan, ForwardScanDirection, slot);
	if (found)
		ExecMaterializeSlot(slot);
	index_endscan(scan);
	index_close(index, AccessShareLock);
	return found;
}

/*
 * An id that the caller gave was inserted into one segment, whose index has seen to it
 * that it is new there.  Is it in another one?  As an exclusion constraint does: whoever
 * is about to insert or delete it there is waited for, and who finds it has come second.
 */
void
log_check_id(Oid inserted, const pg_uuid_t *id)
{
	for (int i = 0; i < N_SEGMENTS; i++)
	{
		Oid			oid = outbox_oid(segments[i]);
		TransactionId other = InvalidTransactionId;

		if (oid == inserted)
			continue;
		if (find_id_anyhow(oid, id, &other))
			ereport(ERROR,
					(errcode(ERRCODE_UNIQUE_VIOLATION),
					 errmsg("a message with this id exists"),
					 errdetail("Key (id)=(%s) already exists.",
							   DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id)))),
					 errhint("Leave the id out to get a new one; to keep a second message out, give a dedupe_key.")));
		if (TransactionIdIsValid(other))
		{
			XactLockTableWait(other, NULL, NULL, XLTW_None);
			i = -1;				/* it may be anywhere now */
		}
	}
}

/* *other: who is about to insert it, or to move it elsewhere */
static bool
find_id_anyhow(Oid segment, const pg_uuid_t *id, TransactionId *other)
{
	Relation	rel = table_open(segment, AccessShareLock);
	bool		found = false;

	if (RelationGetNumberOfBlocks(rel) > 0)
	{
		TupleTableSlot *slot = table_slot_create(rel, NULL);
		SnapshotData dirty;

		InitDirtySnapshot(dirty);
		found = find_id(rel, &dirty, id, slot);
		*other = !found ? InvalidTransactionId :
			TransactionIdIsValid(dirty.xmin) ? dirty.xmin : dirty.xmax;
		ExecDropSingleTupleTableSlot(slot);
	}
	table_close(rel, AccessShareLock);
	return found && !TransactionIdIsValid(*other);
}

/* Reads all rows, upwards, and each of them once. */
static bool
is_whole_unique(Relation index, AttrNumber column)
{
	Form_pg_index form = index->rd_index;

	return form->indisunique && form->indisvalid && form->indimmediate &&
		form->indnkeyatts == 1 && form->indkey.values[0] == column &&
		index->rd_rel->relam == BTREE_AM_OID && index->rd_indoption[0] == 0 &&
		RelationGetIndexPredicate(index) == NIL;
}

/* The unique index whose only column this is, whatever its name; not a user's partial one. */
static Relation
open_index_on(Relation rel, AttrNumber column)
{
	ListCell   *cell;

	foreach(cell, RelationGetIndexList(rel))
	{
		Relation	index = index_open(lfirst_oid(cell), AccessShareLock);

		if (is_whole_unique(index, column))
			return index;
		index_close(index, AccessShareLock);
	}
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" has lost its unique index on column %d",
					RelationGetRelationName(rel), column),
			 errhint("Create it again: the extension cannot work without it.")));
}

int64
log_position(TupleTableSlot *slot)
{
	bool		isnull;

	return DatumGetInt64(slot_getattr(slot, LOG_POSITION, &isnull));
}

TimestampTz
log_created_at(TupleTableSlot *slot)
{
	bool		isnull;

	return DatumGetTimestampTz(slot_getattr(slot, LOG_CREATED_AT, &isnull));
}

TransactionId
log_writer(TupleTableSlot *slot)
{
	bool		isnull;

	return DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull));
}

/* Messages without headers are stored with NULL and delivered with an empty object. */
static Datum
empty_headers(void)
{
	static Jsonb *empty = NULL;

	if (empty == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);

		empty = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum("{}")));
		MemoryContextSwitchTo(caller);
	}
	return JsonbPGetDatum(empty);
}

/*
 * The columns of the log that message and claimed_message end with, in their order:
 * correlation_id … created_at; and those they have in common before: name … headers.
 */
void
log_fill_row(TupleTableSlot *slot, int head, int tail, Datum *values, bool *nulls)
{
	static const LogColumn heads[] = {LOG_NAME, LOG_KIND, LOG_VERSION, LOG_PAYLOAD, LOG_HEADERS};
	static const LogColumn tails[] = {
		LOG_CORRELATION_ID, LOG_CAUSATION_ID, LOG_AGGREGATE_TYPE, LOG_AGGREGATE_ID,
		LOG_TENANT_ID, LOG_OWNER_ID, LOG_DEDUPE_KEY, LOG_ORDERING_KEY, LOG_OCCURRED_AT,
		LOG_AVAILABLE_AT, LOG_CREATED_AT
	};

	slot_getallattrs(slot);
	values[0] = slot->tts_values[LOG_ID - 1];
	nulls[0] = false;
	for (int i = 0; i < lengthof(heads); i++)
	{
		values[head + i] = slot->tts_values[heads[i] - 1];
		nulls[head + i] = slot->tts_isnull[heads[i] - 1];
	}
	if (nulls[head + 4])
	{
		values[head + 4] = empty_headers();
		nulls[head + 4] = false;
	}
	for (int i = 0; i < lengthof(tails); i++)
	{
		values[tail + i] = slot->tts_values[tails[i] - 1];
		nulls[tail + i] = slot->tts_isnull[tails[i] - 1];
	}
	/* due at once: from its creation */
	if (nulls[tail + 9])
	{
		values[tail + 9] = values[tail + 10];
		nulls[tail + 9] = false;
	}
}

Datum
log_message(TupleTableSlot *slot, const char *subscription, int attempts, int max_attempts)
{
	Datum		values[20];
	bool		nulls[20] = {false};
	TupleDesc	desc = outbox_row_type(OB_MESSAGE_TYPE);

	Assert(desc->natts == lengthof(values));
	log_fill_row(slot, 1, 9, values, nulls);
	nulls[6] = (subscription == NULL);
	if (subscription != NULL)
		values[6] = CStringGetTextDatum(subscription);
	values[7] = Int32GetDatum(attempts);
	if (max_attempts != 0)
		values[8] = Int32GetDatum(max_attempts);
	else
		values[8] = slot_getattr(slot, LOG_MAX_ATTEMPTS, &nulls[8]);
	return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
}
