/*
 * rows.c
 *		Reading and writing rows of our tables without SPI.
 *
 * Writing goes through the executor's functions for logical replication's apply
 * workers, which take care of indexes, constraints, triggers and publications; reading
 * through index scans with explicit keys.  So a hot path never waits for a planner, and
 * no ill-timed ANALYZE can change what it does.
 *
 * Locks: the table's, RowExclusiveLock for writing and AccessShareLock for reading, kept
 * to the end of the transaction when writing.
 */
#include "rows.h"

#include "access/table.h"
#include "access/tableam.h"
#include "commands/trigger.h"
#include "parser/parse_relation.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

static void writer_open(Rows *rows);
static bool only_ours(TriggerDesc *triggers);
static void store_values(TupleTableSlot *slot, const Datum *values, const bool *nulls);

Rows *
rows_open(OutboxObject table, bool writing)
{
	return rows_open_oid(outbox_oid(table), writing);
}

Rows *
rows_open_oid(Oid table, bool writing)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox rows",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	Rows	   *rows = palloc0(sizeof(Rows));

	rows->context = context;
	rows->lockmode = writing ? RowExclusiveLock : AccessShareLock;
	rows->rel = table_open(table, rows->lockmode);
	rows->slot = table_slot_create(rows->rel, NULL);
	if (writing)
		writer_open(rows);
	MemoryContextSwitchTo(caller);
	return rows;
}

/* The range table is for the executor's functions, which ask it which columns change. */
static void
writer_open(Rows *rows)
{
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
	AfterTriggerBeginQuery();
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
	{
		AfterTriggerEndQuery(rows->estate);
		ExecCloseIndices(rows->info);
		ExecCloseResultRelations(rows->estate);	/* those that triggers opened */
		ExecResetTupleTable(rows->estate->es_tupleTable, false);
		FreeExecutorState(rows->estate);
	}
	ExecDropSingleTupleTableSlot(rows->slot);
	table_close(rows->rel, rows->estate != NULL ? NoLock : rows->lockmode);
	MemoryContextDelete(rows->context);
}

/* The arrays have the columns that the install script made. */
void
rows_check_columns(Relation rel, int columns)
{
	if (RelationGetNumberOfAttributes(rel) == columns)
		return;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"outbox.%s\" was altered", RelationGetRelationName(rel)),
			 errdetail("It has %d columns, the extension made %d.",
					   RelationGetNumberOfAttributes(rel), columns),
			 errhint("Tables of the extension cannot have other columns; keep your own in a table beside it.")));
}

static void
store_values(TupleTableSlot *slot, const Datum *values, const bool *nulls)
{
	int			n = slot->tts_tupleDescriptor->natts;

	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, n * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, n * sizeof(bool));
	ExecStoreVirtualTuple(slot);
	ExecMaterializeSlot(slot);
}

void
rows_insert(Rows *rows, const Datum *values, const bool *nulls, ItemPointer tid)
{
	store_values(rows->slot, values, nulls);
	ExecSimpleRelationInsert(rows->info, rows->estate, rows->slot);
	if (tid != NULL)
		*tid = rows->slot->tts_tid;
	ExecClearTuple(rows->slot);
	ResetPerTupleExprContext(rows->estate);
	CommandCounterIncrement();
}

/* The caller holds the row's lock; tid becomes that of the new version. */
void
rows_update(Rows *rows, ItemPointer tid, const Datum *values, const bool *nulls)
{
	TupleTableSlot *old = table_slot_create(rows->rel, NULL);
	EPQState	epq;

	outbox_epq_init(&epq, rows->estate);
	old->tts_tid = *tid;
	store_values(rows->slot, values, nulls);
	rows->estate->es_snapshot = GetActiveSnapshot();
	rows->estate->es_output_cid = GetCurrentCommandId(true);	/* triggers lock the row by it */
	ExecSimpleRelationUpdate(rows->info, rows->estate, &epq, old, rows->slot);
	*tid = rows->slot->tts_tid;
	EvalPlanQualEnd(&epq);
	ExecClearTuple(rows->slot);
	ExecDropSingleTupleTableSlot(old);
	ResetPerTupleExprContext(rows->estate);
	CommandCounterIncrement();
}

void
rows_delete(Rows *rows, ItemPointer tid)
{
	EPQState	epq;

	outbox_epq_init(&epq, rows->estate);
	ExecClearTuple(rows->slot);
	rows->slot->tts_tid = *tid;
	rows->estate->es_snapshot = GetActiveSnapshot();
	rows->estate->es_output_cid = GetCurrentCommandId(true);
	ExecSimpleRelationDelete(rows->info, rows->estate, &epq, rows->slot);
	EvalPlanQualEnd(&epq);
	ResetPerTupleExprContext(rows->estate);
	CommandCounterIncrement();
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
