/*
 * segment.c
 *		The ring of log segments: which one is written, and what is known of each.
 *
 * outbox.segment has a row for each segment that was ever written or left by rotation; a
 * missing row is a segment of which nothing is known: not closed, not condemned.
 *
 * The segment that is written is cached until a relcache message names the table: every
 * change of it sends one, but for the progress of sweeping.  Who reads it before the
 * message comes writes to the segment before: harmless, since what is truncated is
 * decided under a lock that waits for writers.  rotate.c has the whole argument.
 *
 * Locks: ShareRowExclusiveLock on outbox.segment for a change, to the end of the
 * transaction; after the routing lock.
 */
#include "segment.h"

#include "catalog.h"
#include "log.h"
#include "rows.h"

#include "access/tableam.h"
#include "storage/lmgr.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

enum
{
	SEGMENT_NUMBER = 0,
	SEGMENT_WRITING,
	SEGMENT_CLOSED_AT,
	SEGMENT_CONDEMNED_AT,
	SEGMENT_LAST_POSITION,
	SEGMENT_SWEEP_TO,
	SEGMENT_SWEEP_SUBSCRIPTION,
	SEGMENT_SWEEP_FROM,
	SEGMENT_COLUMNS
};

static bool cached = false;
static int	cached_writing;

static int	read_rows(Rows *rows, SegmentState *states, ItemPointerData *tids, bool *stored);
static int64 number_or_null(TupleTableSlot *slot, int column);
static bool is_progress(const SegmentState *before, const SegmentState *after);

void
segment_forget(void)
{
	cached = false;
}

static int64
number_or_null(TupleTableSlot *slot, int column)
{
	return slot->tts_isnull[column] ? 0 : DatumGetInt64(slot->tts_values[column]);
}

/* Returns the number of the segment that is written. */
static int
read_rows(Rows *rows, SegmentState *states, ItemPointerData *tids, bool *stored)
{
	TableScanDesc scan = table_beginscan(rows->rel, GetActiveSnapshot(), 0, NULL);
	TupleTableSlot *slot = table_slot_create(rows->rel, NULL);
	int			writing = 0;

	memset(states, 0, RING_SEGMENTS * sizeof(SegmentState));
	memset(stored, false, RING_SEGMENTS * sizeof(bool));
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		SegmentState *state;
		int			number;

		slot_getallattrs(slot);
		number = DatumGetInt32(slot->tts_values[SEGMENT_NUMBER]);
		if (number < 0 || number >= RING_SEGMENTS)
			continue;
		state = &states[number];
		state->writing = DatumGetBool(slot->tts_values[SEGMENT_WRITING]);
		state->closed_at = number_or_null(slot, SEGMENT_CLOSED_AT);
		state->condemned_at = number_or_null(slot, SEGMENT_CONDEMNED_AT);
		state->last_position = number_or_null(slot, SEGMENT_LAST_POSITION);
		state->sweep_to = number_or_null(slot, SEGMENT_SWEEP_TO);
		state->sweep_subscription = number_or_null(slot, SEGMENT_SWEEP_SUBSCRIPTION);
		state->sweep_from = number_or_null(slot, SEGMENT_SWEEP_FROM);
		tids[number] = slot->tts_tid;
		stored[number] = true;
		if (state->writing)
			writing = number;
	}
	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		states[i].number = i;
		states[i].writing = (i == writing);
	}
	ExecDropSingleTupleTableSlot(slot);
	table_endscan(scan);
	return writing;
}

int
segment_writing(void)
{
	if (!cached)
	{
		SegmentState states[RING_SEGMENTS];

		cached_writing = segments_read(states);
		cached = true;
	}
	return cached_writing;
}

int
segments_read(SegmentState *states)
{
	Rows	   *rows = rows_open(OB_SEGMENT, false);
	ItemPointerData tids[RING_SEGMENTS];
	bool		stored[RING_SEGMENTS];
	int			writing;

	snapshot_push();
	writing = read_rows(rows, states, tids, stored);
	snapshot_pop();
	rows_close(rows);
	return writing;
}

bool
segments_lock(bool wait)
{
	Oid			table = outbox_oid(OB_SEGMENT);

	if (!wait)
		return ConditionalLockRelationOid(table, ShareRowExclusiveLock);
	LockRelationOid(table, ShareRowExclusiveLock);
	return true;
}

/* Nothing but how far sweeping has come: caches need not hear of each bite. */
static bool
is_progress(const SegmentState *before, const SegmentState *after)
{
	return before->writing == after->writing && before->closed_at == after->closed_at &&
		before->condemned_at == after->condemned_at;
}

/* The caller has the lock, so the row is as it was read. */
void
segment_write(const SegmentState *state)
{
	Rows	   *rows = rows_open(OB_SEGMENT, true);
	SegmentState states[RING_SEGMENTS];
	ItemPointerData tids[RING_SEGMENTS];
	bool		stored[RING_SEGMENTS];
	Datum		values[SEGMENT_COLUMNS];
	bool		nulls[SEGMENT_COLUMNS] = {false};
	const int64 numbers[] = {
		[SEGMENT_CLOSED_AT] = state->closed_at,
		[SEGMENT_CONDEMNED_AT] = state->condemned_at,
		[SEGMENT_LAST_POSITION] = state->last_position,
		[SEGMENT_SWEEP_TO] = state->sweep_to,
		[SEGMENT_SWEEP_SUBSCRIPTION] = state->sweep_subscription,
		[SEGMENT_SWEEP_FROM] = state->sweep_from,
	};

	snapshot_push();
	(void) read_rows(rows, states, tids, stored);
	values[SEGMENT_NUMBER] = Int32GetDatum(state->number);
	values[SEGMENT_WRITING] = BoolGetDatum(state->writing);
	for (int i = SEGMENT_CLOSED_AT; i < SEGMENT_COLUMNS; i++)
	{
		values[i] = Int64GetDatum(numbers[i]);	/* a time is one too */
		nulls[i] = (numbers[i] == 0);
	}
	if (stored[state->number])
		rows_update(rows, &tids[state->number], values, nulls);
	else
		rows_insert(rows, values, nulls, NULL);
	snapshot_pop();
	if (!stored[state->number] || !is_progress(&states[state->number], state))
		CacheInvalidateRelcache(rows->rel);
	rows_close(rows);
}

/*
 * Locked like a writer, so that no segment is condemned on what was seen before our
 * change; and what was condemned already is looked at again.
 */
void
segments_reprieve(void)
{
	log_lock(RowExclusiveLock);
	segments_strike_out();
}

void
segments_strike_out(void)
{
	SegmentState states[RING_SEGMENTS];
	bool		any = false;

	segments_read(states);
	for (int i = 0; i < RING_SEGMENTS; i++)
		any |= (states[i].condemned_at != 0);
	if (!any)
		return;
	(void) segments_lock(true);
	segments_read(states);
	for (int i = 0; i < RING_SEGMENTS; i++)
	{
		if (states[i].condemned_at == 0)
			continue;
		states[i].condemned_at = 0;
		segment_write(&states[i]);
	}
}
