/*
 * rotate.h
 *		The ring turns: settled history leaves, whole segments at a time.
 */
#ifndef OUTBOX_ROTATE_H
#define OUTBOX_ROTATE_H

#include "outbox.h"

/*
 * One look at the ring, with the routing lock held; number of segments that were emptied.
 * *wrote: something was changed, so that the lock must be kept to the commit.
 */
extern int	rotate(bool *wrote);
/* a WARNING: what is wrong with a segment stops nothing else */
extern void rotate_complain(const ErrorData *error);

/* Remove a bite of what is known of messages that have left; true: there is more. */
extern bool sweep(void);

#endif							/* OUTBOX_ROTATE_H */
