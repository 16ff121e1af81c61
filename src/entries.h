/*
 * entries.h
 *		Index entries of a row that was just written, without the executor where it can be.
 */
#ifndef OUTBOX_ENTRIES_H
#define OUTBOX_ENTRIES_H

#include "postgres.h"

#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "nodes/primnodes.h"
#include "utils/relcache.h"

typedef struct EntryIndex
{
	Relation	rel;
	IndexInfo  *info;
	AttrNumber	column;			/* partial: rows where this column is this text; or 0 */
	Const	   *value;
} EntryIndex;

/* the indexes of a table, open for writing; in the memory context of the caller */
typedef struct Entries
{
	Relation	table;
	bool		plain;			/* entries_insert() can do it */
	int			n;
	EntryIndex *indexes;
} Entries;

extern void entries_open(Entries *entries, Relation table);
extern void entries_close(Entries *entries);
/* "update": the row has taken the place of another */
extern void entries_insert(Entries *entries, TupleTableSlot *slot, bool update);

#endif							/* OUTBOX_ENTRIES_H */
