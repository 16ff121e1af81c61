/*
 * envelope.c
 *		A message as CloudEvent 1.0, in the structured JSON form.
 *
 * Attributes of the specification:
 *
 *	 specversion      "1.0"
 *	 id               id
 *	 source           the header "source", else "/outbox/" and the database's name
 *	 type             name
 *	 subject          aggregate_type/aggregate_id, or the one of them that there is
 *	 time             occurred_at, in UTC
 *	 datacontenttype  "application/json"
 *	 data             payload
 *
 * Extension attributes, left out where they have no value:
 *
 *	 kind, dataversion (version), correlationid, causationid, tenantid, ownerid,
 *	 partitionkey (ordering_key)
 *
 *	 each header whose name is a valid attribute name, one to twenty lower-case letters
 *	 or digits, and whose value is a string, an integer or a boolean: so traceparent and
 *	 tracestate, dataschema, or whatever an application agrees on.  A header never
 *	 replaces an attribute of the lists above, except source.
 *
 *	 datatruncated    true: the envelope was too long for NOTIFY and goes without data;
 *	                  outbox.get(id) has it
 *
 * NOTIFY takes at most 7999 bytes.  A longer envelope goes without its data; if it is
 * still too long, because of its headers, with the attributes that must be there only.
 * These always fit: names are bounded, and so is a source in that case.
 *
 * The two row types have these columns under the same names, at other places: columns
 * are found by name.  Locks: none.
 */
#include "deliver.h"

#include "access/htup_details.h"
#include "commands/async.h"
#include "commands/dbcommands.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#define NOTIFY_MAX_BYTES		7999
#define MAX_ATTRIBUTE_NAME		20
/* bytes that an envelope has room for however they are escaped */
#define MAX_MINIMAL_SOURCE		1000

typedef enum Column
{
	COL_ID,
	COL_NAME,
	COL_KIND,
	COL_VERSION,
	COL_PAYLOAD,
	COL_HEADERS,
	COL_CORRELATION_ID,
	COL_CAUSATION_ID,
	COL_AGGREGATE_TYPE,
	COL_AGGREGATE_ID,
	COL_TENANT_ID,
	COL_OWNER_ID,
	COL_ORDERING_KEY,
	COL_OCCURRED_AT,
	COLUMNS
} Column;

static const char *const column_names[COLUMNS] = {
	[COL_ID] = "id",
	[COL_NAME] = "name",
	[COL_KIND] = "kind",
	[COL_VERSION] = "version",
	[COL_PAYLOAD] = "payload",
	[COL_HEADERS] = "headers",
	[COL_CORRELATION_ID] = "correlation_id",
	[COL_CAUSATION_ID] = "causation_id",
	[COL_AGGREGATE_TYPE] = "aggregate_type",
	[COL_AGGREGATE_ID] = "aggregate_id",
	[COL_TENANT_ID] = "tenant_id",
	[COL_OWNER_ID] = "owner_id",
	[COL_ORDERING_KEY] = "ordering_key",
	[COL_OCCURRED_AT] = "occurred_at",
};

/* What a header cannot set. */
static const char *const reserved[] = {
	"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "data",
	"data_base64", "kind", "dataversion", "correlationid", "causationid", "tenantid", "ownerid",
	"partitionkey", "datatruncated"
};

typedef enum Form
{
	FORM_FULL,
	FORM_WITHOUT_DATA,			/* nobody asked for it */
	FORM_TRUNCATED,				/* it does not fit */
	FORM_MINIMAL				/* not even that fits */
} Form;

typedef struct Fields
{
	Datum		values[COLUMNS];
	bool		nulls[COLUMNS];
} Fields;

PG_FUNCTION_INFO_V1(outbox_cloudevent);

static void read_fields(HeapTupleHeader row, Fields *fields);
static void require(const Fields *fields, Column column, const char *attribute);
static Jsonb *build(const Fields *fields, Form form);
static void add_optional(JsonbParseState **state, const Fields *fields);
static void add_headers(JsonbParseState **state, Jsonb *headers);
static void add_data(JsonbParseState **state, Jsonb *payload);
static void push_key(JsonbParseState **state, const char *key);
static void push_text(JsonbParseState **state, const char *key, const char *value);
static void push_column(JsonbParseState **state, const char *key, const Fields *fields,
						Column column);
static char *source(const Fields *fields, Form form);
static char *subject(const Fields *fields);
static char *rfc3339(TimestampTz time);
static bool is_attribute_name(const JsonbValue *name);
static bool is_attribute_value(const JsonbValue *value);

Datum
outbox_cloudevent(PG_FUNCTION_ARGS)
{
	PG_RETURN_JSONB_P(envelope_make(PG_GETARG_DATUM(0), true));
}

Jsonb *
envelope_make(Datum message, bool with_data)
{
	Fields		fields;

	read_fields(DatumGetHeapTupleHeader(message), &fields);
	return build(&fields, with_data ? FORM_FULL : FORM_WITHOUT_DATA);
}

char *
envelope_notification(Datum message, bool with_data)
{
	Fields		fields;
	char	   *text;

	read_fields(DatumGetHeapTupleHeader(message), &fields);
	for (Form form = with_data ? FORM_FULL : FORM_WITHOUT_DATA;;)
	{
		Jsonb	   *envelope = build(&fields, form);

		text = JsonbToCString(NULL, &envelope->root, VARSIZE(envelope));
		if (strlen(text) <= NOTIFY_MAX_BYTES || form == FORM_MINIMAL)
			return text;
		form = (form == FORM_FULL) ? FORM_TRUNCATED : FORM_MINIMAL;
	}
}

static void
read_fields(HeapTupleHeader row, Fields *fields)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(row),
											  HeapTupleHeaderGetTypMod(row));
	Datum	   *values = palloc(desc->natts * sizeof(Datum));
	bool	   *nulls = palloc(desc->natts * sizeof(bool));
	HeapTupleData tuple;

	tuple.t_len = HeapTupleHeaderGetDatumLength(row);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = row;
	heap_deform_tuple(&tuple, desc, values, nulls);

	memset(fields->nulls, true, sizeof(fields->nulls));
	for (int i = 0; i < desc->natts; i++)
	{
		for (int column = 0; column < COLUMNS; column++)
		{
			if (strcmp(NameStr(TupleDescAttr(desc, i)->attname), column_names[column]) == 0)
			{
				fields->values[column] = values[i];
				fields->nulls[column] = nulls[i];
			}
		}
	}
	ReleaseTupleDesc(desc);
	require(fields, COL_ID, "id");
	require(fields, COL_NAME, "type");
}

/* Only a row that somebody made himself has none. */
static void
require(const Fields *fields, Column column, const char *attribute)
{
	if (fields->nulls[column])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("the message has no %s", column_names[column]),
				 errdetail("A CloudEvent must have the attribute \"%s\".", attribute),
				 errhint("Pass a row of outbox.claim_batch(), or the argument of a hook.")));
}

static Jsonb *
build(const Fields *fields, Form form)
{
	JsonbParseState *state = NULL;
	JsonbValue	truth = {.type = jbvBool};

	pushJsonbValue(&state, WJB_BEGIN_OBJECT, NULL);
	push_text(&state, "specversion", "1.0");
	push_text(&state, "id", DatumGetCString(DirectFunctionCall1(uuid_out, fields->values[COL_ID])));
	push_text(&state, "source", source(fields, form));
	push_column(&state, "type", fields, COL_NAME);
	if (form != FORM_MINIMAL)
		add_optional(&state, fields);
	if (form == FORM_FULL && !fields->nulls[COL_PAYLOAD])
		add_data(&state, DatumGetJsonbP(fields->values[COL_PAYLOAD]));
	if (form == FORM_TRUNCATED || form == FORM_MINIMAL)
	{
		truth.val.boolean = true;
		push_key(&state, "datatruncated");
		pushJsonbValue(&state, WJB_VALUE, &truth);
	}
	return JsonbValueToJsonb(pushJsonbValue(&state, WJB_END_OBJECT, NULL));
}

static void
add_optional(JsonbParseState **state, const Fields *fields)
{
	char	   *about = subject(fields);
	char	   *time = fields->nulls[COL_OCCURRED_AT] ? NULL :
		rfc3339(DatumGetTimestampTz(fields->values[COL_OCCURRED_AT]));

	if (about != NULL)
		push_text(state, "subject", about);
	if (time != NULL)
		push_text(state, "time", time);
	push_column(state, "kind", fields, COL_KIND);
	if (!fields->nulls[COL_VERSION])
	{
		JsonbValue	version = {.type = jbvNumeric};

		version.val.numeric = int64_to_numeric(DatumGetInt32(fields->values[COL_VERSION]));
		push_key(state, "dataversion");
		pushJsonbValue(state, WJB_VALUE, &version);
	}
	push_column(state, "correlationid", fields, COL_CORRELATION_ID);
	push_column(state, "causationid", fields, COL_CAUSATION_ID);
	push_column(state, "tenantid", fields, COL_TENANT_ID);
	push_column(state, "ownerid", fields, COL_OWNER_ID);
	push_column(state, "partitionkey", fields, COL_ORDERING_KEY);
	if (!fields->nulls[COL_HEADERS])
		add_headers(state, DatumGetJsonbP(fields->values[COL_HEADERS]));
}

static void
add_headers(JsonbParseState **state, Jsonb *headers)
{
	JsonbIterator *iterator = JsonbIteratorInit(&headers->root);
	JsonbValue	name;
	JsonbValue	value;

	if (!JB_ROOT_IS_OBJECT(headers))
		return;
	(void) JsonbIteratorNext(&iterator, &name, true);
	while (JsonbIteratorNext(&iterator, &name, true) == WJB_KEY)
	{
		(void) JsonbIteratorNext(&iterator, &value, true);
		if (is_attribute_name(&name) && is_attribute_value(&value))
		{
			pushJsonbValue(state, WJB_KEY, &name);
			pushJsonbValue(state, WJB_VALUE, &value);
		}
	}
}

static void
add_data(JsonbParseState **state, Jsonb *payload)
{
	JsonbValue	data = {.type = jbvBinary};

	push_text(state, "datacontenttype", "application/json");
	data.val.binary.data = &payload->root;
	data.val.binary.len = VARSIZE(payload) - VARHDRSZ;
	push_key(state, "data");
	pushJsonbValue(state, WJB_VALUE, &data);
}

static void
push_key(JsonbParseState **state, const char *key)
{
	JsonbValue	name = {.type = jbvString};

	name.val.string.val = unconstify(char *, key);
	name.val.string.len = strlen(key);
	pushJsonbValue(state, WJB_KEY, &name);
}

static void
push_text(JsonbParseState **state, const char *key, const char *value)
{
	JsonbValue	text = {.type = jbvString};

	push_key(state, key);
	text.val.string.val = unconstify(char *, value);
	text.val.string.len = strlen(value);
	pushJsonbValue(state, WJB_VALUE, &text);
}

static void
push_column(JsonbParseState **state, const char *key, const Fields *fields, Column column)
{
	if (!fields->nulls[column])
		push_text(state, key, TextDatumGetCString(fields->values[column]));
}

/* A URI reference: what is not allowed in one is escaped in the name of the database. */
static char *
source(const Fields *fields, Form form)
{
	StringInfoData uri;

	if (!fields->nulls[COL_HEADERS])
	{
		Jsonb	   *headers = DatumGetJsonbP(fields->values[COL_HEADERS]);
		JsonbValue *given = JB_ROOT_IS_OBJECT(headers) ?
			getKeyJsonValueFromContainer(&headers->root, "source", 6, NULL) : NULL;

		if (given != NULL && given->type == jbvString && given->val.string.len > 0 &&
			(form != FORM_MINIMAL || given->val.string.len <= MAX_MINIMAL_SOURCE))
			return pnstrdup(given->val.string.val, given->val.string.len);
	}

	initStringInfo(&uri);
	appendStringInfoString(&uri, "/outbox/");
	for (const char *c = get_database_name(MyDatabaseId); *c != '\0'; c++)
	{
		if (!IS_HIGHBIT_SET(*c) && (isalnum((unsigned char) *c) || strchr("-._~", *c) != NULL))
			appendStringInfoChar(&uri, *c);
		else
			appendStringInfo(&uri, "%%%02X", (unsigned char) *c);
	}
	return uri.data;
}

static char *
subject(const Fields *fields)
{
	char	   *type = fields->nulls[COL_AGGREGATE_TYPE] ? NULL :
		TextDatumGetCString(fields->values[COL_AGGREGATE_TYPE]);
	char	   *id = fields->nulls[COL_AGGREGATE_ID] ? NULL :
		TextDatumGetCString(fields->values[COL_AGGREGATE_ID]);

	if (type != NULL && id != NULL)
		return psprintf("%s/%s", type, id);
	return type != NULL ? type : id;
}

/* NULL for what RFC 3339 cannot write: its years have four digits. */
static char *
rfc3339(TimestampTz time)
{
	struct pg_tm tm;
	fsec_t		fsec;
	char		text[MAXDATELEN + 1];

	if (TIMESTAMP_NOT_FINITE(time) ||
		timestamp2tm(time, NULL, &tm, &fsec, NULL, NULL) != 0 ||
		tm.tm_year < 1 || tm.tm_year > 9999)
		return NULL;
	EncodeDateTime(&tm, fsec, false, 0, NULL, USE_XSD_DATES, text);
	return psprintf("%sZ", text);
}

static bool
is_attribute_name(const JsonbValue *name)
{
	int			length = name->val.string.len;

	if (length < 1 || length > MAX_ATTRIBUTE_NAME)
		return false;
	for (int i = 0; i < length; i++)
	{
		char		c = name->val.string.val[i];

		if (!(c >= 'a' && c <= 'z') && !(c >= '0' && c <= '9'))
			return false;
	}
	for (int i = 0; i < lengthof(reserved); i++)
	{
		if (strlen(reserved[i]) == length && memcmp(reserved[i], name->val.string.val, length) == 0)
			return false;
	}
	return true;
}

/* CloudEvents knows no other numbers than integers of 32 bits. */
static bool
is_attribute_value(const JsonbValue *value)
{
	char	   *number;
	char	   *end;
	long long	whole;

	if (value->type != jbvNumeric)
		return value->type == jbvString || value->type == jbvBool;
	number = DatumGetCString(DirectFunctionCall1(numeric_out, NumericGetDatum(value->val.numeric)));
	whole = strtoll(number, &end, 10);
	return *end == '\0' && strlen(number) <= 11 && whole >= PG_INT32_MIN && whole <= PG_INT32_MAX;
}
