"""pgmq, where its SQL file is given with --pgmq: a table per queue, read with a visibility timeout, deleted when done."""
import os

from harness.peer import NotHere, Peer, Probe, one_by_one


class PgMQ(Peer):
    name = 'pgmq'
    about = 'pgmq by its SQL file: read with a visibility timeout of 30 s, settled by delete'

    def install(self):
        if not self.bench.options.pgmq:
            raise NotHere('its SQL is in no registry; name the file with --pgmq')
        if not os.path.exists(self.bench.options.pgmq):
            raise NotHere(f'no such file: {self.bench.options.pgmq}')

    def create(self, db):
        # the file is that of an extension: it begins with a guard for psql, and marks its tables for pg_dump
        with open(self.bench.options.pgmq, encoding='utf-8') as file:
            lines = [line for line in file if not line.startswith('\\')]
        if not any(line.lower().startswith('create schema') for line in lines):
            db.run('create schema if not exists pgmq')
        text = ''.join(lines)
        db.run(text.replace('SELECT pg_catalog.pg_extension_config_dump', '-- SELECT pg_catalog.pg_extension_config_dump'))
        db.run("select pgmq.create('q')")

    def enqueue(self):
        return "select pgmq.send('q', :payload::jsonb);\n"

    def bulk(self):
        return "select count(*) from pgmq.send_batch('q', (select array_agg(e) from jsonb_array_elements(:payloads::jsonb) as e));\n"

    def read(self, batch):
        return f"""\\set n 0
with c as materialized (select msg_id, message, read_ct from pgmq.read('q', 30, {batch}))
select c.*, null::bigint[] as ids, 0 as n from c
union all select null, null, null, array_agg(msg_id), count(*) from c \\aset
"""

    def claim(self, batch):
        return self.read(batch) + "\\if :n > 0\nselect count(*) from pgmq.delete('q', :ids::bigint[]);\n\\endif\n"

    def claim_each(self, batch):
        return one_by_one(self.read(batch), batch, lambda id: f"select pgmq.delete('q', {id}::bigint)")

    def settled(self, db):
        return -db.value('select count(*) from pgmq.q_q')

    def probe(self, db):
        return Probe(db, "select msg_id, message, read_ct from pgmq.read('q', 30, $1)", "select pgmq.delete('q', $1)",
                     lambda rows: [row[0] for row in rows], ('integer', 'bigint[]'))

    def status(self):
        return "select * from pgmq.metrics('q')"


PEER = PgMQ
