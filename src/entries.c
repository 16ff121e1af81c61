/*
 * entries.c
 *		Index entries of a row that was just written, without the executor where it can be.
 *
 * A btree of plain columns needs no executor; neither does a partial one whose predicate
 * says that a column is a given text, as those of outbox.delivery do: the predicate is
 * read as the relation cache has it, not compiled at each call.  Where a table has any
 * other index (of another kind, of an expression, deferrable, of an exclusion constraint,
 * being built) the executor does it for all of them.
 *
 * What the indexes of the last table with partial ones are is remembered until a relcache
 * message names the table, as any change of its indexes sends one: so those that a row
 * does not belong to need not be opened.
 *
 * Locks: the caller has the table's, RowExclusiveLock; the same on the indexes, until
 * entries_close().
 */
#include "entries.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "utils/inval.h"
#include "utils/rel.h"

#define REMEMBERED_INDEXES	16

static Oid	remembered = InvalidOid;	/* a table all of whose indexes are plain */
static int	n_remembered;
static EntryIndex remembered_indexes[REMEMBERED_INDEXES];
static uint64 messages = 0;		/* that named any table */

static void forget(Datum argument, Oid relation);
static void entry_open(Entries *entries, EntryIndex *index);
static void remember(const Entries *entries);
static bool is_plain(Relation rel);
static bool read_predicate(EntryIndex *index);
static bool belongs(const EntryIndex *index, TupleTableSlot *slot);

void
entries_register_callbacks(void)
{
	CacheRegisterRelcacheCallback(forget, (Datum) 0);
}

static void
forget(Datum argument, Oid relation)
{
	messages++;
	if (relation == InvalidOid || relation == remembered)
		remembered = InvalidOid;
}

void
entries_open(Entries *entries, Relation table)
{
	uint64		messages_before = messages;
	List	   *oids;
	ListCell   *cell;

	entries->table = table;
	entries->context = CurrentMemoryContext;
	entries->plain = true;
	entries->n = 0;
	if (RelationGetRelid(table) == remembered)
	{
		entries->n = n_remembered;
		entries->indexes = palloc(sizeof(remembered_indexes));
		memcpy(entries->indexes, remembered_indexes, sizeof(remembered_indexes));
		return;
	}

	oids = RelationGetIndexList(table);
	entries->indexes = palloc0(Max(list_length(oids), 1) * sizeof(EntryIndex));
	foreach(cell, oids)
	{
		EntryIndex *index = &entries->indexes[entries->n++];

		index->oid = lfirst_oid(cell);
		entry_open(entries, index);
		if (!is_plain(index->rel) || !read_predicate(index))
			entries->plain = false;
	}
	list_free(oids);
	if (messages == messages_before)
		remember(entries);
}

static void
remember(const Entries *entries)
{
	bool		partial = false;

	for (int i = 0; i < entries->n; i++)
		partial |= (entries->indexes[i].column != 0);
	if (!partial || !entries->plain || entries->n > REMEMBERED_INDEXES)
		return;
	remembered = RelationGetRelid(entries->table);
	n_remembered = entries->n;
	memcpy(remembered_indexes, entries->indexes, entries->n * sizeof(EntryIndex));
	for (int i = 0; i < n_remembered; i++)
	{
		remembered_indexes[i].rel = NULL;
		remembered_indexes[i].info = NULL;
	}
}

void
entries_close(Entries *entries)
{
	for (int i = 0; i < entries->n; i++)
	{
		if (entries->indexes[i].rel != NULL)
			index_close(entries->indexes[i].rel, RowExclusiveLock);
	}
}

/* A btree asks for nothing in its IndexInfo. */
static void
entry_open(Entries *entries, EntryIndex *index)
{
	MemoryContext caller = MemoryContextSwitchTo(entries->context);

	index->rel = index_open(index->oid, RowExclusiveLock);
	index->info = makeNode(IndexInfo);
	MemoryContextSwitchTo(caller);
}

static bool
is_plain(Relation rel)
{
	Form_pg_index form = rel->rd_index;

	if (rel->rd_rel->relkind != RELKIND_INDEX || rel->rd_rel->relam != BTREE_AM_OID ||
		!form->indisready || !form->indimmediate || form->indisexclusion)
		return false;
	for (int i = 0; i < form->indnatts; i++)
	{
		if (form->indkey.values[i] <= 0)
			return false;
	}
	return true;
}

/* True: there is none, or it is "column = 'text'". */
static bool
read_predicate(EntryIndex *index)
{
	OpExpr	   *equals;
	Var		   *column;
	Const	   *value;
	text	   *constant;

	if (heap_attisnull(index->rel->rd_indextuple, Anum_pg_index_indpred, NULL))
		return true;
	if (index->rel->rd_indpred == NIL)
		(void) RelationGetIndexPredicate(index->rel);
	if (list_length(index->rel->rd_indpred) != 1)
		return false;
	equals = linitial(index->rel->rd_indpred);
	if (!IsA(equals, OpExpr) || equals->opno != TextEqualOperator ||
		equals->inputcollid != DEFAULT_COLLATION_OID)
		return false;
	column = linitial(equals->args);
	value = lsecond(equals->args);
	if (!IsA(column, Var) || column->varattno <= 0 || !IsA(value, Const) || value->constisnull)
		return false;
	constant = DatumGetTextPP(value->constvalue);
	if (VARSIZE_ANY_EXHDR(constant) > ENTRY_TEXT)
		return false;
	index->column = column->varattno;
	index->length = VARSIZE_ANY_EXHDR(constant);
	memcpy(index->text, VARDATA_ANY(constant), index->length);
	return true;
}

/* The default collation compares bytes when it looks for equality. */
static bool
belongs(const EntryIndex *index, TupleTableSlot *slot)
{
	Datum		value;
	bool		isnull;
	text	   *given;

	if (index->column == 0)
		return true;
	value = slot_getattr(slot, index->column, &isnull);
	if (isnull)
		return false;
	given = DatumGetTextPP(value);
	return VARSIZE_ANY_EXHDR(given) == index->length &&
		memcmp(VARDATA_ANY(given), index->text, index->length) == 0;
}

/*
 * As ExecInsertIndexTuples() would, which is told of no changed columns: the hint that
 * entries of old versions may go is given with every update.
 */
void
entries_insert(Entries *entries, TupleTableSlot *slot, bool update)
{
	for (int i = 0; i < entries->n; i++)
	{
		EntryIndex *index = &entries->indexes[i];
		Form_pg_index form;
		Datum		values[INDEX_MAX_KEYS];
		bool		nulls[INDEX_MAX_KEYS];

		if (!belongs(index, slot))
			continue;
		if (index->rel == NULL)
			entry_open(entries, index);
		form = index->rel->rd_index;
		for (int j = 0; j < form->indnatts; j++)
			values[j] = slot_getattr(slot, form->indkey.values[j], &nulls[j]);
		(void) index_insert(index->rel, values, nulls, &slot->tts_tid, entries->table,
							form->indisunique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO, update, index->info);
	}
}
