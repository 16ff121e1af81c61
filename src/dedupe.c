/*
 * dedupe.c
 *		Dedupe keys: within its window, a key lets one message of its name in.
 *
 * A table (name, hash of the key) → id, expires_at.  The unique index decides between
 * rivals: the second waits for the first one's transaction, as any unique key does.  An
 * expired row is overwritten.
 */
#include "enqueue.h"

#include "common/sha2.h"
#include "common/cryptohash.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

static SPIPlanPtr prepare_once(SPIPlanPtr *plan, const char *query, int n, Oid *types);
static bytea *key_hash(const char *key);
static int	run_plan(SPIPlanPtr plan, Datum *values, bool read_only);

static SPIPlanPtr
prepare_once(SPIPlanPtr *plan, const char *query, int n, Oid *types)
{
	if (*plan == NULL)
	{
		SPIPlanPtr	made = SPI_prepare(query, n, types);

		if (made == NULL || SPI_keepplan(made) != 0)
			elog(ERROR, "could not prepare: %s", query);
		*plan = made;
	}
	return *plan;
}

static bytea *
key_hash(const char *key)
{
	bytea	   *hash = palloc(VARHDRSZ + PG_SHA256_DIGEST_LENGTH);
	pg_cryptohash_ctx *context = pg_cryptohash_create(PG_SHA256);

	if (context == NULL || pg_cryptohash_init(context) < 0 ||
		pg_cryptohash_update(context, (const uint8 *) key, strlen(key)) < 0 ||
		pg_cryptohash_final(context, (uint8 *) VARDATA(hash), PG_SHA256_DIGEST_LENGTH) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not hash the dedupe key")));
	pg_cryptohash_free(context);
	SET_VARSIZE(hash, VARHDRSZ + PG_SHA256_DIGEST_LENGTH);
	return hash;
}

static int
run_plan(SPIPlanPtr plan, Datum *values, bool read_only)
{
	Snapshot	snapshot = snapshot_push();

	if (SPI_execute_snapshot(plan, values, NULL, snapshot, InvalidSnapshot, read_only, true, 0) < 0)
		elog(ERROR, "dedupe statement failed");
	snapshot_pop();
	return (int) SPI_processed;
}

bool
dedupe_find_or_claim(const char *name, const char *key, pg_uuid_t *id)
{
	static SPIPlanPtr claim = NULL;
	static SPIPlanPtr renew = NULL;
	static SPIPlanPtr find = NULL;
	static Oid	types[] = {TEXTOID, BYTEAOID, UUIDOID, TIMESTAMPTZOID, TIMESTAMPTZOID};
	OwnerSession session;
	TimestampTz now = clock_now();
	Datum		values[5];
	bool		found = false;

	values[0] = CStringGetTextDatum(name);
	values[1] = PointerGetDatum(key_hash(key));
	values[2] = UUIDPGetDatum(id);
	values[3] = TimestampTzGetDatum(now + (int64) outbox_dedupe_window * USECS_PER_SEC);
	values[4] = TimestampTzGetDatum(now);

	session_owner(&session);
	SPI_connect();
	prepare_once(&find,
				 "SELECT d.id FROM outbox.dedupe AS d"
				 " WHERE d.name OPERATOR(pg_catalog.=) $1 AND d.key_hash OPERATOR(pg_catalog.=) $2"
				 " AND d.expires_at OPERATOR(pg_catalog.>) $5", 5, types);
	prepare_once(&claim,
				 "INSERT INTO outbox.dedupe (name, key_hash, id, expires_at)"
				 " VALUES ($1, $2, $3, $4) ON CONFLICT (name, key_hash) DO NOTHING", 5, types);
	prepare_once(&renew,
				 "UPDATE outbox.dedupe AS d SET id = $3, expires_at = $4"
				 " WHERE d.name OPERATOR(pg_catalog.=) $1 AND d.key_hash OPERATOR(pg_catalog.=) $2"
				 " AND d.expires_at OPERATOR(pg_catalog.<=) $5", 5, types);

	/*
	 * Whoever is kept out must not lock the row, or others would wait for it: so look
	 * first, and insert with DO NOTHING.  A rival between the steps makes us look again.
	 */
	for (;;)
	{
		if (run_plan(find, values, true) == 1)
		{
			bool		isnull;
			Datum		stored = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &isnull);

			memcpy(id, DatumGetUUIDP(stored), sizeof(pg_uuid_t));
			found = true;
			break;
		}
		if (run_plan(claim, values, false) == 1 || run_plan(renew, values, false) == 1)
			break;
		CHECK_FOR_INTERRUPTS();
	}
	SPI_finish();
	session_caller(&session);
	return found;
}

/*
 * In bites, each from where the one before ended: behind somebody's snapshot what was
 * deleted is still in the index, and a scan from the start would walk over it again and
 * again.  Once an hour this process begins from the start, for keys that came in below.
 */
int64
dedupe_delete_expired(int max_rows)
{
	static SPIPlanPtr plan = NULL;
	static Oid	types[] = {TIMESTAMPTZOID, INT4OID, TIMESTAMPTZOID};
	static TimestampTz from = DT_NOBEGIN;
	static TimestampTz began_at = DT_NOBEGIN;
	OwnerSession session;
	TimestampTz now = clock_now();
	Datum		values[3];
	int64		deleted;
	bool		isnull;
	Datum		last;

	if (began_at == DT_NOBEGIN || now - began_at > USECS_PER_HOUR || from > now)
	{
		from = DT_NOBEGIN;
		began_at = now;
	}
	values[0] = TimestampTzGetDatum(now);
	values[1] = Int32GetDatum(max_rows);
	values[2] = TimestampTzGetDatum(from);

	session_owner(&session);
	SPI_connect();
	prepare_once(&plan,
				 "WITH gone AS (DELETE FROM outbox.dedupe WHERE ctid OPERATOR(pg_catalog.=) ANY (ARRAY("
				 " SELECT d.ctid FROM outbox.dedupe AS d"
				 " WHERE d.expires_at OPERATOR(pg_catalog.<=) $1 AND d.expires_at OPERATOR(pg_catalog.>=) $3"
				 " ORDER BY d.expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING expires_at)"
				 " SELECT pg_catalog.count(*), pg_catalog.max(expires_at) FROM gone", 3, types);
	(void) run_plan(plan, values, false);
	deleted = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &isnull));
	last = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 2, &isnull);
	if (!isnull)
		from = DatumGetTimestampTz(last);
	SPI_finish();
	session_caller(&session);
	return deleted;
}
