/*
 * dead.c
 *		Dead letters in bulk: requeue_all and discard_all.
 *
 * Both walk the dead runs of a subscription, the longest dead first, by an index, and
 * take out of each run the messages that are meant.  Filters on error and time hold for
 * a whole run; names, budgets and due times need a look at its messages.
 *
 * Locks: the subscription's against unsubscribe(); rows are only skipped, never waited
 * for, since many stay locked to the end of the transaction.  What is skipped is being
 * requeued, discarded or removed by somebody else.
 */
#include "admin.h"

#include "catalog.h"
#include "log.h"

#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* Due times that are spread are a multiple of this apart: what shares one stays together. */
#define SPREAD_STEP		(USECS_PER_SEC / 10)

typedef struct Walk
{
	Subscription *subscription;
	Action		action;
	/* filters */
	char	   *name_pattern;	/* or NULL */
	char	   *error_like;		/* or NULL */
	char	   *error_sqlstate; /* or NULL */
	TimestampTz after;			/* inclusive */
	TimestampTz before;			/* exclusive */
	int64		max_messages;
	/* due times: so many messages over so many microseconds, 0: at once */
	int64		spread_over;
	int64		spread_total;
	bool		counting;		/* nothing is changed */
	int64		done;
} Walk;

/* messages of one run that go the same way */
typedef struct Part
{
	TimestampTz available_at;
	int			max_attempts;
	Cover	   *positions;
	int			count;
} Part;

static void walk_init(FunctionCallInfo fcinfo, Walk *walk, RunState becomes);
static void check_sqlstate(const char *sqlstate);
static int64 walk_dead(Walk *walk);
static bool run_is_meant(const Walk *walk, const Run *run);
static char *error_field(const Jsonb *error, const char *field);
static void walk_run(Walk *walk, RunStore *store, LogReader *reader, Run *run);
static bool walk_needs_messages(const Walk *walk, const Run *run);
static List *select_parts(Walk *walk, LogReader *reader, const Run *run);
static bool message_is_meant(const Walk *walk, TupleTableSlot *message);
static Part *part_for(List **parts, TimestampTz available_at, int max_attempts);
static TimestampTz due_time(const Walk *walk);

/* The arguments that both functions have. */
static void
walk_init(FunctionCallInfo fcinfo, Walk *walk, RunState becomes)
{
	char	   *subscription = arg_required_text(fcinfo, 0, "subscription");

	memset(walk, 0, sizeof(*walk));
	action_init(&walk->action, becomes);
	walk->name_pattern = arg_text(fcinfo, 1, "name_pattern");
	if (walk->name_pattern != NULL)
		topic_check(walk->name_pattern);
	walk->error_like = arg_text(fcinfo, 2, "error_like");
	walk->error_sqlstate = arg_text(fcinfo, 3, "error_sqlstate");
	if (walk->error_sqlstate != NULL)
		check_sqlstate(walk->error_sqlstate);
	if (!arg_time(fcinfo, 4, "dead_after", &walk->after))
		walk->after = DT_NOBEGIN;
	if (!arg_time(fcinfo, 5, "dead_before", &walk->before))
		walk->before = DT_NOEND;
	walk->max_messages = PG_INT64_MAX;
	if (!PG_ARGISNULL(6))
	{
		walk->max_messages = PG_GETARG_INT32(6);
		if (walk->max_messages < 1)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("max_messages must be positive"),
					 errdetail("It is %d.", PG_GETARG_INT32(6)),
					 errhint("Leave it out for all of them.")));
	}
	walk->subscription = subscription_get(subscription);
}

static void
check_sqlstate(const char *sqlstate)
{
	if (strlen(sqlstate) != 5 ||
		strspn(sqlstate, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("error_sqlstate \"%s\" is not an SQLSTATE", sqlstate),
				 errdetail("It must have five digits or capital letters."),
				 errhint("Take it from outbox.dead_letters.last_error_sqlstate.")));
}

PG_FUNCTION_INFO_V1(outbox_requeue_all);
Datum
outbox_requeue_all(PG_FUNCTION_ARGS)
{
	Walk		walk;

	session_begin("outbox.requeue_all()");
	walk_init(fcinfo, &walk, RUN_READY);
	if (!PG_ARGISNULL(7))
		walk.spread_over = interval_usecs(PG_GETARG_DATUM(7), "spread_over");
	subscription_lock(walk.subscription->id, AccessShareLock);
	load_handlers(walk.subscription);

	if (walk.spread_over > 0)
	{
		walk.counting = true;
		walk.spread_total = walk_dead(&walk);
		walk.counting = false;
	}
	PG_RETURN_INT64(walk_dead(&walk));
}

PG_FUNCTION_INFO_V1(outbox_discard_all);
Datum
outbox_discard_all(PG_FUNCTION_ARGS)
{
	Walk		walk;

	session_begin("outbox.discard_all()");
	walk_init(fcinfo, &walk, RUN_DISCARDED);
	walk.action.reason = arg_text(fcinfo, 7, "reason");
	subscription_lock(walk.subscription->id, AccessShareLock);
	PG_RETURN_INT64(walk_dead(&walk));
}

/* Returns messages. */
static int64
walk_dead(Walk *walk)
{
	RunStore   *store = runs_open();
	Snapshot	snapshot = snapshot_push();
	LogReader  *reader = log_open(snapshot);
	RunScan    *scan = runs_dead(store, snapshot, walk->subscription->id);
	MemoryContext per_run = AllocSetContextCreate(CurrentMemoryContext, "outbox dead run",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(per_run);
	Run		   *run;

	walk->done = 0;
	while (walk->done < walk->max_messages && (run = run_next(scan)) != NULL &&
		   run->settled_at < walk->before)
	{
		CHECK_FOR_INTERRUPTS();
		if (run_is_meant(walk, run))
			walk_run(walk, store, reader, run);
		MemoryContextReset(per_run);
	}

	MemoryContextSwitchTo(caller);
	MemoryContextDelete(per_run);
	run_scan_end(scan);
	log_close(reader);
	snapshot_pop();
	runs_close(store);
	return walk->done;
}

static bool
run_is_meant(const Walk *walk, const Run *run)
{
	char	   *message;
	char	   *sqlstate;

	if (run->settled_at < walk->after)
		return false;
	if (walk->error_sqlstate != NULL)
	{
		sqlstate = error_field(run->last_error, "sqlstate");
		if (sqlstate == NULL || strcmp(sqlstate, walk->error_sqlstate) != 0)
			return false;
	}
	if (walk->error_like != NULL)
	{
		message = error_field(run->last_error, "message");
		if (message == NULL ||
			!DatumGetBool(DirectFunctionCall2Coll(textlike, C_COLLATION_OID,
												  CStringGetTextDatum(message),
												  CStringGetTextDatum(walk->error_like))))
			return false;
	}
	return true;
}

/* a text in last_error, or NULL */
static char *
error_field(const Jsonb *error, const char *field)
{
	JsonbValue	key = {.type = jbvString};
	JsonbValue *value;

	if (error == NULL || !JB_ROOT_IS_OBJECT(error))
		return NULL;
	key.val.string.val = unconstify(char *, field);
	key.val.string.len = strlen(field);
	value = findJsonbValueFromContainer(unconstify(JsonbContainer *, &error->root), JB_FOBJECT,
										&key);
	if (value == NULL || value->type != jbvString)
		return NULL;
	return pnstrdup(value->val.string.val, value->val.string.len);
}

static void
walk_run(Walk *walk, RunStore *store, LogReader *reader, Run *run)
{
	List	   *parts = NIL;
	ListCell   *cell;

	if (!walk->counting &&
		(run_lock(store, run, LockWaitSkip) != RUN_LOCKED || run->state != RUN_DEAD))
		return;
	if (walk_needs_messages(walk, run))
		parts = select_parts(walk, reader, run);
	else
	{
		Part	   *all = part_for(&parts, walk->action.available_at, run->max_attempts);

		all->positions = cover_copy(run->positions);
		all->count = run->message_count;
		walk->done += all->count;
	}
	if (walk->counting)
		return;

	foreach(cell, parts)
	{
		Part	   *part = lfirst(cell);
		Action		action = walk->action;

		action.available_at = part->available_at;
		action_carry_out(&action, store, run_take(store, run, part->positions, part->count),
						 part->max_attempts);
	}
}

/* A requeue reads budgets again; a discard takes whole runs where it can. */
static bool
walk_needs_messages(const Walk *walk, const Run *run)
{
	if (walk->name_pattern != NULL || run->message_count > walk->max_messages - walk->done)
		return true;
	return walk->action.becomes == RUN_READY && !walk->counting;
}

/*
 * The messages of a run that are meant, by where they go.  Neighbours that go the same
 * way share a range: nothing of the run lies between them.
 */
static List *
select_parts(Walk *walk, LogReader *reader, const Run *run)
{
	List	   *parts = NIL;
	TupleTableSlot *message;

	for (int i = 0; i < run->positions->n; i++)
	{
		Part	   *open = NULL;

		log_range(reader, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
		while (walk->done < walk->max_messages && (message = log_next(reader)) != NULL)
		{
			int64		position = log_position(message);
			Part	   *part;

			if (!message_is_meant(walk, message))
			{
				open = NULL;
				continue;
			}
			part = part_for(&parts, due_time(walk), attempts_allowed(walk->subscription, message));
			if (part == open)
				part->positions->ranges[part->positions->n - 1].upper = position + 1;
			else
				cover_append(part->positions, position, position + 1);
			part->count++;
			walk->done++;
			open = part;
		}
	}
	return parts;
}

static bool
message_is_meant(const Walk *walk, TupleTableSlot *message)
{
	bool		isnull;

	return walk->name_pattern == NULL ||
		topic_matches(walk->name_pattern,
					  TextDatumGetCString(slot_getattr(message, LOG_NAME, &isnull)));
}

/* Due times ascend, so only the last parts can be meant. */
static Part *
part_for(List **parts, TimestampTz available_at, int max_attempts)
{
	Part	   *part;

	for (int i = list_length(*parts) - 1; i >= 0; i--)
	{
		part = list_nth(*parts, i);
		if (part->available_at != available_at)
			break;
		if (part->max_attempts == max_attempts)
			return part;
	}
	part = palloc0(sizeof(Part));
	part->available_at = available_at;
	part->max_attempts = max_attempts;
	part->positions = cover_make();
	*parts = lappend(*parts, part);
	return part;
}

/* When the next message is due: the n-th of a total after n parts of the time. */
static TimestampTz
due_time(const Walk *walk)
{
	double		share;
	int64		delay;

	if (walk->spread_over == 0 || walk->spread_total == 0)
		return walk->action.available_at;
	share = Min((double) walk->done / walk->spread_total, 1.0);
	delay = (int64) (share * walk->spread_over);
	return walk->action.available_at + (delay + SPREAD_STEP - 1) / SPREAD_STEP * SPREAD_STEP;
}
