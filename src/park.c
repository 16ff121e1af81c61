/*
 * park.c
 *		Whether messages that no handler takes may be parked.
 *
 * What is parked is looked at again only by a registration, and by who finds that the
 * function of a handler marked as broken is there again; both see what is committed.
 * Handlers are read once for a batch, and its hooks take their time: meanwhile a handler
 * may have come for the message, or its function, and nobody would come a second time.
 *
 * So parking on one side, registering and mending on the other exclude each other to the
 * commit, by the lock of the subscription: who is later sees what the other has done.
 * Under the lock the handlers are read again.  A message that one of them takes now is
 * given back, uncharged; so is one of a subscription without handlers, whose messages
 * are whoever's who uses it next.  One that lacks its function is parked only behind a
 * mark that is committed no later than it.
 *
 * Nobody waits here: the rows of the batch are locked, and who registers may stay in his
 * transaction.  Where the lock is taken, or the row of a handler that must be marked, the
 * message is put off.
 *
 * Locks: the subscription's, to park; rows of handlers found broken; both if they are free.
 */
#include "deliver.h"

#include "catalog.h"

#include "utils/inval.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* when a message that could not be parked is looked at again */
#define PUT_OFF			USECS_PER_SEC

static bool any_unhandled(const DeliveryGroup *group);
static bool read_handlers(Subscription *subscription);
static void check_message(const Subscription *subscription, TupleTableSlot *slot,
						  Delivery *delivery);
static void give_back(Delivery *delivery, int64 delay);

void
park_check(DeliveryGroup *group)
{
	const Claim *claim = group->batch->claim;
	Subscription now = *group->batch->subscription;
	TupleTableSlot *slot;
	bool		locked;

	if (!any_unhandled(group))
		return;
	locked = read_handlers(&now);
	slot = MakeSingleTupleTableSlot(claim->log_desc, &TTSOpsHeapTuple);
	for (int i = 0; i < group->n; i++)
	{
		if (group->deliveries[i].result != DELIVERY_UNHANDLED)
			continue;
		if (!locked)
		{
			give_back(&group->deliveries[i], PUT_OFF);
			continue;
		}
		ExecStoreHeapTuple(claim->messages[group->first + i].tuple, slot, false);
		check_message(&now, slot, &group->deliveries[i]);
	}
	ExecDropSingleTupleTableSlot(slot);
}

static bool
any_unhandled(const DeliveryGroup *group)
{
	for (int i = 0; i < group->n; i++)
	{
		if (group->deliveries[i].result == DELIVERY_UNHANDLED)
			return true;
	}
	return false;
}

/* As they are until the commit; false: somebody is changing them. */
static bool
read_handlers(Subscription *subscription)
{
	if (!subscription_lock_if_free(subscription->id, LOCK_TO_PARK))
		return false;
	/* functions that were made before the lock was free */
	AcceptInvalidationMessages();
	subscription_handlers(subscription, snapshot_push());
	snapshot_pop();
	return true;
}

static void
check_message(const Subscription *subscription, TupleTableSlot *slot, Delivery *delivery)
{
	Handler    *handler = deliver_match(subscription, slot);

	delivery->handler = handler;
	delivery->broken = (handler != NULL && handler->function != NULL &&
						!OidIsValid(handler_function(handler)));
	if (subscription->handlers == NIL || (handler != NULL && !delivery->broken))
		give_back(delivery, 0);
	else if (delivery->broken && !handler->broken)
	{
		handler->broken = handler_mark(handler, true);
		if (!handler->broken)
			give_back(delivery, PUT_OFF);
	}
}

static void
give_back(Delivery *delivery, int64 delay)
{
	delivery->result = DELIVERY_RELEASED;
	delivery->delay = delay;
}
