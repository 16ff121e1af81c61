/*
 * enqueue_sql.c
 *		outbox.enqueue(), the two forms of enqueue_batch(), the view outbox.outgoing and
 *		outbox.enqueued(): the ways into enqueue.c.
 */
#include "enqueue.h"

#include "catalog.h"
#include "route.h"
#include "subscription.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/numeric.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_enqueue);
PG_FUNCTION_INFO_V1(outbox_enqueue_batch);
PG_FUNCTION_INFO_V1(outbox_enqueue_payloads);
PG_FUNCTION_INFO_V1(outbox_outgoing_insert);
PG_FUNCTION_INFO_V1(outbox_enqueued);

#define BATCH_MAX 1000			/* messages kept in memory at once */

/* where we are in an array, for errors */
typedef struct BatchPlace
{
	int			before;			/* elements before those that are gathered */
	int			at;				/* which one of these it is about, or NOT_AT_ONE */
} BatchPlace;

static void set_from_json(NewMessage *message, LogColumn column, JsonbValue *value);
static Datum whole_number(LogColumn column, Numeric number);
static Datum scalar_from_json(LogColumn column, const char *text);
static void message_from_json(NewMessage *message, JsonbValue *object);
static LogColumn column_of_attribute(const char *name, int length);
static void return_ids(ReturnSetInfo *rsinfo, const pg_uuid_t *ids, int n);
static Jsonb *array_argument(FunctionCallInfo fcinfo, int n, const char *name);
static void batch_error_context(void *arg);

/* the arguments of enqueue() in their order */
static const LogColumn enqueue_arguments[] = {
	LOG_NAME, LOG_PAYLOAD, LOG_KIND, LOG_VERSION, LOG_ID, LOG_AVAILABLE_AT, LOG_MAX_ATTEMPTS,
	LOG_HEADERS, LOG_CORRELATION_ID, LOG_CAUSATION_ID, LOG_AGGREGATE_TYPE, LOG_AGGREGATE_ID,
	LOG_TENANT_ID, LOG_OWNER_ID, LOG_DEDUPE_KEY, LOG_OCCURRED_AT, LOG_ORDERING_KEY
};

Datum
outbox_enqueue(PG_FUNCTION_ARGS)
{
	NewMessage	message;
	pg_uuid_t  *id = palloc(sizeof(pg_uuid_t));

	session_begin("outbox.enqueue()");
	message_init(&message);
	for (int i = 0; i < lengthof(enqueue_arguments); i++)
	{
		if (!PG_ARGISNULL(i))
			message_set(&message, enqueue_arguments[i], PG_GETARG_DATUM(i));
	}
	message_complete(&message);
	enqueue_messages(&message, 1, id, NULL);
	PG_RETURN_UUID_P(id);
}

static LogColumn
column_of_attribute(const char *name, int length)
{
	for (int column = 1; column <= LOG_COLUMNS; column++)
	{
		const char *attribute = message_attribute(column);

		if (attribute != NULL && strlen(attribute) == length && memcmp(attribute, name, length) == 0)
			return column;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("unknown key \"%.*s\" in a message", length, name),
			 errhint("The keys are the names of the arguments of outbox.enqueue().")));
}

static Datum
scalar_from_json(LogColumn column, const char *text)
{
	switch (column)
	{
		case LOG_ID:
			return DirectFunctionCall1(uuid_in, CStringGetDatum(text));
		case LOG_VERSION:
		case LOG_MAX_ATTEMPTS:
			return DirectFunctionCall1(int4in, CStringGetDatum(text));
		case LOG_AVAILABLE_AT:
		case LOG_OCCURRED_AT:
			return DirectFunctionCall3(timestamptz_in, CStringGetDatum(text),
									   ObjectIdGetDatum(InvalidOid), Int32GetDatum(-1));
		default:
			return CStringGetTextDatum(text);
	}
}

/* A cast would round. */
static Datum
whole_number(LogColumn column, Numeric number)
{
	Datum		given = NumericGetDatum(number);
	Datum		whole = DirectFunctionCall2(numeric_trunc, given, Int32GetDatum(0));

	if (!DatumGetBool(DirectFunctionCall2(numeric_eq, given, whole)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a whole number", message_attribute(column)),
				 errdetail("It is %s.", DatumGetCString(DirectFunctionCall1(numeric_out, given))),
				 errhint("Leave it out, or pass null, for the default.")));
	return DirectFunctionCall1(numeric_int4, given);
}

static void
set_from_json(NewMessage *message, LogColumn column, JsonbValue *value)
{
	bool		number = (column == LOG_VERSION || column == LOG_MAX_ATTEMPTS);

	if (column == LOG_PAYLOAD)
	{
		message_set(message, column, JsonbPGetDatum(JsonbValueToJsonb(value)));
		return;
	}
	if (value->type == jbvNull)
		return;
	if (column == LOG_HEADERS)
	{
		message_set(message, column, JsonbPGetDatum(JsonbValueToJsonb(value)));
		return;
	}
	if (value->type == jbvString)
		message_set(message, column,
					scalar_from_json(column, pnstrdup(value->val.string.val, value->val.string.len)));
	else if (value->type == jbvNumeric && number)
		message_set(message, column, whole_number(column, value->val.numeric));
	else
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a JSON %s", message_attribute(column), number ? "number" : "string"),
				 errdetail("It is of type %s.", JsonbTypeName(value)),
				 errhint("The keys and their types are those of the arguments of outbox.enqueue().")));
}

static void
message_from_json(NewMessage *message, JsonbValue *object)
{
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	LogColumn	column = LOG_NAME;

	if (object->type != jbvBinary || !JsonContainerIsObject(object->val.binary.data))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a message must be a JSON object"),
				 errdetail("It is of type %s.", JsonbTypeName(object)),
				 errhint("To enqueue payloads of one name, call outbox.enqueue_batch(name, payloads).")));

	message_init(message);
	it = JsonbIteratorInit(object->val.binary.data);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
			column = column_of_attribute(value.val.string.val, value.val.string.len);
		else if (token == WJB_VALUE)
			set_from_json(message, column, &value);
	}
	message_complete(message);
}

static Jsonb *
array_argument(FunctionCallInfo fcinfo, int n, const char *name)
{
	Jsonb	   *array;

	arg_required(fcinfo, n, name);
	array = PG_GETARG_JSONB_P(n);
	if (!JB_ROOT_IS_ARRAY(array) || JB_ROOT_IS_SCALAR(array))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a JSON array", name),
				 errdetail("It is of type %s.", json_type(array)),
				 errhint("To enqueue one message, call outbox.enqueue(name, payload).")));
	return array;
}

static void
return_ids(ReturnSetInfo *rsinfo, const pg_uuid_t *ids, int n)
{
	for (int i = 0; i < n; i++)
	{
		Datum		value = UUIDPGetDatum(&ids[i]);
		bool		isnull = false;

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &value, &isnull);
	}
}

static void
batch_error_context(void *arg)
{
	BatchPlace *place = arg;

	if (place->at != NOT_AT_ONE)
		errcontext("element %d of the array, counted from 1", place->before + place->at + 1);
}

/*
 * Walk over an array in bites, so that memory does not grow with it.  With a name the
 * elements are payloads, without one they are messages.
 */
static void
enqueue_array(FunctionCallInfo fcinfo, Jsonb *array, char *name)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox batch",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = CurrentMemoryContext;
	NewMessage *messages = palloc(BATCH_MAX * sizeof(NewMessage));
	pg_uuid_t  *ids = palloc(BATCH_MAX * sizeof(pg_uuid_t));
	JsonbIterator *it = JsonbIteratorInit(&array->root);
	JsonbValue	value;
	JsonbIteratorToken token;
	ErrorContextCallback error_context;
	BatchPlace	place = {0, NOT_AT_ONE};
	int			n = 0;

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	error_context.callback = batch_error_context;
	error_context.arg = &place;
	error_context.previous = error_context_stack;
	error_context_stack = &error_context;

	(void) JsonbIteratorNext(&it, &value, true);
	while ((token = JsonbIteratorNext(&it, &value, true)) == WJB_ELEM)
	{
		place.at = n;
		MemoryContextSwitchTo(context);
		if (name != NULL)
		{
			message_init(&messages[n]);
			message_set(&messages[n], LOG_NAME, CStringGetTextDatum(name));
			message_set(&messages[n], LOG_PAYLOAD, JsonbPGetDatum(JsonbValueToJsonb(&value)));
			message_complete(&messages[n]);
		}
		else
			message_from_json(&messages[n], &value);
		place.at = NOT_AT_ONE;
		if (++n == BATCH_MAX)
		{
			enqueue_messages(messages, n, ids, &place.at);
			return_ids((ReturnSetInfo *) fcinfo->resultinfo, ids, n);
			MemoryContextSwitchTo(caller);
			MemoryContextReset(context);
			place.before += n;
			n = 0;
		}
		MemoryContextSwitchTo(caller);
	}
	enqueue_messages(messages, n, ids, &place.at);
	return_ids((ReturnSetInfo *) fcinfo->resultinfo, ids, n);
	error_context_stack = error_context.previous;
	MemoryContextDelete(context);
}

Datum
outbox_enqueue_batch(PG_FUNCTION_ARGS)
{
	session_begin("outbox.enqueue_batch()");
	enqueue_array(fcinfo, array_argument(fcinfo, 0, "messages"), NULL);
	return (Datum) 0;
}

Datum
outbox_enqueue_payloads(PG_FUNCTION_ARGS)
{
	char	   *name;

	session_begin("outbox.enqueue_batch()");
	name = arg_required_text(fcinfo, 0, "name");
	enqueue_array(fcinfo, array_argument(fcinfo, 1, "payloads"), name);
	return (Datum) 0;
}

/* INSTEAD OF INSERT on outbox.outgoing, whose columns are the arguments of enqueue(). */
Datum
outbox_outgoing_insert(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	TupleDesc	desc;
	HeapTuple	tuple;
	NewMessage	message;
	pg_uuid_t	id;
	Datum		values[lengthof(enqueue_arguments)];
	bool		nulls[lengthof(enqueue_arguments)];

	if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_INSTEAD(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("this function is the trigger of the view outbox.outgoing")));
	session_begin("INSERT INTO outbox.outgoing");
	desc = RelationGetDescr(trigger->tg_relation);
	tuple = trigger->tg_trigtuple;
	if (desc->natts != lengthof(enqueue_arguments) ||
		strcmp(RelationGetRelationName(trigger->tg_relation), "outgoing") != 0 ||
		RelationGetNamespace(trigger->tg_relation) != get_namespace_oid("outbox", false))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("this function is the trigger of the view outbox.outgoing")));
	heap_deform_tuple(tuple, desc, values, nulls);

	message_init(&message);
	for (int i = 0; i < lengthof(enqueue_arguments); i++)
	{
		if (!nulls[i])
			message_set(&message, enqueue_arguments[i], values[i]);
	}
	message_complete(&message);
	enqueue_messages(&message, 1, &id, NULL);

	/* RETURNING shows what was stored, the id of the first message for a duplicate key */
	MESSAGE_SET(&message, LOG_ID, UUIDPGetDatum(&id));
	for (int i = 0; i < lengthof(enqueue_arguments); i++)
	{
		values[i] = MESSAGE_GET(&message, enqueue_arguments[i]);
		nulls[i] = !MESSAGE_HAS(&message, enqueue_arguments[i]);
	}
	return PointerGetDatum(heap_form_tuple(desc, values, nulls));
}

/* What this transaction has enqueued so far and not rolled back. */
Datum
outbox_enqueued(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	char	   *pattern = arg_text(fcinfo, 0, "pattern");
	int64		count = position_own_count();
	LogReader  *reader;
	TupleTableSlot *slot;
	MemoryContext each;
	MemoryContext caller;
	int64		first;

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	if (pattern != NULL)
		topic_check(pattern);
	if (count == 0)
		return (Datum) 0;

	first = position_of_transaction((int64) U64FromFullTransactionId(GetTopFullTransactionId()) +
									identity_offset_for_enqueue());
	reader = log_open(snapshot_push());
	log_range(reader, first, first + count);
	each = AllocSetContextCreate(CurrentMemoryContext, "outbox enqueued", ALLOCSET_DEFAULT_SIZES);
	caller = MemoryContextSwitchTo(each);
	while ((slot = log_next(reader)) != NULL)
	{
		bool		isnull;
		char	   *name;
		HeapTupleData tuple;
		HeapTupleHeader header;

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(each);
		name = TextDatumGetCString(slot_getattr(slot, LOG_NAME, &isnull));
		if (pattern != NULL && !topic_matches(pattern, name))
			continue;
		header = DatumGetHeapTupleHeader(log_message(slot, NULL, 0, 0));
		tuple.t_len = HeapTupleHeaderGetDatumLength(header);
		tuple.t_data = header;
		ItemPointerSetInvalid(&tuple.t_self);
		tuple.t_tableOid = InvalidOid;
		tuplestore_puttuple(rsinfo->setResult, &tuple);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	log_close(reader);
	snapshot_pop();
	return (Datum) 0;
}
