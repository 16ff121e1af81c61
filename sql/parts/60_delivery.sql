-- 60_delivery: delivery by push without a worker, the envelope, and upkeep; src/drain.c,
-- src/envelope.c, src/maintain.c.

CREATE PROCEDURE outbox.drain(
    subscription text DEFAULT NULL,
    max_messages integer DEFAULT NULL,
    INOUT claimed bigint DEFAULT NULL,
    INOUT delivered bigint DEFAULT NULL,
    INOUT retried bigint DEFAULT NULL,
    INOUT dead bigint DEFAULT NULL,
    INOUT unhandled bigint DEFAULT NULL,
    INOUT left_over bigint DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'outbox_drain';
COMMENT ON PROCEDURE outbox.drain(text, integer, bigint, bigint, bigint, bigint, bigint, bigint) IS
    'delivers what is ready of one pushed subscription, or of all whose handlers are the caller''s, until nothing is ready or so many messages were claimed; commits as it goes; left_over is what is ready at the end all the same';

CREATE FUNCTION outbox.deliver(
    subscription text DEFAULT NULL,
    max_messages integer DEFAULT NULL,
    OUT claimed bigint,
    OUT delivered bigint,
    OUT retried bigint,
    OUT dead bigint,
    OUT unhandled bigint,
    OUT left_over bigint)
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_deliver';
COMMENT ON FUNCTION outbox.deliver(text, integer) IS
    'the same as drain() in the caller''s transaction, also what that has enqueued itself; checks the transaction''s deferred constraints first, as its commit would';

CREATE FUNCTION outbox.cloudevent(message outbox.message)
RETURNS jsonb
LANGUAGE C STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'outbox_cloudevent';
COMMENT ON FUNCTION outbox.cloudevent(outbox.message) IS
    'a message as CloudEvent 1.0 in structured JSON form';

CREATE FUNCTION outbox.cloudevent(message outbox.claimed_message)
RETURNS jsonb
LANGUAGE C STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'outbox_cloudevent';
COMMENT ON FUNCTION outbox.cloudevent(outbox.claimed_message) IS
    'a claimed message as CloudEvent 1.0 in structured JSON form';

CREATE FUNCTION outbox.maintain(
    OUT routed bigint,
    OUT expired bigint,
    OUT rotated integer)
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_maintain';
COMMENT ON FUNCTION outbox.maintain() IS
    'what a worker would do beside deliveries: files new messages for their subscriptions, takes back leases that ran out, removes dedupe keys whose window is over and history whose retention is; returns messages, and segments emptied';
