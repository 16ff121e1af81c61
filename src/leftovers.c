/*
 * leftovers.c
 *		What a hook leaves behind in the session.
 *
 * A cursor WITH HOLD runs its query at the commit: after the time limit, where a failure
 * would be laid at the door of a whole group and a cancel be taken for an operator's.  So
 * it runs as a part of the call, and is closed: nobody could fetch from it later.  A commit
 * would hold in the same way, and a worker keep for ever, what a procedural language has
 * pinned and not read to its end; that is closed before the commit.
 *
 * Temporary tables and prepared statements stay.  In a worker they would be in the way of
 * the next message, whose hook would fail over their names in each attempt: a worker
 * drops them after each commit.  A client's session is its own business.
 *
 * Locks: those of dropping temporary tables.
 */
#include "deliver.h"

#include "statement.h"

#include "catalog/namespace.h"
#include "commands/prepare.h"
#include "executor/spi.h"
#include "tcop/utility.h"
#include "utils/inval.h"
#include "utils/portal.h"
#include "utils/syscache.h"

static ProcessUtility_hook_type previous_utility = NULL;
/* since the last hook returned: looking for one costs more than a hook that does little */
static bool cursor_declared = false;
/* of the database; PL/pgSQL pins too, and never forgets */
static bool languages_known = false;
static bool has_other_languages = false;

static void leftovers_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
							  ProcessUtilityContext context, ParamListInfo params,
							  QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion);
static bool other_languages_exist(void);
static void languages_changed(Datum argument, int cache, uint32 hash);
static List *cursors(void);
static void finish(Portal portal);
static void close_pinned(Portal portal);

void
leftovers_register_hook(void)
{
	previous_utility = ProcessUtility_hook;
	ProcessUtility_hook = leftovers_utility;
}

static void
leftovers_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
				  ProcessUtilityContext context, ParamListInfo params,
				  QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion)
{
	ProcessUtility_hook_type next = previous_utility ? previous_utility : standard_ProcessUtility;

	cursor_declared |= IsA(pstmt->utilityStmt, DeclareCursorStmt);
	next(pstmt, query, read_only_tree, context, params, environment, dest, completion);
}

/* In the subtransaction of the hook that has returned. */
void
leftovers_finish_cursors(void)
{
	ListCell   *cell;

	if (!cursor_declared)
		return;
	cursor_declared = false;
	foreach(cell, cursors())
	{
		Portal		portal = GetPortalByName(lfirst(cell));

		if (PortalIsValid(portal) && portal->createSubid == GetCurrentSubTransactionId() &&
			portal->status == PORTAL_READY && (portal->cursorOptions & CURSOR_OPT_HOLD) != 0)
			finish(portal);
	}
}

/* In the subtransaction of a group, to which those of its hooks have left theirs. */
void
leftovers_close_pinned(void)
{
	ListCell   *cell;

	if (!other_languages_exist())
		return;
	foreach(cell, cursors())
	{
		Portal		portal = GetPortalByName(lfirst(cell));

		if (PortalIsValid(portal) && portal->createSubid == GetCurrentSubTransactionId() && portal->portalPinned)
			close_pinned(portal);
	}
}

/* To list cursors takes as long as a few hooks do. */
static bool
other_languages_exist(void)
{
	static bool registered = false;
	Statement	search;

	if (languages_known)
		return has_other_languages;
	if (!registered)
		CacheRegisterSyscacheCallback(LANGOID, languages_changed, (Datum) 0);
	registered = true;
	/* before looking: what changes meanwhile makes it unknown again; and an error leaves the safe side */
	languages_known = has_other_languages = true;
	statement_init(&search,
				   "SELECT FROM pg_catalog.pg_language l"
				   " WHERE l.lanispl AND l.lanname OPERATOR(pg_catalog.<>) 'plpgsql' LIMIT 1");
	has_other_languages = (statement_run(&search) > 0);
	return has_other_languages;
}

static void
languages_changed(Datum argument, int cache, uint32 hash)
{
	languages_known = false;
}

static List *
cursors(void)
{
	MemoryContext caller = CurrentMemoryContext;
	List	   *names = NIL;
	OwnerSession session;

	session_owner(&session);
	SPI_connect();
	if (SPI_execute("SELECT c.name FROM pg_catalog.pg_cursor() c", true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not list cursors");
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext spi = MemoryContextSwitchTo(caller);

		names = lappend(names, SPI_getvalue(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, 1));
		MemoryContextSwitchTo(spi);
	}
	SPI_finish();
	session_caller(&session);
	return names;
}

static void
finish(Portal portal)
{
	SPI_connect();
	SPI_cursor_move(portal, true, FETCH_ALL);
	SPI_cursor_close(portal);
	SPI_finish();
}

static void
close_pinned(Portal portal)
{
	SPI_connect();
	UnpinPortal(portal);
	SPI_cursor_close(portal);
	SPI_finish();
}

/* In a worker, at the beginning of a transaction. */
void
leftovers_drop(void)
{
	Oid			namespace;
	Oid			toast_namespace;

	DropAllPreparedStatements();
	GetTempNamespaceState(&namespace, &toast_namespace);
	if (!OidIsValid(namespace))
		return;
	(void) snapshot_push();
	ResetTempTableNamespace();
	snapshot_pop();
}
