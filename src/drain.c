/*
 * drain.c
 *		drain() and deliver(): delivery by push without a worker, and until when.
 *
 * Both do the same: claim a batch, deliver it in groups (group.c), and again until nothing
 * is ready or enough was claimed.  drain() is a procedure that commits as it goes:
 *
 *	 1. claim, commit: the attempt is charged and survives any crash, whatever the hook
 *	    does; so this commit is flushed even where the session asks for no flush;
 *	 2. lock, call, settle, commit: effects and settlements at once.
 *
 * A group whose commit fails is done again, one message per transaction, and so is one
 * that fails outside of its hooks.  A message that fails alone in the same way is charged
 * with the error, as if its hook had raised it.  If not even that is possible it is left
 * to expiry; twice in a row, and the trouble is ours and not a message's: then what was
 * not begun is given back and the error is raised.
 *
 * deliver() works in the caller's transaction, also on what that has enqueued itself: for
 * tests, and for who cannot commit.  It stands in for a commit, before which nothing
 * would be delivered: so deferred constraints of the caller are checked first, as his.
 *
 * Which subscriptions that is about is in targets.c.
 *
 * What a claim returned and what it was claimed for outlive transactions: they lie in a
 * memory context of the call that is reset after each batch; what a group needs lies in one
 * of its own, since a batch may have as many groups as rows to read in each of them.
 *
 * Locks: as described in claim.c and group.c; none from one transaction to the next.
 */
#include "deliver.h"

#include "route.h"
#include "worker.h"

#include "access/htup_details.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* Hook calls in one transaction; a group ends after a second too, see group.c. */
#define GROUP_CALLS		50
/* A message alone in its transaction is tried so often where others are in the way. */
#define TRIES			3
#define FIRST_PAUSE_MS	100

/*
 * In the counts, claimed is the sum of delivered, retried, dead and unhandled, and of what
 * was lost because its lease had ended before it was begun.
 */
typedef struct Drain
{
	bool		own_commit;		/* drain(), not deliver() */
	bool		deferred;		/* there are initially deferred constraints */
	int64		allowed;		/* messages that may still be claimed */
	char	   *worker;
	bool		(*stop) (bool in_batch);	/* a worker is asked to stop: between batches, groups; or NULL */
	MemoryContext context;		/* of the call */
	MemoryContext batch_context;	/* of one batch */
	List	   *targets;		/* the subscriptions that the call is about */
	int			unsettled;		/* messages in a row that could not even be charged */
	DeliveryCounts counts;
} Drain;

/* what was claimed and is not dealt with: a worker that is stopped gives it back */
static pg_uuid_t live_token;
static TimestampTz live_held_at;
static bool has_live_token = false;

PG_FUNCTION_INFO_V1(outbox_drain);
PG_FUNCTION_INFO_V1(outbox_deliver);

static void refuse_in_hook(const char *function);
static void refuse_atomic(FunctionCallInfo fcinfo);
static void drain_init(Drain *drain, FunctionCallInfo fcinfo, const char *what);
static Datum drain_result(const Drain *drain, FunctionCallInfo fcinfo);
static void drain_run(Drain *drain, const char *name);
static bool deliver_next_batch(Drain *drain, const Target *target);
static Batch *take_batch(Drain *drain, const Target *target);
static void hold(Batch *batch);
static void deliver_batch(Drain *drain, Batch *batch);
static void deliver_alone(Drain *drain, Batch *batch);
static void charge_message(Drain *drain, Batch *batch, const Handler *handler, ErrorData *error);
static void accept_group(Drain *drain, Batch *batch, DeliveryGroup *group);
static void stop(Drain *drain, Batch *batch, int first, ErrorData *error);
static void keep_secrets(ErrorData *error);
static bool is_transient(const ErrorData *error);
static void pause_before(int try);
static ErrorData *end_transaction(Drain *drain);
static ErrorData *commit(void);
static void begin_transaction(const Drain *drain);

/*
 * CALL outbox.drain(subscription, max_messages, INOUT claimed, …)
 */
Datum
outbox_drain(PG_FUNCTION_ARGS)
{
	Drain		drain;
	char	   *name;

	session_begin("outbox.drain()");
	refuse_in_hook("outbox.drain()");
	refuse_atomic(fcinfo);
	name = arg_text(fcinfo, 0, "subscription");
	drain_init(&drain, fcinfo, "drain");
	drain.own_commit = true;

	SPI_connect_ext(SPI_OPT_NONATOMIC);
	drain_run(&drain, name);
	SPI_finish();
	return drain_result(&drain, fcinfo);
}

/*
 * outbox.deliver(subscription, max_messages) → claimed, …
 */
Datum
outbox_deliver(PG_FUNCTION_ARGS)
{
	Drain		drain;
	char	   *name;

	session_begin("outbox.deliver()");
	refuse_in_hook("outbox.deliver()");
	name = arg_text(fcinfo, 0, "subscription");
	drain_init(&drain, fcinfo, "deliver");
	drain_run(&drain, name);
	return drain_result(&drain, fcinfo);
}

/* ---- for delivery workers ---- */

/* Nobody has asked yet whether the role may call drain(). */
int64
drain_for_worker(bool (*stop) (bool in_batch))
{
	MemoryContext caller;
	Drain		drain;

	if (!role_may_drain(GetUserId()))
		return 0;
	caller = MemoryContextSwitchTo(PortalContext);
	drain_init(&drain, NULL, "worker");
	drain.own_commit = true;
	drain.stop = stop;
	drain_run(&drain, NULL);
	MemoryContextSwitchTo(caller);
	return drain.counts.claimed;
}

bool
drain_has_batch(void)
{
	return has_live_token;
}

/*
 * Uncharged, but for the message whose hook was stopped in the middle.  Nobody can
 * interrupt it, so it waits for nobody: then the lease will end by itself.
 */
void
drain_give_back(void)
{
	Settlement	settlement = {.outcome = OUTCOME_FAILED};
	Lease	   *lease;
	int64		running;

	has_live_token = false;
	if (!session_extension_lock())
		return;
	PushActiveSnapshot(GetTransactionSnapshot());
	lease = lease_lock_if_free(&live_token, live_held_at);
	if (lease == NULL)
	{
		PopActiveSnapshot();
		return;
	}
	running = deliver_running(&settlement.handler);
	if (running >= 0)
	{
		settlement.error = error_record(unpack_sql_state(ERRCODE_ADMIN_SHUTDOWN),
										"the worker was stopped while the hook ran",
										NULL, NULL, NULL, NULL);
		(void) lease_settle(lease, running, &settlement);
	}
	settlement = (Settlement) {.outcome = OUTCOME_RELEASED};
	(void) lease_settle_all(lease, &settlement);
	runs_close(lease->store);
	PopActiveSnapshot();
}

static void
refuse_in_hook(const char *function)
{
	if (deliver_in_progress())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s cannot be called by a hook", function),
				 errdetail("A hook runs in the middle of a delivery."),
				 errhint("Enqueue what shall follow: the delivery that called the hook"
						 " goes on with it.")));
}

static void
refuse_atomic(FunctionCallInfo fcinfo)
{
	if (fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic || IsSubTransaction())
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_TERMINATION),
				 errmsg("outbox.drain() cannot run inside a transaction block or a function"),
				 errdetail("It commits what it has delivered as it goes."),
				 errhint("To deliver in the caller's transaction use"
						 " SELECT * FROM outbox.deliver().")));
}

static void
drain_init(Drain *drain, FunctionCallInfo fcinfo, const char *what)
{
	memset(drain, 0, sizeof(*drain));
	drain->allowed = PG_INT64_MAX;
	if (fcinfo != NULL && !PG_ARGISNULL(1))
	{
		drain->allowed = PG_GETARG_INT32(1);
		if (drain->allowed < 1)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("max_messages must be positive"),
					 errdetail("It is %lld.", (long long) drain->allowed),
					 errhint("Leave it out to go on until nothing is ready.")));
	}
	drain->context = AllocSetContextCreate(CurrentMemoryContext, "outbox drain",
										   ALLOCSET_DEFAULT_SIZES);
	drain->batch_context = AllocSetContextCreate(drain->context, "outbox batch",
												 ALLOCSET_DEFAULT_SIZES);
	drain->worker = MemoryContextAlloc(drain->context, 64);
	snprintf(drain->worker, 64, "%s %d", what, MyProcPid);
}

static Datum
drain_result(const Drain *drain, FunctionCallInfo fcinfo)
{
	const DeliveryCounts *counts = &drain->counts;
	Datum		values[6];
	bool		nulls[6] = {false};
	TupleDesc	desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	values[0] = Int64GetDatum(counts->claimed);
	values[1] = Int64GetDatum(counts->delivered);
	values[2] = Int64GetDatum(counts->retried);
	values[3] = Int64GetDatum(counts->dead);
	values[4] = Int64GetDatum(counts->unhandled);
	values[5] = Int64GetDatum(counts->left_over);
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

/* In rounds, so that a subscription that never runs dry leaves the others their turn. */
static void
drain_run(Drain *drain, const char *name)
{
	MemoryContext caller = MemoryContextSwitchTo(drain->context);
	bool		any = true;
	ErrorData  *error;

	frontier_check();
	drain->deferred = constraints_deferred_exist();
	if (!drain->own_commit)
		constraints_check();
	PushActiveSnapshot(GetTransactionSnapshot());
	drain->targets = targets_choose(name, drain->own_commit);
	PopActiveSnapshot();
	if ((error = end_transaction(drain)) != NULL)
		ReThrowError(error);

	while (any && (drain->stop == NULL || !drain->stop(false)))
	{
		ListCell   *cell;

		any = false;
		foreach(cell, drain->targets)
		{
			if (drain->stop != NULL && drain->stop(true))
				break;
			any |= deliver_next_batch(drain, lfirst(cell));
		}
	}
	if (!drain->own_commit && drain->deferred)
		constraints_defer();
	if (drain->stop == NULL)
		drain->counts.left_over = targets_left(drain->targets);
	MemoryContextSwitchTo(caller);
}

/* ---- batches ---- */

/* false: nothing is ready, or no more is allowed */
static bool
deliver_next_batch(Drain *drain, const Target *target)
{
	MemoryContext caller = MemoryContextSwitchTo(drain->batch_context);
	Batch	   *batch = NULL;

	CHECK_FOR_INTERRUPTS();
	if (drain->allowed > 0)
		batch = take_batch(drain, target);
	if (batch != NULL)
	{
		drain->allowed -= batch->claim->n;
		drain->counts.claimed += batch->claim->n;
		deliver_batch(drain, batch);
		has_live_token = false;
	}
	MemoryContextSwitchTo(caller);
	MemoryContextReset(drain->batch_context);
	return batch != NULL;
}

static Batch *
take_batch(Drain *drain, const Target *target)
{
	Batch	   *batch = palloc0(sizeof(Batch));
	Subscription *subscription;
	ErrorData  *error;

	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = target_open(target);
	if (subscription != NULL)
	{
		/* routing reads handlers for itself into what it is given, and forgets them */
		Subscription copy = *subscription;

		batch->claim = claim_take(&copy, MODE_PUSHED, (int) Min(drain->allowed, outbox_batch_size),
								  subscription->lease, subscription->max_active,
								  drain->worker, false);
	}
	PopActiveSnapshot();
	hold(batch);
	if (batch->claim != NULL && batch->claim->n > 0 && drain->own_commit)
	{
		ForceSyncCommit();
		/* from here on, for who is terminated right after the commit */
		live_token = batch->claim->messages[0].run->claim_token;
		has_live_token = true;
	}
	if ((error = end_transaction(drain)) != NULL)
		ReThrowError(error);
	if (batch->claim == NULL || batch->claim->n == 0)
		return NULL;

	batch->subscription = subscription;
	batch->token = batch->claim->messages[0].run->claim_token;
	batch->own_commit = drain->own_commit;
	batch->deferred = drain->deferred;
	return batch;
}

/*
 * From here on the batch's leases count as in time, until they are taken back: a group that
 * fails after a long hook, or a worker that is stopped in it, has held the rest by its locks.
 */
static void
hold(Batch *batch)
{
	batch->held_at = live_held_at = clock_now();
}

static void
deliver_batch(Drain *drain, Batch *batch)
{
	int			limit = !drain->own_commit ? batch->claim->n : drain->deferred ? 1 : GROUP_CALLS;

	while (batch->next < batch->claim->n)
	{
		DeliveryGroup group;
		ErrorData  *error = group_deliver(&group, batch, limit);

		if (error == NULL)
			error = end_transaction(drain);
		if (error == NULL)
			accept_group(drain, batch, &group);
		else if (group.cancel != NULL || is_cancel(error))
			stop(drain, batch, batch->next, group.cancel != NULL ? group.cancel : error);
		else
		{
			for (int end = batch->next + Max(group.n, 1); batch->next < end;)
				deliver_alone(drain, batch);
		}
		group_end(&group);
		if (drain->own_commit && (QueryCancelPending || ProcDiePending))
			stop(drain, batch, batch->next, NULL);
		if (drain->stop != NULL && batch->next < batch->claim->n && drain->stop(true))
		{
			stop(drain, batch, batch->next, NULL);
			return;
		}
	}
}

/* One message per transaction, for its group has failed. */
static void
deliver_alone(Drain *drain, Batch *batch)
{
	for (int try = 1;; try++)
	{
		DeliveryGroup group;
		ErrorData  *error;

		/* a prepared statement outlives what is undone */
		if (drain->stop != NULL)
			leftovers_drop();
		error = group_deliver(&group, batch, 1);
		if (error == NULL)
			error = end_transaction(drain);
		if (error == NULL)
		{
			accept_group(drain, batch, &group);
			group_end(&group);
			return;
		}
		if (group.cancel != NULL || is_cancel(error))
			stop(drain, batch, batch->next, group.cancel != NULL ? group.cancel : error);
		if (is_transient(error) && !drain->own_commit)
			ReThrowError(error);
		if (!is_transient(error) || try == TRIES)
		{
			charge_message(drain, batch, group.deliveries[0].handler, error);
			group_end(&group);
			return;
		}
		group_end(&group);
		pause_before(try);
	}
}

static void
charge_message(Drain *drain, Batch *batch, const Handler *handler, ErrorData *error)
{
	DeliveryGroup group;
	ErrorData  *failure;

	failure = group_charge(&group, batch, handler, error);
	if (failure == NULL)
		failure = end_transaction(drain);
	if (failure == NULL)
	{
		accept_group(drain, batch, &group);
		group_end(&group);
		return;
	}
	if (is_cancel(failure) || ++drain->unsettled > 1)
		stop(drain, batch, batch->next + 1, failure);
	ereport(WARNING,
			(errcode(failure->sqlerrcode),
			 errmsg("a message of subscription \"%s\" could not be settled: %s",
					batch->subscription->name, failure->message),
			 errdetail("It stays claimed until its lease ends.")));
	group_end(&group);
	batch->next++;
}

/* What the group has done is committed, or as good as that. */
static void
accept_group(Drain *drain, Batch *batch, DeliveryGroup *group)
{
	DeliveryCounts *counts = &drain->counts;

	counts->delivered += group->counts.delivered;
	counts->retried += group->counts.retried;
	counts->dead += group->counts.dead;
	counts->unhandled += group->counts.unhandled;
	batch->next += group->n;
	hold(batch);
	drain->unsettled = 0;
	if (group->cancel != NULL)
		stop(drain, batch, batch->next, group->cancel);
}

/*
 * Give back what was not begun, from message "first" on, and raise the error: the one
 * given, or the interrupt that is pending.  deliver() gives nothing back: all of it is
 * undone.
 */
static void
stop(Drain *drain, Batch *batch, int first, ErrorData *error)
{
	uint32		holdoff = InterruptHoldoffCount;
	DeliveryGroup group;

	if (drain->own_commit && first < batch->claim->n)
	{
		/* the interrupt waits; if this fails too, the lease will end by itself */
		HOLD_INTERRUPTS();
		if (group_release(&group, batch, first) == NULL)
			(void) commit();
		InterruptHoldoffCount = holdoff;
		begin_transaction(drain);
	}
	if (error != NULL && drain->stop != NULL)
		keep_secrets(error);
	if (error != NULL)
		ReThrowError(error);
	CHECK_FOR_INTERRUPTS();
}

/*
 * The error of a worker's hook goes into the server's log, and its context is the
 * statement that the hook was in, made from a payload perhaps.
 */
static void
keep_secrets(ErrorData *error)
{
	error->detail = NULL;
	error->context = NULL;
	error->internalquery = NULL;
}

/* Another transaction was in the way. */
static bool
is_transient(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_T_R_SERIALIZATION_FAILURE ||
		error->sqlerrcode == ERRCODE_T_R_DEADLOCK_DETECTED;
}

/* An interrupt waits for the next group, which begins with looking for it. */
static void
pause_before(int try)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 FIRST_PAUSE_MS << (try - 1), outbox_wait_event(OUTBOX_WAIT_RETRY));
	ResetLatch(MyLatch);
}

/* Commit, and begin the next transaction; where that is the caller's: as good as that. */
static ErrorData *
end_transaction(Drain *drain)
{
	ErrorData  *error = NULL;

	if (drain->own_commit)
	{
		error = commit();
		begin_transaction(drain);
	}
	else
		CommandCounterIncrement();
	return error;
}

/*
 * SPI_commit() has begun the next transaction also where it fails: then everything since
 * the last commit is undone, and why is returned.
 */
static ErrorData *
commit(void)
{
	MemoryContext context = CurrentMemoryContext;
	ErrorData  *volatile error = NULL;

	PG_TRY();
	{
		SPI_commit();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return error;
}

/* A worker holds the extension in each of its transactions, before any table: see session.c. */
static void
begin_transaction(const Drain *drain)
{
	MemoryContext context = CurrentMemoryContext;

	if (drain->stop == NULL)
		return;
	session_extension_hold();
	leftovers_drop();
	MemoryContextSwitchTo(context);
}
