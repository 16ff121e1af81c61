/*
 * run.c
 *		Runs of messages and their state machine.  run_row.c writes what it decides.
 *
 *	   ready ──claim──▶ leased ──delivered──▶ delivered
 *		 ▲                │
 *		 ├── failed, budget left: due at the retry time ──┤
 *		 ├── expired, budget left: now, in pieces ────────┤
 *		 ├── released: uncharged ─────────────────────────┤
 *		 ├── unhandled ◀── no handler (uncharged) ────────┤
 *		 │                └── budget spent, or dead on request ──▶ dead
 *		 └───────────────────── requeue ────────────────────────────┘
 *
 * A row is a run: messages of one subscription in the same state.  Every transition
 * moves a whole row or, by run_take(), a part of it.  The part that moves is always the
 * new row; the rest keeps what it had, so somebody who waits for the row finds it under
 * the same id.  message_count is exact at all times.
 *
 * An attempt is charged when the lease begins, so that a crash counts.
 *
 * Lock order: the rows of a claim token in order of id.  Everybody else skips locked
 * rows or holds one at a time.
 */
#include "run.h"

#include "claim.h"
#include "counters.h"
#include "floor.h"

#include "utils/builtins.h"
#include "utils/timestamp.h"

/* The time of a row that collects what was delivered is true to this. */
#define SETTLED_STEP	USECS_PER_SEC

static const char *const state_names[] = {
	[RUN_READY] = "ready",
	[RUN_LEASED] = "leased",
	[RUN_UNHANDLED] = "unhandled",
	[RUN_DELIVERED] = "delivered",
	[RUN_DEAD] = "dead",
	[RUN_DISCARDED] = "discarded",
	[RUN_CANCELLED] = "cancelled",
};

static void leave_lease(Run *run, RunState state);

const char *
run_state_name(RunState state)
{
	return state_names[state];
}

RunState
run_state_from_name(const char *name)
{
	for (int state = 0; state < (int) lengthof(state_names); state++)
	{
		if (strcmp(state_names[state], name) == 0)
			return state;
	}
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("unknown state \"%s\" of a delivery", name)));
}

/* ---- splitting ---- */

Run *
run_take(RunStore *store, Run *run, Cover *part, int32 count)
{
	Run		   *taken;

	Assert(count > 0 && count <= run->message_count);
	if (count == run->message_count)
		return run;

	taken = palloc(sizeof(Run));
	*taken = *run;
	taken->stored = false;
	taken->positions = part;
	taken->message_count = count;
	taken->low = part->ranges[0].lower;

	for (int i = 0; i < part->n; i++)
		cover_remove(run->positions, part->ranges[i].lower, part->ranges[i].upper);
	run->message_count -= count;
	run_write(store, run);
	return taken;
}

/* ---- transitions ---- */

void
run_file(RunStore *store, Run *run)
{
	run->state = RUN_READY;
	run->stored = false;
	run->low = run->positions->ranges[0].lower;
	counters_add(COUNTER_ROUTED, run->subscription_id, run->message_count);
	run_write(store, run);
}

void
run_lease(RunStore *store, Run *run, const pg_uuid_t *token, const char *worker,
		  TimestampTz now, TimestampTz locked_until, TimestampTz active_until)
{
	Assert(run->state == RUN_READY);
	run->state = RUN_LEASED;
	run->attempts++;
	run->claim_token = *token;
	run->worker = worker != NULL ? pstrdup(worker) : NULL;
	run->claimed_at = now;
	run->locked_until = locked_until;
	run->active_until = active_until;
	run->delivered_id = 0;
	counters_add(COUNTER_CLAIMED, run->subscription_id, run->message_count);
	run_write(store, run);
}

void
run_renew(RunStore *store, Run *run, TimestampTz locked_until, TimestampTz active_until)
{
	Assert(run->state == RUN_LEASED);
	run->locked_until = locked_until;
	run->active_until = active_until;
	run_write(store, run);
}

static void
leave_lease(Run *run, RunState state)
{
	run->state = state;
	run->locked_until = 0;
	run->active_until = 0;
	run->delivered_id = 0;
}

/*
 * "rest" is the leased row that the part was taken from (the run itself where it was all
 * that was left).  The first part delivered of it becomes a row that collects the others,
 * whose "low" is the rest's: everything that will ever join it comes from there.
 */
void
run_deliver(RunStore *store, Run *run, Run *rest, TimestampTz now)
{
	bool		whole = (rest == run);

	counters_add(COUNTER_DELIVERED, run->subscription_id, run->message_count);
	if (!whole && rest->delivered_id != 0)
	{
		Run			joined = {0};

		if (run_find_collector(store, rest, &joined) && run_lock(store, &joined, LockWaitBlock) == RUN_LOCKED)
		{
			for (int i = 0; i < run->positions->n; i++)
				cover_add(joined.positions, run->positions->ranges[i].lower, run->positions->ranges[i].upper);
			joined.message_count += run->message_count;
			/* it is in an index: only now and then, the other updates are HOT */
			if (now - joined.settled_at > SETTLED_STEP)
				joined.settled_at = now;
			run_write(store, &joined);
			*run = joined;
			return;
		}
	}
	leave_lease(run, RUN_DELIVERED);
	run->settled_at = now;
	if (whole)
	{
		run_write(store, run);
		return;
	}
	run->low = rest->low;
	run_write(store, run);
	rest->delivered_id = run->id;
	run_write(store, rest);
}

void
run_fail(RunStore *store, Run *run, TimestampTz now, TimestampTz retry_at, Jsonb *error)
{
	if (run->attempts >= run->max_attempts)
	{
		run_kill(store, run, now, error);
		return;
	}
	counters_add(COUNTER_RETRIED, run->subscription_id, run->message_count);
	leave_lease(run, RUN_READY);
	run->piece = false;
	run->available_at = retry_at;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_kill(RunStore *store, Run *run, TimestampTz now, Jsonb *error)
{
	counters_add(COUNTER_DEAD, run->subscription_id, run->message_count);
	leave_lease(run, RUN_DEAD);
	run->piece = false;
	run->settled_at = now;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_release(RunStore *store, Run *run, TimestampTz available_at)
{
	Assert(run->state == RUN_LEASED);
	leave_lease(run, RUN_READY);
	run->attempts--;
	run->available_at = available_at;
	run_write(store, run);
}

void
run_park(RunStore *store, Run *run, Jsonb *error)
{
	if (run->state == RUN_LEASED)
		run->attempts--;
	leave_lease(run, RUN_UNHANDLED);
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_unpark(RunStore *store, Run *run, TimestampTz available_at)
{
	Assert(run->state == RUN_UNHANDLED);
	run->state = RUN_READY;
	run->available_at = available_at;
	run_write(store, run);
}

/*
 * Nobody knows which of its messages the consumer had in its hands when it died: what
 * comes back is handed out in pieces from now on.
 */
void
run_expire(RunStore *store, Run *run, TimestampTz now)
{
	Assert(run->state == RUN_LEASED);
	counters_add(COUNTER_LEASE_LOST, run->subscription_id, run->message_count);
	if (run->attempts >= run->max_attempts)
	{
		counters_add(COUNTER_ABANDONED, run->subscription_id, run->message_count);
		run_kill(store, run, now,
				 error_record(OUTBOX_ABANDONED,
							  psprintf("attempts exhausted without a settlement: %d of %d",
									   run->attempts, run->max_attempts),
							  NULL, NULL, NULL, NULL));
		return;
	}
	run->last_error = error_record(OUTBOX_LEASE_LOST, "the lease ended without a settlement",
								   run->worker, NULL, NULL, NULL);
	leave_lease(run, RUN_READY);
	run->piece = true;
	run->available_at = now;
	run_write(store, run);
}

void
run_requeue(RunStore *store, Run *run, TimestampTz available_at, int attempts, int max_attempts)
{
	leave_lease(run, RUN_READY);
	run->settled_at = 0;
	run->piece = false;
	run->attempts = attempts;
	run->max_attempts = max_attempts;
	run->available_at = available_at;
	run_write(store, run);
}

void
run_discard(RunStore *store, Run *run, RunState state, TimestampTz now, Jsonb *error)
{
	Assert(state == RUN_DISCARDED || state == RUN_CANCELLED);
	leave_lease(run, state);
	run->settled_at = now;
	if (error != NULL)
		run->last_error = error;
	run_write(store, run);
}

void
run_forget(RunStore *store, Run *run, int32 left)
{
	Assert(run_is_settled(run));
	if (left == 0)
	{
		run_delete(store, run);
		return;
	}
	run->message_count = left;
	run_write(store, run);
}

/* A dead letter is not: it waits for an operator. */
bool
run_is_settled(const Run *run)
{
	return run->state == RUN_DELIVERED || run->state == RUN_DISCARDED || run->state == RUN_CANCELLED;
}
