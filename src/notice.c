/*
 * notice.c
 *		Notices that are given at the commit.
 *
 * PostgreSQL silences notices inside an extension script, some things are worth saying
 * once in a transaction only, and whether a transaction went on to write is known at its
 * end: so these come from a pre-commit callback, which is registered once per process.
 *
 * A notice that was asked for in a savepoint goes with it: "level" is the nesting level
 * of the transaction that asked, 0 where nobody did.
 */
#include "notice.h"

#include "worker.h"

#include "access/xact.h"

typedef struct PendingNotice
{
	int			level;
	CommandId	command;		/* the next one at that time */
} PendingNotice;

static PendingNotice no_worker;
static PendingNotice default_unused;
static PendingNotice routing_held;
static const char *routing_holder;

static void ask_for(PendingNotice *notice);
static void at_transaction_end(XactEvent event, void *argument);
static void at_savepoint_end(SubXactEvent event, SubTransactionId mine,
							 SubTransactionId parent, void *argument);
static void give_notices(void);
static void leave_level(PendingNotice *notice, bool commits);

void
notice_no_worker(void)
{
	if (!workers_serve())
		ask_for(&no_worker);
}

void
notice_default_unused(bool unused)
{
	if (unused)
		ask_for(&default_unused);
	else
		default_unused.level = 0;
}

void
notice_routing_held(const char *function)
{
	CommandCounterIncrement();
	routing_holder = function;
	ask_for(&routing_held);
}

static void
ask_for(PendingNotice *notice)
{
	static bool registered = false;

	if (!registered)
	{
		RegisterXactCallback(at_transaction_end, NULL);
		RegisterSubXactCallback(at_savepoint_end, NULL);
		registered = true;
	}
	if (notice->level == 0)
		notice->level = GetCurrentTransactionNestLevel();
	notice->command = GetCurrentCommandId(false);
}

static void
at_transaction_end(XactEvent event, void *argument)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			give_notices();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			no_worker.level = 0;
			default_unused.level = 0;
			routing_held.level = 0;
			break;
		default:
			break;
	}
}

static void
give_notices(void)
{
	if (routing_held.level != 0 && GetCurrentCommandId(false) > routing_held.command)
		ereport(NOTICE,
				(errmsg("%s was not the last write of its transaction", routing_holder),
				 errdetail("No message is routed between the call and the commit."),
				 errhint("Call it last, or in a transaction of its own.")));
	if (default_unused.level != 0)
		ereport(NOTICE,
				(errmsg("subscription \"default\" is unused and keeps every message"),
				 errhint("Unless something is going to use it, remove it: "
						 "SELECT outbox.unsubscribe('default', discard_pending => true).")));
	if (no_worker.level != 0)
		ereport(NOTICE,
				(errmsg("no worker delivers in this database"),
				 worker_state == NULL ?
				 errhint("Preload the library by shared_preload_libraries, run SELECT outbox.start_worker(),"
						 " or CALL outbox.drain(), from cron for example.") :
				 errhint("Set outbox.enabled = on and outbox.workers above 0,"
						 " or CALL outbox.drain(), from cron for example.")));
}

static void
at_savepoint_end(SubXactEvent event, SubTransactionId mine, SubTransactionId parent,
				 void *argument)
{
	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	leave_level(&no_worker, event == SUBXACT_EVENT_COMMIT_SUB);
	leave_level(&default_unused, event == SUBXACT_EVENT_COMMIT_SUB);
	leave_level(&routing_held, event == SUBXACT_EVENT_COMMIT_SUB);
}

static void
leave_level(PendingNotice *notice, bool commits)
{
	int			level = GetCurrentTransactionNestLevel();

	if (notice->level >= level)
		notice->level = commits ? level - 1 : 0;
}
