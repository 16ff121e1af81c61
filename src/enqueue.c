/*
 * enqueue.c
 *		Messages into the log, in the caller's transaction.
 *
 * A message is one heap tuple, put in without SPI or executor as long as the indexes of
 * the segment are plain; nothing is kept open between calls, so that TRUNCATE, REINDEX
 * and DROP INDEX in the same session meet no open relation.  Nobody but this
 * transaction learns of it before the commit: no lock is taken that another producer
 * could wait for (but see dedupe.c).
 *
 * Order of steps: the segment is locked first, which also brings in invalidations; only
 * then the offset of positions is read, and the clock last.
 *
 * Locks: RowExclusiveLock on the segment, to the end of the transaction.
 */
#include "enqueue.h"

#include "catalog.h"
#include "counters.h"
#include "rows.h"
#include "worker.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/index.h"
#include "catalog/pg_am.h"
#include "executor/executor.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/jsonb.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

typedef struct LogWriter
{
	Relation	rel;
	int			n_indexes;
	Relation   *indexes;
	IndexInfo **infos;
	bool		plain;			/* indexes need no executor */
	Rows	   *rows;			/* otherwise */
	TupleTableSlot *slot;
} LogWriter;

static void writer_open(LogWriter *writer);
static void writer_insert(LogWriter *writer, NewMessage *message);
static void writer_close(LogWriter *writer);
static Relation open_segment(void);
static bool is_plain_table(Relation rel);
static bool is_plain(Relation index, IndexInfo *info);
static void insert_plain(LogWriter *writer, HeapTuple tuple);
static bool keep_out(NewMessage *message, pg_uuid_t *id);
static char *verified(char *setting);
static void default_traceparent(NewMessage *message);

static const char *const attributes[LOG_COLUMNS + 1] = {
	[LOG_ID] = "id",
	[LOG_OCCURRED_AT] = "occurred_at",
	[LOG_AVAILABLE_AT] = "available_at",
	[LOG_VERSION] = "version",
	[LOG_MAX_ATTEMPTS] = "max_attempts",
	[LOG_NAME] = "name",
	[LOG_KIND] = "kind",
	[LOG_PAYLOAD] = "payload",
	[LOG_HEADERS] = "headers",
	[LOG_CORRELATION_ID] = "correlation_id",
	[LOG_CAUSATION_ID] = "causation_id",
	[LOG_AGGREGATE_TYPE] = "aggregate_type",
	[LOG_AGGREGATE_ID] = "aggregate_id",
	[LOG_TENANT_ID] = "tenant_id",
	[LOG_OWNER_ID] = "owner_id",
	[LOG_DEDUPE_KEY] = "dedupe_key",
	[LOG_ORDERING_KEY] = "ordering_key",
};

/* all the others are set in each message */
static const LogColumn optional_columns[] = {
	LOG_AVAILABLE_AT, LOG_MAX_ATTEMPTS, LOG_HEADERS, LOG_CORRELATION_ID, LOG_CAUSATION_ID,
	LOG_AGGREGATE_TYPE, LOG_AGGREGATE_ID, LOG_TENANT_ID, LOG_OWNER_ID, LOG_DEDUPE_KEY,
	LOG_ORDERING_KEY
};

/* The caller's name of a column; NULL for those that are ours. */
const char *
message_attribute(LogColumn column)
{
	return attributes[column];
}

void
message_init(NewMessage *message)
{
	memset(message->nulls, true, sizeof(message->nulls));
	message->has_id = false;
}

const char *
json_type(Jsonb *json)
{
	JsonbValue	value;

	if (JB_ROOT_IS_SCALAR(json))
		JsonbExtractScalar(&json->root, &value);
	else
		JsonbToJsonbValue(json, &value);
	return JsonbTypeName(&value);
}

void
message_set(NewMessage *message, LogColumn column, Datum value)
{
	switch (column)
	{
		case LOG_ID:
			message->has_id = true;
			break;
		case LOG_OCCURRED_AT:
		case LOG_AVAILABLE_AT:
			check_finite(DatumGetTimestampTz(value), attributes[column],
						 "Leave it out, or pass NULL, for the time of the call.");
			break;
		case LOG_VERSION:
		case LOG_MAX_ATTEMPTS:
			if (DatumGetInt32(value) < 1)
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("%s must be positive", attributes[column]),
						 errdetail("It is %d.", DatumGetInt32(value)),
						 errhint("Leave it out, or pass NULL, for the default.")));
			break;
		case LOG_PAYLOAD:
			break;
		case LOG_HEADERS:
			if (!JB_ROOT_IS_OBJECT(DatumGetJsonbP(value)))
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("headers must be a JSON object"),
						 errdetail("It is of type %s.", json_type(DatumGetJsonbP(value))),
						 errhint("Pass an object, such as {\"key\": \"value\"}.")));
			break;
		default:
			{
				char	   *given = TextDatumGetCString(value);

				if (column == LOG_DEDUPE_KEY)
				{
					if (strlen(given) > OUTBOX_MAX_DEDUPE_KEY)
						ereport(ERROR,
								(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
								 errmsg("dedupe_key is too long"),
								 errdetail("It has %zu bytes; at most %d are allowed.",
										   strlen(given), OUTBOX_MAX_DEDUPE_KEY),
								 errhint("Use a shorter one, or a hash of it.")));
				}
				else if (column == LOG_NAME)
					check_required_text(given, attributes[column]);
				else
					check_text(given, attributes[column]);
				if (given[0] == '\0')
					return;		/* '' is NULL */
			}
	}
	MESSAGE_SET(message, column, value);
}

void
message_complete(NewMessage *message)
{
	if (!MESSAGE_HAS(message, LOG_NAME) || !MESSAGE_HAS(message, LOG_PAYLOAD))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", MESSAGE_HAS(message, LOG_NAME) ? "payload" : "name"),
				 errhint("A message needs a name and a payload; the JSON value null is a payload.")));

	if (!MESSAGE_HAS(message, LOG_KIND))
		MESSAGE_SET(message, LOG_KIND, CStringGetTextDatum("event"));
	if (!MESSAGE_HAS(message, LOG_VERSION))
		MESSAGE_SET(message, LOG_VERSION, Int32GetDatum(1));
	if (!MESSAGE_HAS(message, LOG_CAUSATION_ID) && outbox_causation[0] != '\0')
		message_set(message, LOG_CAUSATION_ID, CStringGetTextDatum(verified(outbox_causation)));
	if (outbox_traceparent[0] != '\0')
		default_traceparent(message);
}

/*
 * A setting that came when the connection was made, or from a file, is in no encoding that
 * anybody has checked; who is not a client of ours could not even read what is stored.
 */
static char *
verified(char *setting)
{
	(void) pg_verifymbstr(setting, strlen(setting), false);
	return setting;
}

/* headers.traceparent from the setting, unless the call gave one */
static void
default_traceparent(NewMessage *message)
{
	JsonbParseState *parse = NULL;
	JsonbValue	key = {.type = jbvString};
	JsonbValue	value = {.type = jbvString};
	JsonbValue *made;

	key.val.string.val = "traceparent";
	key.val.string.len = strlen("traceparent");
	value.val.string.val = verified(outbox_traceparent);
	value.val.string.len = strlen(outbox_traceparent);
	if (MESSAGE_HAS(message, LOG_HEADERS) &&
		findJsonbValueFromContainer(&DatumGetJsonbP(MESSAGE_GET(message, LOG_HEADERS))->root,
									JB_FOBJECT, &key) != NULL)
		return;

	pushJsonbValue(&parse, WJB_BEGIN_OBJECT, NULL);
	pushJsonbValue(&parse, WJB_KEY, &key);
	pushJsonbValue(&parse, WJB_VALUE, &value);
	made = pushJsonbValue(&parse, WJB_END_OBJECT, NULL);
	if (MESSAGE_HAS(message, LOG_HEADERS))
		MESSAGE_SET(message, LOG_HEADERS,
					DirectFunctionCall2(jsonb_concat, MESSAGE_GET(message, LOG_HEADERS),
										JsonbPGetDatum(JsonbValueToJsonb(made))));
	else
		MESSAGE_SET(message, LOG_HEADERS, JsonbPGetDatum(JsonbValueToJsonb(made)));
}

/*
 * Rotation may have moved on before we had the lock: look again.  What was told long ago is
 * heard before the lock is asked for: nobody waits for who is about to let a segment go.
 */
static Relation
open_segment(void)
{
	AcceptInvalidationMessages();
	for (;;)
	{
		Oid			segment = log_segment(segment_writing());
		Relation	rel = table_open(segment, RowExclusiveLock);

		if (segment == log_segment(segment_writing()))
			return rel;
		table_close(rel, RowExclusiveLock);
	}
}

/* Nobody has put anything on the table that looks at a row, as heap_insert() does not. */
static bool
is_plain_table(Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	bool		refuses = false;

	if (desc->natts != LOG_COLUMNS || rel->trigdesc != NULL || rel->rd_rel->relispartition ||
		desc->constr == NULL || desc->constr->num_check != 0)
		return false;
	for (int i = 0; i < lengthof(optional_columns); i++)
		refuses |= TupleDescAttr(desc, optional_columns[i] - 1)->attnotnull;
	return !refuses;
}

/*
 * An index that index_insert() can be called for without an executor: other kinds than
 * btree may keep something in the IndexInfo (brin does, since 17: buffer pins), which only
 * the executor lets go.
 */
static bool
is_plain(Relation index, IndexInfo *info)
{
	return info->ii_ReadyForInserts && info->ii_Expressions == NIL && info->ii_Predicate == NIL &&
		info->ii_ExclusionOps == NULL && index->rd_index->indimmediate &&
		index->rd_rel->relkind == RELKIND_INDEX && index->rd_rel->relam == BTREE_AM_OID;
}

static void
writer_open(LogWriter *writer)
{
	List	   *oids;
	ListCell   *cell;

	memset(writer, 0, sizeof(*writer));
	writer->rel = open_segment();
	(void) outbox_check_columns(OB_LOG_KEPT, writer->rel);
	oids = RelationGetIndexList(writer->rel);
	writer->indexes = palloc(list_length(oids) * sizeof(Relation));
	writer->infos = palloc(list_length(oids) * sizeof(IndexInfo *));
	writer->plain = is_plain_table(writer->rel);
	foreach(cell, oids)
	{
		int			n = writer->n_indexes++;

		writer->indexes[n] = index_open(lfirst_oid(cell), RowExclusiveLock);
		writer->infos[n] = BuildIndexInfo(writer->indexes[n]);
		writer->plain = writer->plain && is_plain(writer->indexes[n], writer->infos[n]);
	}
	writer->slot = MakeSingleTupleTableSlot(RelationGetDescr(writer->rel), &TTSOpsHeapTuple);
	if (!writer->plain)
		writer->rows = rows_open_segment(RelationGetRelid(writer->rel));
}

static void
insert_plain(LogWriter *writer, HeapTuple tuple)
{
	Datum		values[INDEX_MAX_KEYS];
	bool		nulls[INDEX_MAX_KEYS];

	heap_insert(writer->rel, tuple, GetCurrentCommandId(true), 0, NULL);
	ExecStoreHeapTuple(tuple, writer->slot, false);
	writer->slot->tts_tid = tuple->t_self;
	for (int i = 0; i < writer->n_indexes; i++)
	{
		FormIndexDatum(writer->infos[i], writer->slot, NULL, values, nulls);
		index_insert(writer->indexes[i], values, nulls, &tuple->t_self, writer->rel,
					 writer->indexes[i]->rd_index->indisunique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO,
					 false, writer->infos[i]);
	}
	ExecClearTuple(writer->slot);
}

/*
 * Users who put an expression index, a trigger or a constraint on the log get what they
 * would get from an INSERT.
 */
static void
writer_insert(LogWriter *writer, NewMessage *message)
{
	HeapTuple	tuple;

	if (!writer->plain)
	{
		rows_insert(writer->rows, message->values, message->nulls, NULL);
		return;
	}
	tuple = heap_form_tuple(RelationGetDescr(writer->rel), message->values, message->nulls);
	insert_plain(writer, tuple);
	heap_freetuple(tuple);
}

static void
writer_close(LogWriter *writer)
{
	if (!writer->plain)
		rows_close(writer->rows);
	ExecDropSingleTupleTableSlot(writer->slot);
	for (int i = 0; i < writer->n_indexes; i++)
		index_close(writer->indexes[i], RowExclusiveLock);
	table_close(writer->rel, NoLock);
}

/* true: a message with this dedupe key is in its window, *id is its id */
static bool
keep_out(NewMessage *message, pg_uuid_t *id)
{
	if (!MESSAGE_HAS(message, LOG_DEDUPE_KEY))
		return false;
	return dedupe_find_or_claim(TextDatumGetCString(MESSAGE_GET(message, LOG_NAME)),
								TextDatumGetCString(MESSAGE_GET(message, LOG_DEDUPE_KEY)), id);
}

void
enqueue_messages(NewMessage *messages, int n, pg_uuid_t *ids, int *at)
{
	LogWriter	writer;
	int64		offset;
	TimestampTz tick;
	int			written = 0;
	int			ignored;

	if (n == 0)
		return;
	if (at == NULL)
		at = &ignored;
	writer_open(&writer);
	offset = identity_offset_for_enqueue();
	tick = clock_tick(n);
	for (int i = 0; i < n; i++, tick++)
	{
		NewMessage *message = &messages[i];

		*at = i;
		if ((i & 1023) == 1023)
			CHECK_FOR_INTERRUPTS();
		if (message->has_id)
			ids[i] = *DatumGetUUIDP(MESSAGE_GET(message, LOG_ID));
		else
			uuid_v7(tick, &ids[i]);
		if (keep_out(message, &ids[i]))
			continue;
		MESSAGE_SET(message, LOG_ID, UUIDPGetDatum(&ids[i]));
		MESSAGE_SET(message, LOG_CREATED_AT, TimestampTzGetDatum(tick));
		if (!MESSAGE_HAS(message, LOG_OCCURRED_AT))
			MESSAGE_SET(message, LOG_OCCURRED_AT, TimestampTzGetDatum(tick));
		MESSAGE_SET(message, LOG_POSITION, Int64GetDatum(position_next(offset)));
		writer_insert(&writer, message);
		if (message->has_id)
			log_check_id(RelationGetRelid(writer.rel), &ids[i]);
		written++;
	}
	*at = NOT_AT_ONE;
	writer_close(&writer);
	counters_add(COUNTER_ENQUEUED, OF_DATABASE, written);
	wake_at_commit(WORK_ENQUEUED);
	/* what follows in the same statement shall see them, a claim of our own for instance */
	CommandCounterIncrement();
}
