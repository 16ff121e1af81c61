/*
 * lease_look.c
 *		When the coordinator looks for the leases that end first, and how far.
 *
 * Behind an open snapshot the leases that were settled in time stay in the index until
 * they would have ended.  So while commits keep coming, one look in half a second goes no
 * further than to the next one.  What was left out is owed, and looked for in a turn of
 * its own once no commit has come for as long.
 */
#include "worker.h"

#include "utils/timestamp.h"

/* Of a lease that ends sooner a commit tells. */
#define PAUSE	(500 * 1000)
/* Who has not looked for so long looks at all of them. */
#define RECENT	(5 * USECS_PER_SEC)

/*
 * Who makes room for another database's coordinator looks to the end, since he leaves
 * behind when he is needed again.
 */
TimestampTz
lease_look_plan(LeaseLook *look, TimestampTz turn, bool asked, bool told, bool leaving)
{
	TimestampTz due;

	if (asked)
		look->asked_at = turn;
	look->turn = turn;
	due = (asked ? look->looked_at : Max(look->looked_at, look->asked_at)) + PAUSE;
	look->now = told || leaving || turn >= due;
	look->owed |= asked || look->now;
	if (look->now)
	{
		bool		busy = asked && !leaving && turn - look->looked_at < RECENT;

		look->until = busy ? clock_now() + 2 * PAUSE : DT_NOEND;
		return DT_NOEND;
	}
	return look->owed ? Max(look->looked_at, look->asked_at) + PAUSE : DT_NOEND;
}

/* A turn that had to end before has not looked, and still owes. */
TimestampTz
lease_look_done(LeaseLook *look)
{
	if (!look->now)
		return DT_NOEND;
	look->looked_at = look->turn;
	look->owed = (look->until != DT_NOEND);
	return look->owed ? look->looked_at + PAUSE : DT_NOEND;
}
