/*
 * standalone.c
 *		A worker without preloading: outbox.start_worker().
 *
 * One process for a database and a role, connected as that role.  It does what the
 * coordinator does (route, take back what expired) and what a delivery worker does (call
 * the role's hooks), one after the other.  Nobody wakes it: it looks every poll_interval.
 *
 * There is no shared memory and no hook on DROP DATABASE then.  So it looks whether
 * somebody holds the lock that a command on the whole database takes, and leaves; it
 * leaves too when the extension is gone, and when another such worker runs.  Nobody starts
 * it again: that is what preloading is for.  Stopped in the middle, it gives back what it
 * has claimed as a delivery worker does, and after each turn the advisory locks that hooks
 * have left in its session.
 *
 * Locks: a session lock that makes it the only one of its role; as in coordinator.c and
 * drain.c otherwise.
 */
#include "worker.h"

#include "catalog.h"
#include "claim.h"
#include "deliver.h"
#include "enqueue.h"
#include "route.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_start_worker);

/* A command on the database gives up after 5 s. */
#define LOOK_EVERY		(2 * USECS_PER_SEC)
#define PAUSE_FIRST		(1 * USECS_PER_SEC)
#define PAUSE_MAX		(60 * USECS_PER_SEC)

typedef struct StandaloneArguments
{
	Oid			database;
	Oid			role;
} StandaloneArguments;

static void check_login(void);
static TimestampTz turn_until;

static pid_t start_standalone(void);
static void turn(MemoryContext context);
static void own_locktag(LOCKTAG *tag);
static bool one_runs(void);
static void keep_own_lock_only(void);
static bool turn_is_over(bool in_batch);
static bool database_is_wanted_alone_now(void);
static bool database_is_wanted_alone(void);

/*
 * outbox.start_worker() → pid of the worker that was started, null where workers run
 * already, because the library is preloaded or the role has started one
 */
Datum
outbox_start_worker(PG_FUNCTION_ARGS)
{
	session_begin("outbox.start_worker()");
	(void) outbox_extension();
	if (worker_state != NULL)
	{
		wake_at_commit(WORK_LOOK);
		PG_RETURN_NULL();
	}
	check_login();
	if (one_runs())
	{
		ereport(NOTICE,
				(errmsg("a worker of role \"%s\" runs already in this database",
						GetUserNameFromId(GetUserId(), false))));
		PG_RETURN_NULL();
	}
	PG_RETURN_INT32((int32) start_standalone());
}

/* The worker connects as the caller; whether that worked is known too late to tell him. */
static void
check_login(void)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(GetUserId()));
	char	   *name = GetUserNameFromId(GetUserId(), false);
	bool		can_login = HeapTupleIsValid(tuple) && ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	if (!can_login)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("role \"%s\" cannot log in, so no worker can run as it", name),
				 errdetail("A worker connects as the role that starts it."),
				 errhint("Start it as another role, or run ALTER ROLE %s LOGIN.", quote_identifier(name))));
}

static pid_t
start_standalone(void)
{
	BackgroundWorker worker = {0};
	BackgroundWorkerHandle *handle;
	StandaloneArguments arguments = {MyDatabaseId, GetUserId()};
	pid_t		pid;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_notify_pid = MyProcPid;
	memcpy(worker.bgw_extra, &arguments, sizeof(arguments));
	strlcpy(worker.bgw_library_name, "outbox", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "outbox_standalone_main", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "outbox worker", BGW_MAXLEN);
	snprintf(worker.bgw_name, BGW_MAXLEN, "outbox worker for database %u", MyDatabaseId);
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
		ereport(ERROR,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("could not start a worker"),
				 errdetail("There is no free slot for background workers."),
				 errhint("Raise max_worker_processes.")));
	if (WaitForBackgroundWorkerStartup(handle, &pid) != BGWH_STARTED)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("the worker did not start"),
				 errhint("The server log has the reason.")));
	return pid;
}

void
outbox_standalone_main(Datum argument)
{
	sigjmp_buf	local_sigjmp_buf;
	StandaloneArguments arguments;
	MemoryContext context;
	volatile int64 pause = PAUSE_FIRST;

	memcpy(&arguments, MyBgworkerEntry->bgw_extra, sizeof(arguments));
	session_process_start("outbox worker", arguments.database, arguments.role);
	context = AllocSetContextCreate(TopMemoryContext, "outbox worker", ALLOCSET_DEFAULT_SIZES);
	PortalContext = context;
	before_shmem_exit(delivery_give_back, (Datum) 0);

	if (sigsetjmp(local_sigjmp_buf, 1) != 0)
	{
		session_recover();
		delivery_give_back(0, (Datum) 0);
		MemoryContextSwitchTo(context);
		MemoryContextReset(context);
		PG_exception_stack = &local_sigjmp_buf;
		(void) session_pause(NULL, pause);
		pause = Min(pause * 2, PAUSE_MAX);
	}
	PG_exception_stack = &local_sigjmp_buf;

	for (;;)
	{
		if (database_is_wanted_alone() || !outbox_enabled)
			proc_exit(0);
		turn(context);
		pause = PAUSE_FIRST;
		(void) session_wait(Min(MSECS(outbox_poll_interval), LOOK_EVERY));
	}
}

static void
turn(MemoryContext context)
{
	static TimestampTz history_at = 0;
	List	   *subscriptions;
	ListCell   *cell;

	session_transaction_begin("routing messages");
	if (!session_extension_lock())
	{
		if (!OidIsValid(get_extension_oid("outbox", true)))
			proc_exit(0);
		session_transaction_commit();
		return;
	}
	keep_own_lock_only();			/* named by the role: before the owner's rights */
	session_become_owner();
	if (!own_database_is_served())
		proc_exit(0);
	if (routing_lock(0))
		(void) route(0);
	subscriptions = subscription_list(snapshot_push());
	snapshot_pop();
	foreach(cell, subscriptions)
		(void) claim_expire(lfirst(cell), 0);
	(void) dedupe_delete_expired(100);
	session_transaction_commit();
	history_at = history_turn(history_at);

	turn_until = clock_machine() + LOOK_EVERY;
	session_transaction_begin("delivering messages");
	MemoryContextSwitchTo(context);
	if (session_extension_lock())
	{
		SPI_connect_ext(SPI_OPT_NONATOMIC);
		(void) drain_for_worker(turn_is_over);
		SPI_finish();
		keep_own_lock_only();
	}
	session_transaction_commit();
	MemoryContextSwitchTo(context);
	MemoryContextReset(context);
}

/*
 * In a transaction.  The lock is the session's, and of one method with those that hooks
 * leave behind; core can give them back all together only.  Should another worker have
 * taken ours meanwhile, that one stays.
 */
static void
keep_own_lock_only(void)
{
	LOCKTAG		tag;

	LockReleaseAll(USER_LOCKMETHOD, true);
	own_locktag(&tag);
	if (LockAcquire(&tag, ExclusiveLock, true, true) == LOCKACQUIRE_NOT_AVAIL)
		proc_exit(0);
}

/*
 * Of the method of advisory locks, so that it lasts until the process ends and goes with
 * it: core gives back session locks of its own method at an abort, and not at the exit.
 * No function takes an advisory lock on an object, so no user can have this one.
 */
static void
own_locktag(LOCKTAG *tag)
{
	SET_LOCKTAG_OBJECT(*tag, MyDatabaseId, outbox_oid(OB_HANDLER), GetUserId(), 0);
	tag->locktag_lockmethodid = USER_LOCKMETHOD;
}

static bool
one_runs(void)
{
	LOCKTAG		tag;

	own_locktag(&tag);
	if (LockAcquire(&tag, ExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return true;
	LockRelease(&tag, ExclusiveLock, false);
	return false;
}

/* Between batches for new messages to be filed, in the middle of one for who wants the database alone. */
static bool
turn_is_over(bool in_batch)
{
	if (in_batch)
	{
		session_reload();
		return !outbox_enabled || database_is_wanted_alone_now();
	}
	return ConfigReloadPending || clock_machine() > turn_until || database_is_wanted_alone_now();
}

/* In a transaction: a connection takes this lock; who wants the database alone holds one against it. */
static bool
database_is_wanted_alone_now(void)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return true;
	LockRelease(&tag, RowExclusiveLock, false);
	return false;
}

static bool
database_is_wanted_alone(void)
{
	bool		wanted;

	session_transaction_begin("looking whether the database is wanted");
	wanted = database_is_wanted_alone_now();
	session_transaction_commit();
	return wanted;
}
