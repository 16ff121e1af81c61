"""pg-boss, from npm: enqueued by the INSERT into its job table that its documentation gives, consumed by its library."""
from node import NodePeer


class PgBoss(NodePeer):
    name = 'pg-boss'
    about = 'from npm: INSERT into pgboss.job, as documented for SQL; fetch() and complete() of the library, a process per consumer'
    package = 'pg-boss@12.38.0'
    driver = 'pg_boss.mjs'

    # the policy is the queue's; without it the row would miss some of the indexes
    def enqueue(self):
        return "insert into pgboss.job (name, data, policy) values ('bench', :payload, 'standard');\n"

    def bulk(self):
        return """insert into pgboss.job (name, data, policy)
select 'bench', e, 'standard' from jsonb_array_elements(:payloads::jsonb) as e;
"""

    def settled(self, db):
        return db.value("select count(*) from pgboss.job where name = 'bench' and state = 'completed'")

    def status(self):
        return "select state, count(*) from pgboss.job where name = 'bench' group by state"


PEER = PgBoss
