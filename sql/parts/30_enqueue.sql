-- 30_enqueue: messages into the log.  src/enqueue_sql.c

CREATE FUNCTION outbox.enqueue(
    name text,
    payload jsonb,
    kind text DEFAULT NULL,
    version integer DEFAULT NULL,
    id uuid DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    correlation_id text DEFAULT NULL,
    causation_id text DEFAULT NULL,
    aggregate_type text DEFAULT NULL,
    aggregate_id text DEFAULT NULL,
    tenant_id text DEFAULT NULL,
    owner_id text DEFAULT NULL,
    dedupe_key text DEFAULT NULL,
    occurred_at timestamptz DEFAULT NULL,
    ordering_key text DEFAULT NULL)
RETURNS uuid
AS 'MODULE_PATHNAME', 'outbox_enqueue'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.enqueue(text, jsonb, text, integer, uuid, timestamptz, integer, jsonb, text, text, text, text, text, text, text, timestamptz, text)
    IS 'enqueue a message in the current transaction; returns its id';

CREATE FUNCTION outbox.enqueue_batch(messages jsonb)
RETURNS SETOF uuid
AS 'MODULE_PATHNAME', 'outbox_enqueue_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION outbox.enqueue_batch(jsonb)
    IS 'enqueue an array of messages, objects with the arguments of enqueue() as keys; returns their ids in order';

CREATE FUNCTION outbox.enqueue_batch(name text, payloads jsonb)
RETURNS SETOF uuid
AS 'MODULE_PATHNAME', 'outbox_enqueue_payloads'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100;
COMMENT ON FUNCTION outbox.enqueue_batch(text, jsonb)
    IS 'enqueue an array of payloads under one name; returns the ids in order';

CREATE FUNCTION outbox.enqueued(pattern text DEFAULT NULL)
RETURNS SETOF outbox.message
AS 'MODULE_PATHNAME', 'outbox_enqueued'
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10;
COMMENT ON FUNCTION outbox.enqueued(text)
    IS 'messages that the current transaction has enqueued, those that match the pattern';

CREATE VIEW outbox.outgoing AS
    SELECT m.name, m.payload, m.kind, m.version, m.id, m.available_at, m.max_attempts, m.headers,
           m.correlation_id, m.causation_id, m.aggregate_type, m.aggregate_id, m.tenant_id,
           m.owner_id, m.dedupe_key, m.occurred_at, m.ordering_key
      FROM outbox.enqueued() AS m;
COMMENT ON VIEW outbox.outgoing
    IS 'INSERT enqueues; SELECT shows what the current transaction has enqueued';

CREATE FUNCTION outbox.outgoing_insert() RETURNS trigger
AS 'MODULE_PATHNAME', 'outbox_outgoing_insert'
LANGUAGE C;
COMMENT ON FUNCTION outbox.outgoing_insert() IS 'trigger of the view outbox.outgoing';

CREATE TRIGGER outgoing_insert INSTEAD OF INSERT ON outbox.outgoing
    FOR EACH ROW EXECUTE FUNCTION outbox.outgoing_insert();

-- caches of the identity are dropped, whoever writes it
CREATE FUNCTION outbox.identity_changed() RETURNS trigger
AS 'MODULE_PATHNAME', 'outbox_identity_changed'
LANGUAGE C;
COMMENT ON FUNCTION outbox.identity_changed() IS 'trigger of the table outbox.identity';

CREATE TRIGGER identity_changed BEFORE INSERT OR UPDATE OR DELETE ON outbox.identity
    FOR EACH ROW EXECUTE FUNCTION outbox.identity_changed();
ALTER TABLE outbox.identity ENABLE ALWAYS TRIGGER identity_changed;
