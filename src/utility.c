/*
 * utility.c
 *		Commands that want a database to themselves, while our processes are connected.
 *
 * DROP DATABASE, ALTER DATABASE … RENAME or SET TABLESPACE and CREATE DATABASE … TEMPLATE
 * fail where somebody else is connected.  Test frameworks run them all day.  So the
 * database is suspended first: its processes are asked to leave, those that do not are
 * terminated, and none is started until its transaction has ended.  Only for those who could
 * run the command: others shall not stop a worker by trying.
 *
 * Also: DROP EXTENSION waits for our processes; COMMIT PREPARED wakes the coordinator, since no commit callback of the
 * transaction's own runs then; a new database is looked at when its making has been
 * committed; when ALTER DATABASE or ROLE … SET has been committed our processes there are
 * asked to leave, so that others connect with the new settings, or do not, where that is
 * what was set; and when a role was altered, workers that could not connect try again.
 */
#include "worker.h"

#include "catalog.h"
#include "counters.h"
#include "floor.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

/* Who is idle leaves by itself; who calls a hook, or is registered, takes longer. */
#define SUSPEND_ASK_MS	100
#define SUSPEND_WAIT_MS	5000

typedef enum ChangeKind
{
	CHANGE_SETTINGS,			/* who is connected has old ones */
	CHANGE_DATABASE,			/* the same, and it may be one to serve now */
	CHANGE_NEW_NAME,			/* it may be one to serve now, and nobody is connected */
	CHANGE_RESUMED,				/* the same, and it was suspended: also where it fails */
	CHANGE_ROLE,				/* it may be able to connect now */
	CHANGE_ROLE_NAME
} ChangeKind;

/* what is to be told at the end of the transaction */
typedef struct Change
{
	ChangeKind	kind;
	Oid			database;		/* InvalidOid: all */
	Oid			role;			/* InvalidOid: all */
} Change;

static List *changes = NIL;		/* in the memory of the transaction */

static ProcessUtility_hook_type previous_utility = NULL;

static void outbox_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
						   ProcessUtilityContext context, ParamListInfo params,
						   QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion);
static void wait_for_workers(DropStmt *statement);
static Oid database_wanted_alone(Node *statement);
static Oid others_database(Oid database);
static Oid template_of(CreatedbStmt *statement);
static bool sets_tablespace(AlterDatabaseStmt *statement);
static Oid owned_database(const char *name);
static bool suspend(Oid database);
static bool anybody_connected(Oid database, bool signal_them);
static void resume(Oid database);
static void after_success(NodeTag tag, Node *statement, Oid wanted, Oid alone);
static void after_drop(Oid wanted, Oid alone);
static bool is_served(void);
static void tell_of_database(ChangeKind kind, const char *name);
static void tell_at_end(ChangeKind kind, Oid database, Oid role);
static void transaction_end(XactEvent event, void *arg);

void
utility_register_hook(void)
{
	previous_utility = ProcessUtility_hook;
	ProcessUtility_hook = outbox_utility;
	RegisterXactCallback(transaction_end, NULL);
}

static void
outbox_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
			   ProcessUtilityContext context, ParamListInfo params,
			   QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion)
{
	Node	   *statement = pstmt->utilityStmt;
	NodeTag		tag = nodeTag(statement);
	ProcessUtility_hook_type next = previous_utility ? previous_utility : standard_ProcessUtility;
	Oid			wanted = database_wanted_alone(statement);
	Oid			alone = OidIsValid(wanted) && suspend(wanted) ? wanted : InvalidOid;

	if (IsA(statement, DropStmt))
		wait_for_workers(castNode(DropStmt, statement));
	PG_TRY();
	{
		next(pstmt, query, read_only_tree, context, params, environment, dest, completion);
	}
	PG_CATCH();
	{
		if (OidIsValid(alone))
			resume(alone);
		PG_RE_THROW();
	}
	PG_END_TRY();
	after_success(tag, statement, wanted, alone);
}

/*
 * DROP EXTENSION: our processes lock the extension, then its tables, and so has it to.
 * Only for those who can drop it: others shall stop nobody while they wait.
 */
static void
wait_for_workers(DropStmt *statement)
{
	Oid			extension;
	LOCKTAG		tag;
	ListCell   *cell;

	if (statement->removeType != OBJECT_EXTENSION)
		return;
	foreach(cell, statement->objects)
	{
		if (strcmp(strVal(lfirst(cell)), "outbox") != 0)
			continue;
		extension = get_extension_oid("outbox", true);
		if (!OidIsValid(extension) || !outbox_extension_ownercheck(extension, GetUserId()))
			continue;
		presence_locktag(&tag, extension);
		(void) LockAcquire(&tag, AccessExclusiveLock, false, false);
	}
}

/* The database that the command wants to itself and the caller may have; or InvalidOid. */
static Oid
database_wanted_alone(Node *statement)
{
	switch (nodeTag(statement))
	{
		case T_DropdbStmt:
			return others_database(owned_database(castNode(DropdbStmt, statement)->dbname));
		case T_RenameStmt:
			if (castNode(RenameStmt, statement)->renameType == OBJECT_DATABASE)
				return others_database(owned_database(castNode(RenameStmt, statement)->subname));
			return InvalidOid;
		case T_AlterDatabaseStmt:
			if (sets_tablespace(castNode(AlterDatabaseStmt, statement)))
				return others_database(owned_database(castNode(AlterDatabaseStmt, statement)->dbname));
			return InvalidOid;
		case T_CreatedbStmt:
			return template_of(castNode(CreatedbStmt, statement));
		default:
			return InvalidOid;
	}
}

/* The one that a session is connected to it can copy, but neither drop, rename nor move. */
static Oid
others_database(Oid database)
{
	return database == MyDatabaseId ? InvalidOid : database;
}

static Oid
template_of(CreatedbStmt *statement)
{
	ListCell   *cell;

	foreach(cell, statement->options)
	{
		DefElem    *option = lfirst_node(DefElem, cell);

		if (strcmp(option->defname, "template") == 0 && option->arg != NULL)
			return owned_database(defGetString(option));
	}
	return InvalidOid;
}

static bool
sets_tablespace(AlterDatabaseStmt *statement)
{
	ListCell   *cell;

	foreach(cell, statement->options)
	{
		if (strcmp(lfirst_node(DefElem, cell)->defname, "tablespace") == 0)
			return true;
	}
	return false;
}

static Oid
owned_database(const char *name)
{
	Oid			database = get_database_oid(name, true);

	if (!OidIsValid(database) || !outbox_database_ownercheck(database, GetUserId()))
		return InvalidOid;
	return database;
}

/*
 * End our processes in the database and wait until they are gone.  False: it has none,
 * and nothing is to be resumed.
 */
static bool
suspend(Oid database)
{
	DatabaseSlot *slot = database_slot(database, false);
	TimestampTz began = clock_machine();

	if (slot == NULL || !database_suspend(slot))
		return false;
	(void) workers_ask_to_leave(database, InvalidOid);

	PG_TRY();
	{
		while (clock_machine() < began + MSECS(SUSPEND_WAIT_MS) &&
			   anybody_connected(database, clock_machine() > began + MSECS(SUSPEND_ASK_MS)))
		{
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 10,
							 outbox_wait_event(OUTBOX_WAIT_LEAVE));
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
	}
	PG_CATCH();
	{
		resume(database);
		PG_RE_THROW();
	}
	PG_END_TRY();
	return true;
}

/* Those registered and not yet started count too: they look before they connect. */
static bool
anybody_connected(Oid database, bool signal_them)
{
	pid_t		pids[WORKERS_MAX];
	int			n = 0;
	bool		any = false;
	TimestampTz now = clock_machine();

	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!slot->used || slot->database != database)
			continue;
		if (slot->pid != 0)
			pids[n++] = slot->pid;
		any |= (slot->pid != 0 || now - slot->registered_at < USECS_PER_SEC);
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n && signal_them; i++)
		(void) kill(pids[i], SIGTERM);
	return any;
}

/*
 * At once only where the command has failed: else its locks are held to the end of the
 * transaction, and whoever is started before waits for them.  A probe that had to make way
 * has not looked, so then another is asked for.
 */
static void
resume(Oid database)
{
	DatabaseSlot *slot = database_slot(database, false);

	if (slot != NULL)
		database_resume(slot);
	tell_at_end(CHANGE_RESUMED, database, InvalidOid);
}

/*
 * A CALL that has ended a transaction may have freed its own statement: only those of the
 * kinds named here are looked at, which cannot.
 */
static void
after_success(NodeTag tag, Node *statement, Oid wanted, Oid alone)
{
	if (worker_state == NULL)
		return;
	switch (tag)
	{
		case T_DropdbStmt:
			after_drop(wanted, alone);
			return;
		case T_CreatedbStmt:
			tell_of_database(CHANGE_NEW_NAME, castNode(CreatedbStmt, statement)->dbname);
			break;
		case T_AlterDatabaseSetStmt:
			tell_of_database(CHANGE_SETTINGS, castNode(AlterDatabaseSetStmt, statement)->dbname);
			break;
		case T_AlterDatabaseStmt:
			/* IS_TEMPLATE, ALLOW_CONNECTIONS */
			tell_of_database(CHANGE_DATABASE, castNode(AlterDatabaseStmt, statement)->dbname);
			break;
		case T_AlterRoleSetStmt:
			tell_at_end(CHANGE_SETTINGS, InvalidOid, castNode(AlterRoleSetStmt, statement)->role == NULL ? InvalidOid :
						   get_rolespec_oid(castNode(AlterRoleSetStmt, statement)->role, true));
			break;
		case T_AlterRoleStmt:
			tell_at_end(CHANGE_ROLE, InvalidOid, get_rolespec_oid(castNode(AlterRoleStmt, statement)->role, true));
			break;
		case T_RenameStmt:
			if (castNode(RenameStmt, statement)->renameType == OBJECT_ROLE)
				tell_at_end(CHANGE_ROLE_NAME, InvalidOid, InvalidOid);
			else if (OidIsValid(wanted))
				tell_at_end(CHANGE_NEW_NAME, wanted, InvalidOid);
			break;
		case T_TransactionStmt:
			if (castNode(TransactionStmt, statement)->kind == TRANS_STMT_COMMIT_PREPARED && is_served())
				wake_database(MyDatabaseId, WORK_LOOK | WORK_ENQUEUED | WORK_READY);
			break;
		case T_DropStmt:
			/* it may have been ours: then our processes have nothing to do here any more */
			if (castNode(DropStmt, statement)->removeType == OBJECT_EXTENSION && is_served())
				wake_at_commit(WORK_LOOK);
			break;
		default:
			break;
	}
	if (OidIsValid(alone))
		tell_at_end(CHANGE_RESUMED, alone, InvalidOid);
}

/* With IF EXISTS it may have been dropped by somebody else meanwhile, or have another name now. */
static void
after_drop(Oid wanted, Oid alone)
{
	DatabaseSlot *slot = database_slot(alone, false);

	if (!OidIsValid(wanted))
		return;
	CommandCounterIncrement();
	if (SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(wanted)))
	{
		if (OidIsValid(alone))
			tell_at_end(CHANGE_RESUMED, alone, InvalidOid);
		return;
	}
	if (OidIsValid(alone) && slot != NULL)
		database_slot_free(slot);
	floor_reset_database(wanted);
	counters_forget_database(wanted);
}

/* Whether workers serve the database of this session: waking them for another would announce it. */
static bool
is_served(void)
{
	DatabaseSlot *slot = database_slot(MyDatabaseId, false);

	return slot != NULL && slot->wanted;
}

static void
tell_of_database(ChangeKind kind, const char *name)
{
	Oid			database = get_database_oid(name, true);

	if (OidIsValid(database))
		tell_at_end(kind, database, InvalidOid);
}

static void
tell_at_end(ChangeKind kind, Oid database, Oid role)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	Change	   *change = palloc(sizeof(Change));

	*change = (Change) {kind, database, role};
	changes = lappend(changes, change);
	MemoryContextSwitchTo(caller);
}

/* Nothing here can fail: the transaction has ended. */
static void
transaction_end(XactEvent event, void *arg)
{
	ListCell   *cell;

	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE)
		return;
	foreach(cell, changes)
	{
		Change	   *change = lfirst(cell);

		if (change->kind == CHANGE_RESUMED)
		{
			DatabaseSlot *slot = database_slot(change->database, false);

			if (slot != NULL)
				database_resume(slot);
			/* a prepared transaction keeps its locks */
			if (event != XACT_EVENT_PREPARE)
				request_probe(change->database);
			continue;
		}
		if (event != XACT_EVENT_COMMIT)
			continue;
		if (change->kind == CHANGE_ROLE)
		{
			workers_try_again(change->role);
			continue;
		}
		if (change->kind == CHANGE_ROLE_NAME)
		{
			wake_all_databases(WORK_ROLES);
			continue;
		}
		if (change->kind != CHANGE_NEW_NAME)
			(void) workers_ask_to_leave(change->database, change->role);
		if (change->kind != CHANGE_SETTINGS)
			request_probe(change->database);
	}
	changes = NIL;
}
