/*
 * register.c
 *		register_hook(), register_notify(), unregister().
 *
 * A registration is checked with the caller's rights and by the caller's search_path, and
 * stored as text.  All handlers of a subscription belong to one role, since one worker,
 * connected as that role, delivers them.
 *
 * Registrations of one subscription wait for each other (subscription_hold()), so that
 * the role, the mode and the key of a handler are decided by what is committed.  They also
 * wait for the commit of who has parked messages (park.c), to find them.
 */
#include "subscription.h"

#include "catalog.h"
#include "notice.h"
#include "statement.h"
#include "worker.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#define MAX_RETRY_DELAYS	100

static char *arg_subscription(FunctionCallInfo fcinfo, int n);
static void arg_key(FunctionCallInfo fcinfo, int pattern, int kind, int version, Handler *key);
static int	arg_positive(FunctionCallInfo fcinfo, int n, const char *name);
static void arg_retry(FunctionCallInfo fcinfo, int n, Handler *wanted);

static Oid	resolve_hook(const char *text);
static bool has_arguments(const char *text);
static Oid	find_hook(const char *text);
static char *qualified_name(Oid function, const char *text);
pg_noreturn static void refuse_hook(const char *text, const char *why);
static void check_channel(const char *channel);

static text *register_handler(Handler *wanted, const char *name, bool replace);
static Subscription *hold_with_handlers(const char *name);
static void check_role(const Subscription *subscription);
static char *role_title(Oid role);
static void check_login(Oid role);
static Handler *find_same_key(const Subscription *subscription, const Handler *key);
static bool same_definition(const Handler *a, const Handler *b);
static void insert_handler(const Subscription *subscription, const Handler *handler);
static void replace_handler(const Handler *existing, const Handler *handler);
static void bind_definition(Statement *statement, const Handler *handler);
static void tell_about_others(const Subscription *subscription, const Handler *created);
static bool handlers_overlap(const Handler *a, const Handler *b);
static char *describe(const Handler *handler);

PG_FUNCTION_INFO_V1(outbox_register_hook);
PG_FUNCTION_INFO_V1(outbox_register_notify);
PG_FUNCTION_INFO_V1(outbox_unregister);

/*
 * register_hook(name_pattern, function, subscription, kind, version, timeout,
 *				 max_attempts, retry, replace)
 */
Datum
outbox_register_hook(PG_FUNCTION_ARGS)
{
	Handler		wanted = {0};
	char	   *function;
	char	   *subscription;
	bool		replace = !PG_ARGISNULL(8) && PG_GETARG_BOOL(8);

	session_begin("outbox.register_hook()");
	arg_key(fcinfo, 0, 3, 4, &wanted);
	function = arg_required_text(fcinfo, 1, "function");
	subscription = arg_subscription(fcinfo, 2);
	if (!PG_ARGISNULL(5))
		wanted.own_timeout = interval_usecs(PG_GETARG_DATUM(5), "timeout");
	wanted.max_attempts = arg_positive(fcinfo, 6, "max_attempts");
	arg_retry(fcinfo, 7, &wanted);

	access_check_consumer(subscription);
	wanted.function = qualified_name(resolve_hook(function), function);
	PG_RETURN_TEXT_P(register_handler(&wanted, subscription, replace));
}

/*
 * register_notify(name_pattern, channel, subscription, kind, version, max_attempts, retry,
 *				   include_data, replace)
 */
Datum
outbox_register_notify(PG_FUNCTION_ARGS)
{
	Handler		wanted = {0};
	char	   *subscription;
	bool		replace = !PG_ARGISNULL(8) && PG_GETARG_BOOL(8);

	session_begin("outbox.register_notify()");
	arg_key(fcinfo, 0, 3, 4, &wanted);
	wanted.channel = arg_required_text(fcinfo, 1, "channel");
	check_channel(wanted.channel);
	subscription = arg_subscription(fcinfo, 2);
	wanted.max_attempts = arg_positive(fcinfo, 5, "max_attempts");
	arg_retry(fcinfo, 6, &wanted);
	wanted.include_data = !PG_ARGISNULL(7) && PG_GETARG_BOOL(7);

	access_check_consumer(subscription);
	PG_RETURN_TEXT_P(register_handler(&wanted, subscription, replace));
}

/* unregister(name_pattern, subscription, kind, version) */
Datum
outbox_unregister(PG_FUNCTION_ARGS)
{
	Handler		key = {0};
	Handler    *existing;
	char	   *name;
	Subscription *subscription;
	Statement	delete;

	session_begin("outbox.unregister()");
	arg_key(fcinfo, 0, 2, 3, &key);
	name = arg_subscription(fcinfo, 1);
	access_check_consumer(name);

	subscription = hold_with_handlers(name);
	existing = find_same_key(subscription, &key);
	if (existing == NULL)
		PG_RETURN_BOOL(false);
	if (!has_privs_of_role(GetUserId(), existing->role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for a handler of another role"),
				 errdetail("The handlers of subscription \"%s\" belong to %s.",
						   name, role_title(existing->role)),
				 errhint("Unregister it as that role, or as a superuser.")));

	statement_init(&delete, "DELETE FROM outbox.handler h WHERE h.id OPERATOR(pg_catalog.=) $1");
	bind_int8(&delete, existing->id);
	(void) statement_run_guarded(&delete);
	/* what was parked because its function is missing may belong to another handler now */
	if (!subscription_release(subscription) && existing->broken)
		(void) subscription_unpark(subscription);
	PG_RETURN_BOOL(true);
}

/* ---- arguments ---- */

static char *
arg_subscription(FunctionCallInfo fcinfo, int n)
{
	char	   *name = arg_text(fcinfo, n, "subscription");

	return name != NULL ? name : "default";
}

static void
arg_key(FunctionCallInfo fcinfo, int pattern, int kind, int version, Handler *key)
{
	key->name_pattern = arg_required_text(fcinfo, pattern, "name_pattern");
	topic_check(key->name_pattern);
	key->kind = arg_text(fcinfo, kind, "kind");
	key->version = PG_ARGISNULL(version) ? -1 : arg_positive(fcinfo, version, "version");
}

/* 0 where it is null */
static int
arg_positive(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (PG_ARGISNULL(n))
		return 0;
	if (PG_GETARG_INT32(n) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be at least 1", name),
				 errdetail("It is %d.", PG_GETARG_INT32(n)),
				 errhint("Leave it out, or pass NULL, where there is none.")));
	return PG_GETARG_INT32(n);
}

static void
arg_retry(FunctionCallInfo fcinfo, int n, Handler *wanted)
{
	ArrayType  *array;
	Datum	   *delays;
	bool	   *nulls;

	if (PG_ARGISNULL(n))
		return;
	array = PG_GETARG_ARRAYTYPE_P(n);
	deconstruct_array(array, INTERVALOID, sizeof(Interval), false, TYPALIGN_DOUBLE,
					  &delays, &nulls, &wanted->n_retry);
	if (ARR_NDIM(array) != 1 || wanted->n_retry > MAX_RETRY_DELAYS || array_contains_nulls(array))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retry must be a list of 1 to %d delays", MAX_RETRY_DELAYS),
				 errdetail("The last one repeats."),
				 errhint("Write it like '{10 s, 1 min, 10 min}', or leave it out.")));
	wanted->retry = palloc(wanted->n_retry * sizeof(int64));
	for (int i = 0; i < wanted->n_retry; i++)
		wanted->retry[i] = interval_usecs(delays[i], "retry");
}

/* NOTIFY would refuse it at the delivery. */
static void
check_channel(const char *channel)
{
	if (strlen(channel) >= NAMEDATALEN)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("channel is too long"),
				 errdetail("It has %zu bytes; at most %d are allowed.",
						   strlen(channel), NAMEDATALEN - 1)));
}

/* ---- the function of a hook ---- */

/* By the caller's search_path and with the caller's rights. */
static Oid
resolve_hook(const char *text)
{
	Oid			function = has_arguments(text) ?
		DatumGetObjectId(DirectFunctionCall1(regprocedurein, CStringGetDatum(text))) :
		find_hook(text);
	const char *why;
	AclResult	right;

	if (!hook_is_fit(function, &why))
		refuse_hook(text, why);
	right = outbox_function_aclcheck(function, GetUserId());
	if (right != ACLCHECK_OK)
		aclcheck_error(right, OBJECT_FUNCTION, text);
	return function;
}

/* Whether there is a parenthesis outside of quoted names. */
static bool
has_arguments(const char *text)
{
	bool		quoted = false;

	for (; *text != '\0'; text++)
	{
		if (*text == '"')
			quoted = !quoted;
		else if (*text == '(' && !quoted)
			return true;
	}
	return false;
}

/* A name alone: the first in the path that takes a message, of whatever sort. */
static Oid
find_hook(const char *text)
{
	List	   *names = textToQualifiedNameList(cstring_to_text(text));
	FuncCandidateList candidates = FuncnameGetCandidates(names, -1, NIL, false, false, false, true);
	Oid			message = outbox_row_type(OB_MESSAGE_TYPE)->tdtypeid;

	for (FuncCandidateList each = candidates; each != NULL; each = each->next)
	{
		if (each->nargs == 1 && each->args[0] == message)
			return each->oid;
	}
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_FUNCTION),
			 errmsg("function %s(outbox.message) does not exist", NameListToString(names)),
			 candidates != NULL ?
			 errdetail("A function of that name takes other arguments.") : 0,
			 errhint("Check its schema and search_path. A hook is a function with one argument "
					 "of type outbox.message.")));
}

static char *
qualified_name(Oid function, const char *text)
{
	char	   *schema = get_namespace_name(get_func_namespace(function));
	char	   *name = get_func_name(function);

	/* nothing holds it: it may have been dropped since it was found */
	if (schema == NULL || name == NULL)
		refuse_hook(text, NULL);
	return quote_qualified_identifier(schema, name);
}

static void
refuse_hook(const char *text, const char *why)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("function \"%s\" cannot be a hook", text),
			 errdetail("%s", why != NULL ? why : "It does not exist any more."),
			 errhint("A hook is a function with one argument of type outbox.message.")));
}

/* ---- registering ---- */

static text *
register_handler(Handler *wanted, const char *name, bool replace)
{
	Subscription *subscription;
	Handler    *existing;
	const char *result = "unchanged";

	wanted->role = GetUserId();
	wanted->search_path = namespace_search_path;
	subscription = hold_with_handlers(name);
	subscription_use(subscription, MODE_PUSHED);
	check_role(subscription);
	check_login(wanted->role);

	existing = find_same_key(subscription, wanted);
	if (existing == NULL)
	{
		insert_handler(subscription, wanted);
		tell_about_others(subscription, wanted);
		result = "created";
	}
	else if (!same_definition(existing, wanted) ||
			 (replace && !same_text(existing->search_path, wanted->search_path)))
	{
		if (!replace)
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_OBJECT),
					 errmsg("handler \"%s\" exists with another definition", wanted->name_pattern),
					 errdetail("It is %s.", describe(existing)),
					 errhint("Pass replace => true to change it.")));
		replace_handler(existing, wanted);
		result = "altered";
	}
	else if (existing->broken)
		(void) handler_mark(existing, false);

	(void) subscription_unpark(subscription);
	wake_at_commit(WORK_LOOK);
	notice_no_worker();
	return cstring_to_text(result);
}

static Subscription *
hold_with_handlers(const char *name)
{
	Subscription *subscription = subscription_hold(name, LOCK_TO_UNPARK);

	subscription_handlers(subscription, snapshot_push());
	snapshot_pop();
	return subscription;
}

static void
check_role(const Subscription *subscription)
{
	Handler    *first = subscription->handlers != NIL ? linitial(subscription->handlers) : NULL;

	if (first == NULL || first->role == GetUserId())
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("the handlers of subscription \"%s\" belong to another role",
					subscription->name),
			 errdetail("They belong to %s, and all handlers of a subscription run as one role.",
					   role_title(first->role)),
			 errhint("Register as that role, or on a subscription of your own: "
					 "SELECT outbox.subscribe(%s).",
					 quote_literal_cstr(psprintf("%s_%s", subscription->name,
												 GetUserNameFromId(GetUserId(), false))))));
}

static char *
role_title(Oid role)
{
	char	   *name = GetUserNameFromId(role, true);

	return name != NULL ? psprintf("role \"%s\"", name) : "a role that does not exist any more";
}

/* The worker that calls the handlers connects as their role. */
static void
check_login(Oid role)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(role));
	char	   *name = GetUserNameFromId(role, false);
	char	   *database = get_database_name(MyDatabaseId);
	bool		can_login = HeapTupleIsValid(tuple) &&
		((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	if (!can_login)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("role \"%s\" cannot log in, so it cannot have handlers", name),
				 errdetail("Handlers run in a session of the role that registers them."),
				 errhint("Register as another role, or run ALTER ROLE %s LOGIN.",
						 quote_identifier(name))));
	if (!DatumGetBool(OidFunctionCall3(F_HAS_DATABASE_PRIVILEGE_OID_OID_TEXT,
									   ObjectIdGetDatum(role), ObjectIdGetDatum(MyDatabaseId),
									   CStringGetTextDatum("CONNECT"))))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("role \"%s\" cannot connect here, so it cannot have handlers", name),
				 errdetail("Handlers run in a session of the role that registers them."),
				 errhint("Run GRANT CONNECT ON DATABASE %s TO %s.",
						 quote_identifier(database), quote_identifier(name))));
	if (!role_may_drain(role))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("role \"%s\" cannot deliver, so it cannot have handlers", name),
				 errdetail("It has no privilege to call outbox.drain()."),
				 errhint("Run SELECT outbox.grant_access(%s, 'consumer').",
						 quote_literal_cstr(name))));
}

static Handler *
find_same_key(const Subscription *subscription, const Handler *key)
{
	ListCell   *cell;

	foreach(cell, subscription->handlers)
	{
		Handler    *handler = lfirst(cell);

		if (strcmp(handler->name_pattern, key->name_pattern) == 0 &&
			same_text(handler->kind, key->kind) && handler->version == key->version)
			return handler;
	}
	return NULL;
}

/*
 * The search_path is not part of it: a deployment that happens to run with another one
 * has not asked for anything else.  It is recorded anew by a replace.
 */
static bool
same_definition(const Handler *a, const Handler *b)
{
	return same_text(a->function, b->function) &&
		same_text(a->channel, b->channel) &&
		a->include_data == b->include_data &&
		a->own_timeout == b->own_timeout &&
		a->max_attempts == b->max_attempts &&
		a->n_retry == b->n_retry &&
		(a->n_retry == 0 || memcmp(a->retry, b->retry, a->n_retry * sizeof(int64)) == 0);
}

static void
insert_handler(const Subscription *subscription, const Handler *handler)
{
	Statement	insert;

	statement_init(&insert,
				   "INSERT INTO outbox.handler"
				   " (function, channel, include_data, role_name, role_oid, search_path,"
				   "  timeout, max_attempts, retry, subscription_id, name_pattern, kind,"
				   "  version, created_at)"
				   " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)");
	bind_definition(&insert, handler);
	bind_int8(&insert, subscription->id);
	bind_text(&insert, handler->name_pattern);
	bind_text(&insert, handler->kind);
	bind_int4(&insert, handler->version, handler->version < 0);
	bind_time(&insert, clock_now());
	(void) statement_run_guarded(&insert);
}

static void
replace_handler(const Handler *existing, const Handler *handler)
{
	Statement	change;

	statement_init(&change,
				   "UPDATE outbox.handler AS h"
				   " SET function = $1, channel = $2, include_data = $3, role_name = $4,"
				   "     role_oid = $5, search_path = $6, timeout = $7, max_attempts = $8,"
				   "     retry = $9, broken_since = NULL"
				   " WHERE h.id OPERATOR(pg_catalog.=) $10");
	bind_definition(&change, handler);
	bind_int8(&change, existing->id);
	(void) statement_run_guarded(&change);
}

static void
bind_definition(Statement *statement, const Handler *handler)
{
	Interval   *delays = palloc0(Max(handler->n_retry, 1) * sizeof(Interval));
	Datum	   *retry = palloc(Max(handler->n_retry, 1) * sizeof(Datum));

	for (int i = 0; i < handler->n_retry; i++)
	{
		delays[i].time = handler->retry[i];
		retry[i] = IntervalPGetDatum(&delays[i]);
	}
	bind_text(statement, handler->function);
	bind_text(statement, handler->channel);
	bind_bool(statement, handler->include_data);
	bind_role(statement, handler->role);
	bind_text(statement, handler->search_path);
	bind_usecs(statement, handler->own_timeout);
	bind_int4(statement, handler->max_attempts, handler->max_attempts == 0);
	bind(statement, INTERVALARRAYOID,
		 PointerGetDatum(construct_array(retry, handler->n_retry, INTERVALOID, sizeof(Interval),
										 false, TYPALIGN_DOUBLE)),
		 handler->n_retry == 0);
}

/* ---- one message, one handler: say where that could surprise ---- */

static void
tell_about_others(const Subscription *subscription, const Handler *created)
{
	StringInfoData before;
	StringInfoData after;
	ListCell   *cell;

	initStringInfo(&before);
	initStringInfo(&after);
	foreach(cell, subscription->handlers)
	{
		Handler    *other = lfirst(cell);
		StringInfo	list = handler_compare(created, other) > 0 ? &before : &after;

		if (handlers_overlap(created, other))
			appendStringInfo(list, "%s\"%s\"", list->len > 0 ? ", " : "", other->name_pattern);
	}
	if (after.len > 0)
		ereport(NOTICE,
				(errmsg("handler \"%s\" is called instead of others for messages that both match",
						created->name_pattern),
				 errdetail("The others are: %s.", after.data),
				 errhint("To have both called, register one of them on another subscription.")));
	if (before.len > 0)
		ereport(NOTICE,
				(errmsg("handler \"%s\" is not called for messages that another one also matches",
						created->name_pattern),
				 errdetail("The others are: %s.", before.data),
				 errhint("To have both called, register one of them on another subscription.")));
}

static bool
handlers_overlap(const Handler *a, const Handler *b)
{
	return (a->kind == NULL || b->kind == NULL || strcmp(a->kind, b->kind) == 0) &&
		(a->version < 0 || b->version < 0 || a->version == b->version) &&
		topics_overlap(a->name_pattern, b->name_pattern);
}

static char *
describe(const Handler *handler)
{
	StringInfoData text;

	initStringInfo(&text);
	if (handler->function != NULL)
		appendStringInfo(&text, "function %s", handler->function);
	else
		appendStringInfo(&text, "channel \"%s\" %s data", handler->channel,
						 handler->include_data ? "with" : "without");
	if (handler->own_timeout != 0)
		appendStringInfo(&text, ", timeout %lld ms", (long long) (handler->own_timeout / 1000));
	if (handler->max_attempts != 0)
		appendStringInfo(&text, ", max_attempts %d", handler->max_attempts);
	for (int i = 0; i < handler->n_retry; i++)
		appendStringInfo(&text, "%s%lld ms", i == 0 ? ", retry after " : " and ",
						 (long long) (handler->retry[i] / 1000));
	return text.data;
}
