/*
 * identity.c
 *		Whose data this is, and the offset of positions.
 *
 * The identity row names the system and the database that new positions are counted in;
 * each frontier row names those that routed.  Data that was copied (restored, or a
 * database made from a template) names others:
 *
 *	 - enqueue goes on: whoever first meets the foreign identity gives new positions an
 *	   offset above everything stored, holding the identity's lock to its commit;
 *	 - everything else stops until outbox.adopt(), see frontier_check_identity().
 *
 * The offset is cached until a relcache message names the identity table: our own
 * changes and the table's trigger send one.
 *
 * Locks: ShareRowExclusiveLock on outbox.identity for a change, to the end of the
 * transaction.  Enqueuers read the offset after they have locked the log's segment, so
 * adopt(), which waits for them, never changes it under one.
 */
#include "catalog.h"
#include "log.h"
#include "rows.h"
#include "route.h"

#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xlog.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* Transactions whose messages a source may not have routed yet, and more. */
#define UNROUTED_GAP	(INT64CONST(1) << 30)

PG_FUNCTION_INFO_V1(outbox_identity_changed);

enum
{
	IDENTITY_SINGLETON = 0,
	IDENTITY_SYSTEM_IDENTIFIER,
	IDENTITY_DATABASE_OID,
	IDENTITY_POSITION_OFFSET,
	IDENTITY_SINCE,
	IDENTITY_IN_USE,
	IDENTITY_COLUMNS
};

static bool cached = false;
static int64 cached_offset;

static bool read_row(Rows *rows, Identity *identity, ItemPointer tid);
static void write_row(Rows *rows, ItemPointer old, int64 offset, bool in_use);
static bool is_unsigned_copy(Snapshot snapshot);
static bool first_and_last_have_one_writer(Snapshot snapshot);
static void stop_routing_if_unrouted(Snapshot snapshot);
static void start_clock(void);
static bool merge_restored(HeapTuple restored, TupleDesc desc);

void
identity_forget(void)
{
	cached = false;
}

int64
system_identifier(void)
{
	return (int64) GetSystemIdentifier();
}

bool
identity_is_here(int64 system_id, Oid database)
{
	return system_id == system_identifier() && database == MyDatabaseId;
}

static bool
read_row(Rows *rows, Identity *identity, ItemPointer tid)
{
	TableScanDesc scan = table_beginscan(rows->rel, GetActiveSnapshot(), 0, NULL);
	TupleTableSlot *slot = table_slot_create(rows->rel, NULL);
	bool		isnull;

	memset(identity, 0, sizeof(*identity));
	if (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		int64		system_id = DatumGetInt64(slot_getattr(slot, IDENTITY_SYSTEM_IDENTIFIER + 1, &isnull));
		Oid			database = DatumGetObjectId(slot_getattr(slot, IDENTITY_DATABASE_OID + 1, &isnull));

		identity->exists = true;
		identity->foreign = !identity_is_here(system_id, database);
		identity->other_cluster = (system_id != system_identifier());
		identity->offset = DatumGetInt64(slot_getattr(slot, IDENTITY_POSITION_OFFSET + 1, &isnull));
		identity->in_use = DatumGetBool(slot_getattr(slot, IDENTITY_IN_USE + 1, &isnull));
		*tid = slot->tts_tid;
	}
	ExecDropSingleTupleTableSlot(slot);
	table_endscan(scan);
	return identity->exists;
}

void
identity_read(Identity *identity)
{
	Rows	   *rows = rows_open(OB_IDENTITY, false);
	ItemPointerData tid;

	snapshot_push();
	(void) read_row(rows, identity, &tid);
	snapshot_pop();
	rows_close(rows);
}

static void
write_row(Rows *rows, ItemPointer old, int64 offset, bool in_use)
{
	Datum		values[IDENTITY_COLUMNS];
	bool		nulls[IDENTITY_COLUMNS] = {false};

	values[IDENTITY_SINGLETON] = BoolGetDatum(true);
	values[IDENTITY_SYSTEM_IDENTIFIER] = Int64GetDatum(system_identifier());
	values[IDENTITY_DATABASE_OID] = ObjectIdGetDatum(MyDatabaseId);
	values[IDENTITY_POSITION_OFFSET] = Int64GetDatum(offset);
	values[IDENTITY_SINCE] = TimestampTzGetDatum(clock_now());
	values[IDENTITY_IN_USE] = BoolGetDatum(in_use);
	if (old != NULL)
		rows_update(rows, old, values, nulls);
	else
		rows_insert(rows, values, nulls, NULL);
	CacheInvalidateRelcache(rows->rel);
	CommandCounterIncrement();
}

/* The first transaction number that nothing stored has, and nothing that was routed. */
int64
identity_above_everything(Snapshot snapshot)
{
	Frontier	frontier;
	LogReader  *reader = log_open(snapshot);
	int64		last = log_last_position(reader);

	log_close(reader);
	frontier_read(&frontier, snapshot);
	return Max(last < 0 ? 0 : position_transaction(last) + 1, frontier.horizon);
}

/*
 * Messages that were not enqueued here, and no identity says so: a copy of an outbox that
 * was never routed, or one that is being restored and whose identity is still to come.
 * They have positions of transactions yet to come, or one transaction has written the
 * messages of several.
 */
static bool
is_unsigned_copy(Snapshot snapshot)
{
	return identity_above_everything(snapshot) > (int64) U64FromFullTransactionId(ReadNextFullTransactionId()) ||
		first_and_last_have_one_writer(snapshot);
}

static bool
first_and_last_have_one_writer(Snapshot snapshot)
{
	LogReader  *reader = log_open(snapshot);
	int64		last = log_last_position(reader);
	TransactionId writer = InvalidTransactionId;
	bool		one_writer = false;

	if (last >= 0)
	{
		TupleTableSlot *slot;

		log_range(reader, 0, position_of_transaction(position_transaction(last)));
		slot = log_next(reader);	/* NULL: all are of one transaction */
		if (slot != NULL)
		{
			writer = log_writer(slot);
			log_range(reader, last, last + 1);
			slot = log_next(reader);
			one_writer = (slot != NULL && TransactionIdEquals(writer, log_writer(slot)));
		}
	}
	log_close(reader);
	return one_writer;
}

/*
 * Once the identity is ours, only a frontier can tell that what is stored is not.  Where
 * nothing was routed there is none: one that nobody signed stops routing until adopt().
 */
static void
stop_routing_if_unrouted(Snapshot snapshot)
{
	Frontier	stored;

	frontier_read(&stored, snapshot);
	if (stored.id == 0 && log_has_messages())
		frontier_append_stop();
}

/*
 * The offset becomes the smallest one with which no transaction, of those that run now
 * or later, gets a position at or below one that is stored or was routed.  In a restore
 * that goes on, which is what an enqueue into a copy must expect, more of the source's log
 * may come, and of that nobody sees how far it reaches above the frontier: so a gap is
 * left, until adopt() sees all of it.
 */
void
identity_take_over(bool force)
{
	Rows	   *rows;
	Identity	identity;
	ItemPointerData tid;
	Snapshot	snapshot;
	bool		copied;

	LockRelationOid(outbox_oid(OB_IDENTITY), ShareRowExclusiveLock);
	rows = rows_open(OB_IDENTITY, true);
	snapshot = snapshot_push();
	/* another may have done it while we waited for the lock */
	(void) read_row(rows, &identity, &tid);
	copied = identity.exists ? identity.foreign : is_unsigned_copy(snapshot);
	if (copied && !force)
		stop_routing_if_unrouted(snapshot);
	if (copied || force)
	{
		int64		offset = identity_above_everything(snapshot) - full_transaction(snapshot->xmin);

		if (!force)
			offset += UNROUTED_GAP;
		write_row(rows, identity.exists ? &tid : NULL, Max(0, offset), identity.in_use);
	}
	else if (!identity.exists)
		write_row(rows, NULL, 0, false);
	snapshot_pop();
	rows_close(rows);
	/* adopt() asks more than the identity */
	if (copied && !force)
		adopt_roles(!identity.exists || identity.other_cluster);
}

/* Was what is stored enqueued elsewhere? */
bool
identity_is_copy(const Identity *identity)
{
	bool		copied;

	if (identity->exists)
		return identity->foreign;
	copied = is_unsigned_copy(snapshot_push());
	snapshot_pop();
	return copied;
}

/* After a restart with a wall clock that was set back, new messages are not older than routed ones. */
static void
start_clock(void)
{
	Frontier	frontier;

	frontier_read_now(&frontier);
	if (frontier.id != 0 && identity_is_here(frontier.system_identifier, frontier.database))
		clock_start_above(frontier.created_at);
}

int64
identity_offset_for_enqueue(void)
{
	Identity	identity;

	if (cached)
		return cached_offset;
	identity_read(&identity);
	if (identity_is_copy(&identity))
	{
		identity_take_over(false);
		identity_read(&identity);
	}
	start_clock();
	cached_offset = identity.offset;
	cached = true;
	return cached_offset;
}

/*
 * An enqueue into a copy may have made the identity; then the rest of the first use is
 * still to be done.
 */
bool
identity_ensure(void)
{
	Rows	   *rows;
	Identity	identity;
	ItemPointerData tid;

	identity_read(&identity);
	if (identity.in_use)
		return false;
	adopt_roles(false);
	identity_take_over(false);

	rows = rows_open(OB_IDENTITY, true);
	snapshot_push();
	if (read_row(rows, &identity, &tid))
		write_row(rows, &tid, identity.offset, true);
	snapshot_pop();
	rows_close(rows);
	subscription_insert_default();
	return true;
}

/*
 * An enqueue may meet restored messages before the identity that comes with them: then it
 * makes one, with an offset above what is there, and the restored row has no place.  Only
 * what it says about the first use is kept; adopt() decides about the rest.
 */
static bool
merge_restored(HeapTuple restored, TupleDesc desc)
{
	Rows	   *rows;
	Identity	identity;
	ItemPointerData tid;
	bool		isnull;
	bool		in_use;
	bool		merged = false;

	rows = rows_open(OB_IDENTITY, true);
	in_use = DatumGetBool(heap_getattr(restored, IDENTITY_IN_USE + 1, desc, &isnull));
	snapshot_push();
	if (read_row(rows, &identity, &tid) && !identity.foreign && !identity.in_use)
	{
		write_row(rows, &tid, identity.offset, in_use && !isnull);
		merged = true;
	}
	snapshot_pop();
	rows_close(rows);
	return merged;
}

/* Row trigger on outbox.identity, enabled always: whoever writes it, caches are dropped. */
Datum
outbox_identity_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_BEFORE(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("this function is the trigger of the table outbox.identity")));
	CacheInvalidateRelcache(trigger->tg_relation);
	if (TRIGGER_FIRED_BY_UPDATE(trigger->tg_event))
		PG_RETURN_POINTER(trigger->tg_newtuple);
	if (TRIGGER_FIRED_BY_INSERT(trigger->tg_event) &&
		merge_restored(trigger->tg_trigtuple, RelationGetDescr(trigger->tg_relation)))
		PG_RETURN_POINTER(NULL);
	PG_RETURN_POINTER(trigger->tg_trigtuple);
}
