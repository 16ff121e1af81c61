/*
 * settle.c
 *		settle(), settle_batch(), renew(), renew_batch(): what a consumer says about the
 *		messages that it claimed.
 *
 * One error for everything that is not held (any more): OB003, so that clients branch on
 * one code.  Nothing the caller passes is believed but the id and the token.
 *
 * Locks: the subscription's, shared, and the rows of the token, to the end of the
 * transaction, see lease.c.
 */
#include "claim.h"

#include "catalog.h"
#include "counters.h"
#include "log.h"
#include "route.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(outbox_settle);
PG_FUNCTION_INFO_V1(outbox_settle_batch);
PG_FUNCTION_INFO_V1(outbox_renew);
PG_FUNCTION_INFO_V1(outbox_renew_batch);

/* bytes of error_detail, as jsonb */
#define ERROR_DETAIL_MAX (16 * 1024)

static void parse_settlement(FunctionCallInfo fcinfo, int first, Settlement *settlement);
static Outcome parse_outcome(const char *name);
static bool is_empty(ArrayType *ids);
static int64 *positions_of_ids(ArrayType *ids, int *n);
static Lease *hold(Lease *lease);
pg_noreturn static void refuse(const Lease *lease, const pg_uuid_t *id);
static void count_refused(const Lease *lease);
pg_noreturn static void refuse_all(const Lease *lease);
static pg_uuid_t *token_argument(FunctionCallInfo fcinfo, int n);
static int64 message_argument(FunctionCallInfo fcinfo, int n, const pg_uuid_t *token);
static TimestampTz renew_runs(Lease *lease, const int *named, int64 duration);

static Outcome
parse_outcome(const char *name)
{
	static const char *const names[] = {
		[OUTCOME_DELIVERED] = "delivered",
		[OUTCOME_FAILED] = "failed",
		[OUTCOME_DEAD] = "dead",
		[OUTCOME_RELEASED] = "released",
	};

	for (int i = 0; i < (int) lengthof(names); i++)
	{
		if (strcmp(names[i], name) == 0)
			return i;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("unknown outcome \"%s\"", name),
			 errhint("The outcomes are delivered, failed, dead and released.")));
}

/* outcome, error, error_detail, retry_at: four arguments from "first" */
static void
parse_settlement(FunctionCallInfo fcinfo, int first, Settlement *settlement)
{
	char	   *message = NULL;
	Jsonb	   *detail = NULL;

	memset(settlement, 0, sizeof(*settlement));
	if (!PG_ARGISNULL(first))
		settlement->outcome = parse_outcome(text_to_cstring(PG_GETARG_TEXT_PP(first)));
	if (!PG_ARGISNULL(first + 1))
		message = text_to_cstring(PG_GETARG_TEXT_PP(first + 1));
	if (!PG_ARGISNULL(first + 2))
	{
		detail = PG_GETARG_JSONB_P(first + 2);
		/* it is written again with each transition of the message */
		if (VARSIZE(detail) > ERROR_DETAIL_MAX)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("error_detail is too long"),
					 errdetail("It has %zu bytes; at most %d are allowed.",
							   (size_t) VARSIZE(detail), ERROR_DETAIL_MAX),
					 errhint("Keep the details elsewhere, and pass a reference to them.")));
	}
	if (!PG_ARGISNULL(first + 3))
	{
		settlement->has_retry_at = true;
		settlement->retry_at = PG_GETARG_TIMESTAMPTZ(first + 3);
		check_finite(settlement->retry_at, "retry_at", "To give up on a message, settle it as dead.");
	}

	if (settlement->has_retry_at &&
		(settlement->outcome == OUTCOME_DELIVERED || settlement->outcome == OUTCOME_DEAD))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retry_at has no meaning for a message that is not tried again"),
				 errhint("Settle it as failed or released.")));
	if (settlement->outcome == OUTCOME_DELIVERED && (message != NULL || detail != NULL))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a delivered message has no error"),
				 errhint("Settle it as failed, dead or released.")));
	if (message != NULL || detail != NULL)
		settlement->error = error_record(NULL, message, NULL, NULL, NULL, detail);
	else if (settlement->outcome == OUTCOME_FAILED || settlement->outcome == OUTCOME_DEAD)
		settlement->error = error_record(NULL, "no error was given", NULL, NULL, NULL, NULL);
}

static bool
is_empty(ArrayType *ids)
{
	return ArrayGetNItems(ARR_NDIM(ids), ARR_DIMS(ids)) == 0;
}

/* Ascending; unknown ids are left out. */
static int64 *
positions_of_ids(ArrayType *ids, int *n)
{
	LogReader  *reader = log_open(snapshot_push());
	Datum	   *values;
	bool	   *nulls;
	int			n_ids;
	int64	   *positions;

	deconstruct_array(ids, UUIDOID, UUID_LEN, false, TYPALIGN_CHAR, &values, &nulls, &n_ids);
	if (n_ids > OUTBOX_MAX_BATCH)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many ids"),
				 errdetail("There are %d; a claim has at most %d messages.", n_ids, OUTBOX_MAX_BATCH),
				 errhint("Pass NULL for the whole batch.")));
	positions = palloc(Max(n_ids, 1) * sizeof(int64));
	*n = 0;
	for (int i = 0; i < n_ids; i++)
	{
		TupleTableSlot *slot;

		CHECK_FOR_INTERRUPTS();
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("ids must not contain nulls"),
					 errhint("Leave them out of the array, or pass NULL for the whole batch.")));
		slot = log_find(reader, DatumGetUUIDP(values[i]));
		if (slot != NULL)
			positions[(*n)++] = log_position(slot);
	}
	log_close(reader);
	snapshot_pop();
	qsort(positions, *n, sizeof(int64), compare_int64);
	return positions;
}

/*
 * The lease of a token.  Where the caller may not consume the subscription the rows are
 * none of its business, whatever token it has.
 */
static Lease *
hold(Lease *lease)
{
	if (lease->n == 0)
		refuse(lease, NULL);
	access_check_consumer(lease->subscription->name);
	frontier_check();
	return lease;
}

/* Where nothing is found under the token, nobody knows whose it was: the database's. */
static void
count_refused(const Lease *lease)
{
	counters_add_now(COUNTER_SETTLEMENT_REFUSED,
					 lease->n > 0 ? lease->subscription->id :
					 lease->late > 0 ? lease->late_subscription : OF_DATABASE, 1);
}

/* "id" is the message that the lease, which holds others, does not hold; or NULL */
static void
refuse(const Lease *lease, const pg_uuid_t *id)
{
	const char *hint = "Do not act on the result: another consumer has, or will get, the message.";

	count_refused(lease);
	if (id != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUTBOX_CLAIM_NOT_HELD),
				 errmsg("claim not held"),
				 errdetail("The claim with this token does not hold message %s: it was settled,"
						   " or belongs to another claim.",
						   DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id)))),
				 errhint("%s", hint)));
	if (lease->late > 0)
		ereport(ERROR,
				(errcode(ERRCODE_OUTBOX_CLAIM_NOT_HELD),
				 errmsg("claim not held"),
				 errdetail("Its lease ended at %s.", timestamptz_to_str(lease->late_until)),
				 errhint("%s Claim with a longer lease, or renew it in time.", hint)));
	ereport(ERROR,
			(errcode(ERRCODE_OUTBOX_CLAIM_NOT_HELD),
			 errmsg("claim not held"),
			 errdetail("Nothing is held under this token: it was settled or has run out,"
					   " or it never was the token of a claim."),
			 errhint("%s", hint)));
}

static void
refuse_all(const Lease *lease)
{
	count_refused(lease);
	ereport(ERROR,
			(errcode(ERRCODE_OUTBOX_CLAIM_NOT_HELD),
			 errmsg("claim not held"),
			 errdetail("The claim with this token holds none of these messages."),
			 errhint("Do not act on the result: another consumer has, or will get, the messages.")));
}

static pg_uuid_t *
token_argument(FunctionCallInfo fcinfo, int n)
{
	arg_required(fcinfo, n, "claim_token");
	return PG_GETARG_UUID_P(n);
}

/* the position of a message that exists, or did when it was claimed under the token */
static int64
message_argument(FunctionCallInfo fcinfo, int n, const pg_uuid_t *token)
{
	pg_uuid_t  *id;
	int64		position;

	arg_required(fcinfo, n, "id");
	id = PG_GETARG_UUID_P(n);
	position = recent_position(id, token);
	if (position < 0)
		position = log_position_of(id);
	if (position < 0)
		ereport(ERROR,
				(errcode(ERRCODE_OUTBOX_UNKNOWN_MESSAGE),
				 errmsg("unknown message"),
				 errdetail("No message has the id %s.",
						   DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id)))),
				 errhint("Its transaction may not be committed, or its retention has passed.")));
	return position;
}

/*
 * outbox.settle(id, claim_token, outcome, error, error_detail, retry_at) → new status
 */
Datum
outbox_settle(PG_FUNCTION_ARGS)
{
	TimestampTz asked_at = clock_now();
	Settlement	settlement;
	pg_uuid_t  *token;
	int64		position;
	Lease	   *lease;
	Run		   *settled;
	const char *status;

	session_begin("outbox.settle()");
	parse_settlement(fcinfo, 2, &settlement);
	token = token_argument(fcinfo, 1);
	position = message_argument(fcinfo, 0, token);

	lease = hold(lease_lock_one(runs_open(), token, asked_at, position));
	snapshot_push();
	settled = lease_settle(lease, position, &settlement);
	if (settled == NULL)
		refuse(lease, PG_GETARG_UUID_P(0));
	snapshot_pop();
	runs_close(lease->store);

	status = run_state_name(settled->state);
	if (settled->state == RUN_READY && settled->available_at > clock_now())
		status = "scheduled";
	PG_RETURN_TEXT_P(cstring_to_text(status));
}

/*
 * outbox.settle_batch(claim_token, outcome, error, error_detail, retry_at, ids) → count
 */
Datum
outbox_settle_batch(PG_FUNCTION_ARGS)
{
	TimestampTz asked_at = clock_now();
	Settlement	settlement;
	pg_uuid_t  *token;
	int64	   *positions = NULL;
	int			n = 0;
	Lease	   *lease;
	int64		settled;

	session_begin("outbox.settle_batch()");
	parse_settlement(fcinfo, 1, &settlement);
	token = token_argument(fcinfo, 0);
	if (!PG_ARGISNULL(5))
	{
		ArrayType  *ids = PG_GETARG_ARRAYTYPE_P(5);

		if (is_empty(ids))
			PG_RETURN_INT32(0);
		positions = positions_of_ids(ids, &n);
	}

	lease = hold(lease_lock(runs_open(), token, asked_at));
	snapshot_push();
	if (positions == NULL)
		settled = lease_settle_all(lease, &settlement);
	else
		settled = lease_settle_some(lease, positions, n, &settlement);
	snapshot_pop();
	runs_close(lease->store);
	if (settled == 0)
		refuse_all(lease);
	PG_RETURN_INT32((int32) settled);
}

/*
 * Extend what the token holds: from now, but not beyond the active time since the claim
 * or its last progress, whichever run of the token remembers it.  "named" counts the
 * messages of each run that the caller named (NULL: all of everything); the neighbours
 * of those are extended with them, but never get less than they were promised.
 */
static TimestampTz
renew_runs(Lease *lease, const int *named, int64 duration)
{
	TimestampTz active_until = DT_NOBEGIN;
	TimestampTz locked_until;
	TimestampTz earliest = DT_NOEND;

	for (int i = 0; i < lease->n; i++)
		active_until = Max(active_until, lease->runs[i]->active_until);
	locked_until = clock_now() + duration;
	locked_until = Min(locked_until, active_until);

	snapshot_push();
	for (int i = 0; i < lease->n; i++)
	{
		Run		   *run = lease->runs[i];
		TimestampTz until = locked_until;

		CHECK_FOR_INTERRUPTS();
		if (named != NULL && named[i] == 0)
			continue;
		if (named != NULL && named[i] < run->message_count)
			until = Max(until, run->locked_until);
		run_renew(lease->store, run, until, active_until);
		earliest = Min(earliest, until);
	}
	snapshot_pop();
	runs_close(lease->store);
	return earliest;
}

/*
 * outbox.renew(id, claim_token, lease) → locked_until
 *
 * The run that holds the message is renewed as a whole: its other messages are of the
 * same claim.
 */
Datum
outbox_renew(PG_FUNCTION_ARGS)
{
	TimestampTz asked_at = clock_now();
	pg_uuid_t  *token;
	int64		position;
	Lease	   *lease;
	int			index;
	int		   *named;

	session_begin("outbox.renew()");
	token = token_argument(fcinfo, 1);
	position = message_argument(fcinfo, 0, token);

	lease = hold(lease_lock(runs_open(), token, asked_at));
	index = lease_index(lease, position);
	if (index < 0)
		refuse(lease, PG_GETARG_UUID_P(0));
	named = palloc0(lease->n * sizeof(int));
	named[index] = 1;
	PG_RETURN_TIMESTAMPTZ(renew_runs(lease, named, claim_lease(fcinfo, 2, lease->subscription)));
}

/*
 * outbox.renew_batch(claim_token, lease, ids) → locked_until
 */
Datum
outbox_renew_batch(PG_FUNCTION_ARGS)
{
	TimestampTz asked_at = clock_now();
	pg_uuid_t  *token;
	Lease	   *lease;
	int		   *named = NULL;
	bool		any = true;

	session_begin("outbox.renew_batch()");
	token = token_argument(fcinfo, 0);
	if (!PG_ARGISNULL(2) && is_empty(PG_GETARG_ARRAYTYPE_P(2)))
		PG_RETURN_NULL();
	lease = hold(lease_lock(runs_open(), token, asked_at));
	if (!PG_ARGISNULL(2))
	{
		int			n;
		int64	   *positions = positions_of_ids(PG_GETARG_ARRAYTYPE_P(2), &n);

		named = palloc0(lease->n * sizeof(int));
		any = false;
		for (int i = 0; i < n; i++)
		{
			int			index = lease_index(lease, positions[i]);

			if (index < 0 || (i > 0 && positions[i] == positions[i - 1]))
				continue;
			named[index]++;
			any = true;
		}
	}
	if (!any)
		refuse_all(lease);
	PG_RETURN_TIMESTAMPTZ(renew_runs(lease, named, claim_lease(fcinfo, 1, lease->subscription)));
}
