/*
 * reset.c
 *		reset(): every message goes, subscriptions and handlers stay; for test suites.
 *
 * The frontier goes too: with an empty log every later message is new, whatever was routed
 * before.  TRUNCATE is the one thing that does not go through run.c: no run is left that it
 * could disturb.
 *
 * Locks: the routing lock and the tables, exclusive, to the end of the transaction; so it
 * waits for open transactions that have enqueued, claimed or settled.
 */
#include "outbox.h"

#include "catalog.h"
#include "floor.h"
#include "log.h"
#include "route.h"
#include "statement.h"

#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(outbox_reset);

static const OutboxObject tables[] = {
	OB_LOG_0, OB_LOG_1, OB_LOG_2, OB_LOG_KEPT, OB_SEGMENT,
	OB_DELIVERY, OB_SELF_ROUTED, OB_DEDUPE, OB_FRONTIER
};

/* those of the tables by their place, then the routing lock */
#define ROUTING_LOCK	((int) lengthof(tables))
#define LOCKS			(ROUTING_LOCK + 1)

static void lock_all(void);
static bool lock_one(int which, bool wait);
static void unlock_one(int which);

/*
 * outbox.reset() → messages removed
 */
Datum
outbox_reset(PG_FUNCTION_ARGS)
{
	Statement	statement;
	int64		count = 0;

	session_begin("outbox.reset()");
	if (!has_privs_of_role(GetUserId(), outbox_owner()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to reset the outbox"),
				 errdetail("It removes every message, which is for the owner of the extension.")));

	lock_all();
	snapshot_push();
	for (int i = 0; i <= LOG_KEPT; i++)
		count += log_count(i, GetActiveSnapshot());
	snapshot_pop();
	statement_init(&statement,
				   "TRUNCATE outbox.log_0, outbox.log_1, outbox.log_2, outbox.log_kept, outbox.segment,"
				   " outbox.delivery, outbox.self_routed, outbox.dedupe, outbox.frontier");
	(void) statement_run(&statement);
	/* claims of tests that had moved their clock may have raised them too far for the next */
	floor_reset();
	PG_RETURN_INT64(count);
}

/*
 * The routing lock and the tables, all at once.  Whoever claims, enqueues or settles takes
 * some of them, in any order, and goes on to take more of them in the same transaction: so
 * none is held while another one is waited for.
 */
static void
lock_all(void)
{
	int			first = 0;

	for (;;)
	{
		int			n = 1;

		CHECK_FOR_INTERRUPTS();
		(void) lock_one(first, true);
		while (n < LOCKS && lock_one((first + n) % LOCKS, false))
			n++;
		if (n == LOCKS)
			return;
		for (int i = 0; i < n; i++)
			unlock_one((first + i) % LOCKS);
		/* that is the one to wait for */
		first = (first + n) % LOCKS;
	}
}

static bool
lock_one(int which, bool wait)
{
	if (!wait)
		return which == ROUTING_LOCK ? routing_lock(0) :
			ConditionalLockRelationOid(outbox_oid(tables[which]), AccessExclusiveLock);
	if (which == ROUTING_LOCK)
		routing_lock_wait();
	else
		LockRelationOid(outbox_oid(tables[which]), AccessExclusiveLock);
	return true;
}

static void
unlock_one(int which)
{
	if (which == ROUTING_LOCK)
		routing_unlock();
	else
		UnlockRelationOid(outbox_oid(tables[which]), AccessExclusiveLock);
}
