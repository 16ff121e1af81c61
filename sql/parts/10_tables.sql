-- 10_tables: the schema and everything that is stored.  docs/internals.md explains why
-- it looks like this; in one line: the log is written once and never updated, and the
-- state of messages is kept per run of neighbours, not per message.

-- complain if the script is sourced in psql instead of CREATE EXTENSION
\echo Use "CREATE EXTENSION outbox" to load this file. \quit

-- Some frameworks' schema dumps create every schema before the extensions: an empty
-- schema of the installing role is taken over, anybody else's is refused.
DO $$
DECLARE
    schema_oid pg_catalog.oid;
    schema_owner pg_catalog.oid;
BEGIN
    SELECT n.oid, n.nspowner INTO schema_oid, schema_owner
      FROM pg_catalog.pg_namespace n WHERE n.nspname OPERATOR(pg_catalog.=) 'outbox';
    IF schema_oid IS NULL THEN
        CREATE SCHEMA outbox;
    ELSIF schema_owner OPERATOR(pg_catalog.<>)
            (SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) CURRENT_USER)
       OR EXISTS (SELECT FROM pg_catalog.pg_depend d
                   WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'::pg_catalog.regclass
                     AND d.refobjid OPERATOR(pg_catalog.=) schema_oid) THEN
        RAISE EXCEPTION 'schema "outbox" exists already'
            USING ERRCODE = 'duplicate_schema',
                  DETAIL = 'It is not empty, or not owned by the role that installs the extension.',
                  HINT = 'Rename or drop it, then run CREATE EXTENSION outbox again.';
    ELSE
        ALTER EXTENSION outbox ADD SCHEMA outbox;
    END IF;
END
$$;

-- The log: one immutable row per message.  log_0 to log_2 are a ring: messages go into one
-- of them, and one that nobody needs any more is truncated and written again.  log_kept
-- has the few messages that outlive their segment.  Nothing in the ring is updated, so
-- vacuum has no work there.
CREATE TABLE outbox.log_0 (
    position        bigint      NOT NULL,
    id              uuid        NOT NULL,
    created_at      timestamptz NOT NULL,
    occurred_at     timestamptz NOT NULL,
    available_at    timestamptz,
    version         integer     NOT NULL,
    max_attempts    integer,
    name            text        NOT NULL,
    kind            text        NOT NULL,
    payload         jsonb       NOT NULL,
    headers         jsonb,
    correlation_id  text,
    causation_id    text,
    aggregate_type  text,
    aggregate_id    text,
    tenant_id       text,
    owner_id        text,
    dedupe_key      text,
    ordering_key    text,
    CONSTRAINT log_0_pkey PRIMARY KEY (position),
    CONSTRAINT log_0_id_key UNIQUE (id)
) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);

CREATE TABLE outbox.log_1 (
    LIKE outbox.log_0,
    CONSTRAINT log_1_pkey PRIMARY KEY (position),
    CONSTRAINT log_1_id_key UNIQUE (id)
) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);

CREATE TABLE outbox.log_2 (
    LIKE outbox.log_0,
    CONSTRAINT log_2_pkey PRIMARY KEY (position),
    CONSTRAINT log_2_id_key UNIQUE (id)
) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off);

CREATE TABLE outbox.log_kept (
    LIKE outbox.log_0,
    CONSTRAINT log_kept_pkey PRIMARY KEY (position),
    CONSTRAINT log_kept_id_key UNIQUE (id)
);

CREATE VIEW outbox.log AS
SELECT * FROM outbox.log_0
UNION ALL SELECT * FROM outbox.log_1
UNION ALL SELECT * FROM outbox.log_2
UNION ALL SELECT * FROM outbox.log_kept;

-- The state of the ring, see src/rotate.c; rows appear with the first rotation.
--   writing            new messages go here; without such a row they go to log_0
--   closed_at          when that ended
--   condemned_at       the transaction number below which nobody must look any more before
--                      the segment is truncated; null: not yet decided
--   last_position      the highest position it had when that was decided
--   sweep_...          after the truncation: how far the runs of what is gone were removed
CREATE TABLE outbox.segment (
    number             integer     NOT NULL,
    writing            boolean     NOT NULL,
    closed_at          timestamptz,
    condemned_at       bigint,
    last_position      bigint,
    sweep_to           bigint,
    sweep_subscription bigint,
    sweep_from         bigint,
    CONSTRAINT segment_pkey PRIMARY KEY (number)
);

-- Whose data this is.  Made at first use, never by this script: a row made here would
-- collide with the restored one.
CREATE TABLE outbox.identity (
    singleton         boolean     NOT NULL DEFAULT true,
    system_identifier bigint      NOT NULL,
    database_oid      oid         NOT NULL,
    position_offset   bigint      NOT NULL,
    since             timestamptz NOT NULL,
    in_use            boolean     NOT NULL,
    CONSTRAINT identity_pkey PRIMARY KEY (singleton),
    CONSTRAINT identity_singleton_check CHECK (singleton)
);

-- How far routing has come: a snapshot per pass, in transaction numbers as positions
-- have them (transaction id + offset).  The id of each is its predecessor's plus one.
--   newest  the greatest created_at of all messages routed so far: what a copy has below
--           its horizon and is newer was not routed where the copy comes from.
CREATE TABLE outbox.frontier (
    id                bigint      NOT NULL,
    horizon           bigint      NOT NULL,
    running           bigint[]    NOT NULL,
    seen              bigint      NOT NULL,
    position_offset   bigint      NOT NULL,
    system_identifier bigint      NOT NULL,
    database_oid      oid         NOT NULL,
    created_at        timestamptz NOT NULL,
    newest            timestamptz NOT NULL,
    CONSTRAINT frontier_pkey PRIMARY KEY (id)
);

CREATE TABLE outbox.subscription (
    id           bigint      NOT NULL GENERATED BY DEFAULT AS IDENTITY,
    name         text        NOT NULL,
    pattern      text        NOT NULL DEFAULT '#',
    kind         text,
    mode         text        NOT NULL DEFAULT 'unused',
    paused       boolean     NOT NULL DEFAULT false,
    lease        interval,
    max_active   interval,
    max_attempts integer,
    created_at   timestamptz NOT NULL,
    CONSTRAINT subscription_pkey PRIMARY KEY (id),
    CONSTRAINT subscription_name_key UNIQUE (name),
    CONSTRAINT subscription_mode_check CHECK (mode IN ('unused', 'pulled', 'pushed'))
);

-- What is called for a message of a pushed subscription: a function or a channel.
-- Functions are stored as text: a regprocedure column blocks pg_upgrade.
CREATE TABLE outbox.handler (
    id              bigint      NOT NULL GENERATED BY DEFAULT AS IDENTITY,
    subscription_id bigint      NOT NULL,
    name_pattern    text        NOT NULL,
    kind            text,
    version         integer,
    function        text,
    channel         text,
    include_data    boolean     NOT NULL DEFAULT false,
    role_name       name        NOT NULL,
    role_oid        oid         NOT NULL,
    search_path     text        NOT NULL,
    timeout         interval,
    max_attempts    integer,
    retry           interval[],
    broken_since    timestamptz,
    created_at      timestamptz NOT NULL,
    CONSTRAINT handler_pkey PRIMARY KEY (id),
    CONSTRAINT handler_key UNIQUE NULLS NOT DISTINCT (subscription_id, name_pattern, kind, version),
    CONSTRAINT handler_target_check CHECK ((function IS NULL) OPERATOR(pg_catalog.<>) (channel IS NULL))
);

-- The deliveries: one row per run of messages in the same state for the same
-- subscription.  Only src/run.c writes here.
--   origin  where the index range began in which routing found the run; negative for
--           the range of a single late transaction.  Never changes.
--   low     no position of the row lies below it.  Never changes: an update that
--           shrinks the row touches no index.
-- The id alone is in no index: whoever has one has the subscription and "low" as well, and
-- an index less is a seventh of what a claim writes.
CREATE TABLE outbox.delivery (
    id              bigint      NOT NULL GENERATED BY DEFAULT AS IDENTITY,
    subscription_id bigint      NOT NULL,
    origin          bigint      NOT NULL,
    low             bigint      NOT NULL,
    available_at    timestamptz NOT NULL,
    message_count   integer     NOT NULL,
    attempts        integer     NOT NULL,
    max_attempts    integer     NOT NULL,
    piece           boolean     NOT NULL,
    state           text        NOT NULL,
    positions       int8multirange NOT NULL,
    claim_token     uuid,
    locked_until    timestamptz,
    active_until    timestamptz,
    claimed_at      timestamptz,
    settled_at      timestamptz,
    delivered_id    bigint,
    worker          text,
    last_error      jsonb,
    CONSTRAINT delivery_pkey PRIMARY KEY (subscription_id, low, id),
    CONSTRAINT delivery_check CHECK (
        message_count OPERATOR(pg_catalog.>) 0
        AND attempts OPERATOR(pg_catalog.>=) 0
        AND CASE state
            WHEN 'leased' THEN claim_token IS NOT NULL AND locked_until IS NOT NULL AND active_until IS NOT NULL
                               AND settled_at IS NULL
            WHEN 'ready' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NULL
            WHEN 'unhandled' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NULL
            WHEN 'delivered' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NOT NULL
            WHEN 'dead' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NOT NULL
            WHEN 'discarded' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NOT NULL
            WHEN 'cancelled' THEN claim_token IS NULL AND locked_until IS NULL AND settled_at IS NOT NULL
            ELSE false END)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0);

CREATE INDEX delivery_ready_idx ON outbox.delivery (subscription_id, available_at, id) WHERE state = 'ready';
CREATE INDEX delivery_token_idx ON outbox.delivery (claim_token, id) WHERE state = 'leased';
CREATE INDEX delivery_lease_idx ON outbox.delivery (subscription_id, locked_until, id) WHERE state = 'leased';
CREATE INDEX delivery_dead_idx ON outbox.delivery (subscription_id, settled_at, id) WHERE state = 'dead';
CREATE INDEX delivery_unhandled_idx ON outbox.delivery (subscription_id, id) WHERE state = 'unhandled';

-- What transactions that claimed their own messages have filed themselves: the router
-- leaves it out.  Normally empty.
CREATE TABLE outbox.self_routed (
    subscription_id bigint NOT NULL,
    lower           bigint NOT NULL,
    upper           bigint NOT NULL,
    CONSTRAINT self_routed_pkey PRIMARY KEY (lower, subscription_id)
);

CREATE TABLE outbox.dedupe (
    name       text        NOT NULL,
    key_hash   bytea       NOT NULL,
    id         uuid        NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT dedupe_pkey PRIMARY KEY (name, key_hash)
);
CREATE INDEX dedupe_expires_idx ON outbox.dedupe (expires_at);

-- Consumers that may use only some subscriptions.  A consumer without a row here may
-- use all; a row without a subscription says so beside rows of other roles.
CREATE TABLE outbox.access (
    id           bigint NOT NULL GENERATED BY DEFAULT AS IDENTITY,
    role_name    name   NOT NULL,
    role_oid     oid    NOT NULL,
    subscription text,
    -- No key on role and subscription: of roles that are gone, or were made anew, a restore has
    -- rows that are alike until adopt().
    CONSTRAINT access_pkey PRIMARY KEY (id)
);

SELECT pg_catalog.pg_extension_config_dump('outbox.log_0', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.log_1', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.log_2', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.log_kept', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.segment', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.identity', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.frontier', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.subscription', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.subscription_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.handler', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.handler_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.delivery', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.delivery_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.self_routed', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.dedupe', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.access', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.access_id_seq', '');
