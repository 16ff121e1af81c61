/*
 * history.c
 *		What workers do about settled history: now and then a look at the ring of segments,
 *		then the bites of sweeping, each in a transaction of its own: who waits for a segment
 *		that is being truncated does not wait for more than that.
 *
 * Where something is wrong with a segment, routing and delivery go on: the error stays in
 * a subtransaction, is told once, and the next look comes at its time.
 *
 * Locks: the extension, shared; those of rotate.c and sweep.c.
 */
#include "worker.h"

#include "deliver.h"
#include "rotate.h"
#include "route.h"

#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#define PAUSE_LEAST	(1 * USECS_PER_SEC)
#define PAUSE_MOST	(60 * USECS_PER_SEC)

static void work(void *arg);
static void tell(const ErrorData *error);

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
	session_transaction_begin("removing settled history");
	if (!session_extension_lock())
		sweeping = false;
	else
	{
		ErrorData  *error;

		session_become_owner();
		error = subtransaction_try(work, &sweeping);
		if (error != NULL)
			sweeping = false;
		tell(error);
	}
	session_transaction_commit();
	return sweeping ? now : next;
}

/* A look at the ring, or a bite; *sweeping: whether a bite comes next. */
static void
work(void *arg)
{
	bool	   *sweeping = arg;
	Frontier	frontier;
	bool		wrote;

	if (*sweeping)
	{
		*sweeping = sweep();
		return;
	}
	frontier_read_now(&frontier);
	if (frontier.id == 0 || frontier_is_copy(&frontier))
		return;
	if (routing_lock(0))
	{
		(void) rotate(&wrote);
		if (!wrote)
			routing_unlock();
	}
	*sweeping = true;
}

/* When it changes. */
static void
tell(const ErrorData *error)
{
	static int	told = 0;

	if (error != NULL && error->sqlerrcode != told)
		rotate_complain(error);
	told = (error != NULL) ? error->sqlerrcode : 0;
}
