-- 20_types: what a handler gets and what a claim returns.

CREATE TYPE outbox.message AS (
    id             uuid,
    name           text,
    kind           text,
    version        integer,
    payload        jsonb,
    headers        jsonb,
    subscription   text,
    attempts       integer,
    max_attempts   integer,
    correlation_id text,
    causation_id   text,
    aggregate_type text,
    aggregate_id   text,
    tenant_id      text,
    owner_id       text,
    dedupe_key     text,
    ordering_key   text,
    occurred_at    timestamptz,
    available_at   timestamptz,
    created_at     timestamptz
);
COMMENT ON TYPE outbox.message IS 'a message as handlers receive it';

CREATE TYPE outbox.claimed_message AS (
    id             uuid,
    claim_token    uuid,
    locked_until   timestamptz,
    active_until   timestamptz,
    attempts       integer,
    max_attempts   integer,
    name           text,
    kind           text,
    version        integer,
    payload        jsonb,
    headers        jsonb,
    subscription   text,
    correlation_id text,
    causation_id   text,
    aggregate_type text,
    aggregate_id   text,
    tenant_id      text,
    owner_id       text,
    dedupe_key     text,
    ordering_key   text,
    occurred_at    timestamptz,
    available_at   timestamptz,
    created_at     timestamptz
);
COMMENT ON TYPE outbox.claimed_message IS 'a message under a lease, as claim_batch() returns it';
