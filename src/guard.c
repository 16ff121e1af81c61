/*
 * guard.c
 *		Who may write the tables that name roles.
 *
 * A row of outbox.handler makes a worker run a function as the row's role, and a row of
 * outbox.access says what a role may consume.  Our functions check that themselves; a
 * trigger, enabled always, checks everybody else who can write the tables, such as a
 * member of pg_write_all_data.
 *
 * The same trigger looks a role up by its name where a row is inserted: so a dump that is
 * restored into another cluster gives each row to the role of that name, not to whoever
 * has the number there.
 */
#include "statement.h"

#include "catalog.h"

#include "access/htup_details.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/rel.h"

#define RENAME_ROLES(table) \
	"UPDATE " table " AS t SET role_name = free.rolname" \
	" FROM (SELECT l.id, r.rolname FROM " table " l" \
	"         JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) l.role_oid" \
	"        WHERE r.rolname OPERATOR(pg_catalog.<>) l.role_name" \
	"        FOR NO KEY UPDATE OF l SKIP LOCKED) free" \
	" WHERE t.id OPERATOR(pg_catalog.=) free.id"

/* Set while a statement of ours runs, whose caller has been checked. */
static bool own_write = false;

static HeapTuple checked_row(TriggerData *data);
static bool names_same_role(TupleDesc desc, HeapTuple a, HeapTuple b);
static HeapTuple with_role_oid(TupleDesc desc, HeapTuple tuple);
static void check_writer(Relation rel, HeapTuple tuple);

PG_FUNCTION_INFO_V1(outbox_guard_role);

uint64
statement_run_guarded(Statement *statement)
{
	bool		outer = own_write;
	uint64		rows = 0;

	own_write = true;
	PG_TRY();
	{
		rows = statement_run(statement);
	}
	PG_FINALLY();
	{
		own_write = outer;
	}
	PG_END_TRY();
	return rows;
}

/*
 * Roles that were renamed since.  Rows that somebody else is writing are left to him.  In
 * data that was copied from another cluster, or is being restored, the numbers mean nothing.
 */
void
guard_rename_roles(void)
{
	static const char *const updates[] = {RENAME_ROLES("outbox.handler"), RENAME_ROLES("outbox.access")};

	Identity	identity;

	identity_read(&identity);
	if (!identity.exists || identity_is_copy(&identity))
		return;
	for (int i = 0; i < (int) lengthof(updates); i++)
	{
		Statement	update;

		statement_init(&update, updates[i]);
		(void) statement_run_guarded(&update);
	}
}

Datum
outbox_guard_role(PG_FUNCTION_ARGS)
{
	TriggerData *data = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_BEFORE(data->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(data->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("guard_role() must be called before each row")));
	if (own_write)
		PG_RETURN_POINTER(TRIGGER_FIRED_BY_UPDATE(data->tg_event) ?
						  data->tg_newtuple : data->tg_trigtuple);
	PG_RETURN_POINTER(checked_row(data));
}

/* The row to write in place of the one given; an error where it may not be written. */
static HeapTuple
checked_row(TriggerData *data)
{
	Relation	rel = data->tg_relation;
	HeapTuple	row = data->tg_trigtuple;

	if (!TRIGGER_FIRED_BY_INSERT(data->tg_event))
		check_writer(rel, row);
	if (TRIGGER_FIRED_BY_DELETE(data->tg_event))
		return row;

	if (TRIGGER_FIRED_BY_INSERT(data->tg_event))
		row = with_role_oid(rel->rd_att, row);
	else if (names_same_role(rel->rd_att, row, data->tg_newtuple))
		row = data->tg_newtuple;
	else
		row = with_role_oid(rel->rd_att, data->tg_newtuple);
	check_writer(rel, row);
	return row;
}

static bool
names_same_role(TupleDesc desc, HeapTuple a, HeapTuple b)
{
	int			name = SPI_fnumber(desc, "role_name");
	int			oid = SPI_fnumber(desc, "role_oid");
	char	   *name_a = SPI_getvalue(a, desc, name);
	char	   *name_b = SPI_getvalue(b, desc, name);
	bool		isnull;

	/* null constraints are checked later than this */
	return name_a != NULL && name_b != NULL && strcmp(name_a, name_b) == 0 &&
		SPI_getbinval(a, desc, oid, &isnull) == SPI_getbinval(b, desc, oid, &isnull);
}

/* A role that does not exist here becomes 0, which nobody is a member of. */
static HeapTuple
with_role_oid(TupleDesc desc, HeapTuple tuple)
{
	int			column = SPI_fnumber(desc, "role_oid");
	char	   *name = SPI_getvalue(tuple, desc, SPI_fnumber(desc, "role_name"));
	Datum		oid;
	bool		isnull = false;

	if (name == NULL)
		return tuple;			/* the constraint will say so */
	oid = ObjectIdGetDatum(get_role_oid(name, true));
	return heap_modify_tuple_by_cols(tuple, desc, 1, &column, &oid, &isnull);
}

static void
check_writer(Relation rel, HeapTuple tuple)
{
	bool		isnull;
	Oid			role;

	if (superuser())
		return;
	role = DatumGetObjectId(SPI_getbinval(tuple, rel->rd_att,
										  SPI_fnumber(rel->rd_att, "role_oid"), &isnull));
	if (!isnull && RelationGetRelid(rel) == outbox_oid(OB_HANDLER) &&
		has_privs_of_role(GetUserId(), role))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied to write a row of \"%s\" for another role",
					RelationGetRelationName(rel)),
			 errhint("Use outbox.register_hook(), outbox.unregister() or outbox.grant_access().")));
}
