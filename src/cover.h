/*
 * cover.h
 *		Sets of positions: sorted half-open ranges, stored as int8multirange.
 */
#ifndef OUTBOX_COVER_H
#define OUTBOX_COVER_H

#include "outbox.h"

typedef struct PositionRange
{
	int64		lower;			/* inclusive */
	int64		upper;			/* exclusive */
} PositionRange;

/* ranges ascend, do not touch and are not empty */
typedef struct Cover
{
	int			n;
	int			capacity;
	PositionRange *ranges;
} Cover;

extern Cover *cover_make(void);
extern Cover *cover_copy(const Cover *cover);
/* append a range that begins at or after the end of the last one; joins where they touch */
extern void cover_append(Cover *cover, int64 lower, int64 upper);
/* any range, anywhere */
extern void cover_add(Cover *cover, int64 lower, int64 upper);
/* what is below position goes into a new cover that is returned, the rest stays */
extern Cover *cover_split_below(Cover *cover, int64 position);
/* take [lower, upper) out */
extern void cover_remove(Cover *cover, int64 lower, int64 upper);
extern bool cover_contains(const Cover *cover, int64 position);
extern Cover *cover_from_datum(Datum multirange);
extern Datum cover_to_datum(const Cover *cover);

#endif							/* OUTBOX_COVER_H */
