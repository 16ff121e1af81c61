/*
 * counters.c
 *		Cumulative counters: what has happened to the messages of each subscription since
 *		the last reset; behind the view outbox.counters.
 *
 * A transaction counts in backend memory, by the level of its savepoints: what a rolled
 * back one did has not happened.  Its commit callback adds the counts to atomics in
 * shared memory, where nothing can fail any more.  So who enqueues adds to a number of its
 * own, and to one atomic at the commit.  A prepared transaction counts when it is
 * prepared: who commits it later knows nothing of it.
 *
 * Entries are found by (database, subscription).  The one of the database itself stays as
 * long as the database, so a backend may keep its address and needs no lock; those of
 * subscriptions are removed with them.  Where there is no room for one it is not counted.
 *
 * The counters survive a clean restart, see counter_file.c.
 *
 * Locks: one LWLock over the table, shared for adding, exclusive for a new entry or to
 * remove one; held for a few instructions.
 *
 * Without preloading nothing is counted.
 */
#include "counters.h"

#include "subscription.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_counter_rows);
PG_FUNCTION_INFO_V1(outbox_reset_counters);

#define ENTRIES_MAX		4096	/* subscriptions and databases of the whole cluster */

typedef struct CounterEntry
{
	CounterKey	key;
	TimestampTz reset_at;		/* protected by the lock */
	pg_atomic_uint64 counts[COUNTERS];
} CounterEntry;

typedef struct CounterState
{
	LWLock	   *lock;
	TimestampTz since;			/* when counting began; written at the start only */
} CounterState;

/* what a transaction has counted, at one level of its savepoints */
typedef struct Pending
{
	int			level;
	bool		forget;
	bool		done;			/* by publish() */
	int64		subscription_id;
	int64		counts[COUNTERS];
} Pending;

static CounterState *state = NULL;
static HTAB *table = NULL;
static CounterEntry *own_database = NULL;

/* ascending by level */
static Pending *pending = NULL;
static int	n_pending = 0;
static int	pending_size = 0;

static Pending *pending_for(int64 subscription_id);
static void add_counts(int64 *counts, const int64 *more);
static void transaction_end(XactEvent event, void *arg);
static void savepoint_end(SubXactEvent event, SubTransactionId mine,
						  SubTransactionId parent, void *arg);
static void join_upper_level(int level);
static void publish(void);
static void publish_rest(void);
static bool publish_to(CounterEntry *entry, const int64 *counts);
static void forget(int64 subscription_id);
static void remove_subscriptions(Oid database);
static CounterEntry *find(Oid database, int64 subscription_id, HASHACTION action);
static CounterEntry *make(Oid database, int64 subscription_id);
static void set_to_zero(CounterEntry *entry, TimestampTz at);
static void copy_entry(CounterEntry *entry, CounterCopy *copy);
static TimestampTz counted_since(Oid database);
static void put_counters(ReturnSetInfo *result, const Subscription *subscription);
static int	reset(int64 subscription_id);

void
counters_request_shmem(void)
{
	RequestAddinShmemSpace(add_size(MAXALIGN(sizeof(CounterState)),
									hash_estimate_size(ENTRIES_MAX, sizeof(CounterEntry))));
	RequestNamedLWLockTranche("outbox counters", 1);
}

void
counters_startup_shmem(void)
{
	HASHCTL		info = {.keysize = sizeof(CounterKey), .entrysize = sizeof(CounterEntry)};
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	state = ShmemInitStruct("outbox counters", sizeof(CounterState), &found);
	table = ShmemInitHash("outbox counter table", ENTRIES_MAX, ENTRIES_MAX, &info,
						  HASH_ELEM | HASH_BLOBS | HASH_FIXED_SIZE);
	if (!found)
	{
		state->lock = &GetNamedLWLockTranche("outbox counters")->lock;
		state->since = GetCurrentTimestamp();
	}
	LWLockRelease(AddinShmemInitLock);
	if (IsUnderPostmaster || found)
		return;
	counter_file_open();
}

void
counters_register_callbacks(void)
{
	RegisterXactCallback(transaction_end, NULL);
	RegisterSubXactCallback(savepoint_end, NULL);
}

/* ---- counting, in backend memory ---- */

void
counters_add(Counter counter, int64 subscription_id, int64 n)
{
	if (state != NULL && n != 0)
		pending_for(subscription_id)->counts[counter] += n;
}

void
counters_forget(int64 subscription_id)
{
	if (state != NULL)
		pending_for(subscription_id)->forget = true;
}

/* At the level of the current savepoint; those of this level are the last ones. */
static Pending *
pending_for(int64 subscription_id)
{
	int			level = GetCurrentTransactionNestLevel();

	for (int i = n_pending - 1; i >= 0 && pending[i].level == level; i--)
	{
		if (pending[i].subscription_id == subscription_id)
			return &pending[i];
	}
	if (n_pending == pending_size)
	{
		int			size = Max(16, pending_size * 2);

		if (pending == NULL)
			pending = MemoryContextAlloc(TopMemoryContext, size * sizeof(Pending));
		else
			pending = repalloc(pending, size * sizeof(Pending));
		pending_size = size;
	}
	memset(&pending[n_pending], 0, sizeof(Pending));
	pending[n_pending].level = level;
	pending[n_pending].subscription_id = subscription_id;
	return &pending[n_pending++];
}

static void
add_counts(int64 *counts, const int64 *more)
{
	for (int i = 0; i < COUNTERS; i++)
		counts[i] += more[i];
}

static void
transaction_end(XactEvent event, void *arg)
{
	if (n_pending == 0)
		return;
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_PREPARE)
		publish();
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_PREPARE || event == XACT_EVENT_ABORT)
		n_pending = 0;
}

static void
savepoint_end(SubXactEvent event, SubTransactionId mine, SubTransactionId parent, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_COMMIT_SUB)
		join_upper_level(level);
	else if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (n_pending > 0 && pending[n_pending - 1].level >= level)
			n_pending--;
	}
}

static void
join_upper_level(int level)
{
	int			first = n_pending;
	int			n;

	while (first > 0 && pending[first - 1].level >= level)
		first--;
	n = first;
	for (int i = first; i < n_pending; i++)
	{
		Pending	   *above = NULL;

		for (int j = n - 1; j >= 0 && pending[j].level == level - 1 && above == NULL; j--)
		{
			if (pending[j].subscription_id == pending[i].subscription_id)
				above = &pending[j];
		}
		if (above != NULL)
		{
			above->forget |= pending[i].forget;
			add_counts(above->counts, pending[i].counts);
			continue;
		}
		pending[n] = pending[i];
		pending[n++].level = level - 1;
	}
	n_pending = n;
}

/* ---- shared memory ---- */

/* The caller holds the lock. */
static CounterEntry *
find(Oid database, int64 subscription_id, HASHACTION action)
{
	CounterKey	key;

	memset(&key, 0, sizeof(key));
	key.database = database;
	key.subscription_id = subscription_id;
	return hash_search(table, &key, action, NULL);
}

/* The caller holds the lock exclusively.  NULL: there is no room. */
static CounterEntry *
make(Oid database, int64 subscription_id)
{
	CounterEntry *entry = find(database, subscription_id, HASH_FIND);
	TimestampTz since;

	if (entry != NULL)
		return entry;
	since = counted_since(database);
	entry = find(database, subscription_id, HASH_ENTER_NULL);
	if (entry == NULL)
		return NULL;
	for (int i = 0; i < COUNTERS; i++)
		pg_atomic_init_u64(&entry->counts[i], 0);
	entry->reset_at = since;
	return entry;
}

/* For who has no entry of his own.  The caller holds the lock. */
static TimestampTz
counted_since(Oid database)
{
	CounterEntry *entry = find(database, OF_DATABASE, HASH_FIND);

	return entry != NULL ? entry->reset_at : state->since;
}

static void
set_to_zero(CounterEntry *entry, TimestampTz at)
{
	for (int i = 0; i < COUNTERS; i++)
		pg_atomic_write_u64(&entry->counts[i], 0);
	entry->reset_at = at;
}

static void
copy_entry(CounterEntry *entry, CounterCopy *copy)
{
	copy->key = entry->key;
	copy->reset_at = entry->reset_at;
	for (int i = 0; i < COUNTERS; i++)
		copy->counts[i] = (int64) pg_atomic_read_u64(&entry->counts[i]);
}

static bool
publish_to(CounterEntry *entry, const int64 *counts)
{
	if (entry == NULL)
		return false;
	for (int i = 0; i < COUNTERS; i++)
	{
		if (counts[i] != 0)
			pg_atomic_fetch_add_u64(&entry->counts[i], counts[i]);
	}
	return true;
}

/* Nothing here can fail: the transaction is committed. */
static void
publish(void)
{
	bool		all = true;

	/* most have enqueued, and nothing else */
	if (n_pending == 1 && pending[0].subscription_id == OF_DATABASE && !pending[0].forget &&
		publish_to(own_database, pending[0].counts))
		return;

	LWLockAcquire(state->lock, LW_SHARED);
	for (int i = 0; i < n_pending; i++)
	{
		CounterEntry *entry = find(MyDatabaseId, pending[i].subscription_id, HASH_FIND);

		pending[i].done = !pending[i].forget && publish_to(entry, pending[i].counts);
		all &= pending[i].done;
	}
	own_database = find(MyDatabaseId, OF_DATABASE, HASH_FIND);
	LWLockRelease(state->lock);
	if (!all)
		publish_rest();
}

/* Entries are removed and made. */
static void
publish_rest(void)
{
	LWLockAcquire(state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < n_pending; i++)
	{
		if (pending[i].forget)
			forget(pending[i].subscription_id);
	}
	for (int i = 0; i < n_pending; i++)
	{
		if (!pending[i].done && !(pending[i].forget && pending[i].subscription_id != OF_DATABASE))
			(void) publish_to(make(MyDatabaseId, pending[i].subscription_id), pending[i].counts);
	}
	own_database = find(MyDatabaseId, OF_DATABASE, HASH_FIND);
	LWLockRelease(state->lock);
}

void
counters_add_now(Counter counter, int64 subscription_id, int64 n)
{
	CounterEntry *entry;

	if (state == NULL)
		return;
	LWLockAcquire(state->lock, LW_EXCLUSIVE);
	entry = make(MyDatabaseId, subscription_id);
	if (entry != NULL)
		pg_atomic_fetch_add_u64(&entry->counts[counter], n);
	LWLockRelease(state->lock);
}

/* The caller holds the lock exclusively. */
static void
forget(int64 subscription_id)
{
	CounterEntry *entry = find(MyDatabaseId, OF_DATABASE, HASH_FIND);

	if (subscription_id != OF_DATABASE)
		(void) find(MyDatabaseId, subscription_id, HASH_REMOVE);
	else
	{
		remove_subscriptions(MyDatabaseId);
		if (entry != NULL)
			set_to_zero(entry, GetCurrentTimestamp());
	}
}

/* The caller holds the lock exclusively. */
static void
remove_subscriptions(Oid database)
{
	HASH_SEQ_STATUS status;
	CounterEntry *entry;

	hash_seq_init(&status, table);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		if (entry->key.database == database && entry->key.subscription_id != OF_DATABASE)
			(void) find(database, entry->key.subscription_id, HASH_REMOVE);
	}
}

void
counters_forget_database(Oid database)
{
	if (state == NULL)
		return;
	LWLockAcquire(state->lock, LW_EXCLUSIVE);
	remove_subscriptions(database);
	(void) find(database, OF_DATABASE, HASH_REMOVE);
	LWLockRelease(state->lock);
}

/* ---- for the file: nobody else is there, yet or any more ---- */

int
counters_copy_all(CounterCopy **copies, TimestampTz *since)
{
	HASH_SEQ_STATUS status;
	CounterEntry *entry;
	int			n = 0;

	*copies = palloc(Max(hash_get_num_entries(table), 1) * sizeof(CounterCopy));
	*since = state->since;
	hash_seq_init(&status, table);
	while ((entry = hash_seq_search(&status)) != NULL)
		copy_entry(entry, &(*copies)[n++]);
	return n;
}

void
counters_restore(const CounterCopy *copies, int n, TimestampTz since)
{
	state->since = since;
	for (int i = 0; i < n; i++)
	{
		CounterEntry *entry = make(copies[i].key.database, copies[i].key.subscription_id);

		if (entry == NULL)
			return;
		entry->reset_at = copies[i].reset_at;
		for (int j = 0; j < COUNTERS; j++)
			pg_atomic_write_u64(&entry->counts[j], (uint64) copies[i].counts[j]);
	}
}

/* ---- SQL ---- */

/* One row for the database, and one for each of its subscriptions; behind the view "counters". */
Datum
outbox_counter_rows(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	ListCell   *cell;

	InitMaterializedSRF(fcinfo, 0);
	if (state == NULL)
		return (Datum) 0;
	put_counters(result, NULL);
	foreach(cell, subscription_list(GetActiveSnapshot()))
		put_counters(result, lfirst(cell));
	return (Datum) 0;
}

/* NULL: the database, which has counters of its own; a subscription has all others. */
static void
put_counters(ReturnSetInfo *result, const Subscription *subscription)
{
	CounterCopy copy = {0};
	CounterEntry *entry;
	Datum		values[COUNTERS + 2];
	bool		nulls[COUNTERS + 2] = {false};

	LWLockAcquire(state->lock, LW_SHARED);
	entry = find(MyDatabaseId, subscription != NULL ? subscription->id : OF_DATABASE, HASH_FIND);
	if (entry != NULL)
		copy_entry(entry, &copy);
	else
		copy.reset_at = counted_since(MyDatabaseId);
	LWLockRelease(state->lock);

	values[0] = subscription != NULL ? CStringGetTextDatum(subscription->name) : (Datum) 0;
	nulls[0] = (subscription == NULL);
	for (int i = 0; i < COUNTERS; i++)
	{
		values[i + 1] = Int64GetDatum(copy.counts[i]);
		nulls[i + 1] = subscription != NULL ? i == COUNTER_ENQUEUED :
			i != COUNTER_ENQUEUED && i != COUNTER_SETTLEMENT_REFUSED;
	}
	values[COUNTER_HOOK_TIME + 1] = Float8GetDatum(copy.counts[COUNTER_HOOK_TIME] / 1000.0);
	values[COUNTERS + 1] = TimestampTzGetDatum(copy.reset_at);
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/*
 * outbox.reset_counters(subscription) → rows of outbox.counters
 *
 * At once, whatever becomes of the transaction, as PostgreSQL's own statistics.
 */
Datum
outbox_reset_counters(PG_FUNCTION_ARGS)
{
	char	   *name = arg_text(fcinfo, 0, "subscription");
	List	   *subscriptions;
	int32		rows = 0;
	ListCell   *cell;

	session_begin("outbox.reset_counters()");
	subscriptions = name == NULL ? subscription_list(snapshot_push()) :
		list_make1(subscription_find(snapshot_push(), name));
	snapshot_pop();
	if (name != NULL && linitial(subscriptions) == NULL)
		subscription_unknown(name);
	if (state == NULL)
		PG_RETURN_INT32(0);

	LWLockAcquire(state->lock, LW_EXCLUSIVE);
	if (name == NULL)
		rows += reset(OF_DATABASE);
	foreach(cell, subscriptions)
		rows += reset(((Subscription *) lfirst(cell))->id);
	LWLockRelease(state->lock);
	PG_RETURN_INT32(rows);
}

/* The caller holds the lock exclusively. */
static int
reset(int64 subscription_id)
{
	CounterEntry *entry = make(MyDatabaseId, subscription_id);

	if (entry == NULL)
		return 0;
	set_to_zero(entry, GetCurrentTimestamp());
	return 1;
}
