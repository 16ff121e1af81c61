/*
 * catalog.c
 *		OIDs of the extension and of its tables, and the locks that hang on them.
 *
 * OIDs are looked up by name and cached until a relcache message names one of them (or
 * all): so DROP EXTENSION and CREATE EXTENSION in one session, REINDEX CONCURRENTLY and
 * the like need nothing else.  The extension is asked for by name before its tables: a
 * schema may exist without it.
 */
#include "catalog.h"

#include "segment.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#define OUTBOX_SCHEMA "outbox"

/* Sub-object numbers of our locks on the extension: no column, no other object has them. */
#define ROUTING_LOCK_SUBID	0x4F42
#define PRESENCE_LOCK_SUBID	0x4F43

static const char *const object_names[OUTBOX_OBJECTS] = {
	[OB_LOG_0] = "log_0",
	[OB_LOG_1] = "log_1",
	[OB_LOG_2] = "log_2",
	[OB_LOG_KEPT] = "log_kept",
	[OB_SEGMENT] = "segment",
	[OB_IDENTITY] = "identity",
	[OB_FRONTIER] = "frontier",
	[OB_SUBSCRIPTION] = "subscription",
	[OB_HANDLER] = "handler",
	[OB_DELIVERY] = "delivery",
	[OB_SELF_ROUTED] = "self_routed",
	[OB_DEDUPE] = "dedupe",
	[OB_ACCESS] = "access",
	[OB_FRONTIER_PKEY] = "frontier_pkey",
	[OB_SELF_ROUTED_PKEY] = "self_routed_pkey",
	[OB_SUBSCRIPTION_PKEY] = "subscription_pkey",
	[OB_SUBSCRIPTION_NAME_KEY] = "subscription_name_key",
	[OB_DELIVERY_PKEY] = "delivery_pkey",
	[OB_DELIVERY_READY_IDX] = "delivery_ready_idx",
	[OB_DELIVERY_TOKEN_IDX] = "delivery_token_idx",
	[OB_DELIVERY_LEASE_IDX] = "delivery_lease_idx",
	[OB_DELIVERY_DEAD_IDX] = "delivery_dead_idx",
	[OB_DELIVERY_UNHANDLED_IDX] = "delivery_unhandled_idx",
	[OB_DELIVERY_ID_SEQ] = "delivery_id_seq",
	[OB_MESSAGE_TYPE] = "message",
	[OB_CLAIMED_MESSAGE_TYPE] = "claimed_message",
};

/*
 * The columns that the install script makes: the type of each, a capital where it is
 * NOT NULL; and the last name.  Segments of the log are all like log_kept.
 */
static const struct
{
	const char *types;
	const char *last;
}			table_columns[] = {
	[OB_LOG_KEPT] = {"LUZZzIiTTJjtttttttt", "ordering_key"},
	[OB_SEGMENT] = {"IBzlllll", "sweep_from"},
	[OB_IDENTITY] = {"BLOLZB", "in_use"},
	[OB_FRONTIER] = {"LLALLLOZZ", "newest"},
	[OB_SUBSCRIPTION] = {"LTTtTBvviZ", "created_at"},
	[OB_HANDLER] = {"LLTtittBNOTviwzZ", "created_at"},
	[OB_DELIVERY] = {"LLLLZIIIBTMuzzzzltj", "last_error"},
	[OB_SELF_ROUTED] = {"LLL", "upper"},
	[OB_ACCESS] = {"LNOt", "subscription"},
};

static const Oid column_types[] = {
	['a'] = INT8ARRAYOID, ['b'] = BOOLOID, ['i'] = INT4OID, ['j'] = JSONBOID, ['l'] = INT8OID,
	['m'] = INT8MULTIRANGEOID, ['n'] = NAMEOID, ['o'] = OIDOID, ['t'] = TEXTOID, ['u'] = UUIDOID,
	['v'] = INTERVALOID, ['w'] = INTERVALARRAYOID, ['z'] = TIMESTAMPTZOID,
};

static Oid	extension_oid = InvalidOid;
static Oid	object_oids[OUTBOX_OBJECTS];
static TupleDesc row_types[OUTBOX_OBJECTS];

static void forget(Datum argument, Oid relation);
static Oid	look_up_extension(void);
static bool is_column(Form_pg_attribute column, char type);
static void refuse_table(Relation rel, int count, const char *last);
static void subscription_locktag(LOCKTAG *tag, int64 subscription_id);

void
catalog_register_callbacks(void)
{
	CacheRegisterRelcacheCallback(forget, (Datum) 0);
}

static void
forget(Datum argument, Oid relation)
{
	bool		ours = (relation == InvalidOid);

	for (int i = 0; i < OUTBOX_OBJECTS && !ours; i++)
		ours = (object_oids[i] == relation);
	if (!ours)
		return;

	extension_oid = InvalidOid;
	memset(object_oids, 0, sizeof(object_oids));
	identity_forget();
	segment_forget();
}

/*
 * With one of its tables: only a message about one of them makes us forget it again, see
 * forget().  Messages come in while we look, so what is kept is what did not change.
 */
static Oid
look_up_extension(void)
{
	Oid			extension = extension_oid;
	Oid			identity;

	while (!OidIsValid(extension_oid))
	{
		extension = get_extension_oid("outbox", true);
		if (!OidIsValid(extension))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("extension \"outbox\" does not exist in this database"),
					 errhint("Run CREATE EXTENSION outbox.")));
		identity = get_relname_relid(object_names[OB_IDENTITY], get_namespace_oid(OUTBOX_SCHEMA, true));
		if (!OidIsValid(identity))
			break;				/* half restored: nothing is kept */
		if (extension != get_extension_oid("outbox", true))
			continue;
		object_oids[OB_IDENTITY] = identity;
		extension_oid = extension;
	}
	return extension;
}

Oid
outbox_extension(void)
{
	return look_up_extension();
}

/*
 * That of the row which makes a table a member: no REASSIGN OWNED, ALTER EXTENSION UPDATE or
 * ALTER TABLE writes that one anew, as they do with the extension's own row.
 */
int64
outbox_extension_transaction(void)
{
	Relation	rel = table_open(DependRelationId, AccessShareLock);
	int64		transaction = 0;
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&keys[0], Anum_pg_depend_classid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(RelationRelationId));
	ScanKeyInit(&keys[1], Anum_pg_depend_objid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(outbox_oid(OB_LOG_0)));
	scan = systable_beginscan(rel, DependDependerIndexId, true, NULL, 2, keys);
	while ((tuple = systable_getnext(scan)) != NULL)
	{
		/* a frozen one may be of any epoch */
		if (((Form_pg_depend) GETSTRUCT(tuple))->deptype == DEPENDENCY_EXTENSION &&
			!HeapTupleHeaderXminFrozen(tuple->t_data))
			transaction = full_transaction(HeapTupleHeaderGetRawXmin(tuple->t_data));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return transaction;
}

Oid
outbox_oid(OutboxObject object)
{
	Oid			found = object_oids[object];

	if (OidIsValid(found))
		return found;

	(void) look_up_extension();
	found = get_relname_relid(object_names[object], get_namespace_oid(OUTBOX_SCHEMA, false));
	if (!OidIsValid(found))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation \"%s.%s\" does not exist", OUTBOX_SCHEMA, object_names[object]),
				 errdetail("It is part of the extension."),
				 errhint("Restore it, or create the extension again.")));
	object_oids[object] = found;
	return found;
}

/*
 * Whoever reads or writes a table by the numbers of its columns asks first: of a table
 * that somebody altered, or that is older than the library, he would take one for another.
 * A column that was added and dropped stays behind in the descriptor.
 */
int
outbox_check_columns(OutboxObject table, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	const char *types = table_columns[table].types;
	int			count = strlen(types);
	bool		same = (desc->natts >= count);

	for (int i = 0; same && i < desc->natts; i++)
		same = (i < count) ? is_column(TupleDescAttr(desc, i), types[i]) : TupleDescAttr(desc, i)->attisdropped;
	if (!same || strcmp(NameStr(TupleDescAttr(desc, count - 1)->attname), table_columns[table].last) != 0)
		refuse_table(rel, count, table_columns[table].last);
	return count;
}

/* What somebody made NOT NULL that was not is his, and does no harm. */
static bool
is_column(Form_pg_attribute column, char type)
{
	bool		not_null = (type >= 'A' && type <= 'Z');

	return !column->attisdropped && column->atttypid == column_types[not_null ? type - 'A' + 'a' : type] &&
		(column->attnotnull || !not_null);
}

static void
refuse_table(Relation rel, int count, const char *last)
{
	TupleDesc	desc = RelationGetDescr(rel);
	int			dropped = 0;

	for (int i = 0; i < desc->natts; i++)
		dropped += TupleDescAttr(desc, i)->attisdropped;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"outbox.%s\" was altered", RelationGetRelationName(rel)),
			 desc->natts - dropped == count ?
			 errdetail("Its columns have other types, names or places, or may be NULL.") :
			 errdetail("It has %d columns; the extension made %d, the last one \"%s\".",
					   desc->natts - dropped, count, last),
			 errhint("Drop the columns that were added, and keep your own in a table beside it."
					 " After an upgrade of the library, run ALTER EXTENSION outbox UPDATE.")));
}

/* The tables' owner: as REASSIGN OWNED leaves it. */
Oid
outbox_owner(void)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(outbox_oid(OB_DELIVERY)));
	Oid			owner;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", outbox_oid(OB_DELIVERY));
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

/* Row types cannot be altered while they are members of the extension and in use. */
TupleDesc
outbox_row_type(OutboxObject type)
{
	Oid			type_oid = get_rel_type_id(outbox_oid(type));

	if (row_types[type] == NULL || row_types[type]->tdtypeid != type_oid)
	{
		TupleDesc	desc = lookup_rowtype_tupdesc_copy(type_oid, -1);
		MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);

		row_types[type] = BlessTupleDesc(CreateTupleDescCopy(desc));
		row_types[type]->tdtypeid = type_oid;
		MemoryContextSwitchTo(caller);
	}
	return row_types[type];
}

void
routing_locktag(LOCKTAG *tag)
{
	SET_LOCKTAG_OBJECT(*tag, MyDatabaseId, ExtensionRelationId, outbox_extension(),
					   ROUTING_LOCK_SUBID);
}

void
presence_locktag(LOCKTAG *tag, Oid extension)
{
	SET_LOCKTAG_OBJECT(*tag, MyDatabaseId, ExtensionRelationId, extension, PRESENCE_LOCK_SUBID);
}

void
subscription_lock(int64 subscription_id, LOCKMODE mode)
{
	LOCKTAG		tag;

	subscription_locktag(&tag, subscription_id);
	(void) LockAcquire(&tag, mode, false, false);
}

bool
subscription_lock_if_free(int64 subscription_id, LOCKMODE mode)
{
	LOCKTAG		tag;

	subscription_locktag(&tag, subscription_id);
	return LockAcquire(&tag, mode, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

static void
subscription_locktag(LOCKTAG *tag, int64 subscription_id)
{
	SET_LOCKTAG_OBJECT(*tag, MyDatabaseId, outbox_oid(OB_SUBSCRIPTION), (uint32) subscription_id, 0);
}
