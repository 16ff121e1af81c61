/*
 * utility.c
 *		Commands that want a database to themselves, while our processes are connected.
 *
 * DROP DATABASE, ALTER DATABASE … RENAME or SET TABLESPACE and CREATE DATABASE … TEMPLATE
 * fail where somebody else is connected.  Test frameworks run them all day.  So the
 * database is suspended first: its processes are ended, and none is started until the
 * command has ended.  Only for those who could run the command: others shall not stop a
 * worker by trying.
 *
 * Also: COMMIT PREPARED wakes the coordinator, since no commit callback of the
 * transaction's own runs then; and after ALTER DATABASE or ROLE … SET our processes of
 * the database are ended, so that they connect again with the new settings.
 */
#include "worker.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

/* A hook may take a moment to notice its cancel. */
#define SUSPEND_WAIT_MS	5000

static ProcessUtility_hook_type previous_utility = NULL;

static void outbox_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
						   ProcessUtilityContext context, ParamListInfo params,
						   QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion);
static Oid database_wanted_alone(Node *statement);
static Oid template_of(CreatedbStmt *statement);
static bool sets_tablespace(AlterDatabaseStmt *statement);
static Oid owned_database(const char *name);
static bool suspend(Oid database);
static bool anybody_connected(Oid database, bool signal_them);
static void after_success(Node *statement, Oid alone);
static void reconnect(Oid database, Oid role);

void
utility_register_hook(void)
{
	previous_utility = ProcessUtility_hook;
	ProcessUtility_hook = outbox_utility;
}

static void
outbox_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
			   ProcessUtilityContext context, ParamListInfo params,
			   QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion)
{
	Node	   *statement = pstmt->utilityStmt;
	ProcessUtility_hook_type next = previous_utility ? previous_utility : standard_ProcessUtility;
	Oid			alone = database_wanted_alone(statement);

	if (OidIsValid(alone) && !suspend(alone))
		alone = InvalidOid;
	PG_TRY();
	{
		next(pstmt, query, read_only_tree, context, params, environment, dest, completion);
	}
	PG_CATCH();
	{
		if (OidIsValid(alone))
			workers_resume(alone);
		PG_RE_THROW();
	}
	PG_END_TRY();
	after_success(statement, alone);
}

/* The database that the command wants to itself and the caller may have; or InvalidOid. */
static Oid
database_wanted_alone(Node *statement)
{
	switch (nodeTag(statement))
	{
		case T_DropdbStmt:
			return owned_database(castNode(DropdbStmt, statement)->dbname);
		case T_RenameStmt:
			if (castNode(RenameStmt, statement)->renameType == OBJECT_DATABASE)
				return owned_database(castNode(RenameStmt, statement)->subname);
			return InvalidOid;
		case T_AlterDatabaseStmt:
			if (sets_tablespace(castNode(AlterDatabaseStmt, statement)))
				return owned_database(castNode(AlterDatabaseStmt, statement)->dbname);
			return InvalidOid;
		case T_CreatedbStmt:
			return template_of(castNode(CreatedbStmt, statement));
		default:
			return InvalidOid;
	}
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

	if (!OidIsValid(database) || database == MyDatabaseId ||
		!outbox_database_ownercheck(database, GetUserId()))
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
	TimestampTz give_up = GetCurrentTimestamp() + MSECS(SUSPEND_WAIT_MS);

	if (slot == NULL)
		return false;
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	slot->suspended_by = MyProcPid;
	LWLockRelease(worker_state->lock);

	PG_TRY();
	{
		while (anybody_connected(database, true) && GetCurrentTimestamp() < give_up)
		{
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 10, PG_WAIT_EXTENSION);
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
	}
	PG_CATCH();
	{
		workers_resume(database);
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
	TimestampTz now = GetCurrentTimestamp();

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

void
workers_resume(Oid database)
{
	DatabaseSlot *slot = database_slot(database, false);

	if (slot == NULL)
		return;
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	slot->suspended_by = 0;
	slot->not_before = DT_NOBEGIN;
	slot->deadline = DT_NOBEGIN;
	LWLockRelease(worker_state->lock);
	wake_launcher();
}

static void
after_success(Node *statement, Oid alone)
{
	if (worker_state == NULL)
		return;
	switch (nodeTag(statement))
	{
		case T_DropdbStmt:
			if (OidIsValid(alone))
				database_slot_free(database_slot(alone, false));
			return;
		case T_CreatedbStmt:
			request_probe(get_database_oid(castNode(CreatedbStmt, statement)->dbname, true));
			break;
		case T_AlterDatabaseSetStmt:
			reconnect(get_database_oid(castNode(AlterDatabaseSetStmt, statement)->dbname, true), InvalidOid);
			break;
		case T_AlterRoleSetStmt:
			if (castNode(AlterRoleSetStmt, statement)->role != NULL)
				reconnect(InvalidOid, get_rolespec_oid(castNode(AlterRoleSetStmt, statement)->role, true));
			break;
		case T_TransactionStmt:
			if (castNode(TransactionStmt, statement)->kind == TRANS_STMT_COMMIT_PREPARED)
			{
				/* only where workers serve the database: anywhere else it would announce it */
				DatabaseSlot *slot = database_slot(MyDatabaseId, false);

				if (slot != NULL && slot->wanted)
					wake_database(MyDatabaseId, WORK_LOOK | WORK_ENQUEUED);
			}
			break;
		default:
			break;
	}
	if (OidIsValid(alone))
		workers_resume(alone);
}

/* End those that are connected with old settings; others take their place. */
static void
reconnect(Oid database, Oid role)
{
	pid_t		pids[WORKERS_MAX];
	int			n = 0;

	if (!OidIsValid(database) && !OidIsValid(role))
		return;
	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (slot->used && slot->pid != 0 &&
			(!OidIsValid(database) || slot->database == database) &&
			(!OidIsValid(role) || slot->role == role))
			pids[n++] = slot->pid;
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
		(void) kill(pids[i], SIGTERM);
}
