/*
 * entries.h
 *		Index entries of a row that was just written, without the executor where it can be.
 */
#ifndef OUTBOX_ENTRIES_H
#define OUTBOX_ENTRIES_H

#include "postgres.h"

#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "nodes/memnodes.h"
#include "nodes/primnodes.h"
#include "utils/relcache.h"

/* the longest text that a predicate may compare with */
#define ENTRY_TEXT	31

typedef struct EntryIndex
{
	Oid			oid;
	/* partial: the rows where this column is this text; or 0 */
	AttrNumber	column;
	int			length;
	char		text[ENTRY_TEXT + 1];
	/* once it is open */
	Relation	rel;
	IndexInfo  *info;
} EntryIndex;

/* the indexes of a table, for writing; in the memory context of the caller */
typedef struct Entries
{
	Relation	table;
	MemoryContext context;
	bool		plain;			/* entries_insert() can do it */
	int			n;
	EntryIndex *indexes;
} Entries;

extern void entries_register_callbacks(void);
extern void entries_open(Entries *entries, Relation table);
extern void entries_close(Entries *entries);
/* "update": the row has taken the place of another */
extern void entries_insert(Entries *entries, TupleTableSlot *slot, bool update);

#endif							/* OUTBOX_ENTRIES_H */
