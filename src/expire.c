/*
 * expire.c
 *		Taking back leases: those that have run out, or all of a worker that is gone.
 *
 * Locks: rows as described in run.c, skipping those that others hold.
 */
#include "claim.h"

#include "deliver.h"
#include "floor.h"
#include "route.h"

#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_revoke_lease);

/* taking back leases: those that have ended, or all of a worker's */
typedef struct Expiry
{
	TimestampTz now;
	const char *worker;			/* or NULL */
	int			max_runs;		/* 0: all */
	int			n;
	int64		messages;
	TimestampTz first_seen;
} Expiry;

static bool expire_visit(RunStore *store, Run *run, void *arg);

/*
 * Take back what has run out.  The rows are locked one after the other, skipping those
 * that a settlement holds: whoever locks a row decides.
 */
int64
claim_expire_in(RunStore *store, const Subscription *subscription, int max_runs)
{
	Expiry		expiry = {.now = clock_now(), .max_runs = max_runs, .first_seen = DT_NOEND};
	FloorScan	floor;

	floor_begin(&floor, subscription->id, FLOOR_LEASE);
	runs_visit(store, runs_leased(store, snapshot_push(), subscription->id, floor.start, expiry.now),
			   expire_visit, &expiry);
	snapshot_pop();
	floor_raise(&floor, expiry.first_seen);
	return expiry.messages;
}

int64
claim_expire(const Subscription *subscription, int max_runs)
{
	RunStore   *store = runs_open();
	int64		messages = claim_expire_in(store, subscription, max_runs);

	runs_close(store);
	return messages;
}

static bool
expire_visit(RunStore *store, Run *run, void *arg)
{
	Expiry	   *expiry = arg;

	expiry->first_seen = Min(expiry->first_seen, run->locked_until);
	/* a hook must not take back what its own delivery holds: our own locks do not stop us */
	if (group_holds(&run->claim_token) ||
		run_lock(store, run, LockWaitSkip) != RUN_LOCKED || run->state != RUN_LEASED)
		return true;
	if (expiry->worker != NULL ? !same_text(run->worker, expiry->worker) : run->locked_until > expiry->now)
		return true;
	run_expire(store, run, expiry->now);
	expiry->messages += run->message_count;
	return ++expiry->n != expiry->max_runs;
}

/*
 * outbox.revoke_lease(subscription, worker) → messages
 *
 * For a consumer that is known to be gone: its leases end now, as if they had run out.
 * Rows that a settlement holds are skipped: it is not gone.
 */
Datum
outbox_revoke_lease(PG_FUNCTION_ARGS)
{
	char	   *name;
	Subscription *subscription;
	RunStore   *store;
	Expiry		expiry = {.now = clock_now()};

	session_begin("outbox.revoke_lease()");
	name = arg_required_text(fcinfo, 0, "subscription");
	expiry.worker = arg_required_text(fcinfo, 1, "worker");
	frontier_check();
	subscription = subscription_get(name);

	store = runs_open();
	runs_visit(store, runs_leased(store, snapshot_push(), subscription->id, DT_NOBEGIN, DT_NOEND),
			   expire_visit, &expiry);
	snapshot_pop();
	runs_close(store);
	PG_RETURN_INT64(expiry.messages);
}
