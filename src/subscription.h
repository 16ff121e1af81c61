/*
 * subscription.h
 *		Subscriptions, topic patterns, handlers.
 */
#ifndef OUTBOX_SUBSCRIPTION_H
#define OUTBOX_SUBSCRIPTION_H

#include "outbox.h"

#include "nodes/pg_list.h"

typedef enum SubscriptionMode
{
	MODE_UNUSED,
	MODE_PULLED,
	MODE_PUSHED
} SubscriptionMode;

typedef struct Subscription
{
	int64		id;
	char	   *name;
	char	   *pattern;
	char	   *kind;			/* or NULL: any */
	SubscriptionMode mode;
	bool		paused;
	int64		lease;			/* microseconds; the setting where the row has none */
	int64		max_active;		/* likewise */
	int			max_attempts;	/* likewise */
	/* what the row has itself, 0: nothing */
	int64		own_lease;
	int64		own_max_active;
	int			own_max_attempts;
	bool		locked;			/* as it is since its lock was taken, in share mode or more */
	List	   *handlers;		/* of Handler, filled by subscription_handlers() */
} Subscription;

typedef struct Handler
{
	int64		id;
	int64		subscription_id;
	char	   *name_pattern;
	char	   *kind;			/* or NULL: any */
	int			version;		/* or -1: any */
	char	   *function;		/* qualified name, or NULL: a channel */
	char	   *channel;
	bool		include_data;
	Oid			role;
	char	   *search_path;
	int64		timeout;		/* microseconds; the setting where the row has none */
	int64		own_timeout;	/* what the row has itself, 0: nothing */
	int			max_attempts;	/* 0: none of its own */
	int			n_retry;		/* delays in microseconds; the last one repeats */
	int64	   *retry;
	bool		broken;			/* found missing when last called */
} Handler;

/* equal, or both NULL */
static inline bool
same_text(const char *a, const char *b)
{
	return (a == NULL || b == NULL) ? a == b : strcmp(a, b) == 0;
}

/* topic.c; AMQP: words between dots, * is one word, # any number */
extern bool topic_matches(const char *pattern, const char *name);
/* 22023 where the syntax is wrong */
extern void topic_check(const char *pattern);
extern bool topic_is_exact(const char *pattern);
extern int	topic_literal_words(const char *pattern);
/* whether some name matches both */
extern bool topics_overlap(const char *a, const char *b);

/* subscription.c */
extern bool subscription_matches(const Subscription *subscription,
								 const char *name, const char *kind);

/* by the snapshot given; subscription_find() returns NULL where there is none */
extern List *subscription_list(Snapshot snapshot);
extern Subscription *subscription_find(Snapshot snapshot, const char *name);
extern Subscription *subscription_by_id(Snapshot snapshot, int64 id);
/* the row "default"; under the routing lock, at first use only */
extern void subscription_insert_default(void);
/* by a fresh snapshot; makes "default" at first use; 42704 where there is none */
extern Subscription *subscription_get(const char *name);
pg_noreturn extern void subscription_unknown(const char *name);
/*
 * For a claim: NULL where another first use is under way, which it does not wait for;
 * mostly locked already.
 */
extern Subscription *subscription_get_locked(const char *name, int wait_ms);
/*
 * The same, and keeps others from changing or removing it until the end of the transaction;
 * its lock in the mode given, see catalog.h.
 */
extern Subscription *subscription_hold(const char *name, int mode);
/* 55000 with the call to make where it is the other one */
extern void subscription_check_mode(Subscription *subscription, SubscriptionMode mode);
/* the same, and fixes the mode at first use */
extern void subscription_use(Subscription *subscription, SubscriptionMode mode);
/* pushed, but no handler is left and nothing is leased: unused again; true if it is so now */
extern bool subscription_release(Subscription *subscription);
/* makes all unhandled runs ready; returns messages */
extern int64 subscription_unpark(const Subscription *subscription);

/* handler.c; the list is in order of preference */
extern void subscription_handlers(Subscription *subscription, Snapshot snapshot);
/* the one that the rules of precedence choose, or NULL */
extern Handler *handler_match(const Subscription *subscription, const char *name,
							  const char *kind, int version);
/* positive: b is preferred */
extern int	handler_compare(const Handler *a, const Handler *b);
/* the function as it is now, or InvalidOid where it is missing or no longer fit to be called */
extern Oid	handler_function(const Handler *handler);
/* whether a function may be a hook at all; the reason in *why, or NULL */
extern bool hook_is_fit(Oid function, const char **why);
/*
 * Remember that its function was missing, or is there again; never waits.  False where it was
 * known, or somebody else holds the row.
 */
extern bool handler_mark(const Handler *handler, bool broken);

/* rights.c: 42501 where the caller may not consume this subscription */
extern void access_check_consumer(const char *subscription);
/* the same as an answer, of any role; NULL: whatever the subscription */
extern bool role_may_consume(Oid user, const char *subscription);
/* whether workers deliver to the role's handlers */
extern bool role_may_drain(Oid role);
extern bool role_may_have_handlers(Oid role);
extern bool role_trusts_owner(Oid role);
/* whether a worker may connect as a role and call its hooks; else the reason in *why */
extern bool role_may_be_served(Oid role, const char **why);

#endif							/* OUTBOX_SUBSCRIPTION_H */
