/*
 * route.c
 *		From the log to runs: finds the messages that became visible since the last pass
 *		and files them, for every subscription, into runs.
 *
 * The only place that reads the log by visibility.  The order of its steps is its
 * correctness:
 *
 *	 1. the routing lock, held to the end of the transaction;
 *	 2. then a snapshot S2, the latest one, to which the own transaction is added as in
 *		progress: a snapshot never lists its taker, and without this what the transaction
 *		enqueues afterwards would lie below the frontier and never be found;
 *	 3. then, with that snapshot, the newest frontier S1;
 *	 4. new are the rows of the index range [S1.horizon, S2.horizon) that are visible in
 *		S2, and those of each transaction that was in progress in S1 and is complete in
 *		S2, an index range each.  Whatever the order of commits, no row is in two ranges
 *		and none is in none;
 *	 5. the rows of each range are cut into runs (filing.c);
 *	 6. S2 becomes the new frontier.  A pass that saw nothing writes nothing.
 *
 * S2 may be cut short at any transaction.  That bounds a pass, and it keeps runs
 * compact: a pass stops at a transaction that it sees running for the first time, and
 * only if it still runs in the next pass is it listed as late.
 *
 * Locks: the routing lock (an object lock on the extension that no user can take), to
 * the end of the transaction.
 */
#include "route.h"

#include "catalog.h"
#include "filing.h"
#include "rows.h"

#include "access/transam.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* A pass ends at the first transaction boundary after so many rows. */
#define ROUTE_BITE 10000
#define SELF_ROUTED_COLUMNS 3	/* subscription_id, lower, upper */
/*
 * One claim goes over at most so many: where few match and the caller has a time limit,
 * it would otherwise lose all of its passes, and begin again, for ever.
 */
#define ROUTE_ROWS_PER_CLAIM 1000000

/* set when the lock is taken; the lock itself is asked whether it is still held */
static bool locked_in_transaction = false;

static void transaction_end(XactEvent event, void *arg);
static void lock_tables(void);
static int64 first_running_not_below(const Frontier *frontier, int64 transaction);
static int64 pass(Frontier *s1, Frontier *s2, Snapshot snapshot, int64 subscription_id, int64 wanted,
				  int64 *rows, bool *wrote);
static void keep_running(Frontier *next, const Frontier *s1, const Frontier *s2);
static int64 self_routed_bottom(const Frontier *frontier);
static RowScan *self_routed_scan(Rows *rows, Snapshot snapshot, int64 bottom);
static void self_routed_subtract(Filing *filing, const Frontier *s1, Snapshot snapshot);
static void self_routed_forget(const Frontier *next, const Frontier *s1, const Frontier *s2,
							   Snapshot snapshot);

void
route_register_callbacks(void)
{
	RegisterXactCallback(transaction_end, NULL);
}

/*
 * A prepared transaction that has routed would hold the lock, and with it everybody's
 * new messages, until somebody remembers it.
 */
static void
transaction_end(XactEvent event, void *arg)
{
	if (!locked_in_transaction)
		return;
	if (event == XACT_EVENT_PRE_PREPARE && routing_is_held())
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction that has routed messages of outbox"),
				 errdetail("It holds the routing lock, which other claims need."),
				 errhint("Claim in a transaction of its own, and settle in the one that is prepared.")));
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		locked_in_transaction = false;
}

bool
routing_lock(int wait_ms)
{
	TimestampTz give_up = clock_machine() + MSECS(wait_ms);
	LOCKTAG		tag;

	routing_locktag(&tag);
	while (LockAcquire(&tag, ExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
	{
		if (clock_machine() >= give_up)
			return false;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 1,
						 outbox_wait_event(OUTBOX_WAIT_ROUTING));
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	locked_in_transaction = true;
	return true;
}

void
routing_unlock(void)
{
	LOCKTAG		tag;

	routing_locktag(&tag);
	(void) LockRelease(&tag, ExclusiveLock, false);
}

/* by this transaction */
bool
routing_is_held(void)
{
	LOCKTAG		tag;

	if (!locked_in_transaction)
		return false;
	routing_locktag(&tag);
	return outbox_lock_held_by_me(&tag, ExclusiveLock);
}

void
routing_lock_wait(void)
{
	LOCKTAG		tag;

	routing_locktag(&tag);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
	locked_in_transaction = true;
}

/* What a snapshot says, in the transaction numbers of positions. */
void
frontier_of_snapshot(Frontier *frontier, Snapshot snapshot, int64 offset)
{
	FullTransactionId own = GetTopFullTransactionIdIfAny();
	/* on a standby all that run are listed as if they were subtransactions */
	const TransactionId *running = snapshot->takenDuringRecovery ? snapshot->subxip : snapshot->xip;
	uint32		n_running = snapshot->takenDuringRecovery ? snapshot->subxcnt : snapshot->xcnt;
	int			n = 0;

	memset(frontier, 0, sizeof(*frontier));
	frontier->offset = offset;
	frontier->horizon = full_transaction(snapshot->xmax) + offset;
	frontier->seen = frontier->horizon;
	frontier_sign(frontier);
	frontier->running = palloc((n_running + 1) * sizeof(int64));
	for (uint32 i = 0; i < n_running; i++)
		frontier->running[n++] = full_transaction(running[i]) + offset;
	/* step 2: our own is in progress, even if the snapshot does not say so */
	if (FullTransactionIdIsValid(own) && (int64) U64FromFullTransactionId(own) + offset < frontier->horizon)
		frontier->running[n++] = (int64) U64FromFullTransactionId(own) + offset;
	/*
	 * A transaction that is being prepared is listed twice, as its backend's and as the
	 * prepared one's: filed twice, its messages would be delivered twice.
	 */
	frontier->n_running = sort_unique_int64(frontier->running, n);
}

static int64
first_running_not_below(const Frontier *frontier, int64 transaction)
{
	for (int i = 0; i < frontier->n_running; i++)
	{
		if (frontier->running[i] >= transaction)
			return frontier->running[i];
	}
	return PG_INT64_MAX;
}

/*
 * The in-progress list of the new frontier: what S1 listed and still runs, and what runs
 * between the two horizons.
 */
static void
keep_running(Frontier *next, const Frontier *s1, const Frontier *s2)
{
	int			n = 0;

	next->running = palloc(Max(s2->n_running, 1) * sizeof(int64));
	for (int i = 0; i < s2->n_running; i++)
	{
		int64		running = s2->running[i];

		if (running < next->horizon &&
			(running >= s1->horizon || frontier_is_running(s1, running)))
			next->running[n++] = running;
	}
	next->n_running = n;
}

/*
 * Steps 4 to 6 for S2 as it was cut so far.  Cuts it further after a bite.  Returns the
 * messages filed.
 */
static int64
pass(Frontier *s1, Frontier *s2, Snapshot snapshot, int64 subscription_id, int64 wanted,
	 int64 *rows, bool *wrote)
{
	Filing	   *filing = filing_begin(snapshot, subscription_list(snapshot), s2);
	Frontier	next = *s2;
	int64		cut;
	int64		filed;

	filing_wanted(filing, subscription_id, wanted);
	self_routed_subtract(filing, s1, snapshot);
	for (int i = 0; i < s1->n_running; i++)
	{
		int64		late = s1->running[i];

		if (!frontier_is_running(s2, late))
			(void) filing_range(filing, position_of_transaction(late), position_of_transaction(late + 1),
								-position_of_transaction(late), 0);
	}
	cut = filing_range(filing, position_of_transaction(s1->horizon), position_of_transaction(s2->horizon),
					   position_of_transaction(s1->horizon), ROUTE_BITE);
	if (cut >= 0)
		next.horizon = cut;

	*rows += filing_seen(filing);
	next.newest = filing_newest(filing);
	next.newest = Max(s1->newest, next.newest);
	if (filing_seen(filing) > 0)
	{
		keep_running(&next, s1, s2);
		*wrote = true;
		self_routed_forget(&next, s1, s2, snapshot);
		(void) frontier_append(s1, &next);
	}
	s2->horizon = next.horizon;
	filed = filing_count(filing, subscription_id);
	filing_end(filing);
	return filed;
}

/*
 * Rows of earlier transactions were removed by earlier passes: behind somebody's snapshot
 * they are still in the index, and a scan from the start would walk over them.
 */
static int64
self_routed_bottom(const Frontier *frontier)
{
	return position_of_transaction(frontier->n_running > 0 ?
								   Min(frontier->running[0], frontier->horizon) : frontier->horizon);
}

static RowScan *
self_routed_scan(Rows *rows, Snapshot snapshot, int64 bottom)
{
	ScanKeyData key;

	ScanKeyInit(&key, 1, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(bottom));
	return rows_scan(rows, OB_SELF_ROUTED_PKEY, snapshot, ForwardScanDirection, 1, &key);
}

/* What transactions have filed themselves is left out. */
static void
self_routed_subtract(Filing *filing, const Frontier *s1, Snapshot snapshot)
{
	Rows	   *rows = rows_open(OB_SELF_ROUTED, false);
	RowScan    *scan = self_routed_scan(rows, snapshot, self_routed_bottom(s1));
	TupleTableSlot *slot;

	while ((slot = rows_next(scan)) != NULL)
	{
		bool		isnull;

		filing_leave_out(filing, DatumGetInt64(slot_getattr(slot, 1, &isnull)),
						 DatumGetInt64(slot_getattr(slot, 2, &isnull)),
						 DatumGetInt64(slot_getattr(slot, 3, &isnull)));
	}
	rows_scan_end(scan);
	rows_close(rows);
}

/* Nobody asks again for transactions that lie behind the new frontier. */
static void
self_routed_forget(const Frontier *next, const Frontier *s1, const Frontier *s2, Snapshot snapshot)
{
	Rows	   *rows = rows_open(OB_SELF_ROUTED, true);
	RowScan    *scan = self_routed_scan(rows, snapshot, self_routed_bottom(s1));
	TupleTableSlot *slot;

	while ((slot = rows_next(scan)) != NULL)
	{
		bool		isnull;
		int64		transaction = position_transaction(DatumGetInt64(slot_getattr(slot, 2, &isnull)));
		ItemPointerData tid = slot->tts_tid;

		if (transaction < next->horizon && !frontier_is_running(s2, transaction))
			rows_delete(rows, &tid);
	}
	rows_scan_end(scan);
	rows_close(rows);
}

/*
 * Before the snapshot: a table that is rewritten (ALTER TABLE, pg_repack) seems empty to an
 * older one.  Without the frontier everything would be filed once more; without the
 * subscriptions, to nobody.
 */
static void
lock_tables(void)
{
	static const OutboxObject tables[] = {
		OB_IDENTITY, OB_FRONTIER, OB_SUBSCRIPTION, OB_HANDLER, OB_SELF_ROUTED
	};

	for (int i = 0; i < lengthof(tables); i++)
		LockRelationOid(outbox_oid(tables[i]), AccessShareLock);
}

int64
route(int64 enough)
{
	bool		wrote;

	return route_for(0, enough, &wrote, NULL);
}

int64
route_for(int64 subscription_id, int64 enough, bool *wrote, bool *left)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox route",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	int64		target = -1;
	int64		seen = 0;
	int64		total = 0;
	int64		rows = 0;
	bool		more = true;

	*wrote = false;
	lock_tables();
	while (more)
	{
		Identity	identity;
		Frontier	s1;
		Frontier	s2;
		Snapshot	snapshot;
		int64		first_running;

		CHECK_FOR_INTERRUPTS();
		*wrote |= identity_ensure();
		snapshot = snapshot_push();
		frontier_read(&s1, snapshot);
		frontier_check_identity(&s1);
		identity_read(&identity);
		if (identity.foreign || frontier_is_foreign(&s1))
			frontier_take_over_check();
		if (identity.foreign)	/* and nothing stored */
		{
			identity_take_over(false);
			identity_read(&identity);
			*wrote = true;
		}
		if (frontier_is_foreign(&s1))
		{
			/* an empty outbox adopts itself: what comes now is ours */
			Frontier	ours = s1;

			frontier_sign(&ours);
			ours.id = frontier_append(&s1, &ours);
			ours.created_at = 0;	/* that was another machine's clock */
			s1 = ours;
			*wrote = true;
		}
		frontier_of_snapshot(&s2, snapshot, identity.offset);
		if (s2.horizon < s1.horizon)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("routing is ahead of the transactions of this cluster"),
					 errdetail("Frontier %lld lies at %lld, the newest snapshot at %lld.",
							   (long long) s1.id, (long long) s1.horizon, (long long) s2.horizon),
					 errhint("If the tables of outbox were restored, run SELECT outbox.adopt().")));
		clock_start_above(s1.created_at);

		if (target < 0)
			target = s2.horizon;
		/* stop at what is seen running for the first time */
		seen = Max(seen, s1.seen);
		first_running = first_running_not_below(&s2, Max(seen, s1.horizon));
		s2.horizon = Min(s2.horizon, first_running);
		seen = s2.seen;

		total += pass(&s1, &s2, snapshot, subscription_id, enough == 0 ? 0 : enough - total,
					  &rows, wrote);
		snapshot_pop();
		if (left != NULL)
			*left = s2.horizon < target;
		more = s2.horizon < target && (enough == 0 || (total < enough && rows < ROUTE_ROWS_PER_CLAIM));
		MemoryContextReset(context);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
	return total;
}

/* Everything that was routed before the subscription existed, as the frontier says. */
int64
route_backlog(Subscription *subscription)
{
	Snapshot	snapshot = snapshot_push();
	Frontier	frontier;
	Filing	   *filing;
	int64		filed;

	frontier_read(&frontier, snapshot);
	filing = filing_begin(snapshot, list_make1(subscription), &frontier);
	/* in ranges like those of passes: a look-up by position walks over one */
	for (int64 from = 0; from >= 0;)
		from = filing_range(filing, position_of_transaction(from), position_of_transaction(frontier.horizon),
							position_of_transaction(from), ROUTE_BITE);
	snapshot_pop();
	filed = filing_count(filing, 0);
	filing_end(filing);
	return filed;
}

/*
 * A transaction claims what it enqueued itself: it files its own rows, for this
 * subscription, above what it has filed before, and writes down what it has filed.
 * Invisible to everybody else until its commit.
 */
int64
route_own(Subscription *subscription, int64 wanted)
{
	int64		first = position_of_transaction((int64) U64FromFullTransactionId(GetTopFullTransactionId()) +
												identity_offset_for_enqueue());
	int64		upper = first + position_own_count();
	int64		lower = first;
	Rows	   *rows = rows_open(OB_SELF_ROUTED, true);
	Snapshot	snapshot = snapshot_push();
	Frontier	nobody = {0};
	RowScan    *scan = self_routed_scan(rows, snapshot, first);
	TupleTableSlot *slot;
	Filing	   *filing;
	int64		filed;

	while ((slot = rows_next(scan)) != NULL)
	{
		bool		isnull;
		int64		filed_upper = DatumGetInt64(slot_getattr(slot, 3, &isnull));

		if (DatumGetInt64(slot_getattr(slot, 1, &isnull)) == subscription->id && filed_upper <= upper)
			lower = Max(lower, filed_upper);
	}
	rows_scan_end(scan);

	filing = filing_begin(snapshot, list_make1(subscription), &nobody);
	filing_wanted(filing, subscription->id, wanted);
	if (lower < upper)
		(void) filing_range(filing, lower, upper, -first, 0);
	filed = filing_count(filing, 0);
	filing_end(filing);
	if (lower < upper)
	{
		Datum		values[SELF_ROUTED_COLUMNS] = {Int64GetDatum(subscription->id), Int64GetDatum(lower), Int64GetDatum(upper)};
		bool		nulls[SELF_ROUTED_COLUMNS] = {false};

		rows_insert(rows, values, nulls, NULL);
	}
	snapshot_pop();
	rows_close(rows);
	return filed;
}

bool
enqueued_in_transaction(void)
{
	return position_own_count() > 0;
}
