/*
 * log.h
 *		Reading the log: by ranges of positions and by id, over all segments.
 */
#ifndef OUTBOX_LOG_H
#define OUTBOX_LOG_H

#include "outbox.h"
#include "segment.h"

#include "executor/tuptable.h"
#include "storage/lock.h"

/* columns of every segment, in order */
typedef enum LogColumn
{
	LOG_POSITION = 1,
	LOG_ID,
	LOG_CREATED_AT,
	LOG_OCCURRED_AT,
	LOG_AVAILABLE_AT,
	LOG_VERSION,
	LOG_MAX_ATTEMPTS,
	LOG_NAME,
	LOG_KIND,
	LOG_PAYLOAD,
	LOG_HEADERS,
	LOG_CORRELATION_ID,
	LOG_CAUSATION_ID,
	LOG_AGGREGATE_TYPE,
	LOG_AGGREGATE_ID,
	LOG_TENANT_ID,
	LOG_OWNER_ID,
	LOG_DEDUPE_KEY,
	LOG_ORDERING_KEY
} LogColumn;
#define LOG_COLUMNS LOG_ORDERING_KEY

typedef struct LogReader LogReader;

/* segments by number: those of the ring, then log_kept */
#define LOG_KEPT RING_SEGMENTS
extern Oid	log_segment(int number);
/* all of them, to the end of the transaction */
extern void log_lock(LOCKMODE mode);
extern bool log_lock_if_free(LOCKMODE mode);
/* an id that the caller gave, just inserted into a segment: 23505 where another has it */
extern void log_check_id(Oid inserted, const pg_uuid_t *id);

extern LogReader *log_open(Snapshot snapshot);
extern LogReader *log_open_segment(Snapshot snapshot, int number);
extern void log_close(LogReader *reader);
/* messages in [lower, upper) by position; slot valid until the next call; NULL at the end */
extern void log_range(LogReader *reader, int64 lower, int64 upper);
extern TupleTableSlot *log_next(LogReader *reader);
/* the message with this id, or NULL */
extern TupleTableSlot *log_find(LogReader *reader, const pg_uuid_t *id);
/* its position, -1 where there is none; takes snapshots of its own */
extern int64 log_position_of(const pg_uuid_t *id);
/* the highest position that is stored, or -1 */
extern int64 log_last_position(LogReader *reader);
extern int64 log_count(int number, Snapshot snapshot);
extern int64 log_position(TupleTableSlot *slot);
extern TimestampTz log_created_at(TupleTableSlot *slot);
/* the (sub)transaction that wrote the row here */
extern TransactionId log_writer(TupleTableSlot *slot);

/*
 * Fill a row that begins with the id, has name, kind, version, payload and headers at
 * head, and the rest of the message at tail.
 */
extern void log_fill_row(TupleTableSlot *slot, int head, int tail, Datum *values, bool *nulls);

/* what a handler gets: outbox.message as a composite Datum in the current context;
 * subscription may be NULL and max_attempts 0 (its own, if any): not yet filed */
extern Datum log_message(TupleTableSlot *slot, const char *subscription,
						 int attempts, int max_attempts);

#endif							/* OUTBOX_LOG_H */
