// The worker of docs/examples beside a coordinator, which says on the channel outbox_ready that there is something. The
// workers here would look again only after ten minutes, so whatever they get they were told of.
import assert from 'node:assert/strict';
import { hostname } from 'node:os';
import { test } from 'node:test';
import pg from 'pg';
import {
  enqueue, fresh, inStatus, killConnections, pollUntil, pool, prepare, rows, startWorker, stopWorker, untilDelivered,
  value,
} from './harness.mjs';

prepare({ WORKER_POLL: '600' });

// Until it has looked once and listens.
async function startIdleWorker(settings) {
  const worker = startWorker(settings);
  await pollUntil('the listener and the first look', () => value(
    `select bool_or(query ~ '^listen') and bool_or(query ~ 'claim_batch') and bool_and(state = 'idle')
     from pg_stat_activity where application_name = $1`,
    [`${hostname()}:${worker.child.pid}`],
  ));
  return worker;
}

const coordinator = () => value(
  `select pid from outbox.workers
   where kind = 'coordinator' and database = current_database() and activity_state = 'idle'`,
);

test('a commit', async () => {
  await fresh();
  const worker = await startIdleWorker();
  await enqueue([{}]);
  await untilDelivered(1);
  await stopWorker(worker);
});

test('commits in quick succession, of which not each is told', async () => {
  await fresh();
  const pair = [await startIdleWorker(), await startIdleWorker()];
  for (let n = 0; n < 50; n += 1) await enqueue([{ n }]);
  await untilDelivered(50);
  for (const worker of pair) await stopWorker(worker);
  assert.equal(await value('select count(*) from seen'), '50');
});

test('a due time', async () => {
  await fresh();
  const worker = await startIdleWorker();
  await pool.query(`select outbox.enqueue('task', '{}', available_at => clock_timestamp() + interval '300 ms')`);
  await untilDelivered(1);
  await stopWorker(worker);
});

test('a retry', async () => {
  await fresh(', max_attempts => 3');
  const worker = await startIdleWorker();
  await enqueue([{ action: 'fail', what: 'stamp' }]);
  await pollUntil('a dead letter', async () => (await inStatus('dead')) === 1);
  await stopWorker(worker);
  assert.equal(await value('select count(*) from seen'), '3');
});

test('the end of the lease of a worker that died', async () => {
  await fresh();
  await enqueue([{ action: 'die' }, {}, {}]);
  await startWorker({ WORKER_LEASE: '2' }).ended;
  const worker = await startIdleWorker();
  await untilDelivered(3);
  await stopWorker(worker);
});

test('what a worker gives back when it stops', async () => {
  await fresh();
  await enqueue([{ action: 'wait' }, {}, {}]);
  const first = startWorker();
  await pollUntil('the first message', async () => (await value('select count(*) from seen')) === '1');
  const second = await startIdleWorker();
  first.child.kill('SIGTERM');
  await pool.query('insert into go default values');
  await untilDelivered(3);
  await stopWorker(second);
});

test('dead letters that are requeued, and a subscription that goes on', async () => {
  await fresh(', max_attempts => 1');
  const worker = await startIdleWorker();
  await enqueue([{ action: 'fail', what: 'stamp' }, { action: 'fail', what: 'ink' }]);
  await pollUntil('dead letters', async () => (await inStatus('dead')) === 2);
  await rows(`select outbox.requeue_all('work')`);
  await pollUntil('their second time', async () => (
    (await inStatus('dead')) === 2 && (await value('select count(*) from seen')) === '4'
  ));
  await rows(`select outbox.pause('work')`);
  await enqueue([{}]);
  await pollUntil('the message', async () => (await inStatus('ready')) === 1);
  await rows(`select outbox.resume('work')`);
  await untilDelivered(1);
  await stopWorker(worker);
});

test('what was said while the listener had no connection', async () => {
  await fresh();
  const worker = await startIdleWorker();
  await killConnections();
  await enqueue([{}]);
  await untilDelivered(1);
  await stopWorker(worker);
});

test('another coordinator, after the first was terminated', async () => {
  await fresh();
  const worker = await startIdleWorker();
  await pollUntil('a coordinator', coordinator);
  await rows('select pg_terminate_backend($1)', [await coordinator()]);
  await enqueue([{}]);
  await untilDelivered(1);
  await stopWorker(worker);
});

test('without notifications it looks all the same', async () => {
  await fresh();
  const before = await coordinator();
  await pool.query(`alter database ${process.env.PGDATABASE} set outbox.notify_interval = 0`);
  await pollUntil('a coordinator with the new setting', async () => ![before, undefined].includes(await coordinator()));
  const heard = [];
  const listener = new pg.Client();
  await listener.connect();
  listener.on('notification', ({ payload }) => heard.push(payload));
  await listener.query('listen outbox_ready');
  const worker = await startIdleWorker({ WORKER_POLL: '0.05' });
  await enqueue([{}]);
  await untilDelivered(1);
  await stopWorker(worker);
  await listener.query('select 1');
  assert.deepEqual(heard, []);
  await listener.end();
});
