/*
 * rows.h
 *		Reading and writing rows of our tables without SPI: no plan, so no plan that
 *		depends on statistics, and no rights but those that the SQL function has checked.
 */
#ifndef OUTBOX_ROWS_H
#define OUTBOX_ROWS_H

#include "catalog.h"
#include "entries.h"

#include "access/genam.h"
#include "access/skey.h"
#include "executor/executor.h"

typedef struct Rows
{
	Relation	rel;
	int			columns;		/* as many values has each row that is written */
	LOCKMODE	lockmode;
	MemoryContext context;
	TupleTableSlot *slot;		/* see rows_slot() */
	bool		writing;
	Entries    *entries;		/* indexes, opened when the first row needs them; or NULL */
	/* where the executor writes; or NULL */
	EState	   *estate;
	ResultRelInfo *info;
	bool		triggers;		/* which may be fired after it */
} Rows;

typedef struct RowScan
{
	Relation	index;
	IndexScanDesc scan;
	MemoryContext context;		/* where the scan allocates, whatever context rows_next() is called in */
	ScanDirection direction;
	TupleTableSlot *slot;
} RowScan;

extern Rows *rows_open(OutboxObject table, bool writing);
extern Rows *rows_open_segment(Oid segment);
extern TupleTableSlot *rows_slot(Rows *rows);
extern void rows_close(Rows *rows);
/* Each makes its change visible to the next snapshot of this transaction. */
extern void rows_insert(Rows *rows, const Datum *values, const bool *nulls, ItemPointer tid);
extern void rows_update(Rows *rows, ItemPointer tid, const Datum *values, const bool *nulls);
extern void rows_delete(Rows *rows, ItemPointer tid);

extern TupleTableSlot *rows_fetch(Rows *rows, ItemPointer tid, Snapshot snapshot);
extern RowScan *rows_scan(Rows *rows, OutboxObject index, Snapshot snapshot,
						  ScanDirection direction, int n_keys, ScanKey keys);
extern TupleTableSlot *rows_next(RowScan *scan);
extern void rows_scan_end(RowScan *scan);

#endif							/* OUTBOX_ROWS_H */
