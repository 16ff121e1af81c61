/*
 * claim.c
 *		Claims: runs that are due go to a consumer under a lease.
 *
 * A claim locks run rows first, skipping those that others hold, then takes a new
 * snapshot, then reads the log with it: a run may have been filed after the claim's
 * statement began.  What it takes of a run becomes a row of its own; nobody waits for
 * anybody.
 *
 * In this order: what this transaction enqueued itself is filed; leases that ran out are
 * taken back, so correctness never depends on a worker; what is ready is taken; if it is
 * too little, new messages are routed, here and now; if nothing was found because other
 * claims held runs, they are looked at once more after a moment.
 *
 * Locks: the subscription's, shared, to the end of the transaction; the routing lock if
 * it had to route; rows as described in run.c.
 */
#include "claim.h"

#include "catalog.h"
#include "deliver.h"
#include "enqueue.h"
#include "floor.h"
#include "log.h"
#include "route.h"
#include "worker.h"

#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_claim_batch);

/* Longest wait for another router, and the pause before looking again at held runs. */
#define ROUTING_WAIT_MS		100
#define SECOND_LOOK_MS		20
/* What others split while we looked is looked at again, at once, so often. */
#define LOOKS_AT_CHANGED	10
/* Expired runs that one claim takes back: the rest is left to the next. */
#define EXPIRE_PER_CLAIM	100
/* A run that came back by expiry is handed out in so many pieces. */
#define PIECES				10
/*
 * A pushed batch is kept in memory while its hooks are called.  Of large messages it has
 * fewer, lest the memory that they need stop the claim, uncharged, again and again.
 */
#define BYTES_ENOUGH		(64 * 1024 * 1024)

typedef struct Taking
{
	Claim	   *claim;
	Subscription *subscription;
	RunStore   *store;
	int			max;
	int64		lease;
	int64		max_active;
	const char *worker;
	bool		separate_tokens;
	pg_uuid_t	token;
	TimestampTz begun_at;
	List	   *locked;			/* runs */
	int64		wanted;			/* messages that they do not have */
	TimestampTz first_seen;		/* due time of the first run that was seen, locked or not */
	bool		skipped;		/* others held runs that were due */
	bool		changed;		/* others have just taken a part of runs that were due */
	bool		piece;			/* a piece was taken: nothing else goes with it */
	int64		bytes;			/* of large messages that are kept in memory */
	bool		full;			/* these are enough for one claim */
} Taking;

static void take_ready(Taking *taking);
static List *lock_ready(Taking *taking);
static void lock_due(Taking *taking, Snapshot snapshot, TimestampTz from, TimestampTz now);
static void lock_from(Taking *taking, RunScan *scan);
static int	piece_limit(const Run *run);
static void take_from_run(Taking *taking, LogReader *reader, Run *run);
static int	read_messages(Taking *taking, LogReader *reader, Run *run, int limit);
static int	read_range(Taking *taking, LogReader *reader, int64 lower, int64 upper, int limit);
static void lease_part(Taking *taking, Run *part, int first, int n, TimestampTz now);
static void lose_messages(Taking *taking, Run *run, int found);
static int	compare_claimed(const void *a, const void *b);
static void put_claimed(ReturnSetInfo *rsinfo, const Claim *claim, const char *subscription);
static void lock_subscription(Subscription *subscription);
static void bring_new(Taking *taking);
static void pause_ms(int ms);

/*
 * The tokens claimed in the current transaction: settling them there is never late,
 * since nobody else can have the rows.
 */
static List *own_tokens = NIL;
static TransactionId own_tokens_of = InvalidTransactionId;

/* the last run that this session locked: a hint where the next claim finds what it needs */
static int64 head_of = 0;
static TimestampTz head_due;
static int64 head_id;

static void
remember_token(const pg_uuid_t *token)
{
	MemoryContext caller = MemoryContextSwitchTo(TopTransactionContext);
	pg_uuid_t  *copy = palloc(sizeof(pg_uuid_t));

	if (own_tokens_of != GetTopTransactionId())
	{
		own_tokens = NIL;
		own_tokens_of = GetTopTransactionId();
	}
	*copy = *token;
	own_tokens = lappend(own_tokens, copy);
	MemoryContextSwitchTo(caller);
}

bool
claimed_in_transaction(const pg_uuid_t *token)
{
	ListCell   *cell;

	if (own_tokens_of != GetTopTransactionIdIfAny() || !TransactionIdIsValid(own_tokens_of))
		return false;
	foreach(cell, own_tokens)
	{
		if (memcmp(lfirst(cell), token, sizeof(pg_uuid_t)) == 0)
			return true;
	}
	return false;
}

Claim *
claim_take(Subscription *subscription, SubscriptionMode mode, int max, int64 lease,
		   int64 max_active, const char *worker, bool separate_tokens)
{
	Taking		taking = {0};
	Claim	   *claim = palloc0(sizeof(Claim));

	taking.claim = claim;
	taking.subscription = subscription;
	taking.max = max;
	taking.lease = lease;
	taking.max_active = max_active;
	taking.worker = worker;
	taking.separate_tokens = separate_tokens;
	claim->capacity = Min(max, 1024);
	claim->messages = palloc(claim->capacity * sizeof(ClaimedMessage));

	if (!subscription->locked)
		lock_subscription(subscription);
	if (mode == MODE_PULLED)
		subscription_check_mode(subscription, mode);
	if (subscription->paused)
		return claim;
	taking.begun_at = clock_now();
	if (enqueued_in_transaction())
		(void) route_own(subscription, max);

	taking.store = runs_open();
	(void) claim_expire_in(taking.store, subscription, EXPIRE_PER_CLAIM);
	uuid_v4(&taking.token);
	take_ready(&taking);
	if (claim->n < max && !taking.piece && !taking.full)
	{
		bring_new(&taking);
		take_ready(&taking);
	}
	for (int look = 0; claim->n == 0 && taking.changed && look < LOOKS_AT_CHANGED; look++)
		take_ready(&taking);
	if (claim->n == 0 && taking.skipped)
	{
		pause_ms(SECOND_LOOK_MS);
		take_ready(&taking);
	}
	runs_close(taking.store);

	if (claim->n > 0 && !separate_tokens)
		remember_token(&taking.token);
	qsort(claim->messages, claim->n, sizeof(ClaimedMessage), compare_claimed);
	return claim;
}

/* And read it again, now that nobody can remove it: it may have changed while we waited. */
static void
lock_subscription(Subscription *subscription)
{
	Subscription *now;

	subscription_lock(subscription->id, AccessShareLock);
	now = subscription_by_id(snapshot_push(), subscription->id);
	snapshot_pop();
	if (now == NULL)
		subscription_unknown(subscription->name);
	*subscription = *now;
	subscription->locked = true;
}

/*
 * File what is not yet filed.  Where a coordinator runs it does so, in a transaction that
 * ends at once: one that has claimed and stays open must not keep the routing lock, and
 * with it hide newly committed messages.  A pass that wrote nothing needs its lock no
 * longer either.
 */
static void
bring_new(Taking *taking)
{
	bool		wrote;

	if (!routing_is_held() && coordinator_runs())
	{
		/* it wakes its delivery workers when it has something for them */
		if (worker_is(WORKER_DELIVERY) || wake_and_wait_for_pass(ROUTING_WAIT_MS))
			return;
	}
	if (!routing_lock(ROUTING_WAIT_MS))
		return;
	(void) route_for(taking->subscription->id, taking->max - taking->claim->n, &wrote, NULL);
	if (!wrote)
		routing_unlock();
}

static void
pause_ms(int ms)
{
	TimestampTz until = clock_machine() + MSECS(ms);
	long		left;

	while ((left = TimestampDifferenceMilliseconds(clock_machine(), until)) > 0)
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, left,
						 outbox_wait_event(OUTBOX_WAIT_RUNS));
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

static void
take_ready(Taking *taking)
{
	List	   *runs = lock_ready(taking);
	LogReader  *reader;
	ListCell   *cell;

	if (runs == NIL)
		return;

	/* locked first, then this snapshot, then the log */
	reader = log_open(snapshot_push());
	foreach(cell, runs)
	{
		CHECK_FOR_INTERRUPTS();
		if (taking->full)
			break;
		take_from_run(taking, reader, lfirst(cell));
	}
	log_close(reader);
	snapshot_pop();
}

/* Lock runs that are due, in order of due time and id, until they hold enough messages. */
static List *
lock_ready(Taking *taking)
{
	FloorScan	floor;

	taking->locked = NIL;
	taking->wanted = taking->max - taking->claim->n;
	taking->first_seen = DT_NOEND;
	taking->skipped = false;
	taking->changed = false;

	floor_begin(&floor, taking->subscription->id, FLOOR_READY);
	lock_due(taking, snapshot_push(), floor.start, clock_now());
	snapshot_pop();
	floor_raise(&floor, taking->first_seen);
	return taking->locked;
}

/*
 * An index scan reads a page of entries at once, and there may be hundreds of runs on it:
 * so the scan is broken at the run that the last claim of this session has locked, where
 * mostly enough is left.
 */
static void
lock_due(Taking *taking, Snapshot snapshot, TimestampTz from, TimestampTz now)
{
	RunStore   *store = taking->store;
	int64		subscription = taking->subscription->id;
	TimestampTz due = head_due;
	int64		id = head_id;

	if (head_of == subscription && due >= from && due <= now)
	{
		if (from < due)
			lock_from(taking, runs_ready(store, snapshot, subscription, from, due - 1));
		if (taking->wanted > 0)
			lock_from(taking, runs_ready_at(store, snapshot, subscription, due, PG_INT64_MIN, id));
		if (taking->wanted > 0)
			lock_from(taking, runs_ready_at(store, snapshot, subscription, due, id + 1, PG_INT64_MAX));
		from = due + 1;
	}
	if (taking->wanted > 0)
		lock_from(taking, runs_ready(store, snapshot, subscription, from, now));
}

static void
lock_from(Taking *taking, RunScan *scan)
{
	Run		   *run;

	while (taking->wanted > 0 && (run = run_next(scan)) != NULL)
	{
		bool		piece = run->piece && run->attempts > 0;

		taking->first_seen = Min(taking->first_seen, run->available_at);
		CHECK_FOR_INTERRUPTS();
		/* a piece goes alone: into an empty claim or not at all */
		if (piece && (taking->locked != NIL || taking->claim->n > 0))
			continue;
		switch (run_lock(taking->store, run, LockWaitSkip))
		{
			case RUN_LOCKED:
				if (run->state != RUN_READY)
					break;
				taking->locked = lappend(taking->locked, run);
				taking->wanted -= run->message_count;
				head_of = run->subscription_id;
				head_due = run->available_at;
				head_id = run->id;
				if (piece)
				{
					taking->piece = true;
					taking->wanted = 0;
				}
				break;
			case RUN_BUSY:
				taking->skipped = true;
				break;
			case RUN_GONE:
				taking->changed = true;
				break;
		}
	}
	run_scan_end(scan);
}

/* A message that kills its consumer must not take its neighbours along. */
static int
piece_limit(const Run *run)
{
	if (run->max_attempts - run->attempts <= 1)
		return 1;
	return (run->message_count + PIECES - 1) / PIECES;
}

static void
take_from_run(Taking *taking, LogReader *reader, Run *run)
{
	Claim	   *claim = taking->claim;
	int			limit = Min(taking->max - claim->n, run->message_count);
	int			first = claim->n;
	int			found;
	TimestampTz now;
	Run		   *part;

	if (taking->piece)
	{
		int			most = piece_limit(run);

		limit = Min(limit, most);
	}
	found = read_messages(taking, reader, run, limit);
	if (found < limit && !taking->full)
		lose_messages(taking, run, found);
	if (found == 0)
		return;

	now = clock_now();
	if (!taking->separate_tokens)
	{
		int64		above = claim->messages[first + found - 1].position + 1;

		part = run;
		if (found < run->message_count)
			part = run_take(taking->store, run, cover_split_below(cover_copy(run->positions), above), found);
		lease_part(taking, part, first, found, now);
		return;
	}
	for (int i = 0; i < found; i++)
	{
		int64		above = claim->messages[first + i].position + 1;

		part = run;
		if (run->message_count > 1)
			part = run_take(taking->store, run, cover_split_below(cover_copy(run->positions), above), 1);
		uuid_v4(&taking->token);
		remember_token(&taking->token);
		lease_part(taking, part, first + i, 1, now);
	}
}

/*
 * Append the first messages of a run to the claim, in order of position.
 *
 * Where these are few of many they are looked for in their range bit by bit, since an index
 * scan reads all that a page has of its range: at first among so many positions, which is
 * enough where one transaction has written them, then of so many transactions.
 */
static int
read_messages(Taking *taking, LogReader *reader, Run *run, int limit)
{
	bool		few = (limit < run->message_count / 4);
	int			found = 0;

	for (int i = 0; i < run->positions->n && found < limit && !taking->full; i++)
	{
		PositionRange *range = &run->positions->ranges[i];
		int64		from = range->lower;
		int64		step = few ? limit - found : range->upper - from;

		while (found < limit && from < range->upper && !taking->full)
		{
			int64		to = range->upper - from > step ? from + step : range->upper;

			found += read_range(taking, reader, from, to, limit - found);
			step = step < MESSAGES_PER_TRANSACTION ? step * MESSAGES_PER_TRANSACTION : range->upper - to;
			from = to;
		}
	}
	return found;
}

/* How many were found; fewer than the limit also where what was taken is large enough. */
static int
read_range(Taking *taking, LogReader *reader, int64 lower, int64 upper, int limit)
{
	Claim	   *claim = taking->claim;
	TupleTableSlot *slot;
	int			found = 0;

	log_range(reader, lower, upper);
	while (found < limit && !taking->full && (slot = log_next(reader)) != NULL)
	{
		ClaimedMessage *message;

		if (claim->n == claim->capacity)
		{
			claim->capacity *= 2;
			claim->messages = repalloc(claim->messages, claim->capacity * sizeof(ClaimedMessage));
		}
		if (claim->log_desc == NULL)
			claim->log_desc = CreateTupleDescCopy(slot->tts_tupleDescriptor);
		message = &claim->messages[claim->n++];
		message->tuple = ExecCopySlotHeapTuple(slot);
		/* its hook is called after this commit, and then nothing keeps the segment from being truncated */
		if (taking->subscription->mode == MODE_PUSHED && HeapTupleHasExternal(message->tuple))
		{
			message->tuple = toast_flatten_tuple(message->tuple, claim->log_desc);
			taking->bytes += message->tuple->t_len;
			taking->full = (taking->bytes > BYTES_ENOUGH);
		}
		message->position = log_position(slot);
		message->created_at = log_created_at(slot);
		found++;
	}
	return found;
}

static void
lease_part(Taking *taking, Run *part, int first, int n, TimestampTz now)
{
	run_lease(taking->store, part, &taking->token, taking->worker, now,
			  now + Min(taking->lease, taking->max_active), now + taking->max_active);
	for (int i = first; i < first + n; i++)
	{
		taking->claim->messages[i].run = part;
		/* what was filed during this claim, in whatever order, was due when it began */
		taking->claim->messages[i].due = Min(part->available_at, taking->begun_at);
	}
}

/*
 * Somebody deleted rows of the log.  All of the run was read, since it did not fill the
 * limit: what was found is all that there is.
 */
static void
lose_messages(Taking *taking, Run *run, int found)
{
	ereport(WARNING,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("%d messages of a delivery are gone from the log",
					run->message_count - found),
			 errdetail("Delivery %lld of subscription \"%s\".",
					   (long long) run->id, taking->subscription->name)));
	if (found > 0)
		run->message_count = found;
	else
		run_discard(taking->store, run, RUN_DISCARDED, clock_now(),
					error_record(NULL, "the messages are gone from the log", NULL, NULL, NULL, NULL));
}

static int
compare_claimed(const void *a, const void *b)
{
	const ClaimedMessage *left = a;
	const ClaimedMessage *right = b;

	if (left->due != right->due)
		return left->due < right->due ? -1 : 1;
	if (left->created_at != right->created_at)
		return left->created_at < right->created_at ? -1 : 1;
	return compare_int64(&left->position, &right->position);
}

/* ---- the SQL function ---- */

static void
put_claimed(ReturnSetInfo *rsinfo, const Claim *claim, const char *subscription)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox claimed",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	Datum		name = CStringGetTextDatum(subscription);
	TupleTableSlot *slot = MakeSingleTupleTableSlot(claim->log_desc, &TTSOpsHeapTuple);

	for (int i = 0; i < claim->n; i++)
	{
		const ClaimedMessage *message = &claim->messages[i];
		const Run  *run = message->run;
		Datum		values[23];
		bool		nulls[23] = {false};

		ExecStoreHeapTuple(message->tuple, slot, false);
		log_fill_row(slot, 6, 12, values, nulls);
		values[1] = UUIDPGetDatum(&run->claim_token);
		values[2] = TimestampTzGetDatum(run->locked_until);
		values[3] = TimestampTzGetDatum(run->active_until);
		values[4] = Int32GetDatum(run->attempts);
		values[5] = Int32GetDatum(run->max_attempts);
		values[11] = name;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	ExecDropSingleTupleTableSlot(slot);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
}

/*
 * outbox.claim_batch(max_messages, lease, subscription, worker, separate_tokens)
 */
Datum
outbox_claim_batch(PG_FUNCTION_ARGS)
{
	int			max = PG_ARGISNULL(0) ? outbox_batch_size : PG_GETARG_INT32(0);
	char	   *name = arg_text(fcinfo, 2, "subscription");
	char	   *worker = arg_text(fcinfo, 3, "worker");
	bool		separate_tokens = PG_ARGISNULL(4) ? false : PG_GETARG_BOOL(4);
	int64		lease;
	Subscription *subscription;
	Claim	   *claim;

	session_begin("outbox.claim_batch()");
	if (name == NULL)
		name = "default";
	if (max < 1 || max > OUTBOX_MAX_BATCH)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_messages must be between 1 and %d", OUTBOX_MAX_BATCH),
				 errdetail("It is %d.", max),
				 errhint("Leave it out, or pass NULL, for outbox.batch_size.")));
	access_check_consumer(name);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	subscription = subscription_get_locked(name, ROUTING_WAIT_MS);
	if (subscription == NULL)
		return (Datum) 0;		/* somebody is just beginning to use the outbox */
	lease = claim_lease(fcinfo, 1, subscription);

	frontier_check();
	claim = claim_take(subscription, MODE_PULLED, max, lease, subscription->max_active, worker, separate_tokens);
	if (claim->n > 0)
	{
		if (subscription->mode == MODE_UNUSED)
			subscription_use(subscription, MODE_PULLED);
		recent_remember(claim);
		put_claimed((ReturnSetInfo *) fcinfo->resultinfo, claim, subscription->name);
	}
	return (Datum) 0;
}

/*
 * The lease of a call: refused where it is longer than renewals could make it, for 30000
 * passed by a driver that means milliseconds must not become eight hours.
 */
int64
claim_lease(FunctionCallInfo fcinfo, int n, const Subscription *subscription)
{
	int64		lease;

	if (PG_ARGISNULL(n))
		return Min(subscription->lease, subscription->max_active);
	lease = interval_usecs(PG_GETARG_DATUM(n), "lease");
	if (lease > subscription->max_active)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lease is longer than the claim may be active"),
				 errdetail("It is %.15g seconds, max_active of subscription \"%s\" is %.15g seconds.",
						   (double) lease / USECS_PER_SEC, subscription->name,
						   (double) subscription->max_active / USECS_PER_SEC),
				 errhint("Claim with a shorter lease and renew it, or set max_active with outbox.subscribe().")));
	return lease;
}
