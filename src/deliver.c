/*
 * deliver.c
 *		What one delivery is: a call of a hook, or a NOTIFY.
 *
 * A hook is somebody's code.  It may raise, hang, try to commit, drop its own table,
 * change settings or roles, leave constraints unchecked or lose its privileges: all this
 * costs its own message only.  So a delivery runs in a subtransaction of its own, from
 * the reading of the message to the check of deferred constraints, and deliver_message()
 * turns whatever comes out of it into a result.  It does not settle: see group.c.
 *
 * Around the call:
 *
 *	 settings      outbox.causation and outbox.traceparent say what the message is, so
 *				   that what the hook enqueues is linked to it; search_path is the one
 *				   recorded at registration (a function's own SET comes later and wins).
 *				   All settings the hook changes, the role included, are put back.
 *	 time limit	   a timer of our own cancels the statement that the hook is in.  It fires
 *				   again every half of the time: a hook can catch one cancel.  A hook that
 *				   returns after it was cancelled has failed all the same.
 *	 constraints   SET CONSTRAINTS ALL IMMEDIATE, so that a violation is this message's.
 *
 * The caller's own cancel is told from the timer's by a flag that the timer sets, and
 * from a hook's RAISE with the same code by the place in core where it was raised.
 * Termination is FATAL and never comes here.
 *
 * The function is looked up and its call prepared anew for each message: a hook may
 * replace or drop it, and what is cached by PostgreSQL makes this cheap.
 *
 * Locks: what the hook takes, and none of ours.
 */
#include "deliver.h"

#include "counters.h"
#include "log.h"
#include "worker.h"

#include <signal.h>

#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "commands/async.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "portability/instr_time.h"
#include "storage/latch.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

/* Until there may be room for a notification again. */
#define NOTIFY_PAUSE	(10 * USECS_PER_SEC)
/* Longer texts of a hook's error are cut when they are recorded. */
#define MAX_ERROR_BYTES	4096

/* one delivery on its way through its subtransaction */
typedef struct Call
{
	const Subscription *subscription;
	const Claim *claim;
	const ClaimedMessage *message;
	MemoryContext context;		/* of all that is needed during the call only */
	Delivery   *delivery;
} Call;

typedef struct Delay
{
	const char *text;
	int64		usecs;
} Delay;

static bool in_hook = false;
static int64 running = -1;		/* position of the message that is being delivered */
static const Handler *running_handler = NULL;
static TimeoutId hook_timer = MAX_TIMEOUTS;
static volatile sig_atomic_t hook_timed_out = false;

static void count(const Subscription *subscription, const Delivery *delivery, int64 usecs);
static void deliver_work(void *arg);
static void call_hook(Call *call, Oid function, TupleTableSlot *slot, Datum message);
static void describe_message(const Handler *handler, TupleTableSlot *slot);
static void set_for_call(const char *name, const char *value);
static char *slot_text(TupleTableSlot *slot, LogColumn column);
static char *traceparent(TupleTableSlot *slot);
static void invoke(Oid function, Datum message);
static int64 time_limit(const Call *call);
static void hook_timer_start(int64 usecs);
static void hook_timer_stop(void);
static void hook_timer_fired(void);
static void judge(Delivery *delivery, int64 limit, bool timed_out);
static bool parse_delay(const char *text, int64 *usecs);
static void parse_delay_work(void *arg);
static char *clip(const char *text);

/* ---- subtransactions ---- */

ErrorData *
subtransaction_try(void (*work) (void *arg), void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		work(arg);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return error;
}

bool
is_cancel(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_QUERY_CANCELED &&
		error->funcname != NULL && strcmp(error->funcname, "ProcessInterrupts") == 0;
}

int64
deliver_running(const Handler **handler)
{
	*handler = running_handler;
	return running;
}

bool
deliver_in_progress(void)
{
	return in_hook;
}

/* ---- the delivery ---- */

void
deliver_message(const Subscription *subscription, const Claim *claim,
				const ClaimedMessage *message, Delivery *delivery)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox delivery",
												  ALLOCSET_DEFAULT_SIZES);
	Call		call = {subscription, claim, message, context, delivery};
	instr_time	begin;
	instr_time	spent;

	memset(delivery, 0, sizeof(*delivery));
	hook_timed_out = false;
	running_handler = NULL;
	running = message->position;
	INSTR_TIME_SET_CURRENT(begin);
	delivery->error = subtransaction_try(deliver_work, &call);
	INSTR_TIME_SET_CURRENT(spent);
	INSTR_TIME_SUBTRACT(spent, begin);
	running = -1;
	in_hook = false;
	hook_timer_stop();
	if (delivery->error != NULL)
		judge(delivery, time_limit(&call), hook_timed_out);
	count(subscription, delivery, INSTR_TIME_GET_MICROSEC(spent));
	MemoryContextDelete(context);
}

/* Outside of the delivery's subtransaction: the time of a hook that failed was spent, too. */
static void
count(const Subscription *subscription, const Delivery *delivery, int64 usecs)
{
	const Handler *handler = delivery->handler;

	if (handler == NULL)
		return;
	if (handler->function != NULL)
		counters_add(COUNTER_HOOK_TIME, subscription->id, usecs);
	else if (delivery->result == DELIVERY_DONE)
		counters_add(COUNTER_NOTIFIED, subscription->id, 1);
}

static void
deliver_work(void *arg)
{
	Call	   *call = arg;
	Delivery   *delivery = call->delivery;
	const Run  *run = call->message->run;
	TupleTableSlot *slot;
	Oid			function = InvalidOid;
	Datum		message;

	MemoryContextSwitchTo(call->context);
	slot = MakeSingleTupleTableSlot(call->claim->log_desc, &TTSOpsHeapTuple);
	PushActiveSnapshot(GetTransactionSnapshot());
	ExecStoreHeapTuple(call->message->tuple, slot, false);
	delivery->result = DELIVERY_DONE;
	delivery->handler = deliver_match(call->subscription, slot);
	running_handler = delivery->handler;
	if (delivery->handler != NULL && delivery->handler->function != NULL)
		function = handler_function(delivery->handler);

	if (delivery->handler == NULL)
		delivery->result = DELIVERY_UNHANDLED;
	else if (delivery->handler->function != NULL && !OidIsValid(function))
	{
		delivery->result = DELIVERY_UNHANDLED;
		delivery->broken = true;
	}
	else
	{
		message = log_message(slot, call->subscription->name, run->attempts, run->max_attempts);
		if (OidIsValid(function))
			call_hook(call, function, slot, message);
		else if (!notifications_have_room())
			delivery_put_off(delivery);
		else
			Async_Notify(delivery->handler->channel,
						 envelope_notification(message, delivery->handler->include_data));
	}
	ExecDropSingleTupleTableSlot(slot);
	PopActiveSnapshot();
}

void
delivery_put_off(Delivery *delivery)
{
	delivery->result = DELIVERY_RELEASED;
	delivery->delay = NOTIFY_PAUSE;
}

/* The handler of the message in the slot, a row of the log; or NULL. */
Handler *
deliver_match(const Subscription *subscription, TupleTableSlot *slot)
{
	bool		isnull;

	return handler_match(subscription, slot_text(slot, LOG_NAME), slot_text(slot, LOG_KIND),
						 DatumGetInt32(slot_getattr(slot, LOG_VERSION, &isnull)));
}

static void
call_hook(Call *call, Oid function, TupleTableSlot *slot, Datum message)
{
	const Handler *handler = call->delivery->handler;
	AclResult	right = outbox_function_aclcheck(function, GetUserId());
	int			level;

	if (right != ACLCHECK_OK)
		aclcheck_error(right, OBJECT_FUNCTION, handler->function);

	level = NewGUCNestLevel();
	describe_message(handler, slot);
	hook_timer_start(time_limit(call));
	in_hook = true;
	invoke(function, message);
	constraints_check();
	leftovers_finish_cursors();
	in_hook = false;
	hook_timer_stop();
	if (hook_timed_out)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("the hook went on after it was cancelled")));
	AtEOXact_GUC(false, level);
}

static void
describe_message(const Handler *handler, TupleTableSlot *slot)
{
	bool		isnull;
	Datum		id = slot_getattr(slot, LOG_ID, &isnull);

	set_for_call("outbox.causation", DatumGetCString(DirectFunctionCall1(uuid_out, id)));
	set_for_call("outbox.traceparent", traceparent(slot));
	if (strcmp(handler->search_path, namespace_search_path) != 0)
		set_for_call("search_path", handler->search_path);
}

static void
set_for_call(const char *name, const char *value)
{
	(void) set_config_option(name, value, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

static char *
slot_text(TupleTableSlot *slot, LogColumn column)
{
	bool		isnull;

	return TextDatumGetCString(slot_getattr(slot, column, &isnull));
}

/* '' where the message has none: the caller's own would be a wrong one. */
static char *
traceparent(TupleTableSlot *slot)
{
	bool		isnull;
	Datum		headers = slot_getattr(slot, LOG_HEADERS, &isnull);
	JsonbValue *value;

	if (isnull || !JB_ROOT_IS_OBJECT(DatumGetJsonbP(headers)))
		return "";
	value = getKeyJsonValueFromContainer(&DatumGetJsonbP(headers)->root, "traceparent",
										 strlen("traceparent"), NULL);
	if (value == NULL || value->type != jbvString)
		return "";
	return pnstrdup(value->val.string.val, value->val.string.len);
}

/* Whatever it returns, NULL included, is ignored. */
static void
invoke(Oid function, Datum message)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	PgStat_FunctionCallUsage usage;

	InvokeFunctionExecuteHook(function);
	fmgr_info(function, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = message;
	fcinfo->args[0].isnull = false;
	pgstat_init_function_usage(fcinfo, &usage);
	(void) FunctionCallInvoke(fcinfo);
	pgstat_end_function_usage(&usage, true);
}

/* ---- the time limit ---- */

/* Row locks protect the lease during the call, so it is not a limit of its own. */
static int64
time_limit(const Call *call)
{
	const Handler *handler = call->delivery->handler;
	int64		limit = handler != NULL ? handler->timeout : MSECS(outbox_hook_timeout);

	return Max(Min(Min(limit, call->subscription->max_active), MSECS(PG_INT32_MAX)), MSECS(1));
}

static void
hook_timer_start(int64 usecs)
{
	if (hook_timer == MAX_TIMEOUTS)
		hook_timer = RegisterTimeout(USER_TIMEOUT, hook_timer_fired);
	worker_hook_until(clock_machine() + 2 * usecs);
	enable_timeout_every(hook_timer, GetCurrentTimestamp() + usecs,
						 (int) Max(usecs / 1000 / 2, 1));
}

/* A cancel that is still pending then was ours: nobody else's call may meet it. */
static void
hook_timer_stop(void)
{
	if (hook_timer == MAX_TIMEOUTS)
		return;
	disable_timeout(hook_timer, false);
	worker_hook_until(0);
	if (hook_timed_out)
		QueryCancelPending = false;
}

/* In a signal handler.  The process group gets it too, as by statement_timeout. */
static void
hook_timer_fired(void)
{
	hook_timed_out = true;
	InterruptPending = true;
	QueryCancelPending = true;
#ifndef WIN32
	kill(-MyProcPid, SIGINT);
#endif
	SetLatch(MyLatch);
	worker_hook_overdue();
}

/* ---- what came out ---- */

static void
judge(Delivery *delivery, int64 limit, bool timed_out)
{
	ErrorData  *error = delivery->error;

	delivery->result = DELIVERY_FAILED;
	if (timed_out)
	{
		error->sqlerrcode = ERRCODE_QUERY_CANCELED;
		error->message = psprintf("hook timed out after %lld ms", (long long) (limit / 1000));
	}
	else if (is_cancel(error))
		delivery->cancelled = true;
	else if (error->sqlerrcode == ERRCODE_OUTBOX_DEAD_NOW)
		delivery->result = DELIVERY_DEAD;
	else if (error->sqlerrcode == ERRCODE_OUTBOX_LATER &&
			 parse_delay(error->detail, &delivery->delay))
		delivery->result = DELIVERY_LATER;
}

static bool
parse_delay(const char *text, int64 *usecs)
{
	Delay		delay = {text, 0};

	if (text == NULL || subtransaction_try(parse_delay_work, &delay) != NULL)
		return false;
	*usecs = delay.usecs;
	return true;
}

static void
parse_delay_work(void *arg)
{
	Delay	   *delay = arg;
	Datum		interval = DirectFunctionCall3(interval_in, CStringGetDatum(delay->text),
											   ObjectIdGetDatum(InvalidOid), Int32GetDatum(-1));

	delay->usecs = interval_usecs(interval, "delay");
}

/* What last_error holds; NULL after a success. */
Jsonb *
delivery_error_record(const Delivery *delivery)
{
	const ErrorData *error = delivery->error;

	if (error != NULL)
		return error_record(unpack_sql_state(error->sqlerrcode), clip(error->message),
							clip(error->detail), clip(error->hint), clip(error->context), NULL);
	if (delivery->result != DELIVERY_UNHANDLED)
		return NULL;
	if (delivery->broken)
		return error_record(unpack_sql_state(ERRCODE_UNDEFINED_FUNCTION),
							psprintf("hook %s(outbox.message) does not exist",
									 delivery->handler->function),
							NULL, NULL, NULL, NULL);
	return error_record(unpack_sql_state(ERRCODE_UNDEFINED_OBJECT),
						"no handler matches the message", NULL, NULL, NULL, NULL);
}

static char *
clip(const char *text)
{
	if (text == NULL)
		return NULL;
	return pnstrdup(text, pg_mbcliplen(text, strlen(text), MAX_ERROR_BYTES));
}
