/*
 * admin.h
 *		What operators do to messages, one at a time (admin.c) or many (dead.c).
 */
#ifndef OUTBOX_ADMIN_H
#define OUTBOX_ADMIN_H

#include "run.h"
#include "subscription.h"

#include "executor/tuptable.h"

typedef struct Action
{
	const char *done;			/* "requeued" */
	int			states;			/* bits of the states that it may find */
	TimestampTz now;
	/* requeue */
	TimestampTz available_at;
	bool		reset_attempts;
	/* discard and cancel */
	RunState	becomes;		/* RUN_READY: a requeue */
	const char *reason;			/* or NULL */
} Action;

#define STATE_BIT(state)	(1 << (state))

extern void action_init(Action *action, RunState becomes);
/* the part is locked and a run of its own */
extern void action_carry_out(const Action *action, RunStore *store, Run *part, int max_attempts);
/* attempts that a message gets: its own number, else the handler's, else the subscription's */
extern int	attempts_allowed(const Subscription *subscription, TupleTableSlot *message);
/* the subscription with its handlers, by a fresh snapshot */
extern void load_handlers(Subscription *subscription);
/* false where the argument is null; infinity is refused */
extern bool arg_time(FunctionCallInfo fcinfo, int n, const char *name, TimestampTz *time);

#endif							/* OUTBOX_ADMIN_H */
