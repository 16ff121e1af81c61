/*
 * outbox.h
 *		What every file of outbox may use: error codes, settings, limits, the clock,
 *		the way into and out of a SQL function.
 *
 * The road of a message, file by file:
 *
 *	 enqueue.c   writes a row to the log                        (position.c, clock.c)
 *	 route.c     files what became visible into runs            (frontier.c, cover.c)
 *	 claim.c     gives runs to a consumer under a lease
 *	 deliver.c   calls a hook or sends a NOTIFY                 (drain.c)
 *	 settle.c    ends, renews or returns what was claimed
 *	 run.c       the state machine all of them use; run_row.c alone writes outbox.delivery
 */
#ifndef OUTBOX_H
#define OUTBOX_H

#include "postgres.h"

#include "access/xact.h"
#include "common/int.h"
#include "datatype/timestamp.h"
#include "fmgr.h"
#include "utils/snapshot.h"
#include "utils/uuid.h"

#include "compat.h"

/* Errors that clients branch on; everything else uses PostgreSQL's own codes. */
#define ERRCODE_OUTBOX_UNKNOWN_MESSAGE	MAKE_SQLSTATE('O','B','0','0','2')
#define ERRCODE_OUTBOX_CLAIM_NOT_HELD	MAKE_SQLSTATE('O','B','0','0','3')
#define ERRCODE_OUTBOX_DEAD_NOW			MAKE_SQLSTATE('O','B','0','1','0')
#define ERRCODE_OUTBOX_LATER			MAKE_SQLSTATE('O','B','0','1','1')
/* in last_error only */
#define OUTBOX_LEASE_LOST	"OB005"
#define OUTBOX_ABANDONED	"OB006"

#define OUTBOX_MAX_NAME			255		/* bytes of names, patterns and keys */
#define OUTBOX_MAX_DEDUPE_KEY	1024	/* bytes of a dedupe key */
#define OUTBOX_MAX_BATCH		100000	/* messages in one claim */

/* settings.c; times in milliseconds unless named otherwise */
extern int	outbox_lease;
extern int	outbox_max_active;
extern int	outbox_max_attempts;
extern int	outbox_batch_size;
extern int	outbox_backoff_base;
extern int	outbox_backoff_max;
extern double outbox_jitter;
extern int	outbox_hook_timeout;
extern int	outbox_max_coordinators;
extern int	outbox_notify_interval;
extern int	outbox_poll_interval;
extern int	outbox_retention;	/* seconds */
extern int	outbox_run_length;
extern char *outbox_databases;
extern int	outbox_dedupe_window;	/* seconds */
extern bool outbox_enabled;
extern char *outbox_traceparent;
extern int	outbox_workers;
extern char *outbox_causation;
extern int	outbox_clock_offset;	/* tests only */
extern void outbox_define_settings(void);

/* clock.c: the one source of time, see there */
extern TimestampTz clock_now(void);
extern TimestampTz clock_tick(int64 ticks);
extern TimestampTz clock_unshifted(void);
extern TimestampTz clock_tick_unshifted(int64 ticks);
extern void clock_start_above(TimestampTz unshifted);
/* for waiting and for deadlines of our processes: no step of the wall clock changes it */
extern TimestampTz clock_machine(void);
extern void clock_request_shmem(void);
extern void clock_startup_shmem(void);

/* position.c: the only file that knows the bits of a position */
#define POSITION_ORDINAL_BITS	20
#define MESSAGES_PER_TRANSACTION	(INT64CONST(1) << POSITION_ORDINAL_BITS)
extern int64 position_next(int64 offset);
extern int64 position_of_transaction(int64 transaction);
extern int64 position_transaction(int64 position);
extern int64 position_own_count(void);
extern int64 full_transaction(TransactionId xid);
extern int	compare_int64(const void *a, const void *b);
extern int	sort_unique_int64(int64 *values, int n);
extern Datum int64_array(const int64 *values, int n);

/*
 * outbox.c: the way into a SQL function.  session_begin() refuses standbys, read-only
 * transactions and parallel workers with core's own errors; session_owner() goes on as
 * the owner of the extension with a pinned search_path until session_caller(): needed
 * only around SPI, since direct access to tables asks for no rights.
 */
typedef struct OwnerSession
{
	Oid			user;
	int			security;
	int			guc_level;
} OwnerSession;

extern void session_begin(const char *function);
extern void session_owner(OwnerSession *session);
extern void session_caller(OwnerSession *session);

/* A snapshot that sees everything committed, whatever the isolation level, made active. */
extern Snapshot snapshot_push(void);
extern void snapshot_pop(void);
extern Snapshot snapshot_after_lock(Snapshot callers);

/* arguments: NULL stays NULL, '' becomes NULL, too long or blank is refused (22023) */
extern char *arg_text(FunctionCallInfo fcinfo, int n, const char *name);
extern char *arg_required_text(FunctionCallInfo fcinfo, int n, const char *name);
extern void arg_required(FunctionCallInfo fcinfo, int n, const char *name);
/* too long or blank is refused (22023); '' passes */
extern void check_text(const char *value, const char *name);
extern void check_required_text(const char *value, const char *name);
extern void check_finite(TimestampTz time, const char *name, const char *hint);
/* an interval in microseconds; not null, months refused, must be positive */
extern int64 interval_usecs(Datum interval, const char *name);

/* millisecond setting to microseconds */
#define MSECS(ms) ((int64) (ms) * 1000)

#endif							/* OUTBOX_H */
