/*
 * uuid.c
 *		Ids of messages (version 7, by the clock of outbox) and claim tokens (version 4).
 *
 * The random bits come from the strong source, a buffer at a time: a system call for
 * each id costs more than the rest of making it.
 */
#include "enqueue.h"

#include "utils/timestamp.h"

static void random_bytes(void *into, int n);
static void set_version(pg_uuid_t *id, int version);

static void
random_bytes(void *into, int n)
{
	static uint8 buffer[1024];
	static int	used = sizeof(buffer);

	if (used + n > (int) sizeof(buffer))
	{
		if (!pg_strong_random(buffer, sizeof(buffer)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate random values")));
		used = 0;
	}
	memcpy(into, buffer + used, n);
	memset(buffer + used, 0, n);
	used += n;
}

static void
set_version(pg_uuid_t *id, int version)
{
	id->data[6] = (id->data[6] & 0x0f) | (version << 4);
	id->data[8] = (id->data[8] & 0x3f) | 0x80;
}

void
uuid_v4(pg_uuid_t *id)
{
	random_bytes(id->data, UUID_LEN);
	set_version(id, 4);
}

/*
 * RFC 9562 with its method 3: 48 bits of milliseconds, 12 bits of their fraction.  Ticks
 * are a microsecond apart and the fraction has a quarter of one, so ids of the same
 * clock ascend.
 */
void
uuid_v7(TimestampTz time, pg_uuid_t *id)
{
	int64		unix_usecs = time + (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY;
	uint64		msecs = (uint64) (unix_usecs / 1000);
	uint32		fraction = (uint32) ((unix_usecs % 1000) * 4096 / 1000);

	for (int i = 0; i < 6; i++)
		id->data[i] = (uint8) (msecs >> (8 * (5 - i)));
	id->data[6] = (uint8) (fraction >> 8);
	id->data[7] = (uint8) fraction;
	random_bytes(id->data + 8, 8);
	set_version(id, 7);
}
