/*
 * position.c
 *		Positions of messages in the log; the only file that knows their bits.
 *
 *	 position = ((full id of the top-level transaction + offset) << 20) | ordinal
 *
 * All messages of a transaction lie in one range of positions, so what a snapshot says
 * about transactions says the same about ranges of positions.  The ordinal is a counter
 * in backend memory: it begins anew with each top-level transaction and goes on after a
 * savepoint was rolled back, so no position is ever used twice.
 */
#include "outbox.h"

#include "access/transam.h"
#include "catalog/pg_type.h"
#include "lib/qunique.h"
#include "utils/array.h"

static FullTransactionId counted_transaction = {0};
static int64 counted = 0;

/* Position for the next message of this transaction. */
int64
position_next(int64 offset)
{
	FullTransactionId top = GetTopFullTransactionId();

	if (!FullTransactionIdEquals(top, counted_transaction))
	{
		counted_transaction = top;
		counted = 0;
	}
	if (counted >= MESSAGES_PER_TRANSACTION)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many messages in one transaction"),
				 errdetail("A transaction can enqueue at most %lld messages.",
						   (long long) MESSAGES_PER_TRANSACTION),
				 errhint("Split the work into several transactions.")));

	return position_of_transaction((int64) U64FromFullTransactionId(top) + offset) + counted++;
}

/* Messages that this transaction has enqueued, rolled back savepoints included. */
int64
position_own_count(void)
{
	FullTransactionId top = GetTopFullTransactionIdIfAny();

	if (!FullTransactionIdIsValid(top) || !FullTransactionIdEquals(top, counted_transaction))
		return 0;
	return counted;
}

/* The first position of a transaction, given with the offset added. */
int64
position_of_transaction(int64 transaction)
{
	return transaction << POSITION_ORDINAL_BITS;
}

int64
position_transaction(int64 position)
{
	return position >> POSITION_ORDINAL_BITS;
}

/* A transaction id out of a snapshot, widened: it is at most 2^31 before the next one. */
int64
full_transaction(TransactionId xid)
{
	FullTransactionId next = ReadNextFullTransactionId();
	uint32		epoch = EpochFromFullTransactionId(next);

	if (xid > XidFromFullTransactionId(next))
		epoch--;
	return (int64) U64FromFullTransactionId(FullTransactionIdFromEpochAndXid(epoch, xid));
}

/* for qsort and bsearch */
int
compare_int64(const void *a, const void *b)
{
	int64		left = *(const int64 *) a;
	int64		right = *(const int64 *) b;

	return (left > right) - (left < right);
}

/* Sorts, and drops what is there twice; returns how many are left. */
int
sort_unique_int64(int64 *values, int n)
{
	if (n < 2)
		return n;
	qsort(values, n, sizeof(int64), compare_int64);
	return (int) qunique(values, n, sizeof(int64), compare_int64);
}

/* int8[] of positions, or of transaction numbers */
Datum
int64_array(const int64 *values, int n)
{
	Datum	   *elements = palloc(Max(n, 1) * sizeof(Datum));
	ArrayType  *array;

	for (int i = 0; i < n; i++)
		elements[i] = Int64GetDatum(values[i]);
	array = construct_array(elements, n, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE);
	pfree(elements);
	return PointerGetDatum(array);
}
