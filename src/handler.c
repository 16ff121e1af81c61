/*
 * handler.c
 *		Reading handlers, and choosing the one for a message.
 *
 * A function is stored as text and looked up when it is called, in PostgreSQL's own
 * cache: so it may be replaced, dropped and made again, and a dump carries its name.
 *
 * Locks: none for reading.
 */
#include "subscription.h"

#include "catalog.h"
#include "statement.h"

#include "access/htup_details.h"
#include "access/skey.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

/* columns of outbox.handler, in order */
enum
{
	HANDLER_ID = 1,
	HANDLER_SUBSCRIPTION_ID,
	HANDLER_NAME_PATTERN,
	HANDLER_KIND,
	HANDLER_VERSION,
	HANDLER_FUNCTION,
	HANDLER_CHANNEL,
	HANDLER_INCLUDE_DATA,
	HANDLER_ROLE_NAME,
	HANDLER_ROLE_OID,
	HANDLER_SEARCH_PATH,
	HANDLER_TIMEOUT,
	HANDLER_MAX_ATTEMPTS,
	HANDLER_RETRY,
	HANDLER_BROKEN_SINCE,
	HANDLER_CREATED_AT
};

static Handler *read_row(TupleTableSlot *slot);
static void read_retry(Handler *handler, Datum retry);
static char *get_text(TupleTableSlot *slot, AttrNumber column);
static int64 get_number(TupleTableSlot *slot, AttrNumber column, int64 missing);
static int64 interval_length(const Interval *interval);
static int	compare_cells(const ListCell *a, const ListCell *b);

void
subscription_handlers(Subscription *subscription, Snapshot snapshot)
{
	Relation	rel = table_open(outbox_oid(OB_HANDLER), AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TableScanDesc scan;
	ScanKeyData key;

	(void) outbox_check_columns(OB_HANDLER, rel);
	snapshot = snapshot_after_lock(snapshot);
	ScanKeyInit(&key, HANDLER_SUBSCRIPTION_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(subscription->id));
	scan = table_beginscan(rel, snapshot, 1, &key);
	subscription->handlers = NIL;
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
		subscription->handlers = lappend(subscription->handlers, read_row(slot));
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, AccessShareLock);
	list_sort(subscription->handlers, compare_cells);
}

static Handler *
read_row(TupleTableSlot *slot)
{
	Handler    *handler = palloc0(sizeof(Handler));
	bool		isnull;
	Datum		value;

	handler->id = get_number(slot, HANDLER_ID, 0);
	handler->subscription_id = get_number(slot, HANDLER_SUBSCRIPTION_ID, 0);
	handler->name_pattern = get_text(slot, HANDLER_NAME_PATTERN);
	handler->kind = get_text(slot, HANDLER_KIND);
	handler->version = get_number(slot, HANDLER_VERSION, -1);
	handler->function = get_text(slot, HANDLER_FUNCTION);
	handler->channel = get_text(slot, HANDLER_CHANNEL);
	handler->include_data = DatumGetBool(slot_getattr(slot, HANDLER_INCLUDE_DATA, &isnull));
	handler->role = DatumGetObjectId(slot_getattr(slot, HANDLER_ROLE_OID, &isnull));
	handler->search_path = get_text(slot, HANDLER_SEARCH_PATH);
	value = slot_getattr(slot, HANDLER_TIMEOUT, &isnull);
	handler->own_timeout = isnull ? 0 : interval_length(DatumGetIntervalP(value));
	handler->timeout = handler->own_timeout ? handler->own_timeout : MSECS(outbox_hook_timeout);
	handler->max_attempts = get_number(slot, HANDLER_MAX_ATTEMPTS, 0);
	value = slot_getattr(slot, HANDLER_RETRY, &isnull);
	if (!isnull)
		read_retry(handler, value);
	slot_getattr(slot, HANDLER_BROKEN_SINCE, &isnull);
	handler->broken = !isnull;
	return handler;
}

static void
read_retry(Handler *handler, Datum retry)
{
	Datum	   *delays;

	deconstruct_array(DatumGetArrayTypeP(retry), INTERVALOID, sizeof(Interval), false,
					  TYPALIGN_DOUBLE, &delays, NULL, &handler->n_retry);
	handler->retry = palloc(handler->n_retry * sizeof(int64));
	for (int i = 0; i < handler->n_retry; i++)
		handler->retry[i] = interval_length(DatumGetIntervalP(delays[i]));
}

static char *
get_text(TupleTableSlot *slot, AttrNumber column)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, column, &isnull);

	return isnull ? NULL : TextDatumGetCString(value);
}

/* int4 and int8 alike */
static int64
get_number(TupleTableSlot *slot, AttrNumber column, int64 missing)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, column, &isnull);

	if (isnull)
		return missing;
	if (TupleDescAttr(slot->tts_tupleDescriptor, column - 1)->atttypid == INT4OID)
		return DatumGetInt32(value);
	return DatumGetInt64(value);
}

/* Only registrations write intervals, without months. */
static int64
interval_length(const Interval *interval)
{
	return interval->day * USECS_PER_DAY + interval->time;
}

/*
 * Version given; exact name; more literal words; longer text; kind given; text order.
 * Two handlers that are equal in all of them differ in kind or version, and never match
 * the same message.
 */
int
handler_compare(const Handler *a, const Handler *b)
{
	const char *first = a->name_pattern;
	const char *second = b->name_pattern;

	if ((a->version >= 0) != (b->version >= 0))
		return (b->version >= 0) ? 1 : -1;
	if (topic_is_exact(first) != topic_is_exact(second))
		return topic_is_exact(second) ? 1 : -1;
	if (topic_literal_words(first) != topic_literal_words(second))
		return topic_literal_words(second) - topic_literal_words(first);
	if (strlen(first) != strlen(second))
		return strlen(second) > strlen(first) ? 1 : -1;
	if ((a->kind != NULL) != (b->kind != NULL))
		return (b->kind != NULL) ? 1 : -1;
	return strcmp(first, second);
}

static int
compare_cells(const ListCell *a, const ListCell *b)
{
	return handler_compare(lfirst(a), lfirst(b));
}

/* The list is in order of preference. */
Handler *
handler_match(const Subscription *subscription, const char *name, const char *kind, int version)
{
	ListCell   *cell;

	foreach(cell, subscription->handlers)
	{
		Handler    *handler = lfirst(cell);

		if ((handler->version < 0 || handler->version == version) &&
			(handler->kind == NULL || strcmp(handler->kind, kind) == 0) &&
			topic_matches(handler->name_pattern, name))
			return handler;
	}
	return NULL;
}

Oid
handler_function(const Handler *handler)
{
	Oid			message = outbox_row_type(OB_MESSAGE_TYPE)->tdtypeid;
	List	   *names;
	const char *why;
	Oid			namespace;
	Oid			found;

	/* Registrations write a schema and a name; who else may have written, wrote what? */
	if (!SplitIdentifierString(pstrdup(handler->function), '.', &names) || list_length(names) != 2)
		return InvalidOid;
	namespace = get_namespace_oid(linitial(names), true);
	if (!OidIsValid(namespace))
		return InvalidOid;
	found = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid, CStringGetDatum(lsecond(names)),
							PointerGetDatum(buildoidvector(&message, 1)),
							ObjectIdGetDatum(namespace));
	return OidIsValid(found) && hook_is_fit(found, &why) ? found : InvalidOid;
}

bool
hook_is_fit(Oid function, const char **why)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc form;

	*why = NULL;
	if (!HeapTupleIsValid(tuple))
		return false;
	form = (Form_pg_proc) GETSTRUCT(tuple);
	if (form->pronargs != 1 ||
		form->proargtypes.values[0] != outbox_row_type(OB_MESSAGE_TYPE)->tdtypeid)
		*why = "It must take exactly one argument, of type outbox.message.";
	else if (form->prokind == PROKIND_PROCEDURE)
		*why = "It is a procedure: those may end the transaction that settles their message.";
	else if (form->prokind == PROKIND_AGGREGATE)
		*why = "It is an aggregate.";
	else if (form->prokind == PROKIND_WINDOW)
		*why = "It is a window function.";
	else if (form->proretset)
		*why = "It returns a set.";
	else if (isAnyTempNamespace(form->pronamespace))
		*why = "It is temporary: nobody but this session can call it.";
	ReleaseSysCache(tuple);
	return *why == NULL;
}

bool
handler_mark(const Handler *handler, bool broken)
{
	Statement	mark;

	statement_init(&mark,
				   "UPDATE outbox.handler AS h SET broken_since = CASE WHEN $2 THEN $3 END"
				   " FROM (SELECT l.id FROM outbox.handler l"
				   "        WHERE l.id OPERATOR(pg_catalog.=) $1"
				   "          AND (l.broken_since IS NULL) OPERATOR(pg_catalog.=) $2"
				   "        FOR NO KEY UPDATE SKIP LOCKED) free"
				   " WHERE h.id OPERATOR(pg_catalog.=) free.id");
	bind_int8(&mark, handler->id);
	bind_bool(&mark, broken);
	bind_time(&mark, clock_now());
	return statement_run_guarded(&mark) == 1;
}
