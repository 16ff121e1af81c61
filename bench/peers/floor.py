"""The floor: tables without any queue on top, to compare the enqueueing with. It parses the same JSON parameter."""
from harness.peer import Peer


class Floor(Peer):
    name = 'floor'
    about = 'a bare INSERT into (bigserial primary key, jsonb); in bulk an INSERT ... SELECT of rows as wide as those of ' \
            'outbox into a table with the same two indexes'

    def create(self, db):
        db.run('create table bare (id bigserial primary key, payload jsonb)')
        # the columns and indexes of a message in outbox; positions and ids ascend there too
        db.run("""
            create sequence wide_position;
            create table wide (position bigint primary key, id uuid not null unique,
                created_at timestamptz not null, occurred_at timestamptz not null, available_at timestamptz,
                version integer not null, max_attempts integer, name text not null, kind text not null, payload jsonb not null,
                headers jsonb, correlation_id text, causation_id text, aggregate_type text, aggregate_id text,
                tenant_id text, owner_id text, dedupe_key text, ordering_key text)""")

    def enqueue(self):
        return 'insert into bare (payload) values (:payload);\n'

    def bulk(self):
        return """with base as materialized (select nextval('wide_position') << 20 as base)
insert into wide (position, id, created_at, occurred_at, version, name, kind, payload)
select base + n, lpad(to_hex(base + n), 32, '0')::uuid, now(), now(), 1, 'order.created', 'event', e
from base, jsonb_array_elements(:payloads::jsonb) with ordinality as x (e, n);
"""


PEER = Floor
