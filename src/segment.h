/*
 * segment.h
 *		The ring of log segments: which one is written, and what is known of each.
 */
#ifndef OUTBOX_SEGMENT_H
#define OUTBOX_SEGMENT_H

#include "outbox.h"

#define RING_SEGMENTS 3

/* A row of outbox.segment; see there.  0: null. */
typedef struct SegmentState
{
	int			number;
	bool		writing;
	TimestampTz closed_at;
	int64		condemned_at;
	int64		last_position;
	int64		sweep_to;
	int64		sweep_subscription;
	int64		sweep_from;
} SegmentState;

/* The segment that new messages go to. */
extern int	segment_writing(void);
/* after an invalidation */
extern void segment_forget(void);

/* The only one who changes the ring until the end of the transaction; false: somebody does. */
extern bool segments_lock(bool wait);
/* returns the number of the one that is written */
extern int	segments_read(SegmentState *states);
extern void segment_write(const SegmentState *state);

/*
 * For whoever makes settled messages unsettled again: no segment that has some is
 * truncated before the end of the transaction, and none without looking again.
 */
extern void segments_reprieve(void);
/* the second part of it, for who has the routing lock to the end: nothing is decided without it */
extern void segments_strike_out(void);

#endif							/* OUTBOX_SEGMENT_H */
