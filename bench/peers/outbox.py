"""outbox itself, as installed: preloaded, with its background workers."""
import contextlib

from harness.peer import Peer, Probe, Rate, one_by_one
from harness import pgbench


class Outbox(Peer):
    name = 'outbox'
    about = 'this extension, preloaded, its background workers running'
    push = True

    def version(self, db):
        return db.value("select extversion from pg_extension where extname = 'outbox'")

    def create(self, db):
        db.run('create extension outbox')
        self.workers(db)

    def workers(self, db):
        """Waits for the coordinator, where workers are switched on."""
        if db.value("select current_setting('outbox.enabled')::boolean"):
            db.wait("select exists (select from outbox.workers where kind = 'coordinator' and running and database = current_database())")

    @contextlib.contextmanager
    def quiet(self):
        with self.bench.server.settings(outbox__enabled='off'):
            yield

    def enqueue(self):
        return "select outbox.enqueue('order.created', :payload);\n"

    def bulk(self):
        return "select count(*) from outbox.enqueue_batch('order.created', :payloads);\n"

    def settled_down(self, db):
        if db.value("select current_setting('outbox.enabled')::boolean"):
            db.wait('select not exists (select from outbox.status where pending > 0)', 600)
        while db.value('select coalesce(sum(pending), 0) from outbox.status'):
            db.run('select outbox.maintain()')

    def maintain(self, db):
        db.run('select outbox.maintain()')
        super().maintain(db)

    def claim(self, batch, subscription='default'):
        return f"""\\set attempts 0
select id, claim_token as token, name, payload, attempts from outbox.claim_batch({batch}, subscription => '{subscription}') \\aset
\\if :attempts > 0
select outbox.settle_batch(:token);
\\endif
"""

    def claim_each(self, batch):
        claim = f"""with c as materialized (select id, claim_token, name, payload, attempts from outbox.claim_batch({batch}))
select c.*, null::uuid[] as ids, null::text as token, 0 as n from c
union all select null, null, null, null, null, array_agg(id), min(claim_token::text), count(*) from c \\aset
"""
        return one_by_one(claim, batch, lambda id: f'select outbox.settle({id}, :token)', 'uuid')

    def settled(self, db, subscription='default'):
        return db.value('select coalesce(sum(delivered), 0)::bigint from outbox.status where subscription = %s', subscription)

    def probe(self, db):
        return Probe(db, 'select id, claim_token, name, payload, attempts from outbox.claim_batch($1)',
                     'select outbox.settle_batch($1)', lambda rows: rows[0][1])

    def status(self):
        return 'select * from outbox.status'

    def subscribers(self, db, count):
        for number in range(count):
            db.run('select outbox.subscribe(%s)', f's{number}')
        db.run("select outbox.unsubscribe('default', discard_pending => true)")

    def consume_as(self, db, number, batch, messages):
        before = self.settled(db, f's{number}')
        run = pgbench.run(self.bench, db, self.claim(batch, f's{number}'), transactions=messages // batch)
        return Rate(self.settled(db, f's{number}') - before, run.seconds)


PEER = Outbox
