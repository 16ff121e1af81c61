-- 70_operators: what operators do to messages; src/admin.c and src/dead.c.

CREATE FUNCTION outbox.get(id uuid)
RETURNS outbox.message
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_get';
COMMENT ON FUNCTION outbox.get(uuid) IS
    'one message with its payload; OB002 if there is none with this id';

CREATE FUNCTION outbox.requeue(
    id uuid,
    subscription text DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    reset_attempts boolean DEFAULT true)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_requeue';
COMMENT ON FUNCTION outbox.requeue(uuid, text, timestamptz, boolean) IS
    'makes a dead message ready again, in one subscription or in all where it is dead; where the subscription is named, also an unhandled, discarded or cancelled one; returns in how many';

CREATE FUNCTION outbox.requeue_all(
    subscription text,
    name_pattern text DEFAULT NULL,
    error_like text DEFAULT NULL,
    error_sqlstate text DEFAULT NULL,
    dead_after timestamptz DEFAULT NULL,
    dead_before timestamptz DEFAULT NULL,
    max_messages integer DEFAULT NULL,
    spread_over interval DEFAULT NULL)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_requeue_all';
COMMENT ON FUNCTION outbox.requeue_all(text, text, text, text, timestamptz, timestamptz, integer, interval) IS
    'makes the dead messages of a subscription ready again that all filters match, the longest dead first, due at once or spread over a time; returns how many';

CREATE FUNCTION outbox.discard(
    id uuid,
    subscription text DEFAULT NULL,
    reason text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_discard';
COMMENT ON FUNCTION outbox.discard(uuid, text, text) IS
    'gives up a message that is scheduled, ready, unhandled or dead, in one subscription or in all; returns in how many';

CREATE FUNCTION outbox.discard_all(
    subscription text,
    name_pattern text DEFAULT NULL,
    error_like text DEFAULT NULL,
    error_sqlstate text DEFAULT NULL,
    dead_after timestamptz DEFAULT NULL,
    dead_before timestamptz DEFAULT NULL,
    max_messages integer DEFAULT NULL,
    reason text DEFAULT NULL)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_discard_all';
COMMENT ON FUNCTION outbox.discard_all(text, text, text, text, timestamptz, timestamptz, integer, text) IS
    'gives up the dead messages of a subscription that all filters match; returns how many';

CREATE FUNCTION outbox.cancel(id uuid)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_cancel';
COMMENT ON FUNCTION outbox.cancel(uuid) IS
    'takes back a message from every subscription where it still waits; returns from how many';

CREATE FUNCTION outbox.reset()
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_reset';
COMMENT ON FUNCTION outbox.reset() IS
    'for tests: removes every message with all that is known of it, keeps subscriptions and handlers; returns how many messages there were';

CREATE FUNCTION outbox.purge(before timestamptz)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_purge';
COMMENT ON FUNCTION outbox.purge(timestamptz) IS
    'lets settled messages go that were enqueued before a time, in whole segments, without waiting for their retention; returns how many will go as soon as nobody''s snapshot needs them';
