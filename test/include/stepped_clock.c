/*
 * stepped_clock.c
 *		A library to preload: the wall clock is off by the number of seconds (a 64-bit integer) in
 *		the file that STEPPED_CLOCK names, from the moment it is written there.  The monotonic
 *		clock goes on, as after a step of a real clock.
 *
 * Not libfaketime: it leaves out what is forked from a signal handler, as the postmaster of
 * PostgreSQL 15 does with background workers.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *seconds_off;

__attribute__((constructor)) static void
map_file(void)
{
	const char *path = getenv("STEPPED_CLOCK");
	int			file = path ? open(path, O_RDONLY) : -1;
	void	   *map = MAP_FAILED;

	if (file >= 0)
	{
		map = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
		close(file);
	}
	if (map != MAP_FAILED)
		seconds_off = map;
}

int
clock_gettime(clockid_t clock, struct timespec *now)
{
	int			result = syscall(SYS_clock_gettime, clock, now);

	if (result == 0 && clock == CLOCK_REALTIME && seconds_off)
		now->tv_sec += *seconds_off;
	return result;
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec precise;

	(void) zone;
	if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
		return -1;
	now->tv_sec = precise.tv_sec;
	now->tv_usec = precise.tv_nsec / 1000;
	return 0;
}

time_t
time(time_t *where)
{
	struct timespec now;

	if (clock_gettime(CLOCK_REALTIME, &now) != 0)
		return -1;
	if (where)
		*where = now.tv_sec;
	return now.tv_sec;
}
