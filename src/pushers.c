/*
 * pushers.c
 *		The delivery workers of a database, as its coordinator sees them: started when there
 *		is something to push, woken, ended when a hook does not come back.
 *
 * A worker that failed (its exit code says so) is followed by another after a pause that
 * doubles, up to a minute; the exit callback keeps the account, in shared memory, so that
 * it outlives coordinators.  For a role that cannot connect none is started at all: it
 * would only fail, and fill the log.
 *
 * Locks: the LWLock of worker_state.c, for moments.
 */
#include "worker.h"

#include "subscription.h"

#include <signal.h>

#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#define NO_SLOT_PAUSE	(5 * USECS_PER_SEC)

static bool may_start(Oid database, Oid role, TimestampTz now, TimestampTz *not_before);
static TimestampTz start(Oid database, Oid role, int n, TimestampTz now);
static int	wake_or_end(Oid database, Oid role);

/*
 * For each of these roles as many as the setting says.  Returns when to look again, at
 * the latest.
 */
TimestampTz
start_pushers(Oid database, List *roles)
{
	TimestampTz now = clock_machine();
	TimestampTz next = DT_NOEND;
	ListCell   *cell;

	foreach(cell, roles)
	{
		Oid			role = lfirst_oid(cell);
		int			missing = outbox_workers - wake_or_end(database, role);
		TimestampTz not_before;

		if (missing <= 0)
			continue;
		if (may_start(database, role, now, &not_before))
			not_before = start(database, role, missing, now);
		next = Min(next, not_before);
	}
	return next;
}

static bool
may_start(Oid database, Oid role, TimestampTz now, TimestampTz *not_before)
{
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	*not_before = pusher_of(database, role)->not_before;
	LWLockRelease(worker_state->lock);
	return *not_before <= now;
}

/* Returns when to try again, if there was no slot for some. */
static TimestampTz
start(Oid database, Oid role, int n, TimestampTz now)
{
	TimestampTz again;
	bool		failed = false;
	bool		room;

	for (int i = 0; i < n && !failed; i++)
	{
		WorkerSlot *slot = worker_reserve(WORKER_DELIVERY, database, role);

		failed = (slot == NULL || !worker_start(slot));
	}
	if (!failed)
		return DT_NOEND;
	room = workers_make_room();
	again = now + (room ? ROOM_PAUSE : NO_SLOT_PAUSE);
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	pusher_of(database, role)->not_before = again;
	LWLockRelease(worker_state->lock);
	if (!room && no_slot_is_news())
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("outbox could not start a delivery worker: no free slot for background workers"),
				 errhint("Raise max_worker_processes. It is tried again.")));
	return again;
}

/*
 * Wake those that there are, and ask those to leave that are more than the setting says;
 * returns how many there are.
 */
static int
wake_or_end(Oid database, Oid role)
{
	int			processes[WORKERS_MAX];
	int			n = 0;
	int			running = 0;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!worker_is_of(slot, WORKER_DELIVERY, database, role))
			continue;
		if (++running > outbox_workers)
			slot->leave = LEAVE_NOW;
		if (slot->pid != 0)
			processes[n++] = slot->process;
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
		wake_process(processes[i]);
	return running;
}

/*
 * A hook can catch the cancels of its timer, but not this.  Returns when the next one has
 * to be back.
 */
TimestampTz
end_stuck_hooks(Oid database)
{
	TimestampTz now = clock_machine();
	TimestampTz next = DT_NOEND;
	pid_t		stuck[WORKERS_MAX];
	int			n = 0;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];
		uint64		expected = pg_atomic_read_u64(&slot->hook_until);
		TimestampTz until = (TimestampTz) expected;

		if (!slot->used || slot->pid == 0 || slot->database != database || until == 0)
			continue;
		if (until > now)
			next = Min(next, until);
		/* and once more if it has not gone in a second */
		else if (pg_atomic_compare_exchange_u64(&slot->hook_until, &expected, (uint64) (now + USECS_PER_SEC)))
			stuck[n++] = slot->pid;
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
	{
		ereport(LOG,
				(errmsg("terminating outbox delivery worker with PID %d", (int) stuck[i]),
				 errdetail("Its hook went on for twice its time limit.")));
		(void) kill(stuck[i], SIGTERM);
		next = Min(next, now + USECS_PER_SEC);
	}
	return next;
}

/* Says in the log, once, why the hooks of a role are not called.  In a transaction. */
bool
role_may_push(Oid role)
{
	const char *why;
	bool		may = role_may_be_served(role, &why);
	bool		told;
	Pusher	   *pusher;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	pusher = pusher_of(MyDatabaseId, role);
	told = pusher->told_no_role;
	pusher->told_no_role = !may;
	LWLockRelease(worker_state->lock);
	if (!may && !told)
	{
		char	   *name = GetUserNameFromId(role, true);

		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 name != NULL ?
				 errmsg("hooks of role \"%s\" in database \"%s\" are not called",
						name, get_database_name(MyDatabaseId)) :
				 errmsg("hooks of a role that does not exist any more in database \"%s\" are not called",
						get_database_name(MyDatabaseId)),
				 errdetail("%s", why),
				 errhint("Their messages wait. Give the role what it needs, or unregister the hooks and register them as another role.")));
	}
	return may;
}
