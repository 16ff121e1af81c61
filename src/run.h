/*
 * run.h
 *		Runs and their state machine.  run_row.c is the only writer of outbox.delivery.
 *
 * How a transition is made, by everybody:
 *
 *	 1. find a run by one of the scans, with a fresh snapshot;
 *	 2. run_lock() it; RUN_LOCKED brings the row as it is now into *run;
 *	 3. part = run_take(store, run, cover, count): the part that moves, a run of its own;
 *	    where the part is the whole run it is the run itself;
 *	 4. one of run_lease() … run_discard() on the part, which writes it.
 *
 * Lock order: the rows of a claim token in order of id; everybody else only skips
 * locked rows or locks one row at a time.
 */
#ifndef OUTBOX_RUN_H
#define OUTBOX_RUN_H

#include "outbox.h"
#include "cover.h"

#include "nodes/lockoptions.h"
#include "storage/itemptr.h"
#include "utils/jsonb.h"

typedef enum RunState
{
	RUN_READY,
	RUN_LEASED,
	RUN_UNHANDLED,
	RUN_DELIVERED,
	RUN_DEAD,
	RUN_DISCARDED,
	RUN_CANCELLED
} RunState;

typedef struct Run
{
	ItemPointerData tid;		/* the version that was read or locked */
	bool		stored;			/* false: not yet inserted */
	TimestampTz indexed_at;		/* stored time in the ready or lease index, or DT_NOEND */
	RunState	indexed_as;		/* stored state */
	int64		id;
	int64		subscription_id;
	int64		origin;
	int64		low;
	TimestampTz available_at;
	int32		message_count;
	int32		attempts;
	int32		max_attempts;
	bool		piece;			/* came back by expiry: handed out in pieces */
	RunState	state;
	Cover	   *positions;
	/* leased only */
	pg_uuid_t	claim_token;
	TimestampTz locked_until;
	TimestampTz active_until;
	/* 0: null */
	TimestampTz claimed_at;
	TimestampTz settled_at;
	int64		delivered_id;	/* row that collects what was delivered of this claim */
	char	   *worker;			/* or NULL */
	Jsonb	   *last_error;		/* or NULL */
} Run;

typedef struct RunStore RunStore;
typedef struct RunScan RunScan;

typedef enum RunLock
{
	RUN_LOCKED,
	RUN_BUSY,					/* somebody else holds it (LockWaitSkip only) */
	RUN_GONE					/* changed or deleted since the scan's snapshot: look again */
} RunLock;

extern void runs_register_callbacks(void);
extern RunStore *runs_open(void);
/* NULL where somebody has locked the tables: without waiting for him */
extern RunStore *runs_open_if_free(void);
/* whether a change of outbox.delivery is ours */
extern bool run_is_writing(void);
extern RunStore *runs_open_for_reading(void);
extern bool runs_hold_messages(void);
extern void runs_close(RunStore *store);

/*
 * Scans, each in the order of its index.  run_next() returns a palloc'd Run in the
 * current memory context, or NULL.  A writer that wants to see its own changes does
 * CommandCounterIncrement() and takes a new snapshot.
 */
extern RunScan *runs_ready(RunStore *store, Snapshot snapshot, int64 subscription_id,
						   TimestampTz from, TimestampTz until);
/* due at this very time, by id */
extern RunScan *runs_ready_at(RunStore *store, Snapshot snapshot, int64 subscription_id,
							  TimestampTz due, int64 from, int64 to);
extern RunScan *runs_leased(RunStore *store, Snapshot snapshot, int64 subscription_id,
							TimestampTz from, TimestampTz until);
extern RunScan *runs_of_token(RunStore *store, Snapshot snapshot, const pg_uuid_t *token);
extern Run *run_first_of_token(RunStore *store, Snapshot snapshot, const pg_uuid_t *token);
extern RunScan *runs_dead(RunStore *store, Snapshot snapshot, int64 subscription_id);	/* by settled_at */
extern RunScan *runs_unhandled(RunStore *store, Snapshot snapshot, int64 subscription_id);
extern RunScan *runs_of_subscription(RunStore *store, Snapshot snapshot, int64 subscription_id);	/* by low */
extern RunScan *runs_by_low(RunStore *store, Snapshot snapshot, int64 subscription_id, int64 from, int64 to);
extern Run *run_next(RunScan *scan);
extern void run_scan_end(RunScan *scan);
/*
 * Visit the runs of a scan, each in a memory context of its own, so that memory does not
 * grow with their number; ends when a visit returns false.  Ends the scan.
 */
typedef bool (*RunVisit) (RunStore *store, Run *run, void *arg);
extern void runs_visit(RunStore *store, RunScan *scan, RunVisit visit, void *arg);
/* the run that holds this message, or NULL */
extern Run *run_of_position(RunStore *store, Snapshot snapshot, int64 subscription_id, int64 position);

extern bool run_find_collector(RunStore *store, const Run *rest, Run *run);
/* for the transitions of run.c: insert or update the row as it now is */
extern void run_write(RunStore *store, Run *run);
extern RunLock run_lock(RunStore *store, Run *run, LockWaitPolicy wait);
extern Run *run_take(RunStore *store, Run *run, Cover *part, int32 count);

/* a new run, filed by routing */
extern void run_file(RunStore *store, Run *run);
extern void run_lease(RunStore *store, Run *run, const pg_uuid_t *token, const char *worker,
					  TimestampTz now, TimestampTz locked_until, TimestampTz active_until);
extern void run_renew(RunStore *store, Run *run, TimestampTz locked_until, TimestampTz active_until);
/* delivered: joins rest->delivered_id where the part is not all that is left */
extern void run_deliver(RunStore *store, Run *run, Run *rest, TimestampTz now);
/* failed: ready again at retry_at, or dead when the budget is spent */
extern void run_fail(RunStore *store, Run *run, TimestampTz now, TimestampTz retry_at, Jsonb *error);
extern void run_kill(RunStore *store, Run *run, TimestampTz now, Jsonb *error);
/* uncharged: the attempt of the claim is given back */
extern void run_release(RunStore *store, Run *run, TimestampTz available_at);
extern void run_park(RunStore *store, Run *run, Jsonb *error);
extern void run_unpark(RunStore *store, Run *run, TimestampTz available_at);
extern void run_expire(RunStore *store, Run *run, TimestampTz now);
extern void run_requeue(RunStore *store, Run *run, TimestampTz available_at, int attempts, int max_attempts);
extern void run_discard(RunStore *store, Run *run, RunState state, TimestampTz now, Jsonb *error);
/* some of its messages have left the log; so many did not, and run->positions covers them */
extern void run_forget(RunStore *store, Run *run, int32 left);
/* for unsubscribe: the row goes */
extern void run_delete(RunStore *store, Run *run);

/* nobody needs its messages any more */
extern bool run_is_settled(const Run *run);

extern const char *run_state_name(RunState state);
extern RunState run_state_from_name(const char *name);

#endif							/* OUTBOX_RUN_H */
