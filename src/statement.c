/*
 * statement.c
 *		SQL statements of our own, for what is rare: writes to the small tables of
 *		subscriptions, handlers and access.
 *
 * Hot paths read and write through rows.c and run.c instead.  The text is constant and
 * everything in it qualified; values travel as parameters.  The statement runs as the
 * owner of the extension, whose rights it needs, so whoever calls has checked the
 * caller's; and by a snapshot that was taken now, also where the transaction is
 * REPEATABLE READ.
 */
#include "statement.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

void
statement_init(Statement *statement, const char *text)
{
	statement->text = text;
	statement->n = 0;
}

void
bind(Statement *statement, Oid type, Datum value, bool isnull)
{
	int			i = statement->n++;

	Assert(i < STATEMENT_MAX_PARAMS);
	statement->types[i] = type;
	statement->values[i] = value;
	statement->nulls[i] = isnull ? 'n' : ' ';
}

void
bind_text(Statement *statement, const char *value)
{
	bind(statement, TEXTOID, value != NULL ? CStringGetTextDatum(value) : (Datum) 0, value == NULL);
}

void
bind_bool(Statement *statement, bool value)
{
	bind(statement, BOOLOID, BoolGetDatum(value), false);
}

void
bind_int4(Statement *statement, int value, bool isnull)
{
	bind(statement, INT4OID, Int32GetDatum(value), isnull);
}

void
bind_int8(Statement *statement, int64 value)
{
	bind(statement, INT8OID, Int64GetDatum(value), false);
}

void
bind_int8_array(Statement *statement, const int64 *values, int n)
{
	bind(statement, INT8ARRAYOID, int64_array(values, n), false);
}

void
bind_time(Statement *statement, TimestampTz value)
{
	bind(statement, TIMESTAMPTZOID, TimestampTzGetDatum(value), false);
}

void
bind_usecs(Statement *statement, int64 value)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = value;
	bind(statement, INTERVALOID, IntervalPGetDatum(interval), value == 0);
}

void
bind_role(Statement *statement, Oid role)
{
	char	   *name = GetUserNameFromId(role, false);

	bind(statement, NAMEOID, DirectFunctionCall1(namein, CStringGetDatum(name)), false);
	bind(statement, OIDOID, ObjectIdGetDatum(role), false);
}

uint64
statement_run(Statement *statement)
{
	OwnerSession session;
	SPIPlanPtr	plan;
	uint64		rows;
	int			result;

	session_owner(&session);
	SPI_connect();
	plan = SPI_prepare(statement->text, statement->n, statement->types);
	if (plan == NULL)
		elog(ERROR, "could not prepare \"%s\": %s", statement->text,
			 SPI_result_code_string(SPI_result));
	result = SPI_execute_snapshot(plan, statement->values, statement->nulls, snapshot_push(),
								  InvalidSnapshot, false, true, 0);
	if (result < 0)
		elog(ERROR, "could not run \"%s\": %s", statement->text, SPI_result_code_string(result));
	rows = SPI_processed;
	snapshot_pop();
	SPI_finish();
	session_caller(&session);

	CommandCounterIncrement();
	return rows;
}
