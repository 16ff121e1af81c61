/*
 * maintain.c
 *		maintain(): what keeps the queue going, for whoever runs no worker of ours.
 *
 * Routing, taking back what has expired, turning the ring of segments, sweeping after
 * those that earlier calls have emptied, and removing dedupe keys whose window is over.
 * None of it is needed for a claim to be right: claims route and expire what they need.
 * But status is only as fresh as the last pass, and subscriptions that nobody claims
 * from have nobody else.
 *
 * Locks: the routing lock to the end of the transaction, if it is free within a moment;
 * rows one at a time, skipping locked ones.
 */
#include "claim.h"
#include "deliver.h"
#include "enqueue.h"
#include "floor.h"
#include "rotate.h"
#include "route.h"
#include "statement.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"

#define ROUTING_WAIT_MS		100
/* Keys removed in one statement, and statements in one call. */
#define BITE				1000
#define MAX_BITES			100

PG_FUNCTION_INFO_V1(outbox_maintain);

typedef struct Turn
{
	int			emptied;
	bool		wrote;
} Turn;

static int64 expire_all(void);
static void turn_ring(Turn *turn);
static void turn_ring_work(void *arg);
static void forget_dedupe_keys(void);

/*
 * outbox.maintain() → routed, expired, rotated
 */
Datum
outbox_maintain(PG_FUNCTION_ARGS)
{
	int64		routed = 0;
	bool		wrote;
	Turn		turn = {0};
	Datum		values[3];
	bool		nulls[3] = {false};
	TupleDesc	desc;

	session_begin("outbox.maintain()");
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	frontier_check();
	floor_reset();				/* whatever a superuser did with triggers disabled */
	guard_rename_roles();
	/* sweeping first: it locks the log; routing last: its lock is held to the commit */
	for (int bites = 0; bites < MAX_BITES && sweep(); bites++)
		CHECK_FOR_INTERRUPTS();
	values[1] = Int64GetDatum(expire_all());
	forget_dedupe_keys();
	if (routing_lock(ROUTING_WAIT_MS))
	{
		routed = route_for(0, 0, &wrote, NULL);
		turn_ring(&turn);
		if (!wrote && !turn.wrote)
			routing_unlock();
	}
	values[2] = Int32GetDatum(turn.emptied);
	values[0] = Int64GetDatum(routed);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}

/* What is wrong with a segment shall not undo the routing. */
static void
turn_ring(Turn *turn)
{
	ErrorData  *error = subtransaction_try(turn_ring_work, turn);

	if (error == NULL)
		return;
	if (is_cancel(error))
		ReThrowError(error);
	rotate_complain(error);
	memset(turn, 0, sizeof(*turn));
}

static void
turn_ring_work(void *arg)
{
	Turn	   *turn = arg;

	turn->emptied = rotate(&turn->wrote);
}

static int64
expire_all(void)
{
	List	   *subscriptions = subscription_list(snapshot_push());
	int64		messages = 0;
	ListCell   *cell;

	snapshot_pop();
	foreach(cell, subscriptions)
	{
		CHECK_FOR_INTERRUPTS();
		messages += claim_expire(lfirst(cell), 0);
	}
	return messages;
}

static void
forget_dedupe_keys(void)
{
	for (int bites = 0; bites < MAX_BITES; bites++)
	{
		CHECK_FOR_INTERRUPTS();
		if (dedupe_delete_expired(BITE) < BITE)
			break;
	}
}
