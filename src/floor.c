/*
 * floor.c
 *		The claim floor: a time below which no ready row of a subscription exists or can
 *		appear, and the same for leases.  Scans begin there.
 *
 * Behind an open snapshot the dead index entries of claimed runs cannot be removed; a
 * scan from the start would walk over all of them.  The floor costs nothing when there is
 * no such snapshot and keeps claims flat when there is.
 *
 * Why no row is left behind below a floor:
 *
 *	 - A transaction that will write a ready or leased row first publishes its pin, the
 *	   clock, and then reads the clock again by an atomic operation; no row of it gets a
 *	   time below that second reading.  Before it changes a row it lowers the pin to that
 *	   row's time, which is there again if it aborts.  The pin goes when the transaction's
 *	   end has become visible.
 *	 - A scan reads the clock first, then all pins, then takes its snapshot.  It may raise
 *	   the floor to the smallest of these, and of the first row that it saw.  A pin that it
 *	   did not see was published after its reading of the clock, so the rows lie above.
 *	 - PREPARE hands the pin to the sticky pin, which holds until no transaction as old as
 *	   that PREPARE is prepared.  After a start the sticky pin is "minus infinity".
 *	 - Writers that are not ours (restore, replication, a superuser) and sessions whose
 *	   clock was set back pin at minus infinity and reset all floors when their end is
 *	   visible; the generation keeps a scan that began before from raising one after.
 *
 * Locks: one LWLock over the floors and the sticky pin, held for a few instructions.  Pins
 * are atomics, each written by its backend only.
 *
 * Without preloading there are no floors: slower, never wrong.
 */
#include "floor.h"

#include "run.h"

#include "access/transam.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_delivery_changed);

#define FLOORS_MAX	4096		/* subscriptions of the whole cluster; others have no floor */
#define NO_PIN		DT_NOEND
/* floors rise in steps of this: nearer is not worth the lock */
#define FLOOR_STEP	(10 * 1000)

typedef struct FloorKey
{
	Oid			database;
	int64		subscription_id;
} FloorKey;

typedef struct FloorEntry
{
	FloorKey	key;
	TimestampTz floors[FLOOR_KINDS];	/* protected by the lock; only grow within a generation */
} FloorEntry;

typedef struct Pin
{
	Oid			database;		/* written by the backend before its first pin */
	pg_atomic_uint64 time;		/* NO_PIN: none */
} Pin;

typedef struct FloorState
{
	LWLock	   *lock;
	/* protected by the lock */
	uint64		generation;
	TimestampTz sticky_time;	/* pins of prepared transactions, the smallest */
	uint64		sticky_until;	/* valid while a transaction up to this one is in progress */
	bool		sticky_known;	/* false after a start: there may be prepared ones */
	/* one for each backend */
	int			n_pins;
	Pin			pins[FLEXIBLE_ARRAY_MEMBER];
} FloorState;

static FloorState *floor_state = NULL;
static HTAB *floor_table = NULL;

/* of this transaction */
static TimestampTz pinned_clock = DT_NOBEGIN;
static TimestampTz pin_time = NO_PIN;
static bool foreign_write = false;

static Size state_size(void);
static Pin *my_pin(void);
static void publish(TimestampTz time);
static TimestampTz smallest_pin(void);
static uint64 newest_transaction(void);
static TimestampTz sticky_pin(void);
static void transaction_end(XactEvent event, void *arg);
static FloorEntry *floor_entry(int64 subscription_id, HASHACTION action);
static FloorEntry *floor_entry_to_raise(int64 subscription_id);

static Size
state_size(void)
{
	return add_size(offsetof(FloorState, pins), mul_size(MaxBackends, sizeof(Pin)));
}

void
floor_request_shmem(void)
{
	RequestAddinShmemSpace(add_size(state_size(), hash_estimate_size(FLOORS_MAX, sizeof(FloorEntry))));
	RequestNamedLWLockTranche("outbox", 1);
}

void
floor_startup_shmem(void)
{
	HASHCTL		info = {.keysize = sizeof(FloorKey), .entrysize = sizeof(FloorEntry)};
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	floor_state = ShmemInitStruct("outbox floors", state_size(), &found);
	if (!found)
	{
		memset(floor_state, 0, state_size());
		floor_state->lock = &GetNamedLWLockTranche("outbox")->lock;
		floor_state->n_pins = MaxBackends;
		floor_state->sticky_time = DT_NOBEGIN;
		for (int i = 0; i < MaxBackends; i++)
			pg_atomic_init_u64(&floor_state->pins[i].time, (uint64) NO_PIN);
	}
	floor_table = ShmemInitHash("outbox floor table", FLOORS_MAX, FLOORS_MAX, &info,
								HASH_ELEM | HASH_BLOBS | HASH_FIXED_SIZE);
	LWLockRelease(AddinShmemInitLock);
}

void
floor_register_callbacks(void)
{
	RegisterXactCallback(transaction_end, NULL);
}

/* ---- pins ---- */

static Pin *
my_pin(void)
{
	Assert(OUTBOX_MY_PROC_NUMBER < floor_state->n_pins);
	return &floor_state->pins[OUTBOX_MY_PROC_NUMBER];
}

static void
publish(TimestampTz time)
{
	Pin		   *pin = my_pin();

	pin->database = MyDatabaseId;
	pg_write_barrier();
	pg_atomic_write_u64(&pin->time, (uint64) time);
	pg_memory_barrier();
	pin_time = time;
}

TimestampTz
floor_pin(void)
{
	if (floor_state == NULL)
		return DT_NOBEGIN;
	if (outbox_clock_offset < 0)
	{
		/* its times may lie below any floor */
		foreign_write = true;
		if (pin_time != DT_NOBEGIN)
			publish(DT_NOBEGIN);
		return DT_NOBEGIN;
	}
	if (pin_time == NO_PIN)
	{
		publish(clock_unshifted());
		pinned_clock = clock_tick_unshifted(1);
	}
	return pinned_clock;
}

void
floor_pin_down_to(TimestampTz time)
{
	if (floor_state != NULL && time < pin_time)
		publish(time);
}

static TimestampTz
smallest_pin(void)
{
	TimestampTz smallest = NO_PIN;

	for (int i = 0; i < floor_state->n_pins; i++)
	{
		Pin		   *pin = &floor_state->pins[i];
		TimestampTz time = (TimestampTz) pg_atomic_read_u64(&pin->time);

		if (time >= smallest)
			continue;
		pg_read_barrier();
		if (pin->database == MyDatabaseId)
			smallest = time;
	}
	return smallest;
}

static uint64
newest_transaction(void)
{
	return U64FromFullTransactionId(ReadNextFullTransactionId()) - 1;
}

/*
 * Prepared transactions hold their pin as long as one up to the last PREPARE is there:
 * those are the transactions in progress that no backend runs, or younger than all that
 * have ended: a snapshot does not list those.  (A backend that is about to prepare has its
 * own pin until it has set this one.)  The caller holds the lock exclusively.
 */
static TimestampTz
sticky_pin(void)
{
	Snapshot	snapshot;

	if (!floor_state->sticky_known)
	{
		floor_state->sticky_time = DT_NOBEGIN;
		floor_state->sticky_until = newest_transaction();
		floor_state->sticky_known = true;
	}
	if (floor_state->sticky_time == NO_PIN)
		return NO_PIN;
	snapshot = GetLatestSnapshot();
	if ((uint64) full_transaction(snapshot->xmax) <= floor_state->sticky_until)
		return floor_state->sticky_time;
	for (uint32 i = 0; i < snapshot->xcnt; i++)
	{
		if ((uint64) full_transaction(snapshot->xip[i]) <= floor_state->sticky_until &&
			BackendXidGetPid(snapshot->xip[i]) == 0)
			return floor_state->sticky_time;
	}
	floor_state->sticky_time = NO_PIN;
	return NO_PIN;
}

/* Called when the end of the transaction has become visible to others. */
static void
transaction_end(XactEvent event, void *arg)
{
	if (floor_state == NULL || pin_time == NO_PIN ||
		(event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE))
		return;

	if (event == XACT_EVENT_PREPARE || foreign_write)
	{
		LWLockAcquire(floor_state->lock, LW_EXCLUSIVE);
		if (event == XACT_EVENT_PREPARE)
		{
			floor_state->sticky_time = Min(floor_state->sticky_time, foreign_write ? DT_NOBEGIN : pin_time);
			floor_state->sticky_until = newest_transaction();
			floor_state->generation++;
		}
		LWLockRelease(floor_state->lock);
		if (foreign_write)
			floor_reset();
	}
	pg_atomic_write_u64(&my_pin()->time, (uint64) NO_PIN);
	pin_time = NO_PIN;
	pinned_clock = DT_NOBEGIN;
	foreign_write = false;
}

/* ---- floors ---- */

static FloorEntry *
floor_entry(int64 subscription_id, HASHACTION action)
{
	FloorKey	key;

	memset(&key, 0, sizeof(key));
	key.database = MyDatabaseId;
	key.subscription_id = subscription_id;
	return hash_search(floor_table, &key, action, NULL);
}

void
floor_reset(void)
{
	floor_reset_database(MyDatabaseId);
}

void
floor_reset_database(Oid database)
{
	HASH_SEQ_STATUS status;
	FloorEntry *entry;

	if (floor_state == NULL)
		return;
	LWLockAcquire(floor_state->lock, LW_EXCLUSIVE);
	floor_state->generation++;
	hash_seq_init(&status, floor_table);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		if (entry->key.database == database)
			entry->floors[FLOOR_READY] = entry->floors[FLOOR_LEASE] = DT_NOBEGIN;
	}
	LWLockRelease(floor_state->lock);
}

/* The clock, then the pins, then the sticky pin; the snapshot is the caller's next step. */
void
floor_begin(FloorScan *scan, int64 subscription_id, FloorKind kind)
{
	FloorEntry *entry;
	TimestampTz pin;

	scan->subscription_id = subscription_id;
	scan->kind = kind;
	scan->start = DT_NOBEGIN;
	scan->limit = DT_NOBEGIN;
	if (floor_state == NULL)
		return;

	LWLockAcquire(floor_state->lock, LW_SHARED);
	scan->generation = floor_state->generation;
	entry = floor_entry(subscription_id, HASH_FIND);
	if (entry != NULL && !foreign_write)	/* what we have written may lie below it */
		scan->start = entry->floors[kind];
	LWLockRelease(floor_state->lock);

	scan->limit = clock_tick_unshifted(1);
	pg_memory_barrier();
	pin = smallest_pin();
	scan->limit = Min(scan->limit, pin);
	pg_memory_barrier();		/* PREPARE sets the sticky pin before it clears its own */
	if (floor_state->sticky_time != NO_PIN)
	{
		LWLockAcquire(floor_state->lock, LW_EXCLUSIVE);
		pin = sticky_pin();		/* asked once: a second answer may be another */
		LWLockRelease(floor_state->lock);
		scan->limit = Min(scan->limit, pin);
	}
}

/* The entry to raise; makes room where all are in use: no entry is no floor. */
static FloorEntry *
floor_entry_to_raise(int64 subscription_id)
{
	FloorEntry *entry = floor_entry(subscription_id, HASH_FIND);

	if (entry != NULL)
		return entry;
	if (hash_get_num_entries(floor_table) >= FLOORS_MAX)
	{
		HASH_SEQ_STATUS status;

		hash_seq_init(&status, floor_table);
		entry = hash_seq_search(&status);
		hash_seq_term(&status);
		hash_search(floor_table, &entry->key, HASH_REMOVE, NULL);
	}
	entry = floor_entry(subscription_id, HASH_ENTER_NULL);
	if (entry != NULL)
		entry->floors[FLOOR_READY] = entry->floors[FLOOR_LEASE] = DT_NOBEGIN;
	return entry;
}

void
floor_raise(const FloorScan *scan, TimestampTz first_seen)
{
	TimestampTz floor = Min(scan->limit, first_seen);

	if (floor_state == NULL || floor <= scan->start ||
		(scan->start != DT_NOBEGIN && floor - scan->start < FLOOR_STEP))
		return;

	LWLockAcquire(floor_state->lock, LW_EXCLUSIVE);
	if (floor_state->generation == scan->generation)
	{
		FloorEntry *entry = floor_entry_to_raise(scan->subscription_id);

		if (entry != NULL)
			entry->floors[scan->kind] = Max(entry->floors[scan->kind], floor);
	}
	LWLockRelease(floor_state->lock);
}

/*
 * Row trigger on outbox.delivery, enabled always.  Our own writes keep the rules above;
 * whoever else writes there may put a row anywhere.
 */
Datum
outbox_delivery_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_BEFORE(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("this function is the trigger of the table outbox.delivery")));
	if (floor_state != NULL && !run_is_writing())
	{
		foreign_write = true;
		if (pin_time != DT_NOBEGIN)
			publish(DT_NOBEGIN);
	}
	return PointerGetDatum(TRIGGER_FIRED_BY_UPDATE(trigger->tg_event) ?
						   trigger->tg_newtuple : trigger->tg_trigtuple);
}
