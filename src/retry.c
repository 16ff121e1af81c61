/*
 * retry.c
 *		When a failed message is tried again, and how its error is kept.
 */
#include "claim.h"

#include "common/pg_prng.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_backoff);

/* bytes kept of each part of an error */
#define ERROR_TEXT_MAX 8192

static void add_text(JsonbParseState **state, const char *key, const char *value);

/* min(backoff_max, backoff_base × 2^(attempt − 1)) */
int64
backoff_usecs(int attempt)
{
	int64		delay = MSECS(outbox_backoff_base);
	int64		longest = MSECS(outbox_backoff_max);

	for (int i = 1; i < attempt && delay < longest; i++)
		delay *= 2;
	return Min(delay, longest);
}

/* The handler's own delays come before the setting; jitter spreads both. */
TimestampTz
retry_time(TimestampTz now, int attempt, const Handler *handler)
{
	int64		delay;

	if (handler != NULL && handler->n_retry > 0)
		delay = handler->retry[Min(Max(attempt, 1), handler->n_retry) - 1];
	else
		delay = backoff_usecs(attempt);
	delay += (int64) ((double) delay * outbox_jitter * pg_prng_double(&pg_global_prng_state));
	return now + delay;
}

/* outbox.backoff(attempt) → seconds, without jitter */
Datum
outbox_backoff(PG_FUNCTION_ARGS)
{
	int			attempt;

	arg_required(fcinfo, 0, "attempt");
	attempt = PG_GETARG_INT32(0);
	if (attempt < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("attempt must be positive"),
				 errdetail("It is %d.", attempt),
				 errhint("The first attempt is number 1.")));
	PG_RETURN_FLOAT8((double) backoff_usecs(attempt) / USECS_PER_SEC);
}

static void
add_text(JsonbParseState **state, const char *key, const char *value)
{
	JsonbValue	part = {.type = jbvString};

	if (value == NULL)
		return;
	part.val.string.val = unconstify(char *, key);
	part.val.string.len = strlen(key);
	pushJsonbValue(state, WJB_KEY, &part);
	part.val.string.val = unconstify(char *, value);
	part.val.string.len = pg_mbcliplen(value, strlen(value), ERROR_TEXT_MAX);
	pushJsonbValue(state, WJB_VALUE, &part);
}

Jsonb *
error_record(const char *sqlstate, const char *message, const char *detail,
			 const char *hint, const char *context, Jsonb *data)
{
	JsonbParseState *state = NULL;

	pushJsonbValue(&state, WJB_BEGIN_OBJECT, NULL);
	add_text(&state, "sqlstate", sqlstate);
	add_text(&state, "message", message);
	add_text(&state, "detail", detail);
	add_text(&state, "hint", hint);
	add_text(&state, "context", context);
	if (data != NULL)
	{
		JsonbValue	part = {.type = jbvString};

		part.val.string.val = "data";
		part.val.string.len = strlen("data");
		pushJsonbValue(&state, WJB_KEY, &part);
		JsonbToJsonbValue(data, &part);
		if (part.type == jbvBinary && JsonContainerIsScalar(part.val.binary.data))
			JsonbExtractScalar(&data->root, &part);
		pushJsonbValue(&state, WJB_VALUE, &part);
	}
	return JsonbValueToJsonb(pushJsonbValue(&state, WJB_END_OBJECT, NULL));
}
