/*
 * access.c
 *		Who may do what: grant_access(), revoke_access().
 *
 * Rights are PostgreSQL's own: EXECUTE on functions and SELECT on views, which a kind of
 * access names in the table below.  They are granted as the owner of the extension, to the
 * role itself, and nothing else remembers them: what a role has is read from the ACLs.
 *
 * Only the limit to a subscription is ours: rows of outbox.access, which rights.c reads.
 *
 * Locks: ShareRowExclusiveLock on outbox.access, since two grants at once would fail on
 * the same catalog row.
 */
#include "subscription.h"

#include "catalog.h"
#include "statement.h"
#include "worker.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"

enum
{
	PRODUCER = 1,
	CONSUMER = 2,
	OPERATOR = 4,
	READER = 8
};

/* An operator may also read. */
#define LOOKING		(OPERATOR | READER)
#define ANYBODY		(PRODUCER | CONSUMER | OPERATOR | READER)

static const char *const kind_names[] = {"producer", "consumer", "operator", "reader"};

typedef struct AccessRule
{
	const char *name;			/* of a function, with all that share its name, or a view */
	int			kinds;
} AccessRule;

/* What is not here is for the owner of the extension and superusers. */
static const AccessRule rules[] = {
	{"enqueue", PRODUCER},
	{"enqueue_batch", PRODUCER},
	{"enqueued", PRODUCER},
	{"outgoing", PRODUCER},

	{"claim_batch", CONSUMER},
	{"renew", CONSUMER},
	{"renew_batch", CONSUMER},
	{"settle", CONSUMER},
	{"settle_batch", CONSUMER},
	{"register_hook", CONSUMER},
	{"register_notify", CONSUMER},
	{"unregister", CONSUMER},
	/* it shows payloads, which operators see only where they may read the log */
	{"get", CONSUMER},

	/* whoever calls them reaches only handlers of his own */
	{"deliver", CONSUMER | OPERATOR},
	{"drain", CONSUMER | OPERATOR},

	{"subscribe", OPERATOR},
	{"unsubscribe", OPERATOR},
	{"pause", OPERATOR},
	{"resume", OPERATOR},
	{"skip", OPERATOR},
	{"requeue", OPERATOR},
	{"requeue_all", OPERATOR},
	{"discard", OPERATOR},
	{"discard_all", OPERATOR},
	{"cancel", OPERATOR},
	{"maintain", OPERATOR},
	{"purge", OPERATOR},
	{"adopt", OPERATOR},
	{"revoke_lease", OPERATOR},
	{"reset_counters", OPERATOR},
	/* it works for the caller's own hooks, with the caller's rights */
	{"start_worker", CONSUMER | OPERATOR},

	{"status", LOOKING},
	{"messages", LOOKING},
	{"dead_letters", LOOKING},
	{"leases", LOOKING},
	{"subscriptions", LOOKING},
	{"handlers", LOOKING},
	{"workers", LOOKING},
	{"segments", LOOKING},
	{"counters", LOOKING},
	{"check", LOOKING},
	/* behind these views */
	{"clock", LOOKING},
	{"backlog", LOOKING},
	{"deliveries_of", LOOKING},
	{"log_of", LOOKING},
	{"handler_states", LOOKING},
	{"worker_rows", LOOKING},
	{"segment_holders", LOOKING},
	{"oldest_viewer", LOOKING},
	{"user_of", LOOKING},
	{"counter_rows", LOOKING},

	/* say nothing about what is stored */
	{"backoff", ANYBODY},
	{"cloudevent", ANYBODY},
};

static const char forget_role[] =
"DELETE FROM outbox.access a WHERE a.role_oid OPERATOR(pg_catalog.=) $1";

/* A function or view of the extension, or its schema, and whether a role has it. */
typedef struct AccessObject
{
	const char *what;			/* "ROUTINE", "TABLE", "SCHEMA" */
	const char *privileges;
	const char *identity;		/* as GRANT takes it */
	int			kinds;
	bool		granted;		/* to the role itself */
} AccessObject;

static void read_arguments(FunctionCallInfo fcinfo, Oid *role, int *kind, char **subscription);
static int	kind_from_name(const char *name);
static int	kinds_of(const char *name);
static List *list_objects(Oid role);
static AccessObject *read_object(HeapTuple tuple, TupleDesc desc);
static bool change_grants(const char *command, const char *direction, Oid role, List *objects);
static void execute_as_owner(const char *command);
static List *objects_to_grant(List *objects, int kind);
static List *objects_to_revoke(List *objects, int kind, int *kept);
static int	other_kinds_held(List *objects, int kind);
static bool has_any_of(List *objects, int kind);
static uint64 run_with_role(const char *text, Oid role, const char *subscription);
static bool allow_subscription(Oid role, const char *subscription);
static bool forbid_subscription(Oid role, const char *subscription, bool *any_left);
static void check_owner(void);

PG_FUNCTION_INFO_V1(outbox_grant_access);
PG_FUNCTION_INFO_V1(outbox_revoke_access);

/*
 * Not EXECUTE alone: a grant on all functions of the schema must not let a role lift its
 * own limits.
 */
static void
check_owner(void)
{
	if (!has_privs_of_role(GetUserId(), outbox_owner()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("only the owner of the extension grants and revokes access"),
				 errdetail("It is owned by \"%s\".", GetUserNameFromId(outbox_owner(), false)),
				 errhint("Ask its owner, or a superuser.")));
}

/* ---- granting ---- */

/* grant_access(role, kind, subscription) */
Datum
outbox_grant_access(PG_FUNCTION_ARGS)
{
	Oid			role;
	int			kind;
	char	   *subscription;
	List	   *objects;
	bool		changed = false;

	session_begin("outbox.grant_access()");
	check_owner();
	read_arguments(fcinfo, &role, &kind, &subscription);
	if (subscription != NULL)
		(void) subscription_get(subscription);

	LockRelationOid(outbox_oid(OB_ACCESS), ShareRowExclusiveLock);
	objects = list_objects(role);
	if (kind == CONSUMER)
	{
		/* DROP OWNED and REVOKE have left the rows of what they took */
		if (!has_any_of(objects, CONSUMER))
			(void) run_with_role(forget_role, role, NULL);
		changed = allow_subscription(role, subscription);
	}
	changed |= change_grants("GRANT", "TO", role, objects_to_grant(objects, kind));
	/* a role that has handlers may have waited for it */
	wake_at_commit(WORK_LOOK);
	PG_RETURN_BOOL(changed);
}

/*
 * revoke_access(role, kind, subscription)
 *
 * What another kind that the role has also includes stays.  The right to consume goes with
 * the last subscription: without a row the role could use all of them.
 */
Datum
outbox_revoke_access(PG_FUNCTION_ARGS)
{
	Oid			role;
	int			kind;
	char	   *subscription;
	bool		any_left = false;
	bool		changed = false;
	int			kept = 0;

	session_begin("outbox.revoke_access()");
	check_owner();
	read_arguments(fcinfo, &role, &kind, &subscription);

	LockRelationOid(outbox_oid(OB_ACCESS), ShareRowExclusiveLock);
	if (kind == CONSUMER)
	{
		changed = forbid_subscription(role, subscription, &any_left);
		if (any_left || (subscription != NULL && !changed))
			PG_RETURN_BOOL(changed);
	}
	changed |= change_grants("REVOKE", "FROM", role,
							 objects_to_revoke(list_objects(role), kind, &kept));
	if (kept > 0 && !changed)
		ereport(NOTICE,
				(errmsg("role \"%s\" keeps it through another kind of access",
						GetUserNameFromId(role, false)),
				 errhint("Revoke the kind that includes it.")));
	PG_RETURN_BOOL(changed);
}

static void
read_arguments(FunctionCallInfo fcinfo, Oid *role, int *kind, char **subscription)
{
	arg_required(fcinfo, 0, "role");
	*role = get_role_oid(NameStr(*PG_GETARG_NAME(0)), false);
	*kind = kind_from_name(arg_required_text(fcinfo, 1, "kind"));
	*subscription = arg_text(fcinfo, 2, "subscription");
	if (*subscription != NULL && *kind != CONSUMER)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("only a consumer's access can be for one subscription"),
				 errhint("Leave out the subscription, or pass kind 'consumer'.")));
}

static int
kind_from_name(const char *name)
{
	for (int i = 0; i < lengthof(kind_names); i++)
	{
		if (strcmp(kind_names[i], name) == 0)
			return 1 << i;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("unknown kind of access \"%s\"", name),
			 errhint("The kinds are producer, consumer, operator and reader.")));
}

static int
kinds_of(const char *name)
{
	for (int i = 0; i < lengthof(rules); i++)
	{
		if (strcmp(rules[i].name, name) == 0)
			return rules[i].kinds;
	}
	return 0;
}

/* ---- what there is, and what a role has of it ---- */

static const char list_text[] =
"SELECT 'SCHEMA', n.nspname::pg_catalog.text, 'outbox',"
"       EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) a"
"                WHERE a.grantee OPERATOR(pg_catalog.=) $2"
"                  AND a.privilege_type OPERATOR(pg_catalog.=) 'USAGE')"
"  FROM pg_catalog.pg_namespace n WHERE n.nspname OPERATOR(pg_catalog.=) 'outbox' "
"UNION ALL "
"SELECT 'ROUTINE', p.proname::pg_catalog.text, p.oid::pg_catalog.regprocedure::pg_catalog.text,"
"       EXISTS (SELECT FROM pg_catalog.aclexplode(p.proacl) a"
"                WHERE a.grantee OPERATOR(pg_catalog.=) $2)"
"  FROM pg_catalog.pg_depend d"
"  JOIN pg_catalog.pg_proc p ON p.oid OPERATOR(pg_catalog.=) d.objid"
" WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass"
"   AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass"
"   AND d.refobjid OPERATOR(pg_catalog.=) $1 AND d.deptype OPERATOR(pg_catalog.=) 'e' "
"UNION ALL "
"SELECT 'TABLE', c.relname::pg_catalog.text, c.oid::pg_catalog.regclass::pg_catalog.text,"
"       EXISTS (SELECT FROM pg_catalog.aclexplode(c.relacl) a"
"                WHERE a.grantee OPERATOR(pg_catalog.=) $2"
"                  AND (a.privilege_type OPERATOR(pg_catalog.=) 'INSERT'"
"                       OR c.relname OPERATOR(pg_catalog.<>) 'outgoing'))"
"  FROM pg_catalog.pg_depend d"
"  JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) d.objid"
" WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass"
"   AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass"
"   AND d.refobjid OPERATOR(pg_catalog.=) $1 AND d.deptype OPERATOR(pg_catalog.=) 'e'"
"   AND c.relkind OPERATOR(pg_catalog.=) 'v'";

static List *
list_objects(Oid role)
{
	Oid			types[2] = {OIDOID, OIDOID};
	Datum		values[2] = {ObjectIdGetDatum(outbox_extension()), ObjectIdGetDatum(role)};
	MemoryContext caller = CurrentMemoryContext;
	OwnerSession session;
	SPIPlanPtr	plan;
	List	   *objects = NIL;

	session_owner(&session);
	SPI_connect();
	plan = SPI_prepare(list_text, 2, types);
	/* what is granted now, as the rows of outbox.access are read: not as of the transaction's snapshot */
	if (plan == NULL ||
		SPI_execute_snapshot(plan, values, NULL, snapshot_push(), InvalidSnapshot,
							 true, false, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not list the objects of the extension");
	snapshot_pop();
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext spi = MemoryContextSwitchTo(caller);

		objects = lappend(objects, read_object(SPI_tuptable->vals[i], SPI_tuptable->tupdesc));
		MemoryContextSwitchTo(spi);
	}
	SPI_finish();
	session_caller(&session);
	return objects;
}

static AccessObject *
read_object(HeapTuple tuple, TupleDesc desc)
{
	AccessObject *object = palloc(sizeof(AccessObject));
	char	   *name = SPI_getvalue(tuple, desc, 2);
	bool		isnull;

	object->what = SPI_getvalue(tuple, desc, 1);
	object->identity = SPI_getvalue(tuple, desc, 3);
	object->granted = DatumGetBool(SPI_getbinval(tuple, desc, 4, &isnull));
	if (strcmp(object->what, "SCHEMA") == 0)
	{
		object->privileges = "USAGE";
		object->kinds = ANYBODY;
	}
	else
	{
		bool		view = strcmp(object->what, "TABLE") == 0;

		object->kinds = kinds_of(name);
		object->privileges = !view ? "EXECUTE" :
			object->kinds == PRODUCER ? "SELECT, INSERT" : "SELECT";
	}
	return object;
}

static List *
objects_to_grant(List *objects, int kind)
{
	List	   *missing = NIL;
	ListCell   *cell;

	foreach(cell, objects)
	{
		AccessObject *object = lfirst(cell);

		if ((object->kinds & kind) != 0 && !object->granted)
			missing = lappend(missing, object);
	}
	return missing;
}

static List *
objects_to_revoke(List *objects, int kind, int *kept)
{
	int			others = other_kinds_held(objects, kind);
	List	   *granted = NIL;
	ListCell   *cell;

	foreach(cell, objects)
	{
		AccessObject *object = lfirst(cell);

		if ((object->kinds & kind) == 0 || !object->granted)
			continue;
		if ((object->kinds & others) != 0)
			(*kept)++;
		else
			granted = lappend(granted, object);
	}
	return granted;
}

/* Something that no other kind includes. */
static bool
has_any_of(List *objects, int kind)
{
	ListCell   *cell;

	foreach(cell, objects)
	{
		AccessObject *object = lfirst(cell);

		if (object->kinds == kind && object->granted)
			return true;
	}
	return false;
}

/* The kinds of which a role has everything that is not in this kind too. */
static int
other_kinds_held(List *objects, int kind)
{
	int			held = 0;

	for (int other = PRODUCER; other <= READER; other <<= 1)
	{
		int			mine = 0;
		int			missing = 0;
		ListCell   *cell;

		foreach(cell, objects)
		{
			AccessObject *object = lfirst(cell);

			if ((object->kinds & other) == 0 || (object->kinds & kind) != 0)
				continue;
			mine++;
			missing += object->granted ? 0 : 1;
		}
		if (other != kind && mine > 0 && missing == 0)
			held |= other;
	}
	return held;
}

/* False where there is nothing to do. */
static bool
change_grants(const char *command, const char *direction, Oid role, List *objects)
{
	ListCell   *cell;

	foreach(cell, objects)
	{
		AccessObject *object = lfirst(cell);

		execute_as_owner(psprintf("%s %s ON %s %s %s %s", command, object->privileges,
								  object->what, object->identity, direction,
								  quote_identifier(GetUserNameFromId(role, false))));
	}
	return objects != NIL;
}

static void
execute_as_owner(const char *command)
{
	OwnerSession session;

	session_owner(&session);
	SPI_connect();
	if (SPI_execute(command, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not run \"%s\"", command);
	SPI_finish();
	session_caller(&session);
	CommandCounterIncrement();
}

/* ---- rows of outbox.access ---- */

/* $1 is the role, $2 the subscription; a text need not use both. */
static uint64
run_with_role(const char *text, Oid role, const char *subscription)
{
	Statement	statement;

	statement_init(&statement, text);
	bind(&statement, OIDOID, ObjectIdGetDatum(role), false);
	bind_text(&statement, subscription);
	return statement_run_guarded(&statement);
}

/* A row for all subscriptions takes the place of the others. */
static bool
allow_subscription(Oid role, const char *subscription)
{
	Statement	insert;

	if (run_with_role("SELECT FROM outbox.access a WHERE a.role_oid OPERATOR(pg_catalog.=) $1"
					  " AND (a.subscription IS NULL OR a.subscription OPERATOR(pg_catalog.=) $2)",
					  role, subscription) > 0)
		return false;
	if (subscription == NULL)
		(void) run_with_role(forget_role, role, NULL);
	/* of one that had the name and is gone: a restore would give them to this one */
	(void) run_with_role("DELETE FROM outbox.access a USING pg_catalog.pg_roles r"
						 " WHERE r.oid OPERATOR(pg_catalog.=) $1"
						 " AND a.role_name OPERATOR(pg_catalog.=) r.rolname"
						 " AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles o"
						 " WHERE o.oid OPERATOR(pg_catalog.=) a.role_oid)",
						 role, NULL);
	statement_init(&insert,
				   "INSERT INTO outbox.access (role_name, role_oid, subscription)"
				   " VALUES ($1, $2, $3)");
	bind_role(&insert, role);
	bind_text(&insert, subscription);
	(void) statement_run_guarded(&insert);
	return true;
}

static bool
forbid_subscription(Oid role, const char *subscription, bool *any_left)
{
	bool		changed;

	if (subscription != NULL &&
		run_with_role("SELECT FROM outbox.access a WHERE a.role_oid OPERATOR(pg_catalog.=) $1"
					  " AND a.subscription IS NULL",
					  role, NULL) > 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("role \"%s\" may use every subscription", GetUserNameFromId(role, false)),
				 errdetail("One of them cannot be taken away alone."),
				 errhint("Revoke without a subscription, then grant those that it shall keep.")));
	changed = run_with_role("DELETE FROM outbox.access a WHERE a.role_oid OPERATOR(pg_catalog.=) $1"
							" AND ($2 IS NULL OR a.subscription OPERATOR(pg_catalog.=) $2)",
							role, subscription) > 0;
	*any_left = run_with_role("SELECT FROM outbox.access a"
							  " WHERE a.role_oid OPERATOR(pg_catalog.=) $1",
							  role, NULL) > 0;
	return changed;
}
