-- 40_claim: claims, renewals, settlements.  src/claim.c, src/settle.c

CREATE FUNCTION outbox.claim_batch(
    max_messages integer DEFAULT NULL,
    lease interval DEFAULT NULL,
    subscription text DEFAULT 'default',
    worker text DEFAULT NULL,
    separate_tokens boolean DEFAULT NULL)
RETURNS SETOF outbox.claimed_message
AS 'MODULE_PATHNAME', 'outbox_claim_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION outbox.claim_batch(integer, interval, text, text, boolean)
    IS 'claim messages that are due, under a lease; commit before working on them';

CREATE FUNCTION outbox.renew(id uuid, claim_token uuid, lease interval DEFAULT NULL)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'outbox_renew'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.renew(uuid, uuid, interval)
    IS 'extend the lease of a message, from now; returns its new end';

CREATE FUNCTION outbox.renew_batch(claim_token uuid, lease interval DEFAULT NULL, ids uuid[] DEFAULT NULL)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'outbox_renew_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.renew_batch(uuid, interval, uuid[])
    IS 'extend the lease of a claimed batch, from now; returns its new end';

CREATE FUNCTION outbox.settle(
    id uuid,
    claim_token uuid,
    outcome text DEFAULT 'delivered',
    error text DEFAULT NULL,
    error_detail jsonb DEFAULT NULL,
    retry_at timestamptz DEFAULT NULL)
RETURNS text
AS 'MODULE_PATHNAME', 'outbox_settle'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.settle(uuid, uuid, text, text, jsonb, timestamptz)
    IS 'settle a claimed message as delivered, failed, dead or released; returns its new status';

CREATE FUNCTION outbox.settle_batch(
    claim_token uuid,
    outcome text DEFAULT 'delivered',
    error text DEFAULT NULL,
    error_detail jsonb DEFAULT NULL,
    retry_at timestamptz DEFAULT NULL,
    ids uuid[] DEFAULT NULL)
RETURNS integer
AS 'MODULE_PATHNAME', 'outbox_settle_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.settle_batch(uuid, text, text, jsonb, timestamptz, uuid[])
    IS 'settle what is left of a claimed batch, or the given messages of it; returns how many';

CREATE FUNCTION outbox.backoff(attempt integer)
RETURNS double precision
AS 'MODULE_PATHNAME', 'outbox_backoff'
LANGUAGE C STABLE PARALLEL SAFE;
COMMENT ON FUNCTION outbox.backoff(integer)
    IS 'seconds that a message waits after so many failed attempts, without jitter';

-- the claim floor must know of writers that are not ours: src/floor.c
CREATE FUNCTION outbox.delivery_changed() RETURNS trigger
AS 'MODULE_PATHNAME', 'outbox_delivery_changed'
LANGUAGE C;
COMMENT ON FUNCTION outbox.delivery_changed() IS 'trigger of the table outbox.delivery';

CREATE TRIGGER delivery_changed BEFORE INSERT OR UPDATE OR DELETE ON outbox.delivery
    FOR EACH ROW EXECUTE FUNCTION outbox.delivery_changed();
ALTER TABLE outbox.delivery ENABLE ALWAYS TRIGGER delivery_changed;
