/*
 * constraints.c
 *		Deferred constraints around hook calls.
 *
 * A violation of a deferred constraint comes up at the commit, too late to be blamed on
 * one of several hook calls.  So each call ends with SET CONSTRAINTS ALL IMMEDIATE, which
 * runs the checks that its changes have queued.
 *
 * This statement outlives its subtransaction: for the rest of the transaction nothing is
 * deferred any more, and a hook that relies on an initially deferred constraint would
 * fail without fault.  Where such constraints exist, drain() therefore makes one call
 * per transaction; deliver(), which has only the caller's, puts the constraints that
 * begin a transaction deferred back into that mode.
 */
#include "deliver.h"

#include "access/genam.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "nodes/makefuncs.h"
#include "utils/lsyscache.h"

static void set_constraints(List *constraints, bool deferred);
static List *initially_deferred(void);
static void defer_work(void *arg);

void
constraints_check(void)
{
	set_constraints(NIL, false);
}

static void
set_constraints(List *constraints, bool deferred)
{
	ConstraintsSetStmt *statement = makeNode(ConstraintsSetStmt);

	statement->constraints = constraints;
	statement->deferred = deferred;
	AfterTriggerSetState(statement);
}

/* Each deferrable constraint has triggers; reading these answers for all kinds. */
bool
constraints_deferred_exist(void)
{
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	tuple;
	bool		found = false;

	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
		found = ((Form_pg_trigger) GETSTRUCT(tuple))->tginitdeferred;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

/*
 * As the owner: naming a constraint asks for rights on its schema.  A name may also stand
 * for a constraint of another table that is not deferrable, which is an error: then one
 * by one, and without those.
 */
void
constraints_defer(void)
{
	List	   *all = initially_deferred();
	OwnerSession session;
	ListCell   *cell;

	if (all == NIL)
		return;
	session_owner(&session);
	if (subtransaction_try(defer_work, all) != NULL)
	{
		foreach(cell, all)
			(void) subtransaction_try(defer_work, list_make1(lfirst(cell)));
	}
	session_caller(&session);
}

static void
defer_work(void *arg)
{
	set_constraints(arg, true);
}

static List *
initially_deferred(void)
{
	Relation	rel = table_open(ConstraintRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	tuple;
	List	   *names = NIL;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_constraint constraint = (Form_pg_constraint) GETSTRUCT(tuple);
		char	   *schema;

		if (!constraint->condeferred || isOtherTempNamespace(constraint->connamespace))
			continue;
		schema = get_namespace_name(constraint->connamespace);
		if (schema != NULL)
			names = lappend(names, makeRangeVar(schema, pstrdup(NameStr(constraint->conname)), -1));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return names;
}
