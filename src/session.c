/*
 * session.c
 *		The frame of a process of outbox: its start, its transactions, its waiting, and
 *		what it does after an error.
 *
 * A transaction is open only while there is something to do in it, never while waiting.
 * At the start of each one the extension is locked, before any of its tables: so DROP
 * EXTENSION waits for that transaction, and a deadlock with it is not possible.
 */
#include "worker.h"

#include "catalog.h"

#include "access/xact.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "libpq/pqsignal.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

/* session_become_owner() was called in this transaction */
static bool is_owner = false;

static void force_settings(bool user_code);
static bool lock_extension(Oid extension, bool wait);
static bool is_asked_to_leave(const WorkerSlot *slot);

/*
 * What a database or a role has set must not stop a process that nobody watches.
 */
static void
force_settings(bool user_code)
{
	/* the queue reads and writes, whatever the default is */
	SetConfigOption("default_transaction_read_only", "false", PGC_SUSET, PGC_S_OVERRIDE);
	/* a retry of 40001 is of no use here: nothing is decided by an old snapshot */
	SetConfigOption("default_transaction_isolation", "read committed", PGC_SUSET, PGC_S_OVERRIDE);
	/* these end statements of clients, not turns of ours; hooks have their own timer */
	SetConfigOption("statement_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("idle_in_transaction_session_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	/* a hook that raises an error would end us with it */
	SetConfigOption("exit_on_error", "false", PGC_SUSET, PGC_S_OVERRIDE);
	/* hooks are called as who registered them, not as who that role becomes in its sessions */
	SetConfigOption("role", "none", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("lock_timeout", user_code ? "0" : "10s", PGC_SUSET, PGC_S_OVERRIDE);
#if PG_VERSION_NUM >= 170000
	SetConfigOption("transaction_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
#endif
	if (user_code)
		return;
	/* routing and expiry can be done again after a crash: no need to wait for the disk */
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("search_path", "pg_catalog, pg_temp", PGC_SUSET, PGC_S_OVERRIDE);
}

/* Handlers first, then unblock, then connect. */
void
session_process_start(const char *what, Oid database, Oid role)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();

	if (OidIsValid(database))
		BackgroundWorkerInitializeConnectionByOid(database, role, 0);
	else
		BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	force_settings(OidIsValid(role));
	SetConfigOption("application_name", what, PGC_USERSET, PGC_S_SESSION);
	pgstat_report_appname(what);
	pgstat_report_activity(STATE_IDLE, NULL);
}

void
session_transaction_begin(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	pgstat_report_activity(STATE_RUNNING, activity);
}

/*
 * Until the transaction ends.  Triggers, checks and index expressions on our tables are
 * code of their owner.  Where that is no superuser, a process that is connected as one
 * leaves these rights behind before it writes, and cannot take them again: as VACUUM does.
 * Nor shall that code find functions of the role that has started a worker.  Aborts put
 * the user back by themselves, the end of the transaction search_path.
 */
void
session_become_owner(void)
{
	if (superuser_arg(outbox_owner()))
		return;
	SetUserIdAndSecContext(outbox_owner(), SECURITY_RESTRICTED_OPERATION);
	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
	is_owner = true;
}

void
session_transaction_commit(void)
{
	CommitTransactionCommand();
	if (is_owner)
		SetUserIdAndSecContext(GetSessionUserId(), 0);
	is_owner = false;
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * In the order of autovacuum's launcher: hold interrupts, report, abort, clean, resume.
 * Memory is the caller's.
 */
void
session_recover(void)
{
	error_context_stack = NULL;
	HOLD_INTERRUPTS();
	disable_all_timeouts(false);
	QueryCancelPending = false;
	EmitErrorReport();
	AbortOutOfAnyTransaction();
	is_owner = false;
	LWLockReleaseAll();
	FlushErrorState();
	pgstat_report_activity(STATE_IDLE, NULL);
	RESUME_INTERRUPTS();
}

/*
 * Not core's lock on the extension, where it can be helped: anybody who owns a function can
 * have that to the end of his transaction, by ALTER FUNCTION … DEPENDS ON EXTENSION, and
 * stop us.  Without preloading there is no hook that takes ours for DROP EXTENSION.
 */
static bool
lock_extension(Oid extension, bool wait)
{
	LOCKTAG		tag;

	if (worker_state != NULL)
		presence_locktag(&tag, extension);
	else
		SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	return LockAcquire(&tag, AccessShareLock, false, !wait) != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * False: the extension is absent, or is being dropped or altered right now.  The lock is
 * the transaction's.
 *
 * One that was made in the place of another can be seen a moment before the messages about
 * what went with the other one are: who dropped it has its lock until they are there.
 */
bool
session_extension_lock(void)
{
	static Oid	known = InvalidOid;
	Oid			extension = get_extension_oid("outbox", true);

	if (!OidIsValid(extension))
		return false;
	if (OidIsValid(known) && known != extension && !lock_extension(known, false))
		return false;
	if (!lock_extension(extension, false))
		return false;
	AcceptInvalidationMessages();
	known = extension;
	return get_extension_oid("outbox", true) == extension;
}

void
session_extension_hold(void)
{
	Oid			extension = get_extension_oid("outbox", true);

	if (OidIsValid(extension) && lock_extension(extension, true) &&
		get_extension_oid("outbox", true) == extension)
		return;
	/* with it went all that was claimed */
	proc_exit(0);
}

bool
session_wait(int64 usecs)
{
	/* rounded up: who wakes too early has to sleep once more */
	long		ms = (long) Max(1, Min((usecs + 999) / 1000, 3600 * 1000));
	int			events;

	events = WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, ms,
					   outbox_wait_event(OUTBOX_WAIT_WORK));
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	session_reload();
	return (events & WL_LATCH_SET) != 0;
}

void
session_reload(void)
{
	if (!ConfigReloadPending)
		return;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
}

/* Who is asked to leave: a coordinator also for another database's. */
static bool
is_asked_to_leave(const WorkerSlot *slot)
{
	if (slot == NULL)
		return false;
	return worker_should_leave(slot) || (slot->kind == WORKER_COORDINATOR && worker_should_make_room(slot));
}

/* An error that comes again with each commit shall not fill the log. */
bool
session_pause(const WorkerSlot *slot, int64 usecs)
{
	TimestampTz until = clock_machine() + usecs;
	int64		left;

	while ((left = until - clock_machine()) > 0 && !is_asked_to_leave(slot))
		(void) session_wait(left);
	return is_asked_to_leave(slot);
}

/* Asked to leave, switched off, or the database shall be left alone. */
bool
worker_should_leave(const WorkerSlot *slot)
{
	DatabaseSlot *database = database_slot(slot->database, false);
	bool		leave;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	/* a database without a slot is one that a probe looks at for the first time */
	leave = slot->leave == LEAVE_NOW || (database != NULL && database_is_suspended(database));
	LWLockRelease(worker_state->lock);
	return leave || !outbox_enabled || (slot->kind == WORKER_DELIVERY && outbox_workers == 0);
}

bool
worker_should_make_room(const WorkerSlot *slot)
{
	bool		leave;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	leave = slot->leave != LEAVE_NOT;
	LWLockRelease(worker_state->lock);
	return leave;
}
