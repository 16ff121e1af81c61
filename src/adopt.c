/*
 * adopt.c
 *		outbox.adopt(): deliver copied data from here.
 *
 * Data that was restored, or came with a template, was routed elsewhere: everything but
 * enqueue stops until this function.  It gives new positions an offset above everything
 * stored, while no transaction that enqueues is open, repeats the stored frontier as
 * ours, and routes what lies behind it: what the copy had not yet routed is new here, and
 * so is what was enqueued here while the data was being restored.
 *
 * Locks: ShareRowExclusiveLock on the log's segments, which waits for enqueuers and holds
 * new ones up, and other adoptions with them; and the routing lock; both to the end of the
 * transaction.
 */
#include "catalog.h"
#include "floor.h"
#include "log.h"
#include "route.h"
#include "rows.h"
#include "segment.h"
#include "statement.h"
#include "worker.h"

#include "access/transam.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/rel.h"

PG_FUNCTION_INFO_V1(outbox_adopt);

/* What the adoption looks at for messages that were enqueued here behind the stored frontier. */
typedef struct Stray
{
	const Frontier *stored;
	LogReader  *reader;
	Rows	   *rows;			/* of the segment of the last one found, or NULL */
	int64		top;			/* first transaction number above everything stored */
	int64		shift;			/* what brings the first one there; 0: none found yet */
} Stray;

static bool needs_adoption(const Frontier *frontier);
static void move_strays(const Frontier *stored);
static void move_strays_of(Stray *stray, int64 first, int64 end);
static void open_for_stray(Stray *stray, Oid segment);
static bool is_stray(const Frontier *stored, TupleTableSlot *slot);
static void move_stray(Stray *stray, TupleTableSlot *slot);
static void enable_triggers_always(void);
static void advance_sequences(void);
static bool fires_always(const char *table, const char *trigger);
static bool guards_were_off(void);

static bool
needs_adoption(const Frontier *frontier)
{
	Identity	identity;

	if (frontier->id != 0)
		return !identity_is_here(frontier->system_identifier, frontier->database);
	identity_read(&identity);
	return identity_is_copy(&identity);
}

/*
 * An application that is at work while the data is restored enqueues behind the frontier
 * that comes with it: at positions of this cluster's transactions, below the stored
 * horizon, where no pass will look.  They may even lie within ranges that a restored run
 * covers.  So they get new positions, above everything stored: new to the frontier, and
 * in no run.
 *
 * Which ones are these?  Every message that the source has routed is at most as new as
 * the frontier's "newest": what lies below the horizon and is newer was never routed
 * there.  So nothing is delivered twice.  And it was enqueued by a transaction of this
 * cluster since the extension is here; only those ranges are read.
 */
static void
move_strays(const Frontier *stored)
{
	Stray		stray = {.stored = stored};
	int64		first = outbox_extension_transaction();
	int64		end = (int64) U64FromFullTransactionId(ReadNextFullTransactionId());
	Identity	identity;
	Snapshot	snapshot = snapshot_push();

	identity_read(&identity);
	stray.reader = log_open(snapshot);
	stray.top = identity_above_everything(snapshot);
	move_strays_of(&stray, first, end);
	/* an enqueue has made the identity ours before the rest of the data was there */
	if (identity.exists && !identity.foreign && identity.offset > 0)
		move_strays_of(&stray, Max(end, first + identity.offset), end + identity.offset);
	if (stray.rows != NULL)
		rows_close(stray.rows);
	log_close(stray.reader);
	snapshot_pop();
}

static void
move_strays_of(Stray *stray, int64 first, int64 end)
{
	MemoryContext context;
	TupleTableSlot *slot;

	end = Min(end, stray->stored->horizon);
	if (first >= end)
		return;
	context = AllocSetContextCreate(CurrentMemoryContext, "outbox strays", ALLOCSET_DEFAULT_SIZES);
	log_range(stray->reader, position_of_transaction(first), position_of_transaction(end));
	while ((slot = log_next(stray->reader)) != NULL)
	{
		MemoryContext caller;

		CHECK_FOR_INTERRUPTS();
		if (!is_stray(stray->stored, slot))
			continue;
		open_for_stray(stray, slot->tts_tableOid);
		caller = MemoryContextSwitchTo(context);
		move_stray(stray, slot);
		MemoryContextSwitchTo(caller);
		MemoryContextReset(context);
	}
	MemoryContextDelete(context);
}

static void
open_for_stray(Stray *stray, Oid segment)
{
	if (stray->rows != NULL && RelationGetRelid(stray->rows->rel) == segment)
		return;
	if (stray->rows != NULL)
		rows_close(stray->rows);
	stray->rows = rows_open_segment(segment);
}

static bool
is_stray(const Frontier *stored, TupleTableSlot *slot)
{
	return log_created_at(slot) > stored->newest &&
		!frontier_is_running(stored, position_transaction(log_position(slot)));
}

static void
move_stray(Stray *stray, TupleTableSlot *slot)
{
	int64		position = log_position(slot);
	ItemPointerData tid = slot->tts_tid;
	Datum		values[LOG_COLUMNS];

	if (stray->shift == 0)
		stray->shift = position_of_transaction(stray->top) -
			position_of_transaction(position_transaction(position));
	slot_getallattrs(slot);
	memcpy(values, slot->tts_values, sizeof(values));
	values[LOG_POSITION - 1] = Int64GetDatum(position + stray->shift);
	rows_update(stray->rows, &tid, values, slot->tts_isnull);
}

/*
 * pg_restore --disable-triggers enables them again as if they were ordinary ones, which
 * a session with session_replication_role = replica does not fire.
 */
static void
enable_triggers_always(void)
{
	static const char *const triggers[][2] = {
		{"identity", "identity_changed"},
		{"delivery", "delivery_changed"},
		{"handler", "guard_role"},
		{"access", "guard_role"},
	};

	for (int i = 0; i < lengthof(triggers); i++)
	{
		Statement	statement;

		if (fires_always(triggers[i][0], triggers[i][1]))
			continue;
		statement_init(&statement, psprintf("ALTER TABLE outbox.%s ENABLE ALWAYS TRIGGER %s",
											triggers[i][0], triggers[i][1]));
		(void) statement_run(&statement);
	}
}

/* Logical replication brings the rows and leaves the sequences of their ids behind. */
static void
advance_sequences(void)
{
	static const char *const tables[] = {"delivery", "subscription", "handler", "access"};

	for (int i = 0; i < lengthof(tables); i++)
	{
		Statement	statement;

		statement_init(&statement,
					   psprintf("SELECT pg_catalog.setval('outbox.%s_id_seq'::pg_catalog.regclass, t.newest)"
								" FROM (SELECT pg_catalog.max(r.id) AS newest FROM outbox.%s r) t,"
								" outbox.%s_id_seq s"
								" WHERE t.newest OPERATOR(pg_catalog.>=) s.last_value",
								tables[i], tables[i], tables[i]));
		(void) statement_run(&statement);
	}
}

static bool
fires_always(const char *table, const char *trigger)
{
	Statement	statement;

	statement_init(&statement, psprintf("SELECT FROM pg_catalog.pg_trigger t"
										" WHERE t.tgrelid OPERATOR(pg_catalog.=) 'outbox.%s'::pg_catalog.regclass"
										" AND t.tgname OPERATOR(pg_catalog.=) '%s'"
										" AND t.tgenabled OPERATOR(pg_catalog.<>) 'A'",
										table, trigger));
	return statement_run(&statement) == 0;
}

/* Whether numbers of roles came unseen: COPY with the guards off, or half on, as they are after a restore. */
static bool
guards_were_off(void)
{
	return !fires_always("handler", "guard_role") || !fires_always("access", "guard_role");
}

/*
 * Whose the handlers and rights are that came with the data.  In another cluster roles have
 * other numbers, and the names count; in the same one a role may have another name by now,
 * and the names count only where there is no role of the number.
 */
void
adopt_roles(bool other_cluster)
{
	bool		by_name = other_cluster || guards_were_off();
	Statement	handlers;
	Statement	access;

	statement_init(&handlers,
				   "UPDATE outbox.handler AS h SET role_oid = COALESCE((SELECT r.oid"
				   " FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) h.role_name), 0)"
				   " WHERE $1 OR NOT EXISTS (SELECT"
				   " FROM pg_catalog.pg_roles o WHERE o.oid OPERATOR(pg_catalog.=) h.role_oid)");
	bind_bool(&handlers, by_name);
	(void) statement_run_guarded(&handlers);
	statement_init(&access,
				   "DELETE FROM outbox.access AS a WHERE ($1 OR NOT EXISTS (SELECT"
				   " FROM pg_catalog.pg_roles o WHERE o.oid OPERATOR(pg_catalog.=) a.role_oid))"
				   " AND (NOT EXISTS (SELECT"
				   " FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) a.role_name)"
				   " OR EXISTS (SELECT FROM outbox.access b"
				   " WHERE b.role_name OPERATOR(pg_catalog.=) a.role_name"
				   " AND b.subscription IS NOT DISTINCT FROM a.subscription"
				   " AND b.id OPERATOR(pg_catalog.>) a.id))");
	bind_bool(&access, by_name);
	(void) statement_run_guarded(&access);
	statement_init(&access,
				   "UPDATE outbox.access AS a SET role_oid = r.oid FROM pg_catalog.pg_roles r"
				   " WHERE r.rolname OPERATOR(pg_catalog.=) a.role_name AND ($1 OR NOT EXISTS (SELECT"
				   " FROM pg_catalog.pg_roles o WHERE o.oid OPERATOR(pg_catalog.=) a.role_oid))");
	bind_bool(&access, by_name);
	(void) statement_run_guarded(&access);
}

Datum
outbox_adopt(PG_FUNCTION_ARGS)
{
	Frontier	stored;
	Frontier	ours;
	Identity	identity;

	session_begin("outbox.adopt()");
	frontier_read_now(&stored);
	if (!needs_adoption(&stored))
		PG_RETURN_BOOL(false);	/* and nobody was made to wait */

	advance_sequences();		/* reads all deliveries: before producers have to wait */
	log_lock(ShareRowExclusiveLock);
	routing_lock_wait();

	frontier_read(&stored, snapshot_push());
	if (!needs_adoption(&stored))
	{
		snapshot_pop();
		PG_RETURN_BOOL(false);
	}
	segments_strike_out();		/* what another cluster has decided means nothing here */
	identity_read(&identity);
	/* a stop says nothing of where the data comes from, but then the identity does, or has */
	adopt_roles(stored.id > 0 ? stored.system_identifier != system_identifier() :
				!identity.exists || identity.other_cluster);
	enable_triggers_always();
	move_strays(&stored);
	identity_take_over(true);
	(void) identity_ensure();
	identity_read(&identity);
	ours = stored;
	ours.offset = identity.offset;
	frontier_sign(&ours);
	(void) frontier_append(&stored, &ours);
	snapshot_pop();
	floor_reset();
	(void) route(0);
	wake_at_commit(WORK_LOOK);
	PG_RETURN_BOOL(true);
}
