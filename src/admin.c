/*
 * admin.c
 *		What operators do to single messages: get, requeue, discard, cancel.
 *
 * An action looks for the run of a message in each subscription it is about, with a
 * fresh snapshot, locks it and takes the message out of it.  Who had to wait and finds
 * the run changed looks again, and only then refuses.  What has no run yet is routed
 * first where the action can be about it (discard and cancel).
 *
 * Locks: one row at a time, waiting, in the order of subscriptions; the routing lock
 * before them where it is needed.  Many messages at once are the affair of dead.c.
 */
#include "admin.h"

#include "catalog.h"
#include "deliver.h"
#include "floor.h"
#include "log.h"
#include "route.h"
#include "statement.h"
#include "status.h"

#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

typedef struct Message
{
	const char *id;				/* as text */
	int64		position;
	int			max_attempts;	/* of its own; 0: none */
	char	   *name;
	char	   *kind;
	int			version;
	bool		pending;		/* routing has not come to it */
} Message;

/* what was found where nothing could be done, for the error */
typedef struct Findings
{
	StringInfoData text;
	const char *other;			/* subscription that could be named to have it done, or NULL */
} Findings;

static const char *id_text(const pg_uuid_t *id);
pg_noreturn static void unknown_message(const pg_uuid_t *id);
static void check_may_get(TupleTableSlot *message);
static Message *message_find(const pg_uuid_t *id);
static bool message_is_own(const Message *message);
static void message_route(Message *message);
static int	allowed_for(const Subscription *subscription, const Message *message);
static List *subscriptions_meant(const char *name);
static int	act(FunctionCallInfo fcinfo, const char *subscription, const Action *action);
static bool act_for(RunStore *store, const Action *action, Subscription *subscription,
					const Message *message, Findings *findings);
static bool take_back(RunStore *store, Run *run, TimestampTz now);
static void found(Findings *findings, const Subscription *subscription, const char *status);
pg_noreturn static void refuse(const Action *action, const Message *message,
							   const Findings *findings);
static Jsonb *with_reason(Jsonb *error, const char *reason);

bool
arg_time(FunctionCallInfo fcinfo, int n, const char *name, TimestampTz *time)
{
	if (PG_ARGISNULL(n))
		return false;
	*time = PG_GETARG_TIMESTAMPTZ(n);
	check_finite(*time, name, "Leave it out, or pass NULL.");
	return true;
}

static const char *
id_text(const pg_uuid_t *id)
{
	return DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id)));
}

static void
unknown_message(const pg_uuid_t *id)
{
	ereport(ERROR,
			(errcode(ERRCODE_OUTBOX_UNKNOWN_MESSAGE),
			 errmsg("message %s does not exist", id_text(id)),
			 errdetail("It was never committed, or it was settled and has left the log."),
			 errhint("The view outbox.messages shows what there is.")));
}

/* One message with all that it carries; what a listener asks for whose envelope had no data. */
PG_FUNCTION_INFO_V1(outbox_get);
Datum
outbox_get(PG_FUNCTION_ARGS)
{
	LogReader  *reader;
	TupleTableSlot *slot;
	Datum		message;

	PreventCommandIfParallelMode("outbox.get()");	/* it reads with a snapshot of its own */
	arg_required(fcinfo, 0, "id");
	reader = log_open(snapshot_push());
	slot = log_find(reader, PG_GETARG_UUID_P(0));
	if (slot == NULL)
		unknown_message(PG_GETARG_UUID_P(0));
	check_may_get(slot);
	message = log_message(slot, NULL, 0, 0);
	log_close(reader);
	snapshot_pop();
	PG_RETURN_DATUM(message);
}

/* A consumer of some subscriptions gets what one of them gets. */
static void
check_may_get(TupleTableSlot *message)
{
	bool		isnull;
	char	   *name = TextDatumGetCString(slot_getattr(message, LOG_NAME, &isnull));
	char	   *kind = TextDatumGetCString(slot_getattr(message, LOG_KIND, &isnull));
	ListCell   *cell;

	if (!superuser() && GetUserId() != outbox_owner())
		frontier_check();		/* limits are numbers of roles, which in a copy are others' */
	if (role_may_consume(GetUserId(), NULL))
		return;
	foreach(cell, subscriptions_meant(NULL))
	{
		Subscription *subscription = lfirst(cell);

		if (subscription_matches(subscription, name, kind) &&
			role_may_consume(GetUserId(), subscription->name))
			return;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for message %s",
					id_text(DatumGetUUIDP(slot_getattr(message, LOG_ID, &isnull)))),
			 errdetail("It belongs to no subscription that role \"%s\" may use.",
					   GetUserNameFromId(GetUserId(), false))));
}

static Message *
message_find(const pg_uuid_t *id)
{
	Message    *message = palloc0(sizeof(Message));
	Snapshot	snapshot = snapshot_push();
	LogReader  *reader = log_open(snapshot);
	TupleTableSlot *slot = log_find(reader, id);
	Frontier	frontier;
	bool		isnull;
	Datum		max_attempts;

	if (slot == NULL)
		unknown_message(id);
	message->id = id_text(id);
	message->position = log_position(slot);
	message->name = TextDatumGetCString(slot_getattr(slot, LOG_NAME, &isnull));
	message->kind = TextDatumGetCString(slot_getattr(slot, LOG_KIND, &isnull));
	message->version = DatumGetInt32(slot_getattr(slot, LOG_VERSION, &isnull));
	max_attempts = slot_getattr(slot, LOG_MAX_ATTEMPTS, &isnull);
	if (!isnull)
		message->max_attempts = DatumGetInt32(max_attempts);
	frontier_read(&frontier, snapshot);
	message->pending = !frontier_has_passed(&frontier, message->position);
	log_close(reader);
	snapshot_pop();
	return message;
}

/* enqueued by this very transaction: no router will ever see it before the commit */
static bool
message_is_own(const Message *message)
{
	FullTransactionId own = GetTopFullTransactionIdIfAny();
	Identity	identity;

	if (!FullTransactionIdIsValid(own) || !enqueued_in_transaction())
		return false;
	identity_read(&identity);
	return position_transaction(message->position) ==
		(int64) U64FromFullTransactionId(own) + (identity.exists ? identity.offset : 0);
}

/* Give a pending message its runs. */
static void
message_route(Message *message)
{
	bool		own = message_is_own(message);
	Identity	identity;
	ListCell   *cell;

	/* before routing, as unsubscribe() does; and no subscription goes while we file for it */
	foreach(cell, subscriptions_meant(NULL))
		subscription_lock(((Subscription *) lfirst(cell))->id, AccessShareLock);
	identity_read(&identity);
	if (!own || !identity.in_use)
	{
		routing_lock_wait();
		identity_ensure();
	}
	if (!own)
		(void) route(0);
	else
		foreach(cell, subscriptions_meant(NULL))
			(void) route_own(lfirst(cell), 0);
	message->pending = false;
}

static List *
subscriptions_meant(const char *name)
{
	List	   *list;

	if (name != NULL)
		return list_make1(subscription_get(name));
	list = subscription_list(snapshot_push());
	snapshot_pop();
	return list;
}

void
load_handlers(Subscription *subscription)
{
	subscription_handlers(subscription, snapshot_push());
	snapshot_pop();
}

static int
allowed_for(const Subscription *subscription, const Message *message)
{
	Handler    *handler;

	if (message->max_attempts > 0)
		return message->max_attempts;
	handler = handler_match(subscription, message->name, message->kind, message->version);
	if (handler != NULL && handler->max_attempts > 0)
		return handler->max_attempts;
	return subscription->max_attempts;
}

/* For whoever has a row of the log in hand. */
int
attempts_allowed(const Subscription *subscription, TupleTableSlot *slot)
{
	Message		message = {0};
	bool		isnull;
	Datum		own = slot_getattr(slot, LOG_MAX_ATTEMPTS, &isnull);

	if (!isnull)
		return DatumGetInt32(own);
	if (subscription->handlers == NIL)
		return subscription->max_attempts;
	message.name = TextDatumGetCString(slot_getattr(slot, LOG_NAME, &isnull));
	message.kind = TextDatumGetCString(slot_getattr(slot, LOG_KIND, &isnull));
	message.version = DatumGetInt32(slot_getattr(slot, LOG_VERSION, &isnull));
	return allowed_for(subscription, &message);
}

void
action_init(Action *action, RunState becomes)
{
	memset(action, 0, sizeof(*action));
	action->becomes = becomes;
	action->now = clock_now();
	action->available_at = action->now;
	action->reset_attempts = true;
}

/*
 * A requeue that keeps the attempts of a message whose budget is spent gives it one
 * more: to ask for it and get the same dead letter back would help nobody.
 */
void
action_carry_out(const Action *action, RunStore *store, Run *part, int max_attempts)
{
	int			attempts = action->reset_attempts ? 0 : part->attempts;

	if (action->becomes != RUN_READY)
		run_discard(store, part, action->becomes, action->now,
					with_reason(part->last_error, action->reason));
	else
		run_requeue(store, part, action->available_at, attempts,
					attempts < max_attempts ? max_attempts : attempts + 1);
}

/* The error stays on record; a reason is added to it. */
static Jsonb *
with_reason(Jsonb *error, const char *reason)
{
	JsonbParseState *parse = NULL;
	JsonbValue	key = {.type = jbvString};
	JsonbValue	value = {.type = jbvString};
	Jsonb	   *added;

	if (reason == NULL)
		return error;
	key.val.string.val = "reason";
	key.val.string.len = strlen("reason");
	value.val.string.val = unconstify(char *, reason);
	value.val.string.len = strlen(reason);
	pushJsonbValue(&parse, WJB_BEGIN_OBJECT, NULL);
	pushJsonbValue(&parse, WJB_KEY, &key);
	pushJsonbValue(&parse, WJB_VALUE, &value);
	added = JsonbValueToJsonb(pushJsonbValue(&parse, WJB_END_OBJECT, NULL));
	if (error == NULL)
		return added;
	return DatumGetJsonbP(DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(error),
											  JsonbPGetDatum(added)));
}

/*
 * Carry out an action for the message that is the first argument, in one subscription or
 * in all.  Returns in how many; refuses where it is none.
 */
static int
act(FunctionCallInfo fcinfo, const char *subscription, const Action *action)
{
	Message    *message;
	List	   *subscriptions;
	ListCell   *cell;
	RunStore   *store;
	Findings	findings = {.other = NULL};
	int			count = 0;

	arg_required(fcinfo, 0, "id");
	if (action->becomes == RUN_READY)
		segments_reprieve();	/* before it is looked for: it may be settled */
	message = message_find(PG_GETARG_UUID_P(0));
	if (action->becomes != RUN_READY && message->pending)
		message_route(message);
	subscriptions = subscriptions_meant(subscription);

	initStringInfo(&findings.text);
	store = runs_open();
	foreach(cell, subscriptions)
	{
		if (act_for(store, action, lfirst(cell), message, &findings))
			count++;
	}
	runs_close(store);

	if (count == 0)
		refuse(action, message, &findings);
	return count;
}

static bool
act_for(RunStore *store, const Action *action, Subscription *subscription,
		const Message *message, Findings *findings)
{
	bool		done = false;
	bool		looking = true;

	/* keeps unsubscribe() from missing a run that is split off here */
	subscription_lock(subscription->id, AccessShareLock);
	load_handlers(subscription);
	while (looking)
	{
		Snapshot	snapshot = snapshot_push();
		Run		   *run = run_of_position(store, snapshot, subscription->id, message->position);

		CHECK_FOR_INTERRUPTS();
		looking = false;
		if (run == NULL && message->pending &&
			subscription_matches(subscription, message->name, message->kind))
			found(findings, subscription, "pending");
		else if (run == NULL)
			;					/* not for this subscription */
		else if (action->becomes != RUN_READY && take_back(store, run, action->now))
			looking = true;
		else if (!(action->states & STATE_BIT(run->state)))
			found(findings, subscription, run_status(run, action->now));
		else if (run_lock(store, run, LockWaitBlock) != RUN_LOCKED)
			looking = true;
		else
		{
			Cover	   *cover = cover_make();

			cover_append(cover, message->position, message->position + 1);
			action_carry_out(action, store, run_take(store, run, cover, 1),
							 allowed_for(subscription, message));
			done = true;
		}
		snapshot_pop();
	}
	return done;
}

/*
 * A lease that has ended is no reason to refuse: it is taken back, as the next claim
 * would do.  Who holds its row is settling in time.
 */
static bool
take_back(RunStore *store, Run *run, TimestampTz now)
{
	RunLock		lock;

	if (run->state != RUN_LEASED || run->locked_until > now || group_holds(&run->claim_token))
		return false;
	lock = run_lock(store, run, LockWaitSkip);
	if (lock == RUN_LOCKED)
		run_expire(store, run, now);
	return lock != RUN_BUSY;
}

static void
found(Findings *findings, const Subscription *subscription, const char *status)
{
	appendStringInfo(&findings->text, "%s%s for subscription \"%s\"",
					 findings->text.len == 0 ? "" : ", ", status, subscription->name);
	if (findings->other == NULL && (strcmp(status, "unhandled") == 0 ||
									strcmp(status, "discarded") == 0 ||
									strcmp(status, "cancelled") == 0))
		findings->other = subscription->name;
}

static void
refuse(const Action *action, const Message *message, const Findings *findings)
{
	const char *hint;

	if (action->becomes == RUN_CANCELLED)
		hint = "Only what waits can be cancelled: scheduled, ready and unhandled messages.";
	else if (action->becomes == RUN_DISCARDED)
		hint = "Only scheduled, ready, unhandled and dead messages can be discarded.";
	else if (findings->other != NULL && !(action->states & STATE_BIT(RUN_DISCARDED)))
		hint = psprintf("To deliver it all the same, name the subscription:"
						" SELECT outbox.requeue(%s, subscription => %s).",
						quote_literal_cstr(message->id), quote_literal_cstr(findings->other));
	else
		hint = "Dead messages can be requeued and, where the subscription is named,"
			" unhandled, discarded and cancelled ones.";

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("message %s cannot be %s", message->id, action->done),
			 findings->text.len > 0 ? errdetail("It is %s.", findings->text.data) :
			 errdetail("It belongs to no subscription that was asked for."),
			 errhint("%s", hint)));
}

PG_FUNCTION_INFO_V1(outbox_requeue);
Datum
outbox_requeue(PG_FUNCTION_ARGS)
{
	char	   *subscription;
	Action		action;
	TimestampTz available_at;

	session_begin("outbox.requeue()");
	subscription = arg_text(fcinfo, 1, "subscription");
	action_init(&action, RUN_READY);
	action.done = "requeued";
	action.states = STATE_BIT(RUN_DEAD);
	if (subscription != NULL)
		action.states |= STATE_BIT(RUN_UNHANDLED) | STATE_BIT(RUN_DISCARDED) |
			STATE_BIT(RUN_CANCELLED);
	if (arg_time(fcinfo, 2, "available_at", &available_at))
		action.available_at = Max(available_at, action.now);
	action.reset_attempts = PG_ARGISNULL(3) || PG_GETARG_BOOL(3);
	PG_RETURN_INT32(act(fcinfo, subscription, &action));
}

PG_FUNCTION_INFO_V1(outbox_discard);
Datum
outbox_discard(PG_FUNCTION_ARGS)
{
	char	   *subscription;
	Action		action;

	session_begin("outbox.discard()");
	subscription = arg_text(fcinfo, 1, "subscription");
	action_init(&action, RUN_DISCARDED);
	action.done = "discarded";
	action.states = STATE_BIT(RUN_READY) | STATE_BIT(RUN_UNHANDLED) | STATE_BIT(RUN_DEAD);
	action.reason = arg_text(fcinfo, 2, "reason");
	PG_RETURN_INT32(act(fcinfo, subscription, &action));
}

PG_FUNCTION_INFO_V1(outbox_cancel);
Datum
outbox_cancel(PG_FUNCTION_ARGS)
{
	Action		action;

	session_begin("outbox.cancel()");
	action_init(&action, RUN_CANCELLED);
	action.done = "cancelled";
	action.states = STATE_BIT(RUN_READY) | STATE_BIT(RUN_UNHANDLED);
	PG_RETURN_INT32(act(fcinfo, NULL, &action));
}
