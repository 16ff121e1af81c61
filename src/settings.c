/*
 * settings.c
 *		All settings, sorted by name.
 *
 * Policy is PGC_SUSET, so that ALTER DATABASE … SET and ALTER ROLE … SET work; every
 * backend reads the value when it needs it, nothing is cached.
 */
#include "outbox.h"

#include <limits.h>

#include "nodes/pg_list.h"
#include "utils/guc.h"
#include "utils/varlena.h"

int			outbox_backoff_base = 1000;
int			outbox_backoff_max = 60000;
int			outbox_batch_size = 100;
char	   *outbox_causation = NULL;
int			outbox_clock_offset = 0;
char	   *outbox_databases = NULL;
int			outbox_dedupe_window = 3 * 24 * 3600;
bool		outbox_enabled = true;
int			outbox_hook_timeout = 60000;
double		outbox_jitter = 0.1;
int			outbox_lease = 30000;
int			outbox_max_active = 300000;
int			outbox_max_attempts = 3;
int			outbox_max_coordinators = 2;
int			outbox_notify_interval = 100;
int			outbox_poll_interval = 1000;
int			outbox_retention = 3 * 24 * 3600;
int			outbox_run_length = 1000;
char	   *outbox_traceparent = NULL;
int			outbox_workers = 1;

static void define_int(const char *name, const char *short_desc, const char *long_desc,
					   int *variable, int boot, int min, int max, int flags);
static void define_file_int(const char *name, const char *short_desc, int *variable,
							int boot, int min, int max);
static bool check_databases(char **newval, void **extra, GucSource source);
static void define_user_text(const char *name, const char *short_desc, char **variable);

void
outbox_define_settings(void)
{
	define_int("outbox.backoff_base", "Delay before the first retry of a failed message.",
			   "It doubles with each attempt, up to outbox.backoff_max.",
			   &outbox_backoff_base, 1000, 1, INT_MAX, GUC_UNIT_MS);
	define_int("outbox.backoff_max", "Longest computed delay before a retry.", NULL,
			   &outbox_backoff_max, 60000, 1, INT_MAX, GUC_UNIT_MS);
	define_int("outbox.batch_size", "Messages that a claim takes where the call names no number.",
			   NULL, &outbox_batch_size, 100, 1, OUTBOX_MAX_BATCH, 0);
	define_user_text("outbox.causation", "Causation id of messages enqueued without one.",
					 &outbox_causation);
	define_int("outbox.clock_offset", "Moves the clock of outbox, for tests.", NULL,
			   &outbox_clock_offset, 0, INT_MIN, INT_MAX, GUC_UNIT_MS);
	DefineCustomStringVariable( /* name= */ "outbox.databases",
							   /* short_desc= */ "Databases that workers serve: names with commas between, or *.",
							   /* long_desc= */ NULL,
							   /* valueAddr= */ &outbox_databases,
							   /* bootValue= */ "*",
							   PGC_SIGHUP, GUC_LIST_INPUT, check_databases, NULL, NULL);
	define_int("outbox.dedupe_window", "How long a dedupe key keeps a second message out.", NULL,
			   &outbox_dedupe_window, 3 * 24 * 3600, 1, INT_MAX, GUC_UNIT_S);
	DefineCustomBoolVariable( /* name= */ "outbox.enabled",
							 /* short_desc= */ "Whether workers run; the SQL functions work without them.",
							 /* long_desc= */ NULL,
							 /* valueAddr= */ &outbox_enabled,
							 /* bootValue= */ true,
							 PGC_SIGHUP, 0, NULL, NULL, NULL);
	define_int("outbox.hook_timeout", "Longest run time of a hook whose registration names none.",
			   NULL, &outbox_hook_timeout, 60000, 1, INT_MAX, GUC_UNIT_MS);
	DefineCustomRealVariable( /* name= */ "outbox.jitter",
							  /* short_desc= */ "Part of a computed delay that is random.",
							  /* long_desc= */ "An explicit retry time is taken as given.",
							  /* valueAddr= */ &outbox_jitter,
							  /* bootValue= */ 0.1,
							  /* minValue= */ 0.0,
							  /* maxValue= */ 1.0,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	define_int("outbox.lease", "How long a claim is held where neither call nor subscription says.",
			   NULL, &outbox_lease, 30000, 1, INT_MAX, GUC_UNIT_MS);
	define_int("outbox.max_active", "How far renewals can extend a claim that makes no progress.",
			   NULL, &outbox_max_active, 300000, 1, INT_MAX, GUC_UNIT_MS);
	define_int("outbox.max_attempts", "Attempts before a message becomes a dead letter.",
			   "A message, its handler or its subscription may say otherwise.",
			   &outbox_max_attempts, 3, 1, INT_MAX, 0);
	define_file_int("outbox.max_coordinators",
					"Coordinators at once, whatever the number of databases.",
					&outbox_max_coordinators, 2, 1, 64);
	define_int("outbox.notify_interval",
			   "Shortest time between two notifications of a subscription on channel outbox_ready.",
			   "0 switches them off.",
			   &outbox_notify_interval, 100, 0, INT_MAX, GUC_UNIT_MS);
	define_int("outbox.poll_interval", "How often an idle worker looks without being woken.",
			   "It doubles while there is nothing to do, up to ten seconds.",
			   &outbox_poll_interval, 1000, 10, 3600 * 1000, GUC_UNIT_MS);
	define_int("outbox.retention", "How long messages stay after they were settled.",
			   "Whole segments of the log are removed, so that they stay up to half as long again.",
			   &outbox_retention, 3 * 24 * 3600, 1, INT_MAX, GUC_UNIT_S);
	define_int("outbox.run_length", "Most messages that routing files into one run.", NULL,
			   &outbox_run_length, 1000, 1, 65536, 0);
	define_user_text("outbox.traceparent", "W3C trace context of messages enqueued without one.",
					 &outbox_traceparent);
	define_file_int("outbox.workers", "Delivery workers for each database and role with hooks.",
					&outbox_workers, 1, 0, 16);

	MarkGUCPrefixReserved("outbox");
}

static void
define_int(const char *name, const char *short_desc, const char *long_desc,
		   int *variable, int boot, int min, int max, int flags)
{
	DefineCustomIntVariable(name, short_desc, long_desc, variable, boot, min, max,
							PGC_SUSET, flags, NULL, NULL, NULL);
}

/* by file and reload */
static void
define_file_int(const char *name, const char *short_desc, int *variable,
				int boot, int min, int max)
{
	DefineCustomIntVariable(name, short_desc, NULL, variable, boot, min, max,
							PGC_SIGHUP, 0, NULL, NULL, NULL);
}

static bool
check_databases(char **newval, void **extra, GucSource source)
{
	char	   *copy = pstrdup(*newval);
	List	   *names;
	bool		valid = SplitIdentifierString(copy, ',', &names);

	if (!valid)
		GUC_check_errdetail("List syntax is invalid.");
	pfree(copy);
	list_free(names);
	return valid;
}

static void
define_user_text(const char *name, const char *short_desc, char **variable)
{
	DefineCustomStringVariable(name, short_desc, NULL, variable, "",
							   PGC_USERSET, 0, NULL, NULL, NULL);
}
