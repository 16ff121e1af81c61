/*
 * filing.h
 *		Cutting new messages into runs: the part of routing that knows about subscriptions.
 */
#ifndef OUTBOX_FILING_H
#define OUTBOX_FILING_H

#include "route.h"

#include "nodes/pg_list.h"

typedef struct Filing Filing;

/* runs of this process are not cut shorter for consumers side by side */
extern int	filing_run_least;

/* "frontier" tells which transactions are in progress: their ranges are left out */
extern Filing *filing_begin(Snapshot snapshot, List *subscriptions, const Frontier *frontier);
extern void filing_leave_out(Filing *filing, int64 subscription_id, int64 lower, int64 upper);
/* the caller will claim so many messages of this subscription at once */
extern void filing_wanted(Filing *filing, int64 subscription_id, int64 wanted);
/*
 * File the messages of an index range, in position order.  With a bite, stops at the
 * first transaction boundary after so many rows and returns that transaction, else -1.
 */
extern int64 filing_range(Filing *filing, int64 lower, int64 upper, int64 origin, int64 bite);
/* rows of the log that were gone over, whether or not anybody wants them */
extern int64 filing_seen(Filing *filing);
/* the greatest created_at among them */
extern TimestampTz filing_newest(Filing *filing);
/* messages filed for a subscription; 0: for all together */
extern int64 filing_count(Filing *filing, int64 subscription_id);
extern void filing_end(Filing *filing);

#endif							/* OUTBOX_FILING_H */
