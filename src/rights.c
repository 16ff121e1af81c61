/*
 * rights.c
 *		What a role may do, where the privileges of the caller do not say it: which
 *		subscriptions it may consume, and whether workers deliver to it.
 *
 * A consumer can be limited to subscriptions by rows of outbox.access.  A role without a
 * row, its own or one of a role whose privileges it has, may consume all of them.  A row
 * without a subscription says so of a role that has got other rows by membership.
 *
 * A delivery worker does for a role what that could do itself with drain(), and has to
 * ask for the right to it: it calls no SQL function, so nobody else asks.
 *
 * Locks: none.
 */
#include "subscription.h"

#include "catalog.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_proc.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* columns of outbox.access, in order */
enum
{
	ACCESS_ID = 1,
	ACCESS_ROLE_NAME,
	ACCESS_ROLE_OID,
	ACCESS_SUBSCRIPTION
};

static void refuse_consumer(const char *subscription);
static bool may_call(Oid role, const char *name);

void
access_check_consumer(const char *subscription)
{
	if (!role_may_consume(GetUserId(), subscription))
		refuse_consumer(subscription);
}

bool
role_may_consume(Oid user, const char *subscription)
{
	Relation	rel;
	TupleTableSlot *slot;
	TableScanDesc scan;
	bool		limited = false;
	bool		allowed = false;

	if (superuser_arg(user) || user == outbox_owner())
		return true;

	rel = table_open(outbox_oid(OB_ACCESS), AccessShareLock);
	(void) outbox_check_columns(OB_ACCESS, rel);
	slot = table_slot_create(rel, NULL);
	scan = table_beginscan(rel, snapshot_push(), 0, NULL);
	while (!allowed && table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		bool		isnull;
		Oid			role = DatumGetObjectId(slot_getattr(slot, ACCESS_ROLE_OID, &isnull));
		Datum		name = slot_getattr(slot, ACCESS_SUBSCRIPTION, &isnull);

		if (!has_privs_of_role(user, role))
			continue;
		limited = true;
		allowed = isnull ||
			(subscription != NULL && strcmp(TextDatumGetCString(name), subscription) == 0);
	}
	table_endscan(scan);
	snapshot_pop();
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, AccessShareLock);

	return !limited || allowed;
}

static void
refuse_consumer(const char *subscription)
{
	char	   *user = GetUserNameFromId(GetUserId(), false);

	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for subscription \"%s\"", subscription),
			 errdetail("Role \"%s\" may use other subscriptions only.", user),
			 errhint("An administrator can run SELECT outbox.grant_access(%s, 'consumer', %s).",
					 quote_literal_cstr(user), quote_literal_cstr(subscription))));
}

/* One of the functions of that name is enough. */
static bool
may_call(Oid role, const char *name)
{
	Oid			schema = get_namespace_oid("outbox", true);
	CatCList   *list = SearchSysCacheList1(PROCNAMEARGSNSP, CStringGetDatum(name));
	bool		may = false;

	for (int i = 0; i < list->n_members && !may; i++)
	{
		Form_pg_proc function = (Form_pg_proc) GETSTRUCT(&list->members[i]->tuple);

		may = function->pronamespace == schema &&
			outbox_function_aclcheck(function->oid, role) == ACLCHECK_OK;
	}
	ReleaseSysCacheList(list);
	return may;
}

bool
role_may_drain(Oid role)
{
	return may_call(role, "drain");
}

/*
 * An operator may call drain() too.  Handlers of one who is no consumer any more would
 * get all subscriptions: his limits went with his access.
 */
bool
role_may_have_handlers(Oid role)
{
	return may_call(role, "register_hook") || may_call(role, "register_notify");
}

/*
 * Who owns the tables can write rows for any role, whatever the trigger says, and gets
 * code of his own run by who writes them.  A worker lends a role only to who has its
 * privileges already.
 */
bool
role_trusts_owner(Oid role)
{
	return superuser_arg(outbox_owner()) || has_privs_of_role(outbox_owner(), role);
}

bool
role_may_be_served(Oid role, const char **why)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(role));
	bool		can_login;

	if (!HeapTupleIsValid(tuple))
	{
		*why = "The role was dropped.";
		return false;
	}
	can_login = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);
	if (!can_login)
		*why = "The role is not permitted to log in.";
	else if (!DatumGetBool(OidFunctionCall3(F_HAS_DATABASE_PRIVILEGE_OID_OID_TEXT, ObjectIdGetDatum(role),
											ObjectIdGetDatum(MyDatabaseId), CStringGetTextDatum("CONNECT"))))
		*why = "The role has no privilege to connect to the database.";
	else if (!role_may_drain(role))
		*why = "The role has no privilege to call outbox.drain().";
	else if (!role_may_have_handlers(role))
		*why = "The role has no privilege to register handlers.";
	else if (!role_trusts_owner(role))
		*why = "The owner of the extension's tables has not the privileges of the role, and is no superuser.";
	else
		return true;
	return false;
}
