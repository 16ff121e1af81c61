/*
 * recent.c
 *		The positions of what this session has claimed last: settling message by message
 *		then needs no look at the log.
 *
 * An id has one position as long as its message is stored, but where that was rolled back,
 * or is gone, another transaction may take the id.  So a position is remembered with the
 * token of its claim, which is never given out again: while that holds anything, the id has
 * the position; and that it holds nothing any more its rows say.
 */
#include "claim.h"

#include "log.h"

#include "access/htup_details.h"
#include "utils/memutils.h"

#define REMEMBERED	1024

typedef struct Recent
{
	pg_uuid_t	id;
	pg_uuid_t	token;
	int64		position;
} Recent;

static Recent *recent = NULL;
static int	n_recent = 0;
static int	next_recent = 0;	/* consumers settle in the order of the claim */

void
recent_remember(const Claim *claim)
{
	if (recent == NULL)
		recent = MemoryContextAlloc(TopMemoryContext, REMEMBERED * sizeof(Recent));
	n_recent = Min(claim->n, REMEMBERED);
	next_recent = 0;
	for (int i = 0; i < n_recent; i++)
	{
		const ClaimedMessage *message = &claim->messages[i];
		bool		isnull;
		Datum		id = heap_getattr(message->tuple, LOG_ID, claim->log_desc, &isnull);

		recent[i] = (Recent) {*DatumGetUUIDP(id), message->run->claim_token, message->position};
	}
}

/* -1: unknown */
int64
recent_position(const pg_uuid_t *id, const pg_uuid_t *token)
{
	for (int i = 0; i < n_recent; i++)
	{
		Recent	   *at = &recent[(next_recent + i) % n_recent];

		if (memcmp(&at->id, id, sizeof(pg_uuid_t)) == 0 &&
			memcmp(&at->token, token, sizeof(pg_uuid_t)) == 0)
		{
			next_recent = (int) (at - recent) + 1;
			return at->position;
		}
	}
	return -1;
}
