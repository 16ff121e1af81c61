"""graphile-worker, from npm: add_job() and add_jobs() in SQL, run() of the library with the options of its performance page."""
from harness.peer import NotHere
from node import NodePeer


class GraphileWorker(NodePeer):
    name = 'graphile-worker'
    about = 'from npm: add_job(), add_jobs(); run() with 24 concurrent jobs, local queue of the batch\'s size, completions in batches'
    package = 'graphile-worker@0.18.0'
    driver = 'graphile_worker.mjs'

    def enqueue(self):
        return "select id from graphile_worker.add_job('bench', :payload::json);\n"

    def bulk(self):
        return """select count(*) from graphile_worker.add_jobs(array(
select json_populate_record(null::graphile_worker.job_spec, json_build_object('identifier', 'bench', 'payload', e))
from json_array_elements(:payloads::json) as e));
"""

    def settled(self, db):
        return -db.value('select count(*) from graphile_worker.jobs')

    def check_each(self):
        raise NotHere('the library settles in batches or all singly: see batch 1')

    def probe(self, db):
        raise NotHere('the library claims by itself: no claim that could be timed')

    def status(self):
        return 'select locked_at is not null, count(*) from graphile_worker.jobs group by 1'


PEER = GraphileWorker
