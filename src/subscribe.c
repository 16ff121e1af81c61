/*
 * subscribe.c
 *		subscribe(), unsubscribe(), pause(), resume().
 *
 * A new subscription begins where routing stands: subscribe() routes to the end, adds the
 * row, and files what was routed before (or not), all under the routing lock, which it
 * holds to its commit.  So what is filed here and what the next pass files neither
 * overlap nor leave a gap.
 *
 * unsubscribe() does the reverse.  It waits for claims, which hold the subscription's lock
 * to their commit; after that nobody makes rows for it.
 *
 * Locks: subscribe() takes the routing lock; unsubscribe() the subscription's, exclusive,
 * then the routing lock, then rows.
 */
#include "subscription.h"

#include "catalog.h"
#include "counters.h"
#include "notice.h"
#include "route.h"
#include "run.h"
#include "segment.h"
#include "statement.h"
#include "worker.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

static void read_definition(FunctionCallInfo fcinfo, Subscription *wanted);
static void check_lease(const Subscription *wanted);
static const char *compare(const Subscription *wanted, const Subscription *existing, bool replace);
static const char *create(Subscription *wanted, bool from_earliest);
static const char *alter(const Subscription *wanted);
static void bind_definition(Statement *statement, const Subscription *subscription);
static void insert_row(const Subscription *subscription);
static Subscription *look(const char *name);
static char *describe(const Subscription *subscription);
static void tell_about_default(const Subscription *created);
static void refuse_open(const Subscription *subscription);
static bool delete_runs(const Subscription *subscription, int64 *open);
static bool is_open(RunState state);
static void delete_rows(const Subscription *subscription);
static Datum set_paused(FunctionCallInfo fcinfo, bool paused);

typedef struct Deletion
{
	int64		open;			/* messages that were not settled */
	bool		all;			/* false: a row changed meanwhile, look again */
} Deletion;

PG_FUNCTION_INFO_V1(outbox_subscribe);
PG_FUNCTION_INFO_V1(outbox_unsubscribe);
PG_FUNCTION_INFO_V1(outbox_pause);
PG_FUNCTION_INFO_V1(outbox_resume);

/*
 * subscribe(name, pattern, kind, from_earliest, lease, max_active, max_attempts, replace)
 */
Datum
outbox_subscribe(PG_FUNCTION_ARGS)
{
	Subscription wanted;
	Subscription *existing;
	bool		from_earliest = PG_ARGISNULL(3) || PG_GETARG_BOOL(3);
	bool		replace = !PG_ARGISNULL(7) && PG_GETARG_BOOL(7);
	const char *result;

	session_begin("outbox.subscribe()");
	read_definition(fcinfo, &wanted);

	/* The usual case at each deployment should not stop routing. */
	existing = look(wanted.name);
	if (existing != NULL && (result = compare(&wanted, existing, replace)) != NULL)
		PG_RETURN_TEXT_P(cstring_to_text(result));

	routing_lock_wait();
	frontier_check();
	identity_ensure();
	existing = look(wanted.name);
	result = existing != NULL ? compare(&wanted, existing, replace) : NULL;
	if (result == NULL)
	{
		(void) route(0);
		result = existing != NULL ? alter(&wanted) : create(&wanted, from_earliest);
	}
	notice_routing_held("outbox.subscribe()");
	PG_RETURN_TEXT_P(cstring_to_text(result));
}

static void
read_definition(FunctionCallInfo fcinfo, Subscription *wanted)
{
	memset(wanted, 0, sizeof(*wanted));
	wanted->name = arg_required_text(fcinfo, 0, "name");
	wanted->pattern = arg_text(fcinfo, 1, "pattern");
	if (wanted->pattern == NULL)
		wanted->pattern = "#";
	topic_check(wanted->pattern);
	wanted->kind = arg_text(fcinfo, 2, "kind");
	if (!PG_ARGISNULL(4))
		wanted->own_lease = interval_usecs(PG_GETARG_DATUM(4), "lease");
	if (!PG_ARGISNULL(5))
		wanted->own_max_active = interval_usecs(PG_GETARG_DATUM(5), "max_active");
	check_lease(wanted);
	if (!PG_ARGISNULL(6))
	{
		wanted->own_max_attempts = PG_GETARG_INT32(6);
		if (wanted->own_max_attempts < 1)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("max_attempts must be at least 1"),
					 errdetail("It is %d.", wanted->own_max_attempts),
					 errhint("Leave it out to use the setting outbox.max_attempts.")));
	}
}

/* Refused, not cut: 30000 that was meant in milliseconds must not become eight hours. */
static void
check_lease(const Subscription *wanted)
{
	int64		max_active = wanted->own_max_active;

	if (max_active == 0)
		max_active = MSECS(outbox_max_active);

	if (wanted->own_lease > max_active)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lease must not be longer than max_active"),
				 errdetail("The lease is %lld ms and max_active %lld ms.",
						   (long long) (wanted->own_lease / 1000), (long long) (max_active / 1000)),
				 errhint("Pass a shorter lease, or a longer max_active.")));
}

static Subscription *
look(const char *name)
{
	Subscription *subscription = subscription_find(snapshot_push(), name);

	snapshot_pop();
	return subscription;
}

/* "unchanged", or NULL where something is to be done; an error where it may not be. */
static const char *
compare(const Subscription *wanted, const Subscription *existing, bool replace)
{
	if (same_text(wanted->pattern, existing->pattern) &&
		same_text(wanted->kind, existing->kind) &&
		wanted->own_lease == existing->own_lease &&
		wanted->own_max_active == existing->own_max_active &&
		wanted->own_max_attempts == existing->own_max_attempts)
		return "unchanged";
	if (replace)
		return NULL;
	ereport(ERROR,
			(errcode(ERRCODE_DUPLICATE_OBJECT),
			 errmsg("subscription \"%s\" exists with another definition", wanted->name),
			 errdetail("It has %s.", describe(existing)),
			 errhint("Pass replace => true to change it for messages routed from then on.")));
}

static char *
describe(const Subscription *subscription)
{
	StringInfoData text;

	initStringInfo(&text);
	appendStringInfo(&text, "pattern \"%s\"", subscription->pattern);
	if (subscription->kind != NULL)
		appendStringInfo(&text, ", kind \"%s\"", subscription->kind);
	if (subscription->own_lease != 0)
		appendStringInfo(&text, ", lease %lld ms", (long long) (subscription->own_lease / 1000));
	if (subscription->own_max_active != 0)
		appendStringInfo(&text, ", max_active %lld ms",
						 (long long) (subscription->own_max_active / 1000));
	if (subscription->own_max_attempts != 0)
		appendStringInfo(&text, ", max_attempts %d", subscription->own_max_attempts);
	return text.data;
}

static const char *
create(Subscription *wanted, bool from_earliest)
{
	Subscription *created;

	insert_row(wanted);
	created = look(wanted->name);
	if (from_earliest)
	{
		segments_reprieve();
		(void) route_backlog(created);
	}
	tell_about_default(created);
	return "created";
}

static const char *
alter(const Subscription *wanted)
{
	Statement	change;

	statement_init(&change,
				   "UPDATE outbox.subscription AS s"
				   " SET pattern = $2, kind = $3, lease = $4, max_active = $5, max_attempts = $6"
				   " WHERE s.name OPERATOR(pg_catalog.=) $1");
	bind_definition(&change, wanted);
	(void) statement_run(&change);
	return "altered";
}

static void
bind_definition(Statement *statement, const Subscription *subscription)
{
	bind_text(statement, subscription->name);
	bind_text(statement, subscription->pattern);
	bind_text(statement, subscription->kind);
	bind_usecs(statement, subscription->own_lease);
	bind_usecs(statement, subscription->own_max_active);
	bind_int4(statement, subscription->own_max_attempts, subscription->own_max_attempts == 0);
}

static void
insert_row(const Subscription *subscription)
{
	Statement	insert;

	statement_init(&insert,
				   "INSERT INTO outbox.subscription"
				   " (name, pattern, kind, lease, max_active, max_attempts, created_at)"
				   " VALUES ($1, $2, $3, $4, $5, $6, $7)");
	bind_definition(&insert, subscription);
	bind_time(&insert, clock_now());
	(void) statement_run(&insert);
}

void
subscription_insert_default(void)
{
	Subscription subscription = {0};

	subscription.name = "default";
	subscription.pattern = "#";
	if (look(subscription.name) == NULL)
		insert_row(&subscription);
}

/* It was made for the first minute; beside subscriptions of one's own it only grows. */
static void
tell_about_default(const Subscription *created)
{
	Subscription *other = look("default");

	if (other != NULL && other->id != created->id && other->mode == MODE_UNUSED)
		notice_default_unused(true);
}

/* unsubscribe(name, discard_pending) */
Datum
outbox_unsubscribe(PG_FUNCTION_ARGS)
{
	char	   *name;
	bool		discard_pending = !PG_ARGISNULL(1) && PG_GETARG_BOOL(1);
	Subscription *subscription;
	int64		open = 0;

	session_begin("outbox.unsubscribe()");
	name = arg_required_text(fcinfo, 0, "name");
	subscription = subscription_get(name);
	/* who claims or settles waits behind a lock that is waited for: not for one who asks in vain */
	if (!discard_pending)
		refuse_open(subscription);

	/*
	 * It may wait for consumers for long: the routing lock, which others need, comes after
	 * that, as it does in claims.
	 */
	subscription_lock(subscription->id, AccessExclusiveLock);
	routing_lock_wait();
	frontier_check();
	subscription = subscription_by_id(snapshot_push(), subscription->id);
	snapshot_pop();
	if (subscription == NULL)
		subscription_unknown(name);
	(void) route(0);

	if (!discard_pending)
		refuse_open(subscription);
	/* a settlement that was under way has split what was seen, or settled it */
	while (!delete_runs(subscription, &open))
		CHECK_FOR_INTERRUPTS();
	delete_rows(subscription);
	counters_forget(subscription->id);
	if (strcmp(name, "default") == 0)
		notice_default_unused(false);
	notice_routing_held("outbox.unsubscribe()");
	PG_RETURN_INT64(open);
}

/* Messages that are not at an end; dead ones are not, they wait for somebody's decision. */
static bool
count_visit(RunStore *store, Run *run, void *arg)
{
	((int64 *) arg)[run->state] += run->message_count;
	return true;
}

static void
refuse_open(const Subscription *subscription)
{
	int64		counts[RUN_CANCELLED + 1] = {0};
	RunStore   *store = runs_open();
	StringInfoData detail;
	int64		open = 0;

	runs_visit(store, runs_of_subscription(store, snapshot_push(), subscription->id), count_visit, counts);
	snapshot_pop();
	runs_close(store);

	initStringInfo(&detail);
	for (int state = 0; state < lengthof(counts); state++)
	{
		int64		count = counts[state];

		if (count == 0 || !is_open(state))
			continue;
		appendStringInfo(&detail, "%s%lld %s", open > 0 ? ", " : "",
						 (long long) count, run_state_name(state));
		open += count;
	}
	if (open > 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("subscription \"%s\" still has messages that are not settled", subscription->name),
				 errdetail("There are %lld: %s.", (long long) open, detail.data),
				 errhint("To give them up: SELECT outbox.unsubscribe(%s, discard_pending => true).",
						 quote_literal_cstr(subscription->name))));
}

/* False where a row changed meanwhile: look again. */
static bool
delete_visit(RunStore *store, Run *run, void *arg)
{
	Deletion   *deletion = arg;

	if (run_lock(store, run, LockWaitBlock) != RUN_LOCKED)
	{
		deletion->all = false;
		return true;
	}
	if (is_open(run->state))
		deletion->open += run->message_count;
	run_delete(store, run);
	return true;
}

static bool
delete_runs(const Subscription *subscription, int64 *open)
{
	RunStore   *store = runs_open();
	Deletion	deletion = {.all = true};

	runs_visit(store, runs_of_subscription(store, snapshot_push(), subscription->id), delete_visit, &deletion);
	snapshot_pop();
	runs_close(store);
	*open += deletion.open;
	return deletion.all;
}

/* Rows of outbox.access stay: a restriction must not widen because its subscription goes. */
static void
delete_rows(const Subscription *subscription)
{
	Statement	statement;

	statement_init(&statement,
				   "DELETE FROM outbox.handler h"
				   " WHERE h.subscription_id OPERATOR(pg_catalog.=) $1");
	bind_int8(&statement, subscription->id);
	(void) statement_run_guarded(&statement);

	statement_init(&statement,
				   "DELETE FROM outbox.self_routed r"
				   " WHERE r.subscription_id OPERATOR(pg_catalog.=) $1");
	bind_int8(&statement, subscription->id);
	(void) statement_run(&statement);

	statement_init(&statement,
				   "DELETE FROM outbox.subscription s WHERE s.id OPERATOR(pg_catalog.=) $1");
	bind_int8(&statement, subscription->id);
	(void) statement_run(&statement);
}

Datum
outbox_pause(PG_FUNCTION_ARGS)
{
	session_begin("outbox.pause()");
	return set_paused(fcinfo, true);
}

Datum
outbox_resume(PG_FUNCTION_ARGS)
{
	session_begin("outbox.resume()");
	return set_paused(fcinfo, false);
}

static Datum
set_paused(FunctionCallInfo fcinfo, bool paused)
{
	Subscription *subscription = subscription_hold(arg_required_text(fcinfo, 0, "subscription"),
												   AccessShareLock);
	Statement	change;

	if (subscription->paused == paused)
		PG_RETURN_BOOL(false);
	statement_init(&change,
				   "UPDATE outbox.subscription AS s SET paused = $2"
				   " WHERE s.id OPERATOR(pg_catalog.=) $1");
	bind_int8(&change, subscription->id);
	bind_bool(&change, paused);
	(void) statement_run(&change);
	wake_at_commit(WORK_READY);
	PG_RETURN_BOOL(true);
}

static bool
is_open(RunState state)
{
	return state == RUN_READY || state == RUN_LEASED || state == RUN_UNHANDLED || state == RUN_DEAD;
}
