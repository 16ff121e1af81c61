/*
 * deliver.h
 *		Delivery by push: what one delivery is (deliver.c, envelope.c), what is delivered
 *		in one transaction (group.c, park.c), and until when (drain.c).
 */
#ifndef OUTBOX_DELIVER_H
#define OUTBOX_DELIVER_H

#include "claim.h"
#include "subscription.h"

#include "executor/tuptable.h"
#include "utils/jsonb.h"

/* envelope.c; a message is an outbox.message or an outbox.claimed_message */
extern Jsonb *envelope_make(Datum message, bool with_data);
/* the text that NOTIFY sends: the envelope, cut down until it fits */
extern char *envelope_notification(Datum message, bool with_data);

/* what became of the delivery of one message */
typedef enum DeliveryResult
{
	DELIVERY_NONE,				/* not begun, or its lease is lost: stays as it is */
	DELIVERY_DONE,
	DELIVERY_FAILED,			/* charged: a retry, or dead when the budget is spent */
	DELIVERY_DEAD,				/* dead now, at the hook's request */
	DELIVERY_LATER,				/* uncharged, at the hook's request */
	DELIVERY_UNHANDLED,			/* no handler, or its function is missing: uncharged */
	DELIVERY_RELEASED			/* given back, uncharged */
} DeliveryResult;

typedef struct Delivery
{
	DeliveryResult result;
	const Handler *handler;		/* the one for this message, or NULL */
	bool		broken;			/* its function is missing */
	int64		delay;			/* DELIVERY_LATER, DELIVERY_RELEASED: microseconds */
	ErrorData  *error;			/* why not, or NULL */
	/* the caller's own cancel arrived during the call; counts as failed, and stops all */
	bool		cancelled;
} Delivery;

/*
 * Deliver one message of a claim.  Raises nothing that the hook did: whatever it is, it
 * is in *delivery, and everything the hook has done is undone.
 */
extern void deliver_message(const Subscription *subscription, const Claim *claim,
							const ClaimedMessage *message, Delivery *delivery);
/* a NOTIFY for which the server's queue of notifications has no room: uncharged, for a while */
extern void delivery_put_off(Delivery *delivery);
extern Handler *deliver_match(const Subscription *subscription, TupleTableSlot *slot);
extern bool deliver_in_progress(void);
/* position of the message whose delivery has begun and not ended, or -1; and its handler, or NULL */
extern int64 deliver_running(const Handler **handler);

/*
 * drain.c, for a delivery worker: deliver what is ready for the session's role until
 * nothing is, or until it is asked to stop; returns messages claimed.  What it had claimed
 * when it was stopped is given back in a transaction of the caller's.
 */
extern int64 drain_for_worker(bool (*stop) (bool in_batch));
extern bool drain_has_batch(void);
extern void drain_give_back(void);
extern Jsonb *delivery_error_record(const Delivery *delivery);

/*
 * Run work in a subtransaction.  NULL if it succeeded; else the error, in the current
 * memory context, and all that work did in the database is undone.
 */
extern ErrorData *subtransaction_try(void (*work) (void *arg), void *arg);
/* raised by core itself because the statement shall end */
extern bool is_cancel(const ErrorData *error);

/* leftovers.c: what a hook leaves in the session */
extern void leftovers_register_hook(void);
extern void leftovers_finish_cursors(void);
extern void leftovers_close_pinned(void);
extern void leftovers_drop(void);

/* SET CONSTRAINTS ALL IMMEDIATE, as a commit would do */
extern void constraints_check(void);
/* initially deferred constraints and constraint triggers: whether there are any */
extern bool constraints_deferred_exist(void);
/* after constraints_check(): defer those again that begin a transaction deferred */
extern void constraints_defer(void);

/* targets.c: a subscription that a call of drain() or deliver() is about */
typedef struct Target
{
	Subscription *subscription; /* as it was when the call began */
	bool		deliverable;	/* its handlers are the caller's, who may consume it */
} Target;

/* all pushed subscriptions, or the one that is named */
extern List *targets_choose(const char *name, bool may_route);
/* the subscription with its handlers, as it is now; NULL where it is not to be delivered */
extern Subscription *target_open(const Target *target);
/* messages that are ready now; a NOTICE says why others' were left */
extern int64 targets_left(const List *targets);

typedef struct DeliveryCounts
{
	int64		claimed;
	int64		delivered;
	int64		retried;
	int64		dead;
	int64		unhandled;
	int64		left_over;
} DeliveryCounts;

/* where a message of a claim lies */
typedef struct Place
{
	int64		position;
	int			index;			/* in the claim */
	bool		settled;
} Place;

/* what one claim took; lives until all of it is dealt with */
typedef struct Batch
{
	Subscription *subscription;
	Claim	   *claim;
	Place	   *places;			/* of all messages, by position; made by the first group */
	pg_uuid_t	token;
	int			next;			/* first message that was not dealt with */
	TimestampTz held_at;		/* when what is left was held last, and no group had begun */
	bool		own_commit;		/* drain(): a group ends with a commit, and so after a while */
	bool		deferred;		/* there are initially deferred constraints */
	DeliveryCounts counts;
} Batch;

/*
 * One group: the leased rows locked, messages from batch->next on delivered, settled,
 * the lease renewed for the rest, all in one subtransaction.
 */
typedef struct DeliveryGroup
{
	Batch	   *batch;
	int			first;
	MemoryContext context;		/* of all that the group needs, what is here included */
	int			limit;			/* messages at most */
	int			n;				/* begun, from first on; also where the group failed */
	Delivery   *deliveries;		/* of these */
	DeliveryCounts counts;		/* what the group makes true */
	ErrorData  *cancel;			/* the caller's cancel arrived in a hook */
	Delivery	charge;			/* group_charge(): with what */
} DeliveryGroup;

/* NULL if it succeeded; else nothing of it has happened.  What they return lives until group_end() */
extern ErrorData *group_deliver(DeliveryGroup *group, Batch *batch, int limit);
extern bool group_holds(const pg_uuid_t *token);
/* charge one message with the error that its group could not get rid of */
extern ErrorData *group_charge(DeliveryGroup *group, Batch *batch, const Handler *handler,
							   ErrorData *error);
/* give back, uncharged, what was not begun, from message first on */
extern ErrorData *group_release(DeliveryGroup *group, Batch *batch, int first);
extern void group_end(DeliveryGroup *group);

/* park.c: those of the group that no handler took, once more: may they be parked? */
extern void park_check(DeliveryGroup *group);

#endif							/* OUTBOX_DELIVER_H */
