/*
 * enqueue.h
 *		A message on its way into the log.
 */
#ifndef OUTBOX_ENQUEUE_H
#define OUTBOX_ENQUEUE_H

#include "log.h"

#include "utils/jsonb.h"

typedef struct NewMessage
{
	Datum		values[LOG_COLUMNS];
	bool		nulls[LOG_COLUMNS];
	bool		has_id;			/* given by the caller */
} NewMessage;

#define MESSAGE_SET(message, column, datum) \
	((message)->values[(column) - 1] = (datum), (message)->nulls[(column) - 1] = false)
#define MESSAGE_HAS(message, column) (!(message)->nulls[(column) - 1])
#define MESSAGE_GET(message, column) ((message)->values[(column) - 1])

extern void message_init(NewMessage *message);
/* one attribute, validated; the value is not null */
extern void message_set(NewMessage *message, LogColumn column, Datum value);
/* all of them are set: fill in the defaults, refuse what is missing */
extern void message_complete(NewMessage *message);
extern const char *message_attribute(LogColumn column);
/* object, array, string, … for error messages */
extern const char *json_type(Jsonb *json);

/*
 * Write messages to the log in the current transaction.  ids[i] becomes the id of
 * message i: the first message's where a dedupe key keeps it out.  *at, for who tells of
 * errors, is the message that is being written, or NOT_AT_ONE; it may be NULL.
 */
#define NOT_AT_ONE (-1)
extern void enqueue_messages(NewMessage *messages, int n, pg_uuid_t *ids, int *at);

/* dedupe.c: true if a message with this key is in its window; *id becomes its id */
extern bool dedupe_find_or_claim(const char *name, const char *key, pg_uuid_t *id);
extern int64 dedupe_delete_expired(int max_rows);

/* uuid.c */
extern void uuid_v7(TimestampTz time, pg_uuid_t *id);
extern void uuid_v4(pg_uuid_t *id);

#endif							/* OUTBOX_ENQUEUE_H */
