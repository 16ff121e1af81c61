/*
 * entries.c
 *		Index entries of a row that was just written, without the executor where it can be.
 *
 * An index of plain columns needs no executor; neither does a partial one whose predicate
 * says that a column is a given text, as those of outbox.delivery do: the predicate is
 * read as the relation cache has it, not compiled at each call.  Where a table has any
 * other index (of an expression, deferrable, of an exclusion constraint, being built) the
 * executor does it for all of them.
 *
 * Locks: RowExclusiveLock on the indexes, until entries_close().
 */
#include "entries.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "catalog/index.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

static bool index_open_plain(EntryIndex *index, Oid oid);
static bool is_plain(Relation rel);
static bool read_predicate(EntryIndex *index);
static bool belongs(const EntryIndex *index, TupleTableSlot *slot);

void
entries_open(Entries *entries, Relation table)
{
	List	   *oids = RelationGetIndexList(table);
	ListCell   *cell;

	entries->table = table;
	entries->plain = true;
	entries->n = 0;
	entries->indexes = palloc(Max(list_length(oids), 1) * sizeof(EntryIndex));
	foreach(cell, oids)
	{
		if (!index_open_plain(&entries->indexes[entries->n++], lfirst_oid(cell)))
			entries->plain = false;
	}
	list_free(oids);
}

void
entries_close(Entries *entries)
{
	for (int i = 0; i < entries->n; i++)
		index_close(entries->indexes[i].rel, RowExclusiveLock);
}

/* A btree asks for nothing in its IndexInfo. */
static bool
index_open_plain(EntryIndex *index, Oid oid)
{
	memset(index, 0, sizeof(EntryIndex));
	index->rel = index_open(oid, RowExclusiveLock);
	if (!is_plain(index->rel) || !read_predicate(index))
		return false;
	index->info = index->rel->rd_rel->relam == BTREE_AM_OID ?
		makeNode(IndexInfo) : BuildIndexInfo(index->rel);
	return true;
}

static bool
is_plain(Relation rel)
{
	Form_pg_index form = rel->rd_index;

	if (rel->rd_rel->relkind != RELKIND_INDEX || !form->indisready ||
		!form->indimmediate || form->indisexclusion)
		return false;
	for (int i = 0; i < form->indnatts; i++)
	{
		if (form->indkey.values[i] <= 0)
			return false;
	}
	return true;
}

/* True: there is none, or it is "column = 'text'".  It stays where it is while the index is open. */
static bool
read_predicate(EntryIndex *index)
{
	OpExpr	   *equals;
	Var		   *column;
	Const	   *value;

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
	index->column = column->varattno;
	index->value = value;
	return true;
}

/* The default collation compares bytes when it looks for equality. */
static bool
belongs(const EntryIndex *index, TupleTableSlot *slot)
{
	Datum		value;
	bool		isnull;
	text	   *a;
	text	   *b;

	if (index->column == 0)
		return true;
	value = slot_getattr(slot, index->column, &isnull);
	if (isnull)
		return false;
	a = DatumGetTextPP(value);
	b = DatumGetTextPP(index->value->constvalue);
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
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
		Form_pg_index form = index->rel->rd_index;
		Datum		values[INDEX_MAX_KEYS];
		bool		nulls[INDEX_MAX_KEYS];

		if (!belongs(index, slot))
			continue;
		for (int j = 0; j < form->indnatts; j++)
			values[j] = slot_getattr(slot, form->indkey.values[j], &nulls[j]);
		(void) index_insert(index->rel, values, nulls, &slot->tts_tid, entries->table,
							form->indisunique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO, update, index->info);
	}
}
