/*
 * subscription.c
 *		Reading subscriptions, and what they are used for.
 *
 * Claims come here each time, so a subscription is read by its name's index, without a
 * plan and without a cache: it is one index look-up.  What a subscription is, pulled or
 * pushed, is fixed by its first use in a conditional update that never waits for the
 * uncommitted first use of somebody else; the next use repeats it.
 *
 * Locks: none for reading.  subscription_hold() takes the subscription's lock in a
 * shared mode, which keeps unsubscribe() out, and then the row's, which makes registrations,
 * pause() and resume() of one subscription wait for each other; claims wait for neither.
 */
#include "subscription.h"

#include "catalog.h"
#include "route.h"
#include "rows.h"
#include "run.h"
#include "statement.h"

#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* columns of outbox.subscription, in order */
enum
{
	SUB_ID = 1,
	SUB_NAME,
	SUB_PATTERN,
	SUB_KIND,
	SUB_MODE,
	SUB_PAUSED,
	SUB_LEASE,
	SUB_MAX_ACTIVE,
	SUB_MAX_ATTEMPTS,
	SUB_CREATED_AT
};

typedef struct Unpark
{
	TimestampTz now;
	int64		messages;
	bool		all;			/* false: a row changed meanwhile, look again */
} Unpark;

/* a hint */
static ItemPointerData last_found;

static Subscription *read_row(TupleTableSlot *slot);
static Subscription *find_row(Snapshot snapshot, const char *name, int64 id);
static Subscription *find_again(Rows *rows, Snapshot snapshot, const char *name, int64 id);
static char *read_text(TupleTableSlot *slot, AttrNumber column);
static int64 read_usecs(TupleTableSlot *slot, AttrNumber column);
static SubscriptionMode read_mode(TupleTableSlot *slot);
static int	compare_ids(const ListCell *a, const ListCell *b);
static Subscription *find_now(const char *name);
static Subscription *find_or_make_default(const char *name);
static bool fix_mode(const Subscription *subscription, SubscriptionMode mode);
static bool holds_leases(const Subscription *subscription);
static void unpark_scan(const Subscription *subscription, Unpark *unpark);
static bool unpark_visit(RunStore *store, Run *run, void *arg);
static void refuse_claim(const Subscription *subscription);
static void refuse_handler(const Subscription *subscription);
static char *subscribe_call(const Subscription *subscription, const char *suffix);

bool
subscription_matches(const Subscription *subscription, const char *name, const char *kind)
{
	if (subscription->kind != NULL && strcmp(subscription->kind, kind) != 0)
		return false;
	return topic_matches(subscription->pattern, name);
}

static Subscription *
read_row(TupleTableSlot *slot)
{
	Subscription *subscription = palloc0(sizeof(Subscription));
	bool		isnull;
	Datum		value;

	subscription->id = DatumGetInt64(slot_getattr(slot, SUB_ID, &isnull));
	subscription->name = read_text(slot, SUB_NAME);
	subscription->pattern = read_text(slot, SUB_PATTERN);
	subscription->kind = read_text(slot, SUB_KIND);
	subscription->mode = read_mode(slot);
	subscription->paused = DatumGetBool(slot_getattr(slot, SUB_PAUSED, &isnull));
	subscription->own_lease = read_usecs(slot, SUB_LEASE);
	subscription->own_max_active = read_usecs(slot, SUB_MAX_ACTIVE);
	value = slot_getattr(slot, SUB_MAX_ATTEMPTS, &isnull);
	subscription->own_max_attempts = isnull ? 0 : DatumGetInt32(value);

	subscription->lease = subscription->own_lease ? subscription->own_lease : MSECS(outbox_lease);
	subscription->max_active = subscription->own_max_active ?
		subscription->own_max_active : MSECS(outbox_max_active);
	subscription->max_attempts = subscription->own_max_attempts ?
		subscription->own_max_attempts : outbox_max_attempts;
	return subscription;
}

static char *
read_text(TupleTableSlot *slot, AttrNumber column)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, column, &isnull);

	return isnull ? NULL : TextDatumGetCString(value);
}

/* Only subscribe() writes intervals, without months. */
static int64
read_usecs(TupleTableSlot *slot, AttrNumber column)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, column, &isnull);

	if (isnull)
		return 0;
	return DatumGetIntervalP(value)->day * USECS_PER_DAY + DatumGetIntervalP(value)->time;
}

static SubscriptionMode
read_mode(TupleTableSlot *slot)
{
	char	   *mode = read_text(slot, SUB_MODE);

	if (strcmp(mode, "pulled") == 0)
		return MODE_PULLED;
	return strcmp(mode, "pushed") == 0 ? MODE_PUSHED : MODE_UNUSED;
}

/* By its name, or where that is NULL by its id, which are unique. */
static Subscription *
find_row(Snapshot snapshot, const char *name, int64 id)
{
	Rows	   *rows = rows_open(OB_SUBSCRIPTION, false);
	Subscription *subscription;
	ScanKeyData key;
	RowScan    *scan;
	TupleTableSlot *slot;

	snapshot = snapshot_after_lock(snapshot);
	subscription = find_again(rows, snapshot, name, id);
	if (subscription == NULL)
	{
		if (name != NULL)
			ScanKeyEntryInitialize(&key, 0, 1, BTEqualStrategyNumber, InvalidOid, DEFAULT_COLLATION_OID,
								   F_TEXTEQ, CStringGetTextDatum(name));
		else
			ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(id));
		scan = rows_scan(rows, name != NULL ? OB_SUBSCRIPTION_NAME_KEY : OB_SUBSCRIPTION_PKEY,
						 snapshot, ForwardScanDirection, 1, &key);
		slot = rows_next(scan);
		if (slot != NULL)
		{
			subscription = read_row(slot);
			last_found = slot->tts_tid;
		}
		rows_scan_end(scan);
	}
	UnregisterSnapshot(snapshot);
	rows_close(rows);
	return subscription;
}

/* Where this session found one last time: if it is there, and the one, no index is needed. */
static Subscription *
find_again(Rows *rows, Snapshot snapshot, const char *name, int64 id)
{
	TupleTableSlot *slot = rows_fetch(rows, &last_found, snapshot);
	Subscription *subscription;

	if (slot == NULL)
		return NULL;
	subscription = read_row(slot);
	if (name != NULL ? strcmp(subscription->name, name) == 0 : subscription->id == id)
		return subscription;
	return NULL;
}

Subscription *
subscription_find(Snapshot snapshot, const char *name)
{
	return find_row(snapshot, name, 0);
}

Subscription *
subscription_by_id(Snapshot snapshot, int64 id)
{
	return find_row(snapshot, NULL, id);
}

/* In order of id. */
List *
subscription_list(Snapshot snapshot)
{
	Relation	rel = table_open(outbox_oid(OB_SUBSCRIPTION), AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TableScanDesc scan;
	List	   *subscriptions = NIL;

	(void) outbox_check_columns(OB_SUBSCRIPTION, rel);
	snapshot = snapshot_after_lock(snapshot);
	scan = table_beginscan(rel, snapshot, 0, NULL);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
		subscriptions = lappend(subscriptions, read_row(slot));
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, AccessShareLock);
	list_sort(subscriptions, compare_ids);
	return subscriptions;
}

static int
compare_ids(const ListCell *a, const ListCell *b)
{
	int64		first = ((Subscription *) lfirst(a))->id;
	int64		second = ((Subscription *) lfirst(b))->id;

	return first < second ? -1 : first > second;
}

static Subscription *
find_now(const char *name)
{
	Subscription *subscription = subscription_find(snapshot_push(), name);

	snapshot_pop();
	return subscription;
}

Subscription *
subscription_get(const char *name)
{
	Subscription *subscription = find_or_make_default(name);

	if (subscription == NULL)
		subscription_unknown(name);
	return subscription;
}

/* The install script makes no rows, so "default" appears at the first use of anything. */
static Subscription *
find_or_make_default(const char *name)
{
	Subscription *subscription = find_now(name);
	Identity	identity;

	if (subscription != NULL)
		return subscription;
	identity_read(&identity);
	if (identity.in_use)
		return NULL;
	routing_lock_wait();
	identity_ensure();
	return find_now(name);
}

/*
 * Locked first, by the id that this session found under the name last time, and then read:
 * mostly once.  Where it is another one by now that is locked and read again, as the names
 * of tables are.
 */
Subscription *
subscription_get_locked(const char *name, int wait_ms)
{
	static char last_name[OUTBOX_MAX_NAME + 1];
	static int64 last_id = 0;
	int64		locked = strcmp(last_name, name) == 0 ? last_id : 0;
	Subscription *subscription;
	Identity	identity;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		if (locked != 0)
			subscription_lock(locked, AccessShareLock);
		subscription = find_now(name);
		if (subscription == NULL)
			break;
		if (subscription->id == locked)
		{
			strlcpy(last_name, name, sizeof(last_name));
			last_id = locked;
			subscription->locked = true;
			return subscription;
		}
		locked = subscription->id;
	}
	identity_read(&identity);
	if (!identity.in_use && !routing_lock(wait_ms))
		return NULL;
	return subscription_get(name);
}

void
subscription_unknown(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("subscription \"%s\" does not exist", name),
			 errhint("The view outbox.subscriptions lists them; "
					 "SELECT outbox.subscribe(%s) makes this one.",
					 quote_literal_cstr(name))));
}

Subscription *
subscription_hold(const char *name, int mode)
{
	Subscription *subscription = subscription_get(name);
	Statement	lock_row;

	subscription_lock(subscription->id, mode);
	statement_init(&lock_row,
				   "SELECT s.id FROM outbox.subscription s"
				   " WHERE s.id OPERATOR(pg_catalog.=) $1 FOR NO KEY UPDATE");
	bind_int8(&lock_row, subscription->id);
	statement_run(&lock_row);

	/* what it is now, after the waiting */
	subscription = find_now(name);
	if (subscription == NULL)
		subscription_unknown(name);
	return subscription;
}

void
subscription_check_mode(Subscription *subscription, SubscriptionMode mode)
{
	if (subscription->mode == MODE_PULLED && mode == MODE_PUSHED)
		refuse_handler(subscription);
	if (subscription->mode == MODE_PUSHED && mode == MODE_PULLED &&
		!subscription_release(subscription))
		refuse_claim(subscription);
}

void
subscription_use(Subscription *subscription, SubscriptionMode mode)
{
	Subscription *now;

	subscription_check_mode(subscription, mode);
	if (subscription->mode == mode)
		return;
	if (fix_mode(subscription, mode))
	{
		subscription->mode = mode;
		return;
	}

	/* Somebody else was faster, or is about to be: then nothing is fixed yet. */
	now = subscription_get(subscription->name);
	subscription_check_mode(now, mode);
	subscription->mode = now->mode;
}

/* False where the row is locked, or no longer unused. */
static bool
fix_mode(const Subscription *subscription, SubscriptionMode mode)
{
	Statement	fix;

	statement_init(&fix,
				   "UPDATE outbox.subscription AS s SET mode = $2"
				   " FROM (SELECT l.id FROM outbox.subscription l"
				   "        WHERE l.id OPERATOR(pg_catalog.=) $1"
				   "          AND l.mode OPERATOR(pg_catalog.=) 'unused'"
				   "        FOR NO KEY UPDATE SKIP LOCKED) free"
				   " WHERE s.id OPERATOR(pg_catalog.=) free.id");
	bind_int8(&fix, subscription->id);
	bind_text(&fix, mode == MODE_PULLED ? "pulled" : "pushed");
	return statement_run(&fix) == 1;
}

bool
subscription_release(Subscription *subscription)
{
	Statement	lock_row;
	Statement	release;

	if (subscription->mode != MODE_PUSHED || holds_leases(subscription))
		return false;
	statement_init(&lock_row,
				   "SELECT l.id FROM outbox.subscription l"
				   " WHERE l.id OPERATOR(pg_catalog.=) $1"
				   "   AND NOT EXISTS (SELECT FROM outbox.handler h"
				   "         WHERE h.subscription_id OPERATOR(pg_catalog.=) l.id)"
				   " FOR NO KEY UPDATE SKIP LOCKED");
	bind_int8(&lock_row, subscription->id);
	if (statement_run(&lock_row) == 0)
		return false;
	/* asked again with the lock: who registered meanwhile had locked the row, and changed nothing in it */
	statement_init(&release,
				   "UPDATE outbox.subscription AS s SET mode = 'unused'"
				   " WHERE s.id OPERATOR(pg_catalog.=) $1"
				   "   AND s.mode OPERATOR(pg_catalog.=) 'pushed'"
				   "   AND NOT EXISTS (SELECT FROM outbox.handler h"
				   "         WHERE h.subscription_id OPERATOR(pg_catalog.=) s.id)");
	bind_int8(&release, subscription->id);
	if (statement_run(&release) == 0)
		return false;

	/* whoever claims them needs no handler */
	subscription_unpark(subscription);
	subscription->mode = MODE_UNUSED;
	return true;
}

static bool
holds_leases(const Subscription *subscription)
{
	RunStore   *store = runs_open();
	RunScan    *scan = runs_leased(store, snapshot_push(), subscription->id,
								   DT_NOBEGIN, DT_NOEND);
	bool		found = (run_next(scan) != NULL);

	run_scan_end(scan);
	snapshot_pop();
	runs_close(store);
	return found;
}

/*
 * Waits for whoever holds one of the rows, to discard a message of it for example: what
 * is left of the row would stay unhandled.
 */
int64
subscription_unpark(const Subscription *subscription)
{
	Unpark		unpark = {.now = clock_now()};

	do
		unpark_scan(subscription, &unpark);
	while (!unpark.all);
	return unpark.messages;
}

static bool
unpark_visit(RunStore *store, Run *run, void *arg)
{
	Unpark	   *unpark = arg;

	if (run_lock(store, run, LockWaitBlock) != RUN_LOCKED)
	{
		unpark->all = false;
		return true;
	}
	unpark->messages += run->message_count;
	run_unpark(store, run, unpark->now);
	return true;
}

static void
unpark_scan(const Subscription *subscription, Unpark *unpark)
{
	RunStore   *store = runs_open();

	unpark->all = true;
	runs_visit(store, runs_unhandled(store, snapshot_push(), subscription->id), unpark_visit, unpark);
	snapshot_pop();
	runs_close(store);
}

static void
refuse_claim(const Subscription *subscription)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("subscription \"%s\" is delivered to handlers and cannot be claimed",
					subscription->name),
			 errdetail("Its first use was a registration, which made it a pushed one."),
			 errhint("Deliver it with CALL outbox.drain(%s), or claim from another subscription: "
					 "%s.",
					 quote_literal_cstr(subscription->name),
					 subscribe_call(subscription, "_pull"))));
}

static void
refuse_handler(const Subscription *subscription)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("subscription \"%s\" is claimed by consumers and cannot have handlers",
					subscription->name),
			 errdetail("Its first use was a claim, which made it a pulled one."),
			 errhint("Register on another subscription: %s, then pass subscription => %s.",
					 subscribe_call(subscription, "_hooks"),
					 quote_literal_cstr(psprintf("%s_hooks", subscription->name)))));
}

/* The call that makes another subscription with the same messages. */
static char *
subscribe_call(const Subscription *subscription, const char *suffix)
{
	StringInfoData call;

	initStringInfo(&call);
	appendStringInfo(&call, "SELECT outbox.subscribe(%s",
					 quote_literal_cstr(psprintf("%s%s", subscription->name, suffix)));
	if (strcmp(subscription->pattern, "#") != 0)
		appendStringInfo(&call, ", pattern => %s", quote_literal_cstr(subscription->pattern));
	if (subscription->kind != NULL)
		appendStringInfo(&call, ", kind => %s", quote_literal_cstr(subscription->kind));
	appendStringInfoChar(&call, ')');
	return call.data;
}
