/*
 * status.h
 *		The words for what a message is, the same everywhere.
 */
#ifndef OUTBOX_STATUS_H
#define OUTBOX_STATUS_H

#include "route.h"
#include "run.h"
#include "subscription.h"

/* pending is what has no run yet; a run is "scheduled" while it is ready but not due */
extern const char *run_status(const Run *run, TimestampTz now);
/* whether routing has come past this message */
extern bool frontier_has_passed(const Frontier *frontier, int64 position);

#endif							/* OUTBOX_STATUS_H */
