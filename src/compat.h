/*
 * compat.h
 *		Differences between PostgreSQL majors, as wrappers with the newest shape, so that
 *		support for an old major can be deleted by range.
 */
#ifndef OUTBOX_COMPAT_H
#define OUTBOX_COMPAT_H

#include "postgres.h"

#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_proc.h"
#include "utils/acl.h"
#include "utils/rangetypes.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 150000
#error "outbox needs PostgreSQL 15 or later"
#endif

/* the number of this backend's slot, below MaxBackends */
#if PG_VERSION_NUM < 170000
#define OUTBOX_MY_PROC_NUMBER (MyProc->pgprocno)
#else
#define OUTBOX_MY_PROC_NUMBER MyProcNumber
#endif

/* a macro: who uses it includes storage/lock.h */
#if PG_VERSION_NUM < 170000
#define outbox_lock_held_by_me(tag, mode) LockHeldByMe(tag, mode)
#else
#define outbox_lock_held_by_me(tag, mode) LockHeldByMe(tag, mode, false)
#endif

#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* catalog/pg_database.h has it since 15.4 */
#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB -2
#endif

/* a macro: who uses it includes access/genam.h; nobody counts its searches */
#if PG_VERSION_NUM < 180000
#define outbox_index_beginscan(heap, index, snapshot, n_keys, n_orderbys) \
	index_beginscan(heap, index, snapshot, n_keys, n_orderbys)
#else
#define outbox_index_beginscan(heap, index, snapshot, n_keys, n_orderbys) \
	index_beginscan(heap, index, snapshot, NULL, n_keys, n_orderbys)
#endif

/* what a process waits for; before 17 all of it is "Extension" */
typedef enum OutboxWait
{
	OUTBOX_WAIT_WORK,			/* a process of ours, for something to do */
	OUTBOX_WAIT_ROUTING,		/* a claim, for another one that routes */
	OUTBOX_WAIT_PASS,			/* a claim, for the coordinator to route */
	OUTBOX_WAIT_RUNS,			/* a claim, for runs that others hold */
	OUTBOX_WAIT_RETRY,			/* a delivery, where another transaction was in the way */
	OUTBOX_WAIT_LEAVE			/* DROP DATABASE and the like, for our processes to leave */
} OutboxWait;

static inline uint32
outbox_wait_event(OutboxWait wait)
{
#if PG_VERSION_NUM < 170000
	return PG_WAIT_EXTENSION;
#else
	static const char *const names[] = {
		[OUTBOX_WAIT_WORK] = "OutboxWork",
		[OUTBOX_WAIT_ROUTING] = "OutboxRouting",
		[OUTBOX_WAIT_PASS] = "OutboxPass",
		[OUTBOX_WAIT_RUNS] = "OutboxRuns",
		[OUTBOX_WAIT_RETRY] = "OutboxRetry",
		[OUTBOX_WAIT_LEAVE] = "OutboxLeave",
	};
	static uint32 events[lengthof(names)];

	if (events[wait] == 0)
		events[wait] = WaitEventExtensionNew(names[wait]);
	return events[wait];
#endif
}

#if PG_VERSION_NUM < 160000
static inline RangeType *
outbox_make_range(TypeCacheEntry *typcache, RangeBound *lower, RangeBound *upper)
{
	return make_range(typcache, lower, upper, false);
}

/* which indexes an updated row needs entries in */
typedef enum TU_UpdateIndexes
{
	TU_None,
	TU_All,
	TU_Summarizing				/* never before 16 */
} TU_UpdateIndexes;

#define outbox_tuple_update(rel, tid, slot, snapshot, which) \
	do { \
		bool		any_; \
		simple_table_tuple_update(rel, tid, slot, snapshot, &any_); \
		*(which) = any_ ? TU_All : TU_None; \
	} while (0)
#define outbox_insert_entries(info, slot, estate, update, which) \
	list_free(ExecInsertIndexTuples(info, slot, estate, update, false, NULL, NIL))

/* macros: who uses them includes executor.h and parse_relation.h, others need not */
#define outbox_init_range_table(estate, rte) ExecInitRangeTable(estate, list_make1(rte))
#define outbox_epq_init(epq, estate) EvalPlanQualInit(epq, estate, NULL, NIL, -1)

static inline bool
outbox_database_ownercheck(Oid database, Oid role)
{
	return pg_database_ownercheck(database, role);
}

static inline bool
outbox_extension_ownercheck(Oid extension, Oid role)
{
	return pg_extension_ownercheck(extension, role);
}

static inline AclResult
outbox_function_aclcheck(Oid function, Oid role)
{
	return pg_proc_aclcheck(function, role, ACL_EXECUTE);
}
#else
static inline RangeType *
outbox_make_range(TypeCacheEntry *typcache, RangeBound *lower, RangeBound *upper)
{
	return make_range(typcache, lower, upper, false, NULL);
}

#define outbox_tuple_update(rel, tid, slot, snapshot, which) \
	simple_table_tuple_update(rel, tid, slot, snapshot, which)
#define outbox_insert_entries(info, slot, estate, update, which) \
	list_free(ExecInsertIndexTuples(info, slot, estate, update, false, NULL, NIL, (which) == TU_Summarizing))

#define outbox_epq_init(epq, estate) EvalPlanQualInit(epq, estate, NULL, NIL, -1, NIL)

#if PG_VERSION_NUM < 180000
#define OUTBOX_UNPRUNED
#else
#define OUTBOX_UNPRUNED , bms_make_singleton(1)
#endif
#define outbox_init_range_table(estate, rte) \
	do { \
		List	   *perminfos_ = NIL; \
		(void) addRTEPermissionInfo(&perminfos_, rte); \
		ExecInitRangeTable(estate, list_make1(rte), perminfos_ OUTBOX_UNPRUNED); \
	} while (0)

static inline bool
outbox_database_ownercheck(Oid database, Oid role)
{
	return object_ownercheck(DatabaseRelationId, database, role);
}

static inline bool
outbox_extension_ownercheck(Oid extension, Oid role)
{
	return object_ownercheck(ExtensionRelationId, extension, role);
}

static inline AclResult
outbox_function_aclcheck(Oid function, Oid role)
{
	return object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE);
}
#endif

#endif							/* OUTBOX_COMPAT_H */
