/*
 * catalog.h
 *		OIDs of the extension and of its tables, and whose data this is.
 */
#ifndef OUTBOX_CATALOG_H
#define OUTBOX_CATALOG_H

#include "outbox.h"

#include "access/tupdesc.h"
#include "storage/lock.h"
#include "utils/relcache.h"

/* Tables, indexes and row types that C code opens; names in catalog.c, same order. */
typedef enum OutboxObject
{
	OB_LOG_0,
	OB_LOG_1,
	OB_LOG_2,
	OB_LOG_KEPT,
	OB_SEGMENT,
	OB_IDENTITY,
	OB_FRONTIER,
	OB_SUBSCRIPTION,
	OB_HANDLER,
	OB_DELIVERY,
	OB_SELF_ROUTED,
	OB_DEDUPE,
	OB_ACCESS,
	OB_FRONTIER_PKEY,
	OB_SELF_ROUTED_PKEY,
	OB_SUBSCRIPTION_PKEY,
	OB_SUBSCRIPTION_NAME_KEY,
	OB_DELIVERY_PKEY,
	OB_DELIVERY_READY_IDX,
	OB_DELIVERY_TOKEN_IDX,
	OB_DELIVERY_LEASE_IDX,
	OB_DELIVERY_DEAD_IDX,
	OB_DELIVERY_UNHANDLED_IDX,
	OB_DELIVERY_ID_SEQ,
	OB_MESSAGE_TYPE,
	OB_CLAIMED_MESSAGE_TYPE,
	OUTBOX_OBJECTS
} OutboxObject;

/* OID by name, cached until the object changes; 55000 where the extension is absent */
extern Oid	outbox_oid(OutboxObject object);
extern Oid	outbox_extension(void);
/* the transaction that made it, or 0 where nobody can tell any more */
extern int64 outbox_extension_transaction(void);
extern Oid	outbox_owner(void);
/* descriptor of outbox.message or outbox.claimed_message, blessed; not to be freed */
extern TupleDesc outbox_row_type(OutboxObject type);
/* how many columns a table has; 55000 unless they are those of the install script; later ones may be dropped.  Of a segment: OB_LOG_KEPT */
extern int	outbox_check_columns(OutboxObject table, Relation rel);
extern void catalog_register_callbacks(void);

/*
 * Locks of ours, of a kind that users cannot take: object locks on the extension.
 * Order: subscription locks, then the routing lock, then rows.
 */
extern void routing_locktag(LOCKTAG *tag);
/* shared by our processes for each transaction, exclusive for DROP EXTENSION; before all others */
extern void presence_locktag(LOCKTAG *tag, Oid extension);
/*
 * In access share mode for claims and settlements, exclusive for unsubscribe, and in two
 * modes that shut each other out, but not their own kind; to the commit.
 */
#define LOCK_TO_PARK			ShareLock	/* parks messages that no handler takes: park.c */
#define LOCK_TO_UNPARK		RowExclusiveLock	/* changes what handlers take */
extern void subscription_lock(int64 subscription_id, LOCKMODE mode);
/* without waiting */
extern bool subscription_lock_if_free(int64 subscription_id, LOCKMODE mode);

/* Identity of the data, see design of copies in docs/internals.md */
typedef struct Identity
{
	bool		exists;
	bool		foreign;		/* made by another cluster or database */
	bool		other_cluster;
	int64		offset;			/* of positions */
	bool		in_use;			/* first use is over: "default" was made */
} Identity;

/* after an invalidation */
extern void identity_forget(void);
extern void identity_read(Identity *identity);
extern bool identity_is_copy(const Identity *identity);
extern bool identity_is_here(int64 system_id, Oid database);
/* gives new positions an offset above everything stored and makes the identity ours */
extern void identity_take_over(bool force);
/* adopt.c: whose handlers and rights are that came with a copy */
extern void adopt_roles(bool other_cluster);
/* offset for new positions; gives a new one where the stored identity is foreign */
extern int64 identity_offset_for_enqueue(void);
/* under the routing lock: makes identity and the subscription "default" at first use; true: now */
extern bool identity_ensure(void);
extern int64 system_identifier(void);
/* the first transaction number, as positions have them, that nothing stored has and nothing routed */
extern int64 identity_above_everything(Snapshot snapshot);

#endif							/* OUTBOX_CATALOG_H */
