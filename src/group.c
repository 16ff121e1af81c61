/*
 * group.c
 *		What is delivered in one transaction: locked, called, settled.
 *
 * A group is a part of a claimed batch.  Its rows are locked first, so that nobody else
 * can take them however long the hooks run.  Then each message is delivered, in a
 * subtransaction of its own (deliver.c), and what came out of it is noted.  Only at the
 * end are all of them settled, outside of the hooks' subtransactions: neighbours that
 * fared alike move together, a hundred delivered messages being one row; and a settlement
 * that fails takes no hook's subtransaction for its own.
 *
 * Effects and settlements commit together, because both lie in one transaction.  The
 * group as a whole is a subtransaction too: what goes wrong outside of the hooks, such as
 * a settlement of a message that its own hook has discarded, is undone with all effects of
 * the group, and drain.c does it again one message at a time.  The same happens if the
 * commit fails.  So nothing that any hook does can harm another message, not even by a
 * trap that snaps at the commit.
 *
 * The relation and the executor state of the RunStore belong to the group's
 * subtransaction: a hook's abort, one level deeper, leaves them alone.  While they are
 * open, a hook cannot drop, alter or truncate outbox.delivery: core refuses it.
 *
 * Before a group ends, the lease of what is left of the batch is renewed; settlements are
 * the progress that this needs.  What could not begin in time is left to expiry.
 *
 * Locks: the subscription's, shared; the rows of the token in order of id; then those of
 * park.c, without waiting.
 */
#include "deliver.h"

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* A group that commits ends after so much time. */
#define GROUP_MSECS		1000.0

static const pg_uuid_t *held_token = NULL;

static ErrorData *group_try(DeliveryGroup *group, Batch *batch, void (*work) (void *arg));
static void deliver_all_work(void *arg);
static void charge_work(void *arg);
static void release_work(void *arg);
static Lease *group_open(DeliveryGroup *group);
static void group_close(Lease *lease);
static void deliver_all(DeliveryGroup *group, Lease *lease);
static bool is_predecessors_fault(const DeliveryGroup *group, const Delivery *delivery);
static Delivery *delivery_at(const DeliveryGroup *group, int index);
static void settle(DeliveryGroup *group, Lease *lease);
static void settle_single(DeliveryGroup *group, Lease *lease, int64 position,
						  const Delivery *delivery);
static void settle_run(DeliveryGroup *group, Lease *lease, int which);
static bool *runs_with_messages(const DeliveryGroup *group, const Lease *lease);
static Place *places_of(const Claim *claim);
static Place *places_in(const Batch *batch, const Run *run, int *n);
static int	first_place(const Batch *batch, int64 position);
static int	compare_places(const void *a, const void *b);
static bool is_settled_alike(const Delivery *a, const Delivery *b);
static void settle_alike(DeliveryGroup *group, Lease *lease, int which,
						 Place *places, int n, int first);
static void append_part(Cover *cover, const Run *run, int64 lower, int64 upper);
static void move_part(DeliveryGroup *group, Lease *lease, Run *part, Run *rest,
					  const Delivery *delivery);
static void renew(const DeliveryGroup *group, Lease *lease);

ErrorData *
group_deliver(DeliveryGroup *group, Batch *batch, int limit)
{
	memset(group, 0, sizeof(*group));
	group->first = batch->next;
	group->limit = Min(limit, batch->claim->n - batch->next);
	return group_try(group, batch, deliver_all_work);
}

ErrorData *
group_charge(DeliveryGroup *group, Batch *batch, const Handler *handler, ErrorData *error)
{
	memset(group, 0, sizeof(*group));
	group->first = batch->next;
	group->limit = 1;
	group->charge.result = DELIVERY_FAILED;
	group->charge.handler = handler;
	group->charge.error = error;
	/* not by its message's fault: others have filled the queue meanwhile */
	if (handler != NULL && handler->channel != NULL)
	{
		delivery_put_off(&group->charge);
		ereport(WARNING,
				(errcode(error->sqlerrcode),
				 errmsg("a notification of subscription \"%s\" could not be sent: %s",
						batch->subscription->name, error->message),
				 errdetail("It is tried again in ten seconds.")));
	}
	return group_try(group, batch, charge_work);
}

ErrorData *
group_release(DeliveryGroup *group, Batch *batch, int first)
{
	memset(group, 0, sizeof(*group));
	group->first = first;
	group->limit = batch->claim->n - first;
	return group_try(group, batch, release_work);
}

static ErrorData *
group_try(DeliveryGroup *group, Batch *batch, void (*work) (void *arg))
{
	MemoryContext caller = CurrentMemoryContext;
	ErrorData  *error;

	if (batch->places == NULL)
		batch->places = places_of(batch->claim);
	group->batch = batch;
	group->context = AllocSetContextCreate(caller, "outbox group", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(group->context);
	group->deliveries = palloc0(Max(group->limit, 1) * sizeof(Delivery));
	held_token = &batch->token;
	error = subtransaction_try(work, group);
	held_token = NULL;
	MemoryContextSwitchTo(caller);
	return error;
}

/* A batch of many rows has many groups, each of which reads them all. */
void
group_end(DeliveryGroup *group)
{
	MemoryContextDelete(group->context);
}

/* Does the group that is being delivered hold this token?  Its hooks must not take its rows. */
bool
group_holds(const pg_uuid_t *token)
{
	return held_token != NULL && memcmp(held_token, token, sizeof(pg_uuid_t)) == 0;
}

static Lease *
group_open(DeliveryGroup *group)
{
	PushActiveSnapshot(GetTransactionSnapshot());
	return lease_lock(runs_open(), &group->batch->token, group->batch->held_at);
}

static void
group_close(Lease *lease)
{
	runs_close(lease->store);
	PopActiveSnapshot();
}

static void
deliver_all_work(void *arg)
{
	DeliveryGroup *group = arg;
	Lease	   *lease = group_open(group);

	deliver_all(group, lease);
	leftovers_close_pinned();
	park_check(group);
	settle(group, lease);
	renew(group, lease);
	group_close(lease);
}

static void
charge_work(void *arg)
{
	DeliveryGroup *group = arg;
	Lease	   *lease = group_open(group);

	group->n = 1;
	group->deliveries[0] = group->charge;
	settle(group, lease);
	renew(group, lease);
	group_close(lease);
}

/* Nobody can interrupt it, so it waits for nobody: the lease will end by itself. */
static void
release_work(void *arg)
{
	DeliveryGroup *group = arg;
	Lease	   *lease;

	PushActiveSnapshot(GetTransactionSnapshot());
	lease = lease_lock_if_free(&group->batch->token, group->batch->held_at);
	if (lease == NULL)
	{
		PopActiveSnapshot();
		return;
	}
	for (group->n = 0; group->n < group->limit; group->n++)
		group->deliveries[group->n].result = DELIVERY_RELEASED;
	settle(group, lease);
	group_close(lease);
}

/* ---- calling ---- */

static void
deliver_all(DeliveryGroup *group, Lease *lease)
{
	Batch	   *batch = group->batch;
	instr_time	begin;
	instr_time	spent;

	INSTR_TIME_SET_CURRENT(begin);
	while (group->n < group->limit && group->cancel == NULL)
	{
		Delivery   *delivery = &group->deliveries[group->n];
		ClaimedMessage *message = &batch->claim->messages[group->first + group->n];

		/* what is done stays done: the caller stops after this group */
		if (group->n > 0 && (QueryCancelPending || ProcDiePending))
			break;
		CHECK_FOR_INTERRUPTS();
		if (lease_index(lease, message->position) >= 0)
			deliver_message(batch->subscription, batch->claim, message, delivery);
		if (batch->own_commit && is_predecessors_fault(group, delivery))
		{
			memset(delivery, 0, sizeof(*delivery));
			break;
		}
		group->n++;
		if (delivery->cancelled)
			group->cancel = delivery->error;
		if (!batch->own_commit && batch->deferred)
			constraints_defer();

		INSTR_TIME_SET_CURRENT(spent);
		INSTR_TIME_SUBTRACT(spent, begin);
		if (batch->own_commit && INSTR_TIME_GET_MILLISEC(spent) >= GROUP_MSECS)
			break;
	}
}

/*
 * What a hook leaves behind until the commit can be in the way of the next one: a
 * temporary table, an open cursor, a prepared statement.  That one gets a transaction
 * of its own.
 */
static bool
is_predecessors_fault(const DeliveryGroup *group, const Delivery *delivery)
{
	return group->n > 0 && delivery->result == DELIVERY_FAILED &&
		(delivery->error->sqlerrcode == ERRCODE_DUPLICATE_TABLE ||
		 delivery->error->sqlerrcode == ERRCODE_DUPLICATE_CURSOR ||
		 delivery->error->sqlerrcode == ERRCODE_DUPLICATE_PSTATEMENT);
}

/* ---- settling ---- */

/* NULL for a message that the group has not begun. */
static Delivery *
delivery_at(const DeliveryGroup *group, int index)
{
	int			i = index - group->first;

	if (i < 0 || i >= group->n || group->deliveries[i].result == DELIVERY_NONE)
		return NULL;
	return &group->deliveries[i];
}

/*
 * First those that fared badly, each by itself; then neighbours that fared alike.  Those
 * delivered come last, because they are the most: where nothing else is left of a row,
 * it moves whole.
 */
static void
settle(DeliveryGroup *group, Lease *lease)
{
	bool	   *wanted = runs_with_messages(group, lease);

	for (int i = 0; i < group->n; i++)
		settle_single(group, lease, group->batch->claim->messages[group->first + i].position,
					  &group->deliveries[i]);

	for (int which = 0; which < lease->n; which++)
	{
		/* what drain() has called it settles, before it stops; deliver() undoes it anyway */
		if (!group->batch->own_commit)
			CHECK_FOR_INTERRUPTS();
		if (wanted[which] && lease->runs[which] != NULL)
			settle_run(group, lease, which);
	}
}

static void
settle_run(DeliveryGroup *group, Lease *lease, int which)
{
	int			n;
	Place	   *places = places_in(group->batch, lease->runs[which], &n);

	for (int delivered = 0; delivered <= 1; delivered++)
	{
		for (int i = 0; i < n && lease->runs[which] != NULL; i++)
		{
			Delivery   *delivery = delivery_at(group, places[i].index);

			if (delivery != NULL && !places[i].settled &&
				(delivery->result == DELIVERY_DONE) == (delivered == 1))
				settle_alike(group, lease, which, places, n, i);
		}
	}
	pfree(places);
}

/* Which runs of the lease hold a message of the group: mostly a few of many. */
static bool *
runs_with_messages(const DeliveryGroup *group, const Lease *lease)
{
	bool	   *wanted = palloc0(Max(lease->n, 1) * sizeof(bool));

	for (int i = 0; i < group->n; i++)
	{
		int			which = lease_index(lease, group->batch->claim->messages[group->first + i].position);

		if (which >= 0)
			wanted[which] = true;
	}
	return wanted;
}

static void
settle_single(DeliveryGroup *group, Lease *lease, int64 position, const Delivery *delivery)
{
	Settlement	settlement = {.handler = delivery->handler};
	Run		   *settled;

	switch (delivery->result)
	{
		case DELIVERY_FAILED:
			settlement.outcome = OUTCOME_FAILED;
			break;
		case DELIVERY_DEAD:
			settlement.outcome = OUTCOME_DEAD;
			break;
		case DELIVERY_LATER:
			settlement.outcome = OUTCOME_RELEASED;
			settlement.has_retry_at = true;
			settlement.retry_at = clock_now() + delivery->delay;
			break;
		default:
			return;
	}
	settlement.error = delivery_error_record(delivery);
	settled = lease_settle(lease, position, &settlement);
	if (settled == NULL)
		return;
	if (settled->state == RUN_DEAD)
		group->counts.dead++;
	else
		group->counts.retried++;
}

static Place *
places_of(const Claim *claim)
{
	Place	   *places = palloc(Max(claim->n, 1) * sizeof(Place));

	for (int i = 0; i < claim->n; i++)
		places[i] = (Place) {claim->messages[i].position, i, false};
	qsort(places, claim->n, sizeof(Place), compare_places);
	return places;
}

/* The claim's messages that lie in a run, in order of position. */
static Place *
places_in(const Batch *batch, const Run *run, int *n)
{
	const Cover *cover = run->positions;
	Place	   *places;

	*n = 0;
	for (int i = 0; i < cover->n; i++)
		*n += first_place(batch, cover->ranges[i].upper) - first_place(batch, cover->ranges[i].lower);
	places = palloc(Max(*n, 1) * sizeof(Place));

	*n = 0;
	for (int i = 0; i < cover->n; i++)
	{
		int			first = first_place(batch, cover->ranges[i].lower);
		int			end = first_place(batch, cover->ranges[i].upper);

		memcpy(places + *n, batch->places + first, (end - first) * sizeof(Place));
		*n += end - first;
	}
	return places;
}

/* The first at this position or above it. */
static int
first_place(const Batch *batch, int64 position)
{
	int			low = 0;
	int			high = batch->claim->n;

	while (low < high)
	{
		int			middle = (low + high) / 2;

		if (batch->places[middle].position >= position)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static int
compare_places(const void *a, const void *b)
{
	return compare_int64(&((const Place *) a)->position, &((const Place *) b)->position);
}

static bool
is_settled_alike(const Delivery *a, const Delivery *b)
{
	return a->result == b->result && a->delay == b->delay &&
		(a->result != DELIVERY_UNHANDLED || (a->handler == b->handler && a->broken == b->broken));
}

/*
 * Settle all messages of a run that are settled like the one at places[first].  What they
 * cover is the run's positions between neighbours, without those of any other message
 * that is still in it.
 */
static void
settle_alike(DeliveryGroup *group, Lease *lease, int which, Place *places, int n, int first)
{
	Run		   *run = lease->runs[which];
	const Delivery *delivery = delivery_at(group, places[first].index);
	Cover	   *cover = cover_make();
	int64		lower = 0;
	int64		upper = 0;
	int			count = 0;

	for (int i = first; i < n; i++)
	{
		const Delivery *other = delivery_at(group, places[i].index);

		if (places[i].settled)
			continue;
		if (other == NULL || !is_settled_alike(delivery, other))
		{
			append_part(cover, run, lower, upper);
			lower = upper;
			continue;
		}
		if (lower == upper)
			lower = places[i].position;
		upper = places[i].position + 1;
		places[i].settled = true;
		count++;
	}
	append_part(cover, run, lower, upper);
	if (count == run->message_count)
		lease->runs[which] = NULL;
	else
		run->active_until = clock_now() + lease->max_active;
	move_part(group, lease, run_take(lease->store, run, cover, count), run, delivery);
}

static void
append_part(Cover *cover, const Run *run, int64 lower, int64 upper)
{
	for (int i = 0; i < run->positions->n; i++)
	{
		int64		from = Max(lower, run->positions->ranges[i].lower);
		int64		to = Min(upper, run->positions->ranges[i].upper);

		if (from < to)
			cover_append(cover, from, to);
	}
}

static void
move_part(DeliveryGroup *group, Lease *lease, Run *part, Run *rest, const Delivery *delivery)
{
	int			count = part->message_count;

	switch (delivery->result)
	{
		case DELIVERY_DONE:
			run_deliver(lease->store, part, rest, clock_now());
			group->counts.delivered += count;
			break;
		case DELIVERY_UNHANDLED:
			run_park(lease->store, part, delivery_error_record(delivery));
			group->counts.unhandled += count;
			break;
		case DELIVERY_RELEASED:
			run_release(lease->store, part, delivery->delay > 0 ?
						clock_now() + delivery->delay : part->available_at);
			group->counts.retried += count;
			break;
		default:
			elog(ERROR, "unexpected result %d of a delivery", delivery->result);
	}
}

/*
 * What is left of the batch has waited for its neighbours: their settlement is its progress.
 * Half of a lease is enough until the next group holds the rows; to write all that is left
 * behind each group would cost more than the groups, where each message has its own row.
 */
static void
renew(const DeliveryGroup *group, Lease *lease)
{
	int64		length = Min(group->batch->subscription->lease, lease->max_active);
	TimestampTz now = clock_now();

	if (group->n == 0)
		return;
	for (int i = 0; i < lease->n; i++)
	{
		Run		   *run = lease->runs[i];

		if (run == NULL ||
			(run->locked_until - now > length / 2 && run->active_until - now > lease->max_active / 2))
			continue;
		run_renew(lease->store, run, now + length, now + lease->max_active);
	}
}
