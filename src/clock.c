/*
 * clock.c
 *		The one source of time.
 *
 * clock_tick() gives the times of enqueueing: strictly increasing across all backends,
 * so that created_at tells the order of calls.  clock_now() is the time of everything
 * else, never below a tick that was given out.
 *
 * Both follow the wall clock as long as it goes forward.  They are anchored to
 * CLOCK_MONOTONIC: after a backward step of the wall clock they go on at real speed,
 * for a clock that stood still would end no lease.
 *
 * Shared state needs preloading; without it each backend has a clock of its own, which
 * follows the same rules.  Locks: none, two atomics.
 *
 * outbox.clock_offset (tests) is added to what is returned and never stored, so that a
 * test that moves its clock moves nobody else's.
 */
#include "outbox.h"

#include <time.h>

#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

typedef struct ClockState
{
	/* newest tick given out; only grows */
	pg_atomic_uint64 last;
	/* wall clock minus monotonic clock, the largest ever seen; only grows */
	pg_atomic_uint64 anchor;
} ClockState;

/* A wall clock that was set back by more is not what clock_start_above() is for. */
#define AHEAD_MOST	(365 * USECS_PER_DAY)

static ClockState local_clock;
static ClockState *clock_state = NULL;

static ClockState *state(void);
static uint64 clock_raw(ClockState *clock);
static void raise_to(pg_atomic_uint64 *atomic, uint64 value);
static int64 monotonic_usecs(void);

void
clock_request_shmem(void)
{
	(void) clock_machine();		/* so that all processes have one anchor */
	RequestAddinShmemSpace(MAXALIGN(sizeof(ClockState)));
}

void
clock_startup_shmem(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	clock_state = ShmemInitStruct("outbox clock", sizeof(ClockState), &found);
	if (!found)
	{
		pg_atomic_init_u64(&clock_state->last, 0);
		pg_atomic_init_u64(&clock_state->anchor, 0);
	}
	LWLockRelease(AddinShmemInitLock);
}

static ClockState *
state(void)
{
	if (clock_state == NULL)
	{
		pg_atomic_init_u64(&local_clock.last, 0);
		pg_atomic_init_u64(&local_clock.anchor, 0);
		clock_state = &local_clock;
	}
	return clock_state;
}

static int64
monotonic_usecs(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64) now.tv_sec * USECS_PER_SEC + now.tv_nsec / 1000;
}

/*
 * It shows the time of day as it was told when the server started, and goes on at real speed.
 * What a process waits for must not be hours away because somebody sets the clock back.
 */
TimestampTz
clock_machine(void)
{
	static int64 anchor = 0;

	if (anchor == 0)
		anchor = GetCurrentTimestamp() - monotonic_usecs();
	return monotonic_usecs() + anchor;
}

static void
raise_to(pg_atomic_uint64 *atomic, uint64 value)
{
	uint64		old = pg_atomic_read_u64(atomic);

	while (old < value && !pg_atomic_compare_exchange_u64(atomic, &old, value))
		;
}

/* Times since 2000 and anchors are positive on any machine that is in use. */
static uint64
clock_raw(ClockState *clock)
{
	int64		wall = GetCurrentTimestamp();
	int64		monotonic = monotonic_usecs();

	if ((uint64) (wall - monotonic) > pg_atomic_read_u64(&clock->anchor))
		raise_to(&clock->anchor, (uint64) (wall - monotonic));
	return (uint64) monotonic + pg_atomic_read_u64(&clock->anchor);
}

/* Reserve so many ticks of a microsecond; returns the first. */
TimestampTz
clock_tick(int64 ticks)
{
	return clock_tick_unshifted(ticks) + MSECS(outbox_clock_offset);
}

/* An atomic operation even where nobody else ticks: floor.c depends on it. */
TimestampTz
clock_tick_unshifted(int64 ticks)
{
	ClockState *clock = state();
	uint64		raw = clock_raw(clock);
	uint64		last = pg_atomic_read_u64(&clock->last);
	uint64		first;

	Assert(ticks > 0);
	do
	{
		first = Max(raw, last + 1);
	} while (!pg_atomic_compare_exchange_u64(&clock->last, &last, first + ticks - 1));

	return (TimestampTz) first;
}

TimestampTz
clock_now(void)
{
	return clock_unshifted() + MSECS(outbox_clock_offset);
}

/* what may be stored as the time of the clock itself */
TimestampTz
clock_unshifted(void)
{
	ClockState *clock = state();
	uint64		raw = clock_raw(clock);

	return (TimestampTz) Max(raw, pg_atomic_read_u64(&clock->last));
}

/* After a restart with a wall clock that was set back, go on above what was stored. */
void
clock_start_above(TimestampTz unshifted)
{
	ClockState *clock = state();

	if (unshifted <= (int64) clock_raw(clock))
		return;
	/* one clock serves all databases: a row that somebody wrote in one must not move it for good */
	if (unshifted > GetCurrentTimestamp() + AHEAD_MOST)
	{
		ereport(WARNING,
				(errmsg("the last routing pass is from the future and does not move the clock"),
				 errdetail("It was at %s.", timestamptz_to_str(unshifted)),
				 errhint("If the clock of this machine is right, somebody has written to outbox.frontier.")));
		return;
	}
	raise_to(&clock->anchor, (uint64) (unshifted - monotonic_usecs()));
	raise_to(&clock->last, (uint64) unshifted);
}
