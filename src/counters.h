/*
 * counters.h
 *		Cumulative counters of what happened to messages, per subscription.
 */
#ifndef OUTBOX_COUNTERS_H
#define OUTBOX_COUNTERS_H

#include "outbox.h"

/* In the order of the columns of outbox.counters; all but the last count messages or calls. */
typedef enum Counter
{
	COUNTER_ENQUEUED,			/* of the database: no subscription has them yet */
	COUNTER_ROUTED,
	COUNTER_CLAIMED,
	COUNTER_DELIVERED,
	COUNTER_RETRIED,
	COUNTER_DEAD,				/* those abandoned included */
	COUNTER_ABANDONED,
	COUNTER_LEASE_LOST,			/* those abandoned included */
	COUNTER_SETTLEMENT_REFUSED, /* calls */
	COUNTER_NOTIFIED,
	COUNTER_HOOK_TIME,			/* microseconds */
	COUNTERS
} Counter;

/* what belongs to the database, and to none of its subscriptions */
#define OF_DATABASE		INT64CONST(0)

extern void counters_request_shmem(void);
extern void counters_startup_shmem(void);
extern void counters_register_callbacks(void);

/* counted when the transaction commits, or is prepared; not if its savepoint is rolled back */
extern void counters_add(Counter counter, int64 subscription_id, int64 n);
/* counted now: for what ends in an error */
extern void counters_add_now(Counter counter, int64 subscription_id, int64 n);
/* at the commit: the subscription is gone; OF_DATABASE: all of this database begin anew */
extern void counters_forget(int64 subscription_id);
/* now: the database was dropped, nobody is connected to it */
extern void counters_forget_database(Oid database);

/* for counter_file.c: an entry as it is stored */
typedef struct CounterKey
{
	Oid			database;
	int64		subscription_id;	/* or OF_DATABASE */
} CounterKey;

typedef struct CounterCopy
{
	CounterKey	key;
	TimestampTz reset_at;
	int64		counts[COUNTERS];
} CounterCopy;

extern int	counters_copy_all(CounterCopy **copies, TimestampTz *since);
extern void counters_restore(const CounterCopy *copies, int n, TimestampTz since);

/* counter_file.c: in the postmaster, when shared memory is made */
extern void counter_file_open(void);

#endif							/* OUTBOX_COUNTERS_H */
