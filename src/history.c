/*
 * history.c
 *		What workers do about settled history: now and then a look at the ring of segments,
 *		then the bites of sweeping, each in a transaction of its own.
 *
 * The next look is fixed before this one begins: where something is wrong with a segment,
 * an error comes back once a minute and stops nothing else.
 *
 * Locks: the extension, shared; those of rotate.c and sweep.c.
 */
#include "worker.h"

#include "rotate.h"
#include "route.h"

#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define PAUSE_LEAST	(1 * USECS_PER_SEC)
#define PAUSE_MOST	(60 * USECS_PER_SEC)

static bool look(void);

/* When to come again; a while from now, or at once in the middle of sweeping. */
TimestampTz
history_turn(TimestampTz due)
{
	static bool sweeping = false;
	TimestampTz now = clock_machine();
	int64		pause = outbox_retention * USECS_PER_SEC / 100;
	TimestampTz next = now + Max(PAUSE_LEAST, Min(PAUSE_MOST, pause));

	if (now < due && !sweeping)
		return due;
	sweeping = false;
	session_transaction_begin("removing settled history");
	sweeping = session_extension_lock() && look();
	session_transaction_commit();
	return sweeping ? now : next;
}

/* In a transaction.  True: there is more to sweep. */
static bool
look(void)
{
	Frontier	frontier;
	bool		wrote = false;
	int			emptied = 0;

	frontier_read(&frontier, snapshot_push());
	snapshot_pop();
	if (frontier.id == 0 || frontier_is_copy(&frontier))
		return false;
	if (routing_lock(0))
	{
		emptied = rotate(&wrote);
		if (!wrote)
			routing_unlock();
	}
	return sweep() || emptied > 0;
}
