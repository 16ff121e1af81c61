/*
 * adopt.c
 *		outbox.adopt(): deliver copied data from here.
 *
 * Data that was restored, or came with a template, was routed elsewhere: everything but
 * enqueue stops until this function.  It gives new positions an offset above everything
 * stored, while no transaction that enqueues is open, repeats the stored frontier as
 * ours, and routes what lies behind it: what the copy had not yet routed is new here.
 *
 * Locks: ShareLock on the log's segments, which waits for enqueuers and holds new ones up,
 * and the routing lock, both to the end of the transaction.
 */
#include "catalog.h"
#include "floor.h"
#include "log.h"
#include "route.h"
#include "segment.h"
#include "statement.h"
#include "worker.h"

#include "storage/lmgr.h"

PG_FUNCTION_INFO_V1(outbox_adopt);

static bool needs_adoption(const Frontier *frontier);
static void find_roles_again(void);

static bool
needs_adoption(const Frontier *frontier)
{
	Identity	identity;

	if (frontier->id != 0)
		return !identity_is_here(frontier->system_identifier, frontier->database);
	identity_read(&identity);
	return identity_is_copy(&identity);
}

/* Roles have other OIDs in another cluster. */
static void
find_roles_again(void)
{
	Statement	handlers;
	Statement	access;

	statement_init(&handlers,
				   "UPDATE outbox.handler AS h SET role_oid = COALESCE((SELECT r.oid"
				   " FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) h.role_name), 0)");
	(void) statement_run_guarded(&handlers);
	statement_init(&access,
				   "DELETE FROM outbox.access AS a WHERE NOT EXISTS (SELECT"
				   " FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) a.role_name)");
	(void) statement_run_guarded(&access);
	statement_init(&access,
				   "UPDATE outbox.access AS a SET role_oid = r.oid FROM pg_catalog.pg_roles r"
				   " WHERE r.rolname OPERATOR(pg_catalog.=) a.role_name");
	(void) statement_run_guarded(&access);
}

Datum
outbox_adopt(PG_FUNCTION_ARGS)
{
	Frontier	stored;
	Frontier	ours;
	Identity	identity;

	session_begin("outbox.adopt()");
	frontier_read(&stored, snapshot_push());
	snapshot_pop();
	if (!needs_adoption(&stored))
		PG_RETURN_BOOL(false);	/* and nobody was made to wait */

	log_lock(ShareLock);
	routing_lock_wait();

	frontier_read(&stored, snapshot_push());
	if (!needs_adoption(&stored))
	{
		snapshot_pop();
		PG_RETURN_BOOL(false);
	}
	segments_reprieve();		/* what another cluster has decided means nothing here */
	identity_take_over(true);
	(void) identity_ensure();
	identity_read(&identity);
	find_roles_again();
	ours = stored;
	ours.offset = identity.offset;
	frontier_sign(&ours);
	frontier_append(&stored, &ours);
	snapshot_pop();
	floor_reset();
	(void) route(0);
	wake_at_commit(WORK_LOOK);
	PG_RETURN_BOOL(true);
}
