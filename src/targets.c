/*
 * targets.c
 *		Which subscriptions a call of drain() or deliver() delivers, and what it leaves.
 *
 * A hook runs with the rights of whoever calls these functions, so they call only
 * handlers of that role: which must be the session's user too, or a hook could become
 * the session's user by RESET ROLE; and who has logged in, or a hook could become the
 * superuser who has run SET SESSION AUTHORIZATION, by RESET SESSION AUTHORIZATION.  Other
 * roles' subscriptions are counted as left.
 *
 * Locks: the routing lock, where others' subscriptions must be counted; the subscription's,
 * to unpark, and the row of a handler that is found mended, both if they are free.
 */
#include "deliver.h"

#include "catalog.h"
#include "route.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

/* More runs are not counted. */
#define MAX_COUNTED_RUNS	10000
#define ROUTING_WAIT_MS		100

static List *subscriptions_asked_for(const char *name);
static void refuse_without_handler(const char *name);
static bool is_own(const Subscription *subscription);
static void mend_handlers(const Subscription *subscription);
static int64 count_runs(RunScan *scan);
static void tell_left(const Subscription *subscription, int64 left);

/*
 * Who may not consume a subscription is told so if he names it; otherwise he hears of it
 * only if it is his.  What is new is routed for subscriptions that are only counted, if
 * the routing lock can be given back soon; claims route what they need.
 */
List *
targets_choose(const char *name, bool may_route)
{
	List	   *targets = NIL;
	bool		consumer = role_may_have_handlers(GetUserId());
	bool		others = false;
	ListCell   *cell;

	if (name != NULL)
		access_check_consumer(name);
	foreach(cell, subscriptions_asked_for(name))
	{
		Target	   *target = palloc(sizeof(Target));
		bool		own;
		bool		allowed;

		target->subscription = lfirst(cell);
		subscription_handlers(target->subscription, snapshot_push());
		snapshot_pop();
		own = is_own(target->subscription);
		allowed = (name != NULL || role_may_consume(GetUserId(), target->subscription->name));
		target->deliverable = (own && allowed && consumer);
		if (target->deliverable)
			mend_handlers(target->subscription);
		if (own || allowed)
			targets = lappend(targets, target);
		others |= !target->deliverable;
	}
	if (others && may_route && routing_lock(ROUTING_WAIT_MS))
		(void) route(0);
	return targets;
}

static List *
subscriptions_asked_for(const char *name)
{
	List	   *all;
	List	   *pushed = NIL;
	ListCell   *cell;

	if (name != NULL)
	{
		Subscription *subscription = subscription_get(name);

		if (subscription->mode != MODE_PUSHED)
			refuse_without_handler(name);
		return list_make1(subscription);
	}

	all = subscription_list(snapshot_push());
	snapshot_pop();
	foreach(cell, all)
	{
		if (((Subscription *) lfirst(cell))->mode == MODE_PUSHED)
			pushed = lappend(pushed, lfirst(cell));
	}
	return pushed;
}

static void
refuse_without_handler(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("subscription \"%s\" has no handler", name),
			 errdetail("Only messages of subscriptions with handlers are delivered."),
			 errhint("Register one with SELECT outbox.register_hook('#', 'schema.function',"
					 " subscription => %s), or claim its messages with outbox.claim_batch().",
					 quote_literal_cstr(name))));
}

/* Whether all its handlers are the caller's own. */
static bool
is_own(const Subscription *subscription)
{
	ListCell   *cell;

	foreach(cell, subscription->handlers)
	{
		Oid			role = ((Handler *) lfirst(cell))->role;

		if (role != GetUserId() || role != GetSessionUserId() || role != GetAuthenticatedUserId())
			return false;
	}
	return subscription->handlers != NIL;
}

/*
 * A function that was missing is there again: what was parked for it is ready again.  Where
 * somebody has parked messages and not committed, the mark is left to the next call, which
 * finds those too.
 */
static void
mend_handlers(const Subscription *subscription)
{
	bool		mended = false;
	ListCell   *cell;

	foreach(cell, subscription->handlers)
	{
		Handler    *handler = lfirst(cell);

		if (!handler->broken || !OidIsValid(handler_function(handler)))
			continue;
		if (!mended && !subscription_lock_if_free(subscription->id, LOCK_TO_UNPARK))
			return;
		(void) handler_mark(handler, false);
		mended = true;
	}
	if (mended)
		(void) subscription_unpark(subscription);
}

/* Read anew for each batch: it may have been paused, altered or dropped. */
Subscription *
target_open(const Target *target)
{
	Snapshot	snapshot;
	Subscription *subscription;

	if (!target->deliverable)
		return NULL;
	snapshot = snapshot_push();
	subscription = subscription_find(snapshot, target->subscription->name);
	if (subscription != NULL)
		subscription_handlers(subscription, snapshot);
	snapshot_pop();
	if (subscription == NULL || subscription->mode != MODE_PUSHED || subscription->paused ||
		!is_own(subscription) || !role_may_have_handlers(GetUserId()) ||
		!role_may_consume(GetUserId(), subscription->name))
		return NULL;
	return subscription;
}

int64
targets_left(const List *targets)
{
	TimestampTz now = clock_now();
	RunStore   *store;
	Snapshot	snapshot;
	int64		all = 0;
	ListCell   *cell;

	if (targets == NIL)
		return 0;
	snapshot = snapshot_push();
	store = runs_open();
	foreach(cell, targets)
	{
		Target	   *target = lfirst(cell);
		int64		id = target->subscription->id;
		int64		left = count_runs(runs_ready(store, snapshot, id, DT_NOBEGIN, now));

		/* a lease that has ended is as good as ready */
		left += count_runs(runs_leased(store, snapshot, id, DT_NOBEGIN, now));
		if (left > 0 && !target->deliverable)
			tell_left(target->subscription, left);
		all += left;
	}
	runs_close(store);
	snapshot_pop();
	return all;
}

static int64
count_runs(RunScan *scan)
{
	int64		messages = 0;
	Run		   *run;

	for (int n = 0; n < MAX_COUNTED_RUNS && (run = run_next(scan)) != NULL; n++)
	{
		messages += run->message_count;
		pfree(run);
	}
	run_scan_end(scan);
	return messages;
}

static void
tell_left(const Subscription *subscription, int64 left)
{
	Handler    *handler = subscription->handlers != NIL ? linitial(subscription->handlers) : NULL;
	char	   *role = handler != NULL ? GetUserNameFromId(handler->role, true) : NULL;

	if (role == NULL)
		return;
	ereport(NOTICE,
			(errmsg_plural("%lld message of subscription \"%s\" is left to role \"%s\"",
						   "%lld messages of subscription \"%s\" are left to role \"%s\"",
						   left, (long long) left, subscription->name, role),
			 errdetail("A handler is called only in sessions of the role that registered it."),
			 errhint("Connect as \"%s\" and deliver them there.", role)));
}
