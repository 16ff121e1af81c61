-- 50_subscriptions: who gets which messages, and what is called for them;
-- src/subscribe.c, src/skip.c, src/register.c.

CREATE FUNCTION outbox.subscribe(
    name text,
    pattern text DEFAULT '#',
    kind text DEFAULT NULL,
    from_earliest boolean DEFAULT true,
    lease interval DEFAULT NULL,
    max_active interval DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    replace boolean DEFAULT false)
RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_subscribe';
COMMENT ON FUNCTION outbox.subscribe(text, text, text, boolean, interval, interval, integer, boolean) IS
    'makes an independent consumer of the messages whose name matches a topic pattern (* is one word, # any number), from the earliest that is kept or from now on; returns created, unchanged or altered; an altered pattern holds for messages routed from then on; should be the last write of its transaction';

CREATE FUNCTION outbox.unsubscribe(
    name text,
    discard_pending boolean DEFAULT false)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_unsubscribe';
COMMENT ON FUNCTION outbox.unsubscribe(text, boolean) IS
    'removes a subscription with its handlers and all it knows of its messages; refused while messages are not settled, unless they may be discarded; returns how many were discarded';

CREATE FUNCTION outbox.skip(
    subscription text,
    before timestamptz)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_skip';
COMMENT ON FUNCTION outbox.skip(text, timestamptz) IS
    'discards the messages of a subscription that were created before a time and are neither leased nor at an end; returns how many';

CREATE FUNCTION outbox.pause(subscription text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_pause';
COMMENT ON FUNCTION outbox.pause(text) IS
    'stops claims and deliveries of a subscription; what is leased may be settled, what is enqueued is kept; returns whether that is a change';

CREATE FUNCTION outbox.resume(subscription text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_resume';
COMMENT ON FUNCTION outbox.resume(text) IS
    'ends a pause; returns whether that is a change';

CREATE FUNCTION outbox.register_hook(
    name_pattern text,
    function text,
    subscription text DEFAULT 'default',
    kind text DEFAULT NULL,
    version integer DEFAULT NULL,
    timeout interval DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    retry interval[] DEFAULT NULL,
    replace boolean DEFAULT false)
RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_register_hook';
COMMENT ON FUNCTION outbox.register_hook(text, text, text, text, integer, interval, integer, interval[], boolean) IS
    'has a function of one outbox.message argument called, as the current role, for each message of a subscription that matches; returns created, unchanged or altered';

CREATE FUNCTION outbox.register_notify(
    name_pattern text,
    channel text,
    subscription text DEFAULT 'default',
    kind text DEFAULT NULL,
    version integer DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    retry interval[] DEFAULT NULL,
    include_data boolean DEFAULT false,
    replace boolean DEFAULT false)
RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_register_notify';
COMMENT ON FUNCTION outbox.register_notify(text, text, text, text, integer, integer, interval[], boolean, boolean) IS
    'has a NOTIFY sent for each message of a subscription that matches, without its payload unless that is asked for: everybody who can connect can listen; returns created, unchanged or altered';

CREATE FUNCTION outbox.unregister(
    name_pattern text,
    subscription text DEFAULT 'default',
    kind text DEFAULT NULL,
    version integer DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_unregister';
COMMENT ON FUNCTION outbox.unregister(text, text, text, integer) IS
    'removes the handler that was registered with exactly these; returns whether there was one';

-- Always: it must hold, too, where rows are restored or replicated.
CREATE FUNCTION outbox.guard_role()
RETURNS trigger
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_guard_role';
COMMENT ON FUNCTION outbox.guard_role() IS
    'lets only superusers and members of its role write a row of outbox.handler, only superusers one of outbox.access';

CREATE TRIGGER guard_role BEFORE INSERT OR UPDATE OR DELETE ON outbox.handler
    FOR EACH ROW EXECUTE FUNCTION outbox.guard_role();
ALTER TABLE outbox.handler ENABLE ALWAYS TRIGGER guard_role;
