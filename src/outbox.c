/*
 * outbox.c
 *		Loading the library; the way into and out of SQL functions; their arguments.
 */
#include "outbox.h"

#include "catalog.h"
#include "counters.h"
#include "deliver.h"
#include "entries.h"
#include "floor.h"
#include "route.h"
#include "run.h"
#include "worker.h"

#include "access/parallel.h"
#include "access/xact.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_MODULE_MAGIC;

static shmem_request_hook_type previous_shmem_request = NULL;
static shmem_startup_hook_type previous_shmem_startup = NULL;

static void shmem_request(void);
static void shmem_startup(void);
static bool is_blank(const char *text);

PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	outbox_define_settings();
	catalog_register_callbacks();
	counters_register_callbacks();
	entries_register_callbacks();
	route_register_callbacks();
	runs_register_callbacks();
	floor_register_callbacks();
	wake_register_callbacks();
	leftovers_register_hook();

	/* Loaded by a session: everything works without shared memory, see clock.c. */
	if (!process_shared_preload_libraries_in_progress)
		return;

	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = shmem_request;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = shmem_startup;
	utility_register_hook();
	/* pg_upgrade's server must not deliver anything */
	if (!IsBinaryUpgrade)
		launcher_register();
}

static void
shmem_request(void)
{
	if (previous_shmem_request)
		previous_shmem_request();
	clock_request_shmem();
	counters_request_shmem();
	floor_request_shmem();
	workers_request_shmem();
}

static void
shmem_startup(void)
{
	if (previous_shmem_startup)
		previous_shmem_startup();
	clock_startup_shmem();
	counters_startup_shmem();
	floor_startup_shmem();
	workers_startup_shmem();
}

void
session_begin(const char *function)
{
	PreventCommandDuringRecovery(function);
	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
}

void
session_owner(OwnerSession *session)
{
	GetUserIdAndSecContext(&session->user, &session->security);
	SetUserIdAndSecContext(outbox_owner(), session->security | SECURITY_LOCAL_USERID_CHANGE);
	session->guc_level = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

/* After an error the abort of the (sub)transaction does the same. */
void
session_caller(OwnerSession *session)
{
	AtEOXact_GUC(true, session->guc_level);
	SetUserIdAndSecContext(session->user, session->security);
}

Snapshot
snapshot_push(void)
{
	PushActiveSnapshot(GetLatestSnapshot());
	return GetActiveSnapshot();
}

/*
 * Not older than the lock that the caller has just got: to an older snapshot a table that
 * was rewritten meanwhile (ALTER TABLE, pg_repack) is empty.  Registered: for the caller to
 * unregister.  Parallel workers have to do with the leader's.
 */
Snapshot
snapshot_after_lock(Snapshot callers)
{
	return RegisterSnapshot(IsInParallelMode() ? callers : GetLatestSnapshot());
}

void
snapshot_pop(void)
{
	PopActiveSnapshot();
}

static bool
is_blank(const char *text)
{
	return text[strspn(text, " \t\n\r\v\f")] == '\0';
}

void
arg_required(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name),
				 errhint("Pass a value for the argument \"%s\".", name)));
}

/* '' is NULL: drivers and forms send it where they mean nothing. */
char *
arg_text(FunctionCallInfo fcinfo, int n, const char *name)
{
	char	   *value;

	if (PG_ARGISNULL(n))
		return NULL;
	value = text_to_cstring(PG_GETARG_TEXT_PP(n));
	check_text(value, name);
	return value[0] == '\0' ? NULL : value;
}

char *
arg_required_text(FunctionCallInfo fcinfo, int n, const char *name)
{
	char	   *value;

	arg_required(fcinfo, n, name);
	value = text_to_cstring(PG_GETARG_TEXT_PP(n));
	check_required_text(value, name);
	return value;
}

void
check_required_text(const char *value, const char *name)
{
	if (is_blank(value))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be blank", name),
				 strcmp(name, "name") == 0 ? errhint("Give it a name, such as 'order.created'.") : 0));
	check_text(value, name);
}

void
check_finite(TimestampTz time, const char *name, const char *hint)
{
	if (TIMESTAMP_NOT_FINITE(time))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be finite", name),
				 errdetail("It is %s.", TIMESTAMP_IS_NOEND(time) ? "infinity" : "-infinity"),
				 errhint("%s", hint)));
}

/* '' is allowed here, a text of blanks is not. */
void
check_text(const char *value, const char *name)
{
	if (strlen(value) > OUTBOX_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is too long", name),
				 errdetail("It has %zu bytes; at most %d are allowed.",
						   strlen(value), OUTBOX_MAX_NAME),
				 errhint("Use a shorter one, or a hash of it.")));
	if (value[0] != '\0' && is_blank(value))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be blank", name),
				 errhint("Leave it out, or pass NULL.")));
}

int64
interval_usecs(Datum interval, const char *name)
{
	Interval   *value = DatumGetIntervalP(interval);
	int64		usecs;

	if (value->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not contain months or years", name),
				 errdetail("Their length depends on the date."),
				 errhint("Give it in days or smaller units.")));
	if (pg_mul_s64_overflow(value->day, USECS_PER_DAY, &usecs) ||
		pg_add_s64_overflow(usecs, value->time, &usecs) ||
		usecs <= 0 || usecs > INT64CONST(1000) * 365 * USECS_PER_DAY)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be longer than nothing and at most 1000 years", name),
				 errdetail("It is %s.",
						   DatumGetCString(DirectFunctionCall1(interval_out, interval))),
				 errhint("Write it as an interval with its unit, such as '30 s'.")));
	return usecs;
}
