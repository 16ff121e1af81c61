/*
 * route.h
 *		From the log to runs.
 */
#ifndef OUTBOX_ROUTE_H
#define OUTBOX_ROUTE_H

#include "outbox.h"
#include "subscription.h"

/*
 * The routing lock, to the end of the transaction.  Waits up to so many milliseconds;
 * false: somebody else routes.
 */
extern bool routing_lock(int wait_ms);
/* give back what routing_lock() got, where nothing was written under it */
extern void routing_unlock(void);
extern bool routing_is_held(void);
/* without limit, for subscribe() and the like */
extern void routing_lock_wait(void);

/*
 * Under the routing lock: route until at least so many messages were found (0: to the
 * end of what is committed now).  Returns the messages found.
 */
extern int64 route(int64 enough);
/*
 * The same, counting what was found for one subscription (0: for any).  *wrote: whether
 * anything was written, so that the lock is needed to the end of the transaction; *left:
 * whether it stopped before the end, which it also does behind many that nobody wants;
 * or NULL.
 */
extern int64 route_for(int64 subscription_id, int64 enough, bool *wrote, bool *left);
/* file what a new subscription should get from the past */
extern int64 route_backlog(Subscription *subscription);
/* file what this transaction has enqueued itself, of which so many are wanted; no lock needed */
extern int64 route_own(Subscription *subscription, int64 wanted);

/* enqueue.c says so; cleared at the end of the transaction */
extern bool enqueued_in_transaction(void);

/* refuses PREPARE for a transaction that has routed */
extern void route_register_callbacks(void);

/* how far routing has come, for status */
typedef struct Frontier
{
	int64		id;				/* 0: nothing was ever routed; negative: frontier_append_stop() */
	int64		horizon;
	int64		seen;
	int64		offset;
	int64		system_identifier;
	Oid			database;
	TimestampTz created_at;
	TimestampTz newest;			/* greatest created_at of what was routed, ever */
	int			n_running;
	int64	   *running;
} Frontier;

extern void frontier_read(Frontier *frontier, Snapshot snapshot);
extern void frontier_sign(Frontier *frontier);
/* under the routing lock; returns the id, the predecessor's plus one */
extern int64 frontier_append(const Frontier *predecessor, const Frontier *frontier);
extern void frontier_append_stop(void);
extern bool log_has_messages(void);
extern void frontier_read_now(Frontier *frontier);
extern bool frontier_is_foreign(const Frontier *frontier);
extern bool frontier_is_copy(const Frontier *frontier);
/* 55000 where the data is a copy that was not adopted */
extern void frontier_check_identity(const Frontier *frontier);
extern bool frontier_may_take_over(void);
extern void frontier_take_over_check(void);
extern void frontier_check(void);
/* what a snapshot says, and what is added to it */
extern void frontier_of_snapshot(Frontier *frontier, Snapshot snapshot, int64 offset);
extern bool frontier_is_running(const Frontier *frontier, int64 transaction);

#endif							/* OUTBOX_ROUTE_H */
