/*
 * claim.h
 *		Claims and settlements, for the SQL functions and for delivery.
 */
#ifndef OUTBOX_CLAIM_H
#define OUTBOX_CLAIM_H

#include "outbox.h"
#include "run.h"
#include "subscription.h"

#include "access/htup.h"

typedef struct ClaimedMessage
{
	HeapTuple	tuple;			/* row of the log */
	int64		position;
	TimestampTz due;
	TimestampTz created_at;
	Run		   *run;			/* the leased run it lies in */
} ClaimedMessage;

typedef struct Claim
{
	TupleDesc	log_desc;		/* of the tuples */
	int			n;
	int			capacity;
	ClaimedMessage *messages;	/* by due time, then created_at */
} Claim;

/*
 * Claim up to max messages; lease and max_active in microseconds.  The subscription is
 * looked at again once its lock is held: 42704 where it is gone, 55000 where its mode is
 * the other one; paused, it has nothing.
 */
extern Claim *claim_take(Subscription *subscription, SubscriptionMode mode, int max, int64 lease,
						 int64 max_active, const char *worker, bool separate_tokens);
/* take back what has expired; at most so many runs (0: all); returns messages */
extern int64 claim_expire(const Subscription *subscription, int max_runs);
extern int64 claim_expire_in(RunStore *store, const Subscription *subscription, int max_runs);

/* recent.c: the position of a message of the session's last claim; -1: not one of its, with this token */
extern void recent_remember(const Claim *claim);
extern int64 recent_position(const pg_uuid_t *id, const pg_uuid_t *token);

/* was this token given out by the current transaction? */
extern bool claimed_in_transaction(const pg_uuid_t *token);
/* the lease argument of a SQL function, in microseconds, with its default */
extern int64 claim_lease(FunctionCallInfo fcinfo, int n, const Subscription *subscription);

typedef enum Outcome
{
	OUTCOME_DELIVERED,
	OUTCOME_FAILED,
	OUTCOME_DEAD,
	OUTCOME_RELEASED
} Outcome;

typedef struct Settlement
{
	Outcome		outcome;
	Jsonb	   *error;			/* or NULL */
	bool		has_retry_at;
	TimestampTz retry_at;
	const Handler *handler;		/* whose retry delays apply, or NULL */
} Settlement;

/* a range of positions and the run it lies in */
typedef struct LeasePlace
{
	PositionRange range;
	int			run;			/* index in Lease.runs */
} LeasePlace;

/* the rows of a token, locked in order of id, as one lease */
typedef struct Lease
{
	RunStore   *store;
	pg_uuid_t	token;
	TimestampTz asked_at;		/* the clock when the call began to wait */
	LockWaitPolicy wait;
	Subscription *subscription;
	int64		max_active;		/* microseconds from a claim or its last progress */
	int			n;
	Run		  **runs;			/* leased and in time; NULL once settled */
	int			n_places;
	LeasePlace *places;			/* by position, as they were when the rows were locked */
	int			late;			/* rows left out because their lease had ended */
	TimestampTz late_until;		/* when */
	int64		late_subscription;	/* whose they are */
} Lease;

/*
 * Lock what the token holds.  Rows whose lease had ended when the call began are left
 * out, unless this very transaction claimed them.  n = 0: nothing is held.
 */
extern Lease *lease_lock(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at);
/* the same without waiting: NULL where somebody has locked the tables, n = 0 where he has the rows */
extern Lease *lease_lock_if_free(const pg_uuid_t *token, TimestampTz asked_at);
/* only what settling this message needs */
extern Lease *lease_lock_one(RunStore *store, const pg_uuid_t *token, TimestampTz asked_at, int64 position);
/* settle one message; NULL if the lease does not hold it; else the settled run */
extern Run *lease_settle(Lease *lease, int64 position, const Settlement *settlement);
/* settle those of these positions that are held; returns messages */
extern int64 lease_settle_some(Lease *lease, const int64 *positions, int n, const Settlement *settlement);
/* index of the run that holds the message, or -1 */
extern int	lease_index(const Lease *lease, int64 position);
/* settle all that is left; returns messages */
extern int64 lease_settle_all(Lease *lease, const Settlement *settlement);

/* retry.c */
extern int64 backoff_usecs(int attempt);			/* without jitter */
extern TimestampTz retry_time(TimestampTz now, int attempt, const Handler *handler);

/* {"sqlstate","message",…} as last_error holds it; any part may be NULL */
extern Jsonb *error_record(const char *sqlstate, const char *message, const char *detail,
						   const char *hint, const char *context, Jsonb *data);

#endif							/* OUTBOX_CLAIM_H */
