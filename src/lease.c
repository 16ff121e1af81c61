/*
 * lease.c
 *		What a claim token holds: locking it, settling it whole or message by message.
 *
 * Whether a lease was in time is judged by the clock when the call began to wait, the
 * token by what the rows say once they are locked.  That is safe because expiry skips
 * locked rows, and because a row that expiry or another claim has changed meanwhile is
 * no longer found under the token.
 *
 * A token belongs to one session.  Its rows are locked in order of id, always the first
 * among them, so two settlements of the same token cannot deadlock.
 *
 * Before them the subscription is locked, shared, as claims do: unsubscribe() comes to the
 * rows in another order, so it waits for all who hold some before it touches any.
 */
#include "claim.h"

#include "catalog.h"

#include "lib/qunique.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

static Lease *lock_lease(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at, int64 position,
						 LockWaitPolicy wait);
static List *rows_to_lock(Lease *lease, Snapshot snapshot, int64 position);
static bool lock_subscription(int64 subscription_id, LockWaitPolicy wait);
static bool lock_token(Lease *lease, int64 position, bool *lost);
static void join_subscription(Lease *lease);
static void index_places(Lease *lease);
static int	compare_places(const void *a, const void *b);
static int	compare_chosen(const void *a, const void *b);
static Run *transition(Lease *lease, Run *part, Run *rest, const Settlement *settlement, TimestampTz now);
static void note_progress(Lease *lease, TimestampTz now);
static Run *settle_part(Lease *lease, int index, Cover *part, int count,
						const Settlement *settlement);

static Lease *
lock_lease(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at, int64 position,
		   LockWaitPolicy wait)
{
	Lease	   *lease = palloc0(sizeof(Lease));
	bool		lost;

	lease->store = store;
	lease->token = *token;
	lease->asked_at = asked_at;
	lease->wait = wait;
	/* a row that was split while we waited has new parts: a fresh snapshot shows them */
	do
	{
		CHECK_FOR_INTERRUPTS();
		lost = false;
	} while (!lock_token(lease, position, &lost) && lost);
	if (lease->n > 0)
		join_subscription(lease);
	index_places(lease);
	return lease;
}

/* A token is of one subscription: whose rows may the caller settle, how long may they be active? */
static void
join_subscription(Lease *lease)
{
	lease->subscription = subscription_by_id(snapshot_push(), lease->runs[0]->subscription_id);
	snapshot_pop();
	if (lease->subscription == NULL)
		lease->n = 0;
	else
		lease->max_active = lease->subscription->max_active;
}

/*
 * For one message two rows are enough, in order of id: the first of the token, through
 * which settlements of the token pass one at a time, and the one with the message.
 */
Lease *
lease_lock_one(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at, int64 position)
{
	return lock_lease(store, token, asked_at, position, LockWaitBlock);
}

Lease *
lease_lock(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at)
{
	return lock_lease(store, token, asked_at, -1, LockWaitBlock);
}

Lease *
lease_lock_if_free(const pg_uuid_t *token, TimestampTz asked_at)
{
	RunStore   *store = runs_open_if_free();

	return store == NULL ? NULL : lock_lease(store, token, asked_at, -1, LockWaitSkip);
}

/* The rows to lock, in order of id; all of the token's without a position. */
static List *
rows_to_lock(Lease *lease, Snapshot snapshot, int64 position)
{
	List	   *runs = NIL;
	Run		   *first;
	Run		   *run;

	if (position < 0)
	{
		RunScan    *scan = runs_of_token(lease->store, snapshot, &lease->token);

		while ((run = run_next(scan)) != NULL)
			runs = lappend(runs, run);
		run_scan_end(scan);
		return runs;
	}

	first = run_first_of_token(lease->store, snapshot, &lease->token);
	if (first == NULL)
		return NIL;
	runs = list_make1(first);
	/* mostly the first is the only one */
	if (cover_contains(first->positions, position))
		return runs;
	run = run_of_position(lease->store, snapshot, first->subscription_id, position);
	if (run != NULL && run->id != first->id && run->state == RUN_LEASED &&
		memcmp(&run->claim_token, &lease->token, sizeof(pg_uuid_t)) == 0)
		runs = lappend(runs, run);
	return runs;
}

static bool
lock_subscription(int64 subscription_id, LockWaitPolicy wait)
{
	if (wait == LockWaitSkip)
		return subscription_lock_if_free(subscription_id, AccessShareLock);
	subscription_lock(subscription_id, AccessShareLock);
	return true;
}

/* false: nothing held; *lost: something was there and changed while we looked */
static bool
lock_token(Lease *lease, int64 position, bool *lost)
{
	bool		own = claimed_in_transaction(&lease->token);
	List	   *runs = rows_to_lock(lease, snapshot_push(), position);
	ListCell   *cell;
	Run		   *run;

	lease->n = 0;
	lease->late = 0;
	lease->runs = palloc(Max(list_length(runs), 1) * sizeof(Run *));
	/* what has changed while we waited for it the rows themselves will tell */
	if (runs != NIL && !lock_subscription(((Run *) linitial(runs))->subscription_id, lease->wait))
		runs = NIL;
	foreach(cell, runs)
	{
		RunLock		locked;

		CHECK_FOR_INTERRUPTS();
		run = lfirst(cell);
		locked = run_lock(lease->store, run, lease->wait);
		if (locked == RUN_BUSY)
		{
			lease->n = 0;
			break;
		}
		/* no row behind one that has to be looked for again: it may be locked by who waits for those we hold */
		if (locked != RUN_LOCKED || run->state != RUN_LEASED ||
			memcmp(&run->claim_token, &lease->token, sizeof(pg_uuid_t)) != 0)
		{
			*lost = true;
			break;
		}
		if (run->locked_until <= lease->asked_at && !own)
		{
			lease->late++;
			lease->late_until = run->locked_until;
			lease->late_subscription = run->subscription_id;
		}
		else
			lease->runs[lease->n++] = run;
	}
	snapshot_pop();
	return lease->n > 0 && !*lost;
}

/*
 * A settlement is progress: it moves the end of the active time of what is left.  Where
 * a whole run went, the first that is left of the token remembers it.
 */
static void
note_progress(Lease *lease, TimestampTz now)
{
	Run		   *run = NULL;

	for (int i = 0; i < lease->n && run == NULL; i++)
		run = lease->runs[i];
	if (run == NULL)
	{
		/* the first row was the one that went: the next has a higher id */
		run = run_first_of_token(lease->store, snapshot_push(), &lease->token);
		if (run != NULL && run_lock(lease->store, run, LockWaitBlock) != RUN_LOCKED)
			run = NULL;
		snapshot_pop();
	}
	if (run != NULL && run->state == RUN_LEASED)
		run_renew(lease->store, run, run->locked_until, Max(run->active_until, now + lease->max_active));
}

static Run *
transition(Lease *lease, Run *part, Run *rest, const Settlement *settlement, TimestampTz now)
{
	RunStore   *store = lease->store;

	switch (settlement->outcome)
	{
		case OUTCOME_DELIVERED:
			run_deliver(store, part, rest, now);
			break;
		case OUTCOME_FAILED:
			run_fail(store, part, now,
					 settlement->has_retry_at ? Max(settlement->retry_at, now) :
					 retry_time(now, part->attempts, settlement->handler),
					 settlement->error);
			break;
		case OUTCOME_DEAD:
			run_kill(store, part, now, settlement->error);
			break;
		case OUTCOME_RELEASED:
			if (settlement->error != NULL)
				part->last_error = settlement->error;
			run_release(store, part, settlement->has_retry_at ? Max(settlement->retry_at, now) : now);
			break;
	}
	return part;
}

/* Settle a part of the run at this index of the lease. */
static Run *
settle_part(Lease *lease, int index, Cover *part, int count, const Settlement *settlement)
{
	Run		   *rest = lease->runs[index];
	Run		   *moved = rest;
	TimestampTz now = clock_now();

	if (count < rest->message_count)
	{
		/* the update that shrinks the rest writes its progress too */
		rest->active_until = Max(rest->active_until, now + lease->max_active);
		moved = run_take(lease->store, rest, part, count);
	}
	else
		lease->runs[index] = NULL;
	moved = transition(lease, moved, rest, settlement, now);
	if (lease->runs[index] == NULL)
		note_progress(lease, now);
	return moved;
}

Run *
lease_settle(Lease *lease, int64 position, const Settlement *settlement)
{
	int			index = lease_index(lease, position);
	Cover	   *one;

	if (index < 0)
		return NULL;
	one = cover_make();
	cover_append(one, position, position + 1);
	return settle_part(lease, index, one, 1, settlement);
}

/*
 * Which of the runs holds the message; -1: none.  The ranges of the runs of a token do not
 * overlap, so they are looked up as they were when the rows were locked; what has been
 * settled since is no longer in the run.
 */
int
lease_index(const Lease *lease, int64 position)
{
	int			low = 0;
	int			high = lease->n_places;

	while (low < high)
	{
		int			middle = (low + high) / 2;

		if (lease->places[middle].range.upper > position)
			high = middle;
		else
			low = middle + 1;
	}
	if (low < lease->n_places && lease->places[low].range.lower <= position)
	{
		Run		   *run = lease->runs[lease->places[low].run];

		if (run != NULL && cover_contains(run->positions, position))
			return lease->places[low].run;
	}
	return -1;
}

static void
index_places(Lease *lease)
{
	int			n = 0;

	for (int i = 0; i < lease->n; i++)
		n += lease->runs[i]->positions->n;
	lease->places = palloc(Max(n, 1) * sizeof(LeasePlace));
	lease->n_places = 0;
	for (int i = 0; i < lease->n; i++)
	{
		for (int j = 0; j < lease->runs[i]->positions->n; j++)
			lease->places[lease->n_places++] = (LeasePlace) {lease->runs[i]->positions->ranges[j], i};
	}
	qsort(lease->places, n, sizeof(LeasePlace), compare_places);
}

static int
compare_places(const void *a, const void *b)
{
	return compare_int64(&((const LeasePlace *) a)->range.lower, &((const LeasePlace *) b)->range.lower);
}

/* By run, then by position. */
static int
compare_chosen(const void *a, const void *b)
{
	const LeasePlace *left = a;
	const LeasePlace *right = b;

	if (left->run != right->run)
		return left->run < right->run ? -1 : 1;
	return compare_int64(&left->range.lower, &right->range.lower);
}

/* Settle those of the positions that are held, a run at a time. */
int64
lease_settle_some(Lease *lease, const int64 *positions, int n, const Settlement *settlement)
{
	LeasePlace *chosen = palloc(Max(n, 1) * sizeof(LeasePlace));
	int			n_chosen = 0;

	for (int i = 0; i < n; i++)
	{
		int			run = lease_index(lease, positions[i]);

		if (run >= 0)
			chosen[n_chosen++] = (LeasePlace) {{positions[i], positions[i] + 1}, run};
	}
	qsort(chosen, n_chosen, sizeof(LeasePlace), compare_chosen);
	n_chosen = (int) qunique(chosen, n_chosen, sizeof(LeasePlace), compare_chosen);

	for (int first = 0, next; first < n_chosen; first = next)
	{
		Cover	   *part = cover_make();

		CHECK_FOR_INTERRUPTS();
		for (next = first; next < n_chosen && chosen[next].run == chosen[first].run; next++)
			cover_append(part, chosen[next].range.lower, chosen[next].range.upper);
		(void) settle_part(lease, chosen[first].run, part, next - first, settlement);
	}
	return n_chosen;
}

int64
lease_settle_all(Lease *lease, const Settlement *settlement)
{
	TimestampTz now = clock_now();
	int64		messages = 0;

	for (int i = 0; i < lease->n; i++)
	{
		Run		   *run = lease->runs[i];

		CHECK_FOR_INTERRUPTS();
		if (run == NULL)
			continue;
		messages += run->message_count;
		(void) transition(lease, run, run, settlement, now);
		lease->runs[i] = NULL;
	}
	return messages;
}
