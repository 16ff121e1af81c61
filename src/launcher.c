/*
 * launcher.c
 *		The launcher: one static process, connected to no database, that keeps the wanted
 *		set of coordinators running.
 *
 * A database is wanted when it has the extension.  It is found in three ways: CREATE
 * EXTENSION announces it at its commit; the commit callback of an enqueue does; and after
 * a start, a short-lived probe connects once to each database that takes connections.
 *
 * At most outbox.max_coordinators run at once, for any number of databases.  When another
 * database waits, a coordinator with nothing to do makes room, and one with work to do
 * after a second: it leaves the time of its next deadline in shared memory, and that or a
 * commit brings it back.
 *
 * A coordinator that failed is started again after 1 s, then 2 s, … up to a minute.  For
 * processes for which there was no free slot (max_worker_processes) it is tried every 5 s,
 * and sooner where a process of ours that is idle can make room.
 *
 * Exits of our processes and what they mean:
 *
 *	 launcher     never by itself; the postmaster restarts it after 5 s
 *	 coordinator  0: asked to leave, switched off, or the extension is gone
 *				  1: error or pg_terminate_backend(): started again with back-off
 *	 delivery     0: nothing to do for a while, asked to leave, or switched off
 *				  1: as above, started again by the coordinator with back-off
 *	 probe        0 always, but for a failure to connect
 *
 * Locks: the LWLock of worker_state.c, never while waiting.
 */
#include "worker.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

/* A suspended database, a dead suspender: looked at so often even if nobody wakes us. */
#define LAUNCHER_POLL	(60 * USECS_PER_SEC)
#define NO_SLOT_PAUSE	(5 * USECS_PER_SEC)
/* Back-off after our own errors. */
#define PAUSE_FIRST		(1 * USECS_PER_SEC)
#define PAUSE_MAX		(60 * USECS_PER_SEC)

static List *to_probe = NIL;	/* OIDs, in LauncherContext */
static char *listed_databases = NULL;	/* outbox.databases when they were listed */
static MemoryContext LauncherContext;
static int	last_started = DATABASES_MAX - 1;	/* number of a database's slot */

static void launcher_gone(int code, Datum argument);
static void list_databases(void);
static TimestampTz launcher_turn(void);
static bool takes_connections(Form_pg_database database);
static bool may_be_served(DatabaseSlot *slot, Oid database);
static TimestampTz probe_next(TimestampTz now);
static bool is_to_be_probed(Oid database);
static int64 start_process(WorkerKind kind, Oid database);
static bool release_dead_suspenders(void);
static void ask_one_to_leave(void);

void
launcher_register(void)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 5;
	strlcpy(worker.bgw_library_name, "outbox", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "outbox_launcher_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "outbox launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "outbox launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

static void
launcher_gone(int code, Datum argument)
{
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	worker_state->launcher = -1;
	worker_state->launcher_pid = 0;
	LWLockRelease(worker_state->lock);
}

void
outbox_launcher_main(Datum argument)
{
	sigjmp_buf	local_sigjmp_buf;
	volatile int64 pause = PAUSE_FIRST;

	on_shmem_exit(launcher_gone, (Datum) 0);
	session_process_start("outbox launcher", InvalidOid, InvalidOid);
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	worker_state->launcher = OUTBOX_MY_PROC_NUMBER;
	worker_state->launcher_pid = MyProcPid;
	LWLockRelease(worker_state->lock);
	LauncherContext = AllocSetContextCreate(TopMemoryContext, "outbox launcher", ALLOCSET_DEFAULT_SIZES);

	if (sigsetjmp(local_sigjmp_buf, 1) != 0)
	{
		session_recover();
		MemoryContextSwitchTo(LauncherContext);
		pause = Min(pause * 2, PAUSE_MAX);
		PG_exception_stack = &local_sigjmp_buf;
		(void) session_pause(NULL, pause);
	}
	PG_exception_stack = &local_sigjmp_buf;

	list_databases();
	for (;;)
	{
		TimestampTz next = launcher_turn();

		pause = PAUSE_FIRST;
		(void) session_wait(next - clock_machine());
		if (strcmp(listed_databases, outbox_databases) != 0)
			list_databases();
	}
}

/*
 * Those that take connections and are no templates: each is probed once, and again those
 * that have no extension when outbox.databases has changed.
 */
static void
list_databases(void)
{
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	list_free(to_probe);
	to_probe = NIL;
	if (listed_databases != NULL)
		pfree(listed_databases);
	listed_databases = MemoryContextStrdup(LauncherContext, outbox_databases);
	session_transaction_begin("listing databases");
	PushActiveSnapshot(GetTransactionSnapshot());
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan(rel, GetActiveSnapshot(), 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);
		MemoryContext caller;

		if (!takes_connections(database))
			continue;
		caller = MemoryContextSwitchTo(LauncherContext);
		to_probe = lappend_oid(to_probe, database->oid);
		MemoryContextSwitchTo(caller);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	PopActiveSnapshot();
	session_transaction_commit();
	MemoryContextSwitchTo(LauncherContext);
}

/* Start what is wanted and missing; returns when to look again. */
static TimestampTz
launcher_turn(void)
{
	TimestampTz now = clock_machine();
	TimestampTz next = now + LAUNCHER_POLL;
	TimestampTz probe_at;
	bool		others_wait = false;

	if (!outbox_enabled)
		return next;
	if (release_dead_suspenders())
		next = now + USECS_PER_SEC;
	probe_at = probe_next(now);
	next = Min(next, probe_at);

	/* after the one that was started last, so that the first do not starve the others */
	for (int i = 1; i <= DATABASES_MAX; i++)
	{
		int			number = (last_started + i) % DATABASES_MAX;
		DatabaseSlot *slot = &worker_state->databases[number];
		TimestampTz due;
		Oid			database;
		bool		wanted;
		int64		pause;

		LWLockAcquire(worker_state->lock, LW_SHARED);
		database = slot->database;
		wanted = OidIsValid(database) && slot->wanted && !database_is_suspended(slot);
		due = (pg_atomic_read_u32(&slot->work) != 0) ? DT_NOBEGIN : slot->deadline;
		due = Max(due, slot->not_before);
		LWLockRelease(worker_state->lock);

		if (!wanted || workers_of(WORKER_COORDINATOR, database, InvalidOid) > 0)
			continue;
		if (due > now)
			next = Min(next, due);
		else if (!may_be_served(slot, database))
			continue;
		else if (workers_of(WORKER_COORDINATOR, InvalidOid, InvalidOid) >= outbox_max_coordinators)
			others_wait = true;
		else if ((pause = start_process(WORKER_COORDINATOR, database)) == 0)
			last_started = number;
		else
			next = Min(next, now + pause);
	}
	/* a reload may have left more than there may be */
	if (others_wait ||
		workers_of(WORKER_COORDINATOR, InvalidOid, InvalidOid) > outbox_max_coordinators)
	{
		ask_one_to_leave();
		next = Min(next, now + USECS_PER_SEC);
	}
	return next;
}

/* One that is gone, or became a template, is forgotten. */
static bool
may_be_served(DatabaseSlot *slot, Oid database)
{
	char	   *name = served_name(database);
	bool		served = (name != NULL && database_is_served(name));

	if (name == NULL)
	{
		LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
		slot->wanted = false;
		LWLockRelease(worker_state->lock);
	}
	else
		pfree(name);
	return served;
}

/* One at a time: a thousand databases shall not take all slots. */
static TimestampTz
probe_next(TimestampTz now)
{
	Oid			database;

	while (next_probe_request(&database))
	{
		if (OidIsValid(database))
			to_probe = lappend_oid(to_probe, database);
		else
			list_databases();
	}
	while (to_probe != NIL && !is_to_be_probed(linitial_oid(to_probe)))
		to_probe = list_delete_first(to_probe);

	if (to_probe == NIL)
		return DT_NOEND;
	if (workers_of(WORKER_PROBE, InvalidOid, InvalidOid) == 0)
	{
		int64		pause = start_process(WORKER_PROBE, linitial_oid(to_probe));

		if (pause > 0)
			return now + pause;
		to_probe = list_delete_first(to_probe);
	}
	/* its exit wakes us; this is for one that never started */
	return now + USECS_PER_SEC;
}

/* Not one that is known already, nor one that nobody shall be connected to. */
static bool
is_to_be_probed(Oid database)
{
	DatabaseSlot *slot = database_slot(database, false);
	bool		known = false;
	char	   *name;
	bool		served;

	if (slot != NULL)
	{
		LWLockAcquire(worker_state->lock, LW_SHARED);
		known = slot->wanted || database_is_suspended(slot);
		LWLockRelease(worker_state->lock);
	}
	name = known ? NULL : served_name(database);
	served = (name != NULL && database_is_served(name));
	if (name != NULL)
		pfree(name);
	return served;
}

/* 0: it starts; else after how long to try again */
static int64
start_process(WorkerKind kind, Oid database)
{
	WorkerSlot *slot = worker_reserve(kind, database, InvalidOid);

	if (slot != NULL && worker_start(slot))
		return 0;
	if (workers_make_room())
		return ROOM_PAUSE;
	if (no_slot_is_news())
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("outbox could not start a %s: no free slot for background workers",
						worker_kind_name(kind)),
				 errhint("Raise max_worker_processes. It is tried again.")));
	return NO_SLOT_PAUSE;
}

/* Who suspended a database and died did not resume it.  True: one is suspended by who lives. */
static bool
release_dead_suspenders(void)
{
	bool		any = false;

	for (int i = 0; i < DATABASES_MAX * SUSPENDERS_MAX; i++)
	{
		DatabaseSlot *slot = &worker_state->databases[i / SUSPENDERS_MAX];
		pid_t		suspender = slot->suspenders[i % SUSPENDERS_MAX];

		if (suspender == 0)
			continue;
		if (BackendPidGetProc(suspender) != NULL)
		{
			any = true;
			continue;
		}
		LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
		if (slot->suspenders[i % SUSPENDERS_MAX] == suspender)
			slot->suspenders[i % SUSPENDERS_MAX] = 0;
		LWLockRelease(worker_state->lock);
		if (OidIsValid(slot->database))
			request_probe(slot->database);
	}
	return any;
}

/* The coordinator that has had nothing to do for longest. */
static void
ask_one_to_leave(void)
{
	WorkerSlot *longest = NULL;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!slot->used || slot->pid == 0 || slot->kind != WORKER_COORDINATOR)
			continue;
		if (longest == NULL ||
			pg_atomic_read_u64(&slot->idle_since) < pg_atomic_read_u64(&longest->idle_since))
			longest = slot;
	}
	if (longest != NULL)
		longest->leave = Max(longest->leave, LEAVE_IF_IDLE);
	LWLockRelease(worker_state->lock);
	if (longest != NULL)
		wake_process(longest->process);
}

/* A DROP DATABASE that was interrupted leaves it behind, not to be connected to. */
static bool
takes_connections(Form_pg_database database)
{
	return database->datallowconn && !database->datistemplate &&
		database->datconnlimit != DATCONNLIMIT_INVALID_DB;
}

/*
 * The name of a database that may be served; NULL: it is gone, or takes no connections,
 * or is a template, to which nobody must be connected when it is copied.
 */
char *
served_name(Oid database)
{
	MemoryContext caller = CurrentMemoryContext;
	bool		alone = !IsTransactionState();
	HeapTuple	tuple;
	char	   *name = NULL;

	if (alone)
		session_transaction_begin("looking up a database");
	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		if (takes_connections(form))
			name = MemoryContextStrdup(caller, NameStr(form->datname));
		ReleaseSysCache(tuple);
	}
	if (alone)
		session_transaction_commit();
	MemoryContextSwitchTo(caller);
	return name;
}

bool
database_is_served(const char *name)
{
	char	   *copy;
	List	   *names = NIL;
	ListCell   *cell;
	bool		served = false;

	if (strcmp(outbox_databases, "*") == 0)
		return true;
	copy = pstrdup(outbox_databases);
	if (SplitIdentifierString(copy, ',', &names))
	{
		foreach(cell, names)
			served |= (strcmp(lfirst(cell), name) == 0);
	}
	list_free(names);
	pfree(copy);
	return served;
}

/* In a transaction.  outbox.databases may have changed, the database have been renamed or made a template. */
bool
own_database_is_served(void)
{
	char	   *name = served_name(MyDatabaseId);

	return name != NULL && database_is_served(name);
}

/* Connects to a database, looks for the extension, and is gone. */
void
outbox_probe_main(Datum argument)
{
	WorkerSlot *slot = worker_attach(argument, WORKER_PROBE);

	if (worker_should_leave(slot))
	{
		request_probe(slot->database);	/* nobody has looked yet */
		proc_exit(0);
	}
	session_process_start("outbox probe", slot->database, InvalidOid);
	session_transaction_begin("looking for the extension");
	if (!OidIsValid(get_extension_oid("outbox", true)))
		proc_exit(0);
	if (database_slot(slot->database, true) == NULL)
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("outbox workers cannot serve database \"%s\"",
						get_database_name(slot->database)),
				 errdetail("They serve at most %d databases.", DATABASES_MAX),
				 errhint("Call outbox.drain() and outbox.maintain() there, from cron for example.")));
	wake_database(slot->database, WORK_LOOK);
	session_transaction_commit();
	proc_exit(0);
}
