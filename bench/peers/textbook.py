"""The table that most teams write: a row per message, FOR UPDATE SKIP LOCKED, a lease, a partial index."""
from harness.peer import Peer, Probe, one_by_one


class Textbook(Peer):
    name = 'textbook'
    about = 'a table with state, attempts, due time and lease, claimed by UPDATE ... FOR UPDATE SKIP LOCKED, settled by UPDATE'

    PICK = """select id from textbook where state = 'ready' and available_at <= now()
        order by available_at, id limit {batch} for update skip locked"""
    LEASE = """update textbook set state = 'leased', attempts = attempts + 1, token = gen_random_uuid(),
        locked_until = now() + interval '30 s' where id = any (array({pick})) returning id, payload, attempts"""
    SETTLE = "update textbook set state = 'delivered', token = null, locked_until = null where id = {ids}"

    def create(self, db):
        db.run("""
            create table textbook (id bigserial primary key, payload jsonb not null, state text not null default 'ready',
                attempts integer not null default 0, available_at timestamptz not null default now(),
                locked_until timestamptz, token uuid);
            create index on textbook (available_at, id) where state = 'ready'""")

    def enqueue(self):
        return 'insert into textbook (payload) values (:payload);\n'

    def bulk(self):
        return 'insert into textbook (payload) select * from jsonb_array_elements(:payloads::jsonb);\n'

    def lease(self, batch):
        return self.LEASE.format(pick=self.PICK.format(batch=batch))

    # pgbench keeps the last row only, so that one has all ids: what a client collects while it reads
    def claim_all(self, batch):
        return f"""\\set n 0
with c as ({self.lease(batch)})
select id, payload, attempts, null::bigint[] as ids, 0 as n from c
union all select null, null, null, array_agg(id), count(*) from c \\aset
"""

    def claim(self, batch):
        return self.claim_all(batch) + f'\\if :n > 0\n{self.SETTLE.format(ids="any (:ids::bigint[])")};\n\\endif\n'

    def claim_each(self, batch):
        return one_by_one(self.claim_all(batch), batch, lambda id: self.SETTLE.format(ids=id))

    def settled(self, db):
        return db.value("select count(*) from textbook where state = 'delivered'")

    def probe(self, db):
        return Probe(db, self.lease('$1'), self.SETTLE.format(ids='any ($1)'), lambda rows: [row[0] for row in rows],
                     ('integer', 'bigint[]'))

    def status(self):
        return 'select state, count(*), min(available_at) from textbook group by state'


PEER = Textbook
