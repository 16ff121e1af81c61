/*
 * floor.h
 *		Where scans of the ready and the lease index may begin.
 */
#ifndef OUTBOX_FLOOR_H
#define OUTBOX_FLOOR_H

#include "outbox.h"

typedef enum FloorKind
{
	FLOOR_READY,				/* by available_at */
	FLOOR_LEASE,				/* by locked_until */
	FLOOR_KINDS
} FloorKind;

typedef struct FloorScan
{
	int64		subscription_id;
	FloorKind	kind;
	TimestampTz start;			/* begin the scan here */
	TimestampTz limit;			/* the floor may rise so far, and to the first row seen */
	uint64		generation;
} FloorScan;

extern void floor_request_shmem(void);
extern void floor_startup_shmem(void);
extern void floor_register_callbacks(void);

/*
 * Before a ready or leased row is written: returns the time that no such row of this
 * transaction may lie below.
 */
extern TimestampTz floor_pin(void);
/* a row with this time is about to change: if we abort it is there again */
extern void floor_pin_down_to(TimestampTz time);
/* rows may have been written at any time: scan from the start again */
extern void floor_reset(void);
/* likewise, for one that was dropped: its OID may come back */
extern void floor_reset_database(Oid database);

/* before the snapshot of a scan is taken */
extern void floor_begin(FloorScan *scan, int64 subscription_id, FloorKind kind);
/* after it, with the time of the first row it saw, locked or not; DT_NOEND: it saw none */
extern void floor_raise(const FloorScan *scan, TimestampTz first_seen);

#endif							/* OUTBOX_FLOOR_H */
