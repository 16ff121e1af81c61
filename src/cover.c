/*
 * cover.c
 *		Sets of positions: sorted half-open ranges, stored as int8multirange.
 */
#include "cover.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/multirangetypes.h"
#include "utils/rangetypes.h"
#include "utils/typcache.h"

static void cover_reserve(Cover *cover, int n);
static TypeCacheEntry *multirange_type(void);
static int first_ending_after(const Cover *cover, int64 position);
static void cover_replace(Cover *cover, int from, int to, const PositionRange *with, int n);

Cover *
cover_make(void)
{
	Cover	   *cover = palloc(sizeof(Cover));

	cover->n = 0;
	cover->capacity = 4;
	cover->ranges = palloc(cover->capacity * sizeof(PositionRange));
	return cover;
}

static void
cover_reserve(Cover *cover, int n)
{
	if (n <= cover->capacity)
		return;
	cover->capacity = Max(n, cover->capacity * 2);
	cover->ranges = repalloc(cover->ranges, cover->capacity * sizeof(PositionRange));
}

Cover *
cover_copy(const Cover *cover)
{
	Cover	   *copy = cover_make();

	cover_reserve(copy, cover->n);
	memcpy(copy->ranges, cover->ranges, cover->n * sizeof(PositionRange));
	copy->n = cover->n;
	return copy;
}

void
cover_append(Cover *cover, int64 lower, int64 upper)
{
	Assert(lower < upper);
	Assert(cover->n == 0 || cover->ranges[cover->n - 1].upper <= lower);

	if (cover->n > 0 && cover->ranges[cover->n - 1].upper == lower)
	{
		cover->ranges[cover->n - 1].upper = upper;
		return;
	}
	cover_reserve(cover, cover->n + 1);
	cover->ranges[cover->n].lower = lower;
	cover->ranges[cover->n].upper = upper;
	cover->n++;
}

/* The first range that does not end at or before the position; n if there is none. */
static int
first_ending_after(const Cover *cover, int64 position)
{
	int			low = 0;
	int			high = cover->n;

	while (low < high)
	{
		int			middle = (low + high) / 2;

		if (cover->ranges[middle].upper > position)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

/* Put n ranges (at most 2) in the place of ranges [from, to). */
static void
cover_replace(Cover *cover, int from, int to, const PositionRange *with, int n)
{
	cover_reserve(cover, cover->n - (to - from) + n);
	memmove(&cover->ranges[from + n], &cover->ranges[to], (cover->n - to) * sizeof(PositionRange));
	if (n > 0)
		memcpy(&cover->ranges[from], with, n * sizeof(PositionRange));
	cover->n += n - (to - from);
}

void
cover_add(Cover *cover, int64 lower, int64 upper)
{
	PositionRange joined = {lower, upper};
	int			from = first_ending_after(cover, lower - 1);
	int			to = from;

	while (to < cover->n && cover->ranges[to].lower <= upper)
	{
		joined.lower = Min(joined.lower, cover->ranges[to].lower);
		joined.upper = Max(joined.upper, cover->ranges[to].upper);
		to++;
	}
	cover_replace(cover, from, to, &joined, 1);
}

void
cover_remove(Cover *cover, int64 lower, int64 upper)
{
	PositionRange left[2];
	int			n = 0;
	int			from = first_ending_after(cover, lower);
	int			to = from;

	for (; to < cover->n && cover->ranges[to].lower < upper; to++)
	{
		PositionRange range = cover->ranges[to];

		if (range.lower < lower)
			left[n++] = (PositionRange) {range.lower, lower};
		if (range.upper > upper)
			left[n++] = (PositionRange) {upper, range.upper};
	}
	if (to > from)
		cover_replace(cover, from, to, left, n);
}

Cover *
cover_split_below(Cover *cover, int64 position)
{
	Cover	   *below = cover_make();

	for (int i = 0; i < cover->n && cover->ranges[i].lower < position; i++)
		cover_append(below, cover->ranges[i].lower, Min(cover->ranges[i].upper, position));
	cover_remove(cover, PG_INT64_MIN, position);
	return below;
}

bool
cover_contains(const Cover *cover, int64 position)
{
	int			at = first_ending_after(cover, position);

	return at < cover->n && cover->ranges[at].lower <= position;
}

static TypeCacheEntry *
multirange_type(void)
{
	return lookup_type_cache(INT8MULTIRANGEOID, TYPECACHE_MULTIRANGE_INFO);
}

Cover *
cover_from_datum(Datum multirange)
{
	MultirangeType *stored = DatumGetMultirangeTypeP(multirange);
	TypeCacheEntry *range_type = multirange_type()->rngtype;
	Cover	   *cover = cover_make();

	cover_reserve(cover, stored->rangeCount);
	for (uint32 i = 0; i < stored->rangeCount; i++)
	{
		RangeBound	lower;
		RangeBound	upper;

		multirange_get_bounds(range_type, stored, i, &lower, &upper);
		if (lower.infinite || upper.infinite)
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("positions of a delivery without a bound")));
		cover_append(cover, DatumGetInt64(lower.val), DatumGetInt64(upper.val));
	}
	return cover;
}

Datum
cover_to_datum(const Cover *cover)
{
	TypeCacheEntry *range_type = multirange_type()->rngtype;
	RangeType **ranges = palloc(Max(cover->n, 1) * sizeof(RangeType *));

	for (int i = 0; i < cover->n; i++)
	{
		RangeBound	lower = {.val = Int64GetDatum(cover->ranges[i].lower), .inclusive = true, .lower = true};
		RangeBound	upper = {.val = Int64GetDatum(cover->ranges[i].upper)};

		ranges[i] = outbox_make_range(range_type, &lower, &upper);
	}
	return MultirangeTypePGetDatum(make_multirange(INT8MULTIRANGEOID, range_type, cover->n, ranges));
}
