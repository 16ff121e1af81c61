/*
 * notice.h
 *		Notices that are given at the commit.
 */
#ifndef OUTBOX_NOTICE_H
#define OUTBOX_NOTICE_H

#include "outbox.h"

/* that no worker runs, and what to do; once in a transaction */
extern void notice_no_worker(void);
/* that the subscription "default" keeps everything for nobody; false: no more */
extern void notice_default_unused(bool unused);
/* that the function holds the routing lock, should this transaction go on to write */
extern void notice_routing_held(const char *function);

#endif							/* OUTBOX_NOTICE_H */
