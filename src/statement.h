/*
 * statement.h
 *		One SQL statement of ours: a constant text and its parameters.
 */
#ifndef OUTBOX_STATEMENT_H
#define OUTBOX_STATEMENT_H

#include "outbox.h"

#define STATEMENT_MAX_PARAMS 16

typedef struct Statement
{
	const char *text;
	int			n;
	Oid			types[STATEMENT_MAX_PARAMS];
	Datum		values[STATEMENT_MAX_PARAMS];
	char		nulls[STATEMENT_MAX_PARAMS];
} Statement;

extern void statement_init(Statement *statement, const char *text);
/* parameters, in order; NULL and 0, where said so, become null */
extern void bind(Statement *statement, Oid type, Datum value, bool isnull);
extern void bind_text(Statement *statement, const char *value); /* or NULL */
extern void bind_bool(Statement *statement, bool value);
extern void bind_int4(Statement *statement, int value, bool isnull);
extern void bind_int8(Statement *statement, int64 value);
extern void bind_int8_array(Statement *statement, const int64 *values, int n);
extern void bind_time(Statement *statement, TimestampTz value);
extern void bind_usecs(Statement *statement, int64 value);	/* an interval; 0: null */
extern void bind_role(Statement *statement, Oid role);	/* two: its name and its oid */

/*
 * Run it as the owner of the extension, by a snapshot that sees everything committed,
 * and return the number of rows.  What it changed is visible to the next snapshot.
 */
extern uint64 statement_run(Statement *statement);
/* guard.c: the same for statements that write outbox.handler or outbox.access */
extern uint64 statement_run_guarded(Statement *statement);
/* guard.c: their rows have the names that roles have now */
extern void guard_rename_roles(void);

#endif							/* OUTBOX_STATEMENT_H */
