/*
 * rows.c
 *		Reading and writing rows of our tables without SPI.
 *
 * Writing a table that is as the extension made it takes the heap, the indexes
 * (entries.c) and nothing else.  Where somebody has put triggers or constraints on it, or
 * indexes that need more, it goes through the executor's functions for logical
 * replication's apply workers, which take care of all that.  Publications are asked in
 * either way.  Reading goes through index scans with explicit keys.  So a hot path never
 * waits for a planner, and no ill-timed ANALYZE can change what it does.
 *
 * Locks: the table's, RowExclusiveLock for writing and AccessShareLock for reading, kept
 * to the end of the transaction when writing.
 */
#include "rows.h"

#include "access/table.h"
#include "access/tableam.h"
#include "commands/trigger.h"
#include "parser/parse_relation.h"
#include "storage/bufmgr.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

static Rows *open_table(OutboxObject table, Oid oid, bool writing);
static bool needs_executor(Relation rel);
static void executor_open(Rows *rows);
static void executor_close(Rows *rows);
static bool only_ours(TriggerDesc *triggers);
static bool has_forbidden_null(Rows *rows, const bool *nulls);
static bool goes_by_hand(Rows *rows, const bool *nulls);
static void add_entries(Rows *rows, TU_UpdateIndexes which, bool update);
static void store_values(Rows *rows, TupleTableSlot *slot, const Datum *values, const bool *nulls);
static void executor_update(Rows *rows, ItemPointer tid);
static void executor_delete(Rows *rows, ItemPointer tid);
static void written(Rows *rows);

Rows *
rows_open(OutboxObject table, bool writing)
{
	return open_table(table, outbox_oid(table), writing);
}

/* A segment of the log, for writing. */
Rows *
rows_open_segment(Oid segment)
{
	return open_table(OB_LOG_KEPT, segment, true);
}

static Rows *
open_table(OutboxObject table, Oid oid, bool writing)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox rows",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	Rows	   *rows = palloc0(sizeof(Rows));

	rows->context = context;
	rows->lockmode = writing ? RowExclusiveLock : AccessShareLock;
	rows->rel = table_open(oid, rows->lockmode);
	rows->columns = outbox_check_columns(table, rows->rel);
	rows->writing = writing;
	if (writing && needs_executor(rows->rel))
	{
		executor_open(rows);
		AfterTriggerBeginQuery();
		rows->triggers = true;
	}
	MemoryContextSwitchTo(caller);
	return rows;
}

/*
 * Somebody has put a trigger or a constraint on the table.  The one that the extension
 * made is for other writers: run_row.c sees itself to what it says.
 */
static bool
needs_executor(Relation rel)
{
	TupleConstr *constr = RelationGetDescr(rel)->constr;

	if (rel->trigdesc != NULL && !only_ours(rel->trigdesc))
		return true;
	if (rel->rd_rel->relispartition)
		return true;
	return constr != NULL &&
		(constr->has_generated_stored || constr->num_check > 1 ||
		 (constr->num_check == 1 && strcmp(constr->check[0].ccname, "delivery_check") != 0));
}

/* The range table is for the executor's functions, which ask it which columns change. */
static void
executor_open(Rows *rows)
{
	MemoryContext caller = MemoryContextSwitchTo(rows->context);
	RangeTblEntry *rte = makeNode(RangeTblEntry);

	rte->rtekind = RTE_RELATION;
	rte->relid = RelationGetRelid(rows->rel);
	rte->relkind = rows->rel->rd_rel->relkind;
	rte->rellockmode = rows->lockmode;

	rows->estate = CreateExecutorState();
	outbox_init_range_table(rows->estate, rte);
	rows->info = makeNode(ResultRelInfo);
	InitResultRelInfo(rows->info, rows->rel, 1, NULL, 0);
	ExecOpenIndices(rows->info, false);
	if (only_ours(rows->rel->trigdesc))
		rows->info->ri_TrigDesc = NULL;
	MemoryContextSwitchTo(caller);
}

static void
executor_close(Rows *rows)
{
	if (rows->triggers)
		AfterTriggerEndQuery(rows->estate);
	ExecCloseIndices(rows->info);
	ExecCloseResultRelations(rows->estate);	/* those that triggers opened */
	ExecResetTupleTable(rows->estate->es_tupleTable, false);
	FreeExecutorState(rows->estate);
}

/* The triggers that watch other writers need not watch us. */
static bool
only_ours(TriggerDesc *triggers)
{
	return triggers != NULL && triggers->numtriggers == 1 &&
		strcmp(triggers->triggers[0].tgname, "delivery_changed") == 0;
}

void
rows_close(Rows *rows)
{
	if (rows->estate != NULL)
		executor_close(rows);
	if (rows->entries != NULL)
		entries_close(rows->entries);
	if (rows->slot != NULL)
		ExecDropSingleTupleTableSlot(rows->slot);
	table_close(rows->rel, rows->writing ? NoLock : rows->lockmode);
	MemoryContextDelete(rows->context);
}

/* For rows that are locked or written. */
TupleTableSlot *
rows_slot(Rows *rows)
{
	if (rows->slot == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(rows->context);

		rows->slot = table_slot_create(rows->rel, NULL);
		MemoryContextSwitchTo(caller);
	}
	return rows->slot;
}

/* What follows our columns is dropped. */
static void
store_values(Rows *rows, TupleTableSlot *slot, const Datum *values, const bool *nulls)
{
	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, rows->columns * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, rows->columns * sizeof(bool));
	for (int i = rows->columns; i < slot->tts_tupleDescriptor->natts; i++)
		slot->tts_isnull[i] = true;
	ExecStoreVirtualTuple(slot);
	ExecMaterializeSlot(slot);
}

/* The constraint is the executor's to report. */
static bool
has_forbidden_null(Rows *rows, const bool *nulls)
{
	TupleDesc	desc = RelationGetDescr(rows->rel);

	for (int i = 0; i < rows->columns; i++)
	{
		if (nulls[i] && TupleDescAttr(desc, i)->attnotnull)
			return true;
	}
	return false;
}

/* Whether the row, NULL for one that is deleted, is written without the executor. */
static bool
goes_by_hand(Rows *rows, const bool *nulls)
{
	if (rows->estate == NULL && nulls != NULL && has_forbidden_null(rows, nulls))
		executor_open(rows);
	return rows->estate == NULL;
}

/* Of the row in the slot, which was just written.  Most updates need none: they are HOT. */
static void
add_entries(Rows *rows, TU_UpdateIndexes which, bool update)
{
	if (which == TU_None)
		return;
	if (rows->entries == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(rows->context);

		rows->entries = palloc(sizeof(Entries));
		entries_open(rows->entries, rows->rel);
		MemoryContextSwitchTo(caller);
	}
	if (rows->entries->plain && which == TU_All)
	{
		entries_insert(rows->entries, rows->slot, update);
		return;
	}
	if (rows->estate == NULL)
		executor_open(rows);
	outbox_insert_entries(rows->info, rows->slot, rows->estate, update, which);
}

void
rows_insert(Rows *rows, const Datum *values, const bool *nulls, ItemPointer tid)
{
	store_values(rows, rows_slot(rows), values, nulls);
	if (goes_by_hand(rows, nulls))
	{
		simple_table_tuple_insert(rows->rel, rows->slot);
		add_entries(rows, TU_All, false);
	}
	else
		ExecSimpleRelationInsert(rows->info, rows->estate, rows->slot);
	if (tid != NULL)
		*tid = rows->slot->tts_tid;
	written(rows);
}

/* The caller holds the row's lock; tid becomes that of the new version. */
void
rows_update(Rows *rows, ItemPointer tid, const Datum *values, const bool *nulls)
{
	store_values(rows, rows_slot(rows), values, nulls);
	if (goes_by_hand(rows, nulls))
	{
		TU_UpdateIndexes which;

		CheckCmdReplicaIdentity(rows->rel, CMD_UPDATE);
		outbox_tuple_update(rows->rel, tid, rows->slot, GetActiveSnapshot(), &which);
		add_entries(rows, which, true);
	}
	else
		executor_update(rows, tid);
	*tid = rows->slot->tts_tid;
	written(rows);
}

static void
executor_update(Rows *rows, ItemPointer tid)
{
	TupleTableSlot *old = table_slot_create(rows->rel, NULL);
	EPQState	epq;

	outbox_epq_init(&epq, rows->estate);
	old->tts_tid = *tid;
	rows->estate->es_snapshot = GetActiveSnapshot();
	rows->estate->es_output_cid = GetCurrentCommandId(true);	/* triggers lock the row by it */
	ExecSimpleRelationUpdate(rows->info, rows->estate, &epq, old, rows->slot);
	EvalPlanQualEnd(&epq);
	ExecDropSingleTupleTableSlot(old);
}

void
rows_delete(Rows *rows, ItemPointer tid)
{
	if (goes_by_hand(rows, NULL))
	{
		CheckCmdReplicaIdentity(rows->rel, CMD_DELETE);
		simple_table_tuple_delete(rows->rel, tid, GetActiveSnapshot());
	}
	else
		executor_delete(rows, tid);
	written(rows);
}

static void
executor_delete(Rows *rows, ItemPointer tid)
{
	EPQState	epq;

	outbox_epq_init(&epq, rows->estate);
	ExecClearTuple(rows_slot(rows));
	rows->slot->tts_tid = *tid;
	rows->estate->es_snapshot = GetActiveSnapshot();
	rows->estate->es_output_cid = GetCurrentCommandId(true);
	ExecSimpleRelationDelete(rows->info, rows->estate, &epq, rows->slot);
	EvalPlanQualEnd(&epq);
}

static void
written(Rows *rows)
{
	if (rows->slot != NULL)
		ExecClearTuple(rows->slot);
	if (rows->estate != NULL)
		ResetPerTupleExprContext(rows->estate);
	CommandCounterIncrement();
}

/*
 * The row that was at this place when somebody looked last: NULL where the snapshot sees
 * none there.  The place may have been given to another row: the caller looks at its key.
 */
TupleTableSlot *
rows_fetch(Rows *rows, ItemPointer tid, Snapshot snapshot)
{
	if (!ItemPointerIsValid(tid) ||
		ItemPointerGetBlockNumber(tid) >= RelationGetNumberOfBlocks(rows->rel) ||
		!table_tuple_fetch_row_version(rows->rel, tid, snapshot, rows_slot(rows)))
		return NULL;
	return rows->slot;
}

RowScan *
rows_scan(Rows *rows, OutboxObject index, Snapshot snapshot,
		  ScanDirection direction, int n_keys, ScanKey keys)
{
	RowScan    *scan = palloc(sizeof(RowScan));

	scan->index = index_open(outbox_oid(index), AccessShareLock);
	scan->context = CurrentMemoryContext;
	scan->direction = direction;
	scan->slot = table_slot_create(rows->rel, NULL);
	scan->scan = outbox_index_beginscan(rows->rel, scan->index, snapshot, n_keys, 0);
	index_rescan(scan->scan, keys, n_keys, NULL, 0);
	return scan;
}

TupleTableSlot *
rows_next(RowScan *scan)
{
	MemoryContext caller = MemoryContextSwitchTo(scan->context);
	bool		found = index_getnext_slot(scan->scan, scan->direction, scan->slot);

	MemoryContextSwitchTo(caller);
	return found ? scan->slot : NULL;
}

void
rows_scan_end(RowScan *scan)
{
	index_endscan(scan->scan);
	index_close(scan->index, AccessShareLock);
	ExecDropSingleTupleTableSlot(scan->slot);
	pfree(scan);
}
