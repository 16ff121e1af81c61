/*
 * status.c
 *		What the views show that plain SQL cannot: what is not yet routed, which run a
 *		message lies in, the messages of a run, whether a handler could be called.
 *
 * All of it only reads, with the snapshot of the query: so one query sees one state, and
 * standbys and read-only transactions can ask.  Counts of what is routed need nothing
 * from here, they are sums over outbox.delivery.
 *
 * Readers may call these functions directly.  Payload, headers and the details of errors
 * leave only for those who may read the log.
 *
 * Locks: AccessShareLock on what is read.
 */
#include "status.h"

#include "catalog.h"
#include "log.h"
#include "rows.h"
#include "run.h"

#include "access/table.h"
#include "access/tableam.h"
#include "catalog/namespace.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* So many messages that are not yet routed are counted, then it is "at least". */
#define PENDING_COUNTED 100000

/* What one subscription has not yet been given. */
typedef struct Backlog
{
	Subscription *subscription;
	Cover	   *self_routed;	/* not pending, though above the frontier */
	int64		count;
	TimestampTz oldest;			/* 0: none */
} Backlog;

typedef struct Count
{
	int			n;
	Backlog    *backlogs;
	int64		looked_at;
	Frontier	now;			/* which transactions are in progress */
} Count;

/* kept for the calls of one query, which all have the same snapshot and shall see one time */
typedef struct Where
{
	List	   *subscriptions;
	Frontier	frontier;
	TimestampTz now;
	bool		may_read_log;
} Where;

static List *subscriptions_shown(Snapshot snapshot);
static Subscription *default_to_be(void);
static Count *count_pending(Snapshot snapshot);
static void read_self_routed(Count *count, Snapshot snapshot);
static bool count_range(Count *count, LogReader *reader, int64 lower, int64 upper);
static void count_gap(Count *count, LogReader *reader, int64 lower, int64 upper);
static void count_message(Count *count, TupleTableSlot *slot);
static int	routing_pid(void);
static const char *mode_name(SubscriptionMode mode);
static Where *where_of(FunctionCallInfo fcinfo, Snapshot snapshot);
static void put_run(ReturnSetInfo *result, const Subscription *subscription, const Run *run,
					const Where *where);
static Datum error_shown(Jsonb *error, bool may_read_log);
static void put_pending(ReturnSetInfo *result, const Subscription *subscription);
static bool may_read_log(void);
static void put_message(ReturnSetInfo *result, TupleTableSlot *slot, bool all);
static const char *handler_state(const Subscription *subscription, const Handler *handler);

/* The time that outbox goes by, for ages. */
PG_FUNCTION_INFO_V1(outbox_clock);
Datum
outbox_clock(PG_FUNCTION_ARGS)
{
	PG_RETURN_TIMESTAMPTZ(clock_now());
}

/* The word for a run, given the time: a ready run that is not yet due is scheduled. */
const char *
run_status(const Run *run, TimestampTz now)
{
	if (run->state == RUN_READY && run->available_at > now)
		return "scheduled";
	return run_state_name(run->state);
}

/* Whether routing has seen the transaction of this message as complete. */
bool
frontier_has_passed(const Frontier *frontier, int64 position)
{
	int64		transaction = position_transaction(position);

	if (frontier->id == 0 || transaction >= frontier->horizon)
		return false;
	return !frontier_is_running(frontier, transaction);
}

/*
 * All subscriptions, and "default" before its row is made at the first use: what is
 * enqueued is pending for it all the same.
 */
static List *
subscriptions_shown(Snapshot snapshot)
{
	List	   *list = subscription_list(snapshot);
	Identity	identity;

	identity_read(&identity);
	if (list == NIL && !identity.in_use)
		list = list_make1(default_to_be());
	return list;
}

static Subscription *
default_to_be(void)
{
	Subscription *subscription = palloc0(sizeof(Subscription));

	subscription->name = pstrdup("default");
	subscription->pattern = pstrdup("#");
	subscription->mode = MODE_UNUSED;
	return subscription;
}

static const char *
mode_name(SubscriptionMode mode)
{
	switch (mode)
	{
		case MODE_UNUSED:
			return "unused";
		case MODE_PULLED:
			return "pulled";
		case MODE_PUSHED:
			return "pushed";
	}
	pg_unreachable();
}

/* One row per subscription; behind the view "status". */
PG_FUNCTION_INFO_V1(outbox_backlog);
Datum
outbox_backlog(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Count	   *count;
	int			pid = routing_pid();

	InitMaterializedSRF(fcinfo, 0);
	count = count_pending(GetActiveSnapshot());
	for (int i = 0; i < count->n; i++)
	{
		Backlog    *backlog = &count->backlogs[i];
		Datum		values[8];
		bool		nulls[8] = {false};

		values[0] = Int64GetDatum(backlog->subscription->id);
		values[1] = CStringGetTextDatum(backlog->subscription->name);
		values[2] = CStringGetTextDatum(mode_name(backlog->subscription->mode));
		values[3] = BoolGetDatum(backlog->subscription->paused);
		values[4] = Int64GetDatum(backlog->count);
		values[5] = BoolGetDatum(count->looked_at >= PENDING_COUNTED);
		values[6] = TimestampTzGetDatum(backlog->oldest);
		nulls[6] = (backlog->oldest == 0);
		values[7] = Int32GetDatum(pid);
		nulls[7] = (pid == 0);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/*
 * What the snapshot sees above the frontier, and of transactions that the frontier lists
 * as running: the ranges that the next routing pass will read.  The log's reader has a
 * newer snapshot, so the ranges are those of transactions that were complete in this one,
 * and our own.  In a copy nothing is known of the transactions behind the positions.
 */
static Count *
count_pending(Snapshot snapshot)
{
	Count	   *count = palloc0(sizeof(Count));
	List	   *subscriptions = subscriptions_shown(snapshot);
	Frontier	frontier;
	Identity	identity;
	FullTransactionId top = GetTopFullTransactionIdIfAny();
	int64		own;
	bool		ours;
	LogReader  *reader;
	ListCell   *cell;
	bool		more = true;

	count->backlogs = palloc0(Max(list_length(subscriptions), 1) * sizeof(Backlog));
	foreach(cell, subscriptions)
		count->backlogs[count->n++].subscription = lfirst(cell);
	read_self_routed(count, snapshot);

	frontier_read(&frontier, snapshot);
	identity_read(&identity);
	ours = (identity.exists && !identity.foreign && !frontier_is_foreign(&frontier));
	own = FullTransactionIdIsValid(top) ? (int64) U64FromFullTransactionId(top) + identity.offset : -1;
	frontier_of_snapshot(&count->now, snapshot, identity.offset);
	reader = log_open(snapshot);
	for (int i = 0; i < frontier.n_running && more; i++)
	{
		/* a frontier of this transaction may be newer than the snapshot */
		if (ours && frontier.running[i] >= count->now.horizon)
			break;
		more = count_range(count, reader, position_of_transaction(frontier.running[i]),
						   position_of_transaction(frontier.running[i] + 1));
	}
	if (more)
		more = count_range(count, reader,
						   frontier.id == 0 ? 0 : position_of_transaction(frontier.horizon),
						   ours ? position_of_transaction(count->now.horizon) : PG_INT64_MAX);
	/* listed as running, or at the bound */
	if (more && own >= 0 && (ours || frontier_is_running(&count->now, own)))
		count_gap(count, reader, position_of_transaction(own), position_of_transaction(own + 1));
	log_close(reader);
	return count;
}

/* A table that is normally empty: read as a whole. */
static void
read_self_routed(Count *count, Snapshot snapshot)
{
	Relation	rel = table_open(outbox_oid(OB_SELF_ROUTED), AccessShareLock);
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
	TupleTableSlot *slot = table_slot_create(rel, NULL);

	(void) outbox_check_columns(OB_SELF_ROUTED, rel);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		int64		subscription_id;

		slot_getallattrs(slot);
		subscription_id = DatumGetInt64(slot->tts_values[0]);
		for (int i = 0; i < count->n; i++)
		{
			Backlog    *backlog = &count->backlogs[i];

			if (backlog->subscription->id != subscription_id)
				continue;
			if (backlog->self_routed == NULL)
				backlog->self_routed = cover_make();
			cover_add(backlog->self_routed, DatumGetInt64(slot->tts_values[1]),
					  DatumGetInt64(slot->tts_values[2]));
		}
	}
	ExecDropSingleTupleTableSlot(slot);
	table_endscan(scan);
	table_close(rel, AccessShareLock);
}

/*
 * false: enough was looked at.  The scan itself runs in the caller's context: what an
 * index keeps between two rows must not go with the first of them.
 */
static bool
count_range(Count *count, LogReader *reader, int64 lower, int64 upper)
{
	const Frontier *now = &count->now;

	for (int i = 0; i < now->n_running && lower < upper; i++)
	{
		int64		begin = position_of_transaction(now->running[i]);
		int64		end = position_of_transaction(now->running[i] + 1);

		if (end <= lower)
			continue;
		if (begin > lower)
			count_gap(count, reader, lower, Min(begin, upper));
		lower = end;
	}
	if (lower < upper)
		count_gap(count, reader, lower, upper);
	return count->looked_at < PENDING_COUNTED;
}

/* A range without the rows of transactions in progress: nobody sees them, to read them takes time. */
static void
count_gap(Count *count, LogReader *reader, int64 lower, int64 upper)
{
	MemoryContext per_message = AllocSetContextCreate(CurrentMemoryContext, "outbox pending",
													  ALLOCSET_SMALL_SIZES);
	TupleTableSlot *slot;

	log_range(reader, lower, upper);
	while (count->looked_at < PENDING_COUNTED && (slot = log_next(reader)) != NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(per_message);

		CHECK_FOR_INTERRUPTS();
		count->looked_at++;
		count_message(count, slot);
		MemoryContextSwitchTo(caller);
		MemoryContextReset(per_message);
	}
	MemoryContextDelete(per_message);
}

static void
count_message(Count *count, TupleTableSlot *slot)
{
	bool		isnull;
	char	   *name = TextDatumGetCString(slot_getattr(slot, LOG_NAME, &isnull));
	char	   *kind = TextDatumGetCString(slot_getattr(slot, LOG_KIND, &isnull));
	int64		position = log_position(slot);
	TimestampTz created_at = log_created_at(slot);

	for (int i = 0; i < count->n; i++)
	{
		Backlog    *backlog = &count->backlogs[i];

		if (!subscription_matches(backlog->subscription, name, kind) ||
			(backlog->self_routed != NULL && cover_contains(backlog->self_routed, position)))
			continue;
		backlog->count++;
		if (backlog->oldest == 0 || created_at < backlog->oldest)
			backlog->oldest = created_at;
	}
}

/* Who holds the routing lock, or 0: nobody, or a prepared transaction. */
static int
routing_pid(void)
{
	LOCKTAG		tag;
	LockData   *locks = GetLockStatusData();

	routing_locktag(&tag);
	for (int i = 0; i < locks->nelements; i++)
	{
		LockInstanceData *lock = &locks->locks[i];

		if (lock->holdMask != 0 && memcmp(&lock->locktag, &tag, sizeof(LOCKTAG)) == 0)
			return lock->pid;
	}
	return 0;
}

static Where *
where_of(FunctionCallInfo fcinfo, Snapshot snapshot)
{
	Where	   *where = fcinfo->flinfo->fn_extra;

	if (where == NULL)
	{
		MemoryContext caller = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);

		where = palloc0(sizeof(Where));
		where->subscriptions = subscriptions_shown(snapshot);
		frontier_read(&where->frontier, snapshot);
		where->now = clock_now();
		where->may_read_log = may_read_log();
		MemoryContextSwitchTo(caller);
		fcinfo->flinfo->fn_extra = where;
	}
	return where;
}

/*
 * One row for each subscription that a message belongs to, with what its run says; behind
 * the view "messages".  Where there is no run, the message is pending if routing has not
 * come to it; else it was not for that subscription.
 */
PG_FUNCTION_INFO_V1(outbox_deliveries_of);
Datum
outbox_deliveries_of(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Snapshot	snapshot = GetActiveSnapshot();
	RunStore   *store;
	Where	   *where;
	ListCell   *cell;
	int64		position;

	/* called for each message of a query: a descriptor looked up anew would stay until its end */
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(2))
		return (Datum) 0;
	position = PG_GETARG_INT64(0);

	where = where_of(fcinfo, snapshot);
	store = runs_open_for_reading();
	foreach(cell, where->subscriptions)
	{
		Subscription *subscription = lfirst(cell);
		Run		   *run = run_of_position(store, snapshot, subscription->id, position);

		if (run != NULL)
			put_run(result, subscription, run, where);
		else if (!frontier_has_passed(&where->frontier, position) &&
				 subscription_matches(subscription, text_to_cstring(PG_GETARG_TEXT_PP(1)),
									  text_to_cstring(PG_GETARG_TEXT_PP(2))))
			put_pending(result, subscription);
	}
	runs_close(store);
	return (Datum) 0;
}

static void
put_run(ReturnSetInfo *result, const Subscription *subscription, const Run *run, const Where *where)
{
	Datum		values[10];
	bool		nulls[10] = {false};

	values[0] = CStringGetTextDatum(subscription->name);
	values[1] = CStringGetTextDatum(run_status(run, where->now));
	values[2] = Int32GetDatum(run->attempts);
	values[3] = Int32GetDatum(run->max_attempts);
	values[4] = TimestampTzGetDatum(run->available_at);
	values[5] = TimestampTzGetDatum(run->claimed_at);
	nulls[5] = (run->claimed_at == 0);
	values[6] = TimestampTzGetDatum(run->locked_until);
	nulls[6] = (run->state != RUN_LEASED);
	values[7] = TimestampTzGetDatum(run->settled_at);
	nulls[7] = (run->settled_at == 0);
	values[8] = run->worker ? CStringGetTextDatum(run->worker) : (Datum) 0;
	nulls[8] = (run->worker == NULL);
	values[9] = error_shown(run->last_error, where->may_read_log);
	nulls[9] = (run->last_error == NULL);
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* PostgreSQL's details quote rows and keys, and contexts statements: so parts of payloads. */
static Datum
error_shown(Jsonb *error, bool may_read_log)
{
	static const char *const hidden[] = {"detail", "hint", "context", "data"};

	for (int i = 0; i < lengthof(hidden) && error != NULL && !may_read_log && JB_ROOT_IS_OBJECT(error); i++)
		error = DatumGetJsonbP(DirectFunctionCall2(jsonb_delete, JsonbPGetDatum(error),
												   CStringGetTextDatum(hidden[i])));
	return PointerGetDatum(error);
}

static void
put_pending(ReturnSetInfo *result, const Subscription *subscription)
{
	Datum		values[10] = {0};
	bool		nulls[10];

	memset(nulls, true, sizeof(nulls));
	values[0] = CStringGetTextDatum(subscription->name);
	values[1] = CStringGetTextDatum("pending");
	values[2] = Int32GetDatum(0);
	nulls[0] = nulls[1] = nulls[2] = false;
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* The messages at these positions; behind the view "dead_letters". */
PG_FUNCTION_INFO_V1(outbox_log_of);
Datum
outbox_log_of(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	LogReader  *reader;
	Cover	   *cover;
	bool		all;

	InitMaterializedSRF(fcinfo, 0);
	if (PG_ARGISNULL(0))
		return (Datum) 0;
	cover = cover_from_datum(PG_GETARG_DATUM(0));
	all = may_read_log();

	reader = log_open(GetActiveSnapshot());
	for (int i = 0; i < cover->n; i++)
	{
		TupleTableSlot *slot;

		log_range(reader, cover->ranges[i].lower, cover->ranges[i].upper);
		while ((slot = log_next(reader)) != NULL)
		{
			CHECK_FOR_INTERRUPTS();
			put_message(result, slot, all);
		}
	}
	log_close(reader);
	return (Datum) 0;
}

/* SELECT on the view outbox.log is the right to see what messages contain. */
static bool
may_read_log(void)
{
	Oid			log = get_relname_relid("log", get_namespace_oid("outbox", false));

	return OidIsValid(log) && pg_class_aclcheck(log, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
}

static void
put_message(ReturnSetInfo *result, TupleTableSlot *slot, bool all)
{
	bool		nulls[LOG_COLUMNS];

	slot_getallattrs(slot);
	memcpy(nulls, slot->tts_isnull, sizeof(nulls));
	if (!all)
		nulls[LOG_PAYLOAD - 1] = nulls[LOG_HEADERS - 1] = true;
	tuplestore_putvalues(result->setResult, result->setDesc, slot->tts_values, nulls);
}

/* Whether each handler could be called now; behind the view "handlers". */
PG_FUNCTION_INFO_V1(outbox_handler_states);
Datum
outbox_handler_states(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Snapshot	snapshot = GetActiveSnapshot();
	ListCell   *cell;

	InitMaterializedSRF(fcinfo, 0);
	foreach(cell, subscription_list(snapshot))
	{
		Subscription *subscription = lfirst(cell);
		ListCell   *each;

		subscription_handlers(subscription, snapshot);
		foreach(each, subscription->handlers)
		{
			Handler    *handler = lfirst(each);
			Datum		values[2];
			bool		nulls[2] = {false};

			values[0] = Int64GetDatum(handler->id);
			values[1] = CStringGetTextDatum(handler_state(subscription, handler));
			tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
		}
	}
	return (Datum) 0;
}

static const char *
handler_state(const Subscription *subscription, const Handler *handler)
{
	const char *why;
	Oid			function;

	if (!role_may_be_served(handler->role, &why) ||
		!role_may_consume(handler->role, subscription->name))
		return "forbidden";
	if (handler->function == NULL)
		return "ok";
	function = handler_function(handler);
	if (!OidIsValid(function))
		return "broken";
	return outbox_function_aclcheck(function, handler->role) == ACLCHECK_OK ? "ok" : "forbidden";
}
