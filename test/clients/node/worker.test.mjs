// The worker of docs/examples, as a process: it delivers, fails, keeps its lease, loses it, stops and dies. It looks
// for messages by itself, with or without a coordinator.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  enqueue, fresh, inStatus, killConnections, pollUntil, pool, prepare, rows, startWorker, stopWorker, untilDelivered,
  value,
} from './harness.mjs';

prepare({ WORKER_POLL: '0.05' });

test('delivers what is there and what comes, each once, by two workers', async () => {
  await fresh();
  await enqueue(Array.from({ length: 60 }, (_, n) => ({ n })));
  const pair = [startWorker(), startWorker()];
  await untilDelivered(60);
  await enqueue(Array.from({ length: 60 }, (_, n) => ({ n })));
  await untilDelivered(120);
  for (const worker of pair) await stopWorker(worker);
  assert.equal(await value('select count(*) from seen'), '120');
  assert.equal(await value('select count(distinct id) from seen where attempts = 1'), '120');
});

test('a handler that throws costs only its own message', async () => {
  await fresh(', max_attempts => 2');
  const worker = startWorker();
  await enqueue([{}, { action: 'fail', what: 'stamp' }, {}]);
  await pollUntil('a dead letter', async () => (await inStatus('dead')) === 1);
  await untilDelivered(2);
  const [letter] = await rows('select attempts, last_error from outbox.dead_letters');
  assert.equal(letter.attempts, 2);
  assert.equal(letter.last_error.message, 'no stamp');
  assert.match(JSON.stringify(letter.last_error), /TypeError: no stamp/);
  await stopWorker(worker);
});

test('the heartbeat keeps a batch whose work takes longer than the lease', async () => {
  await fresh();
  await enqueue([{ action: 'outlive' }, {}, {}]);
  const worker = startWorker({ WORKER_LEASE: '1' });
  await untilDelivered(3);
  await stopWorker(worker);
  assert.equal(await value('select count(*) from seen'), '3');
});

test('a lost lease aborts the signal, and nothing is settled with it', async () => {
  await fresh();
  const [{ enqueue_batch: id }] = await enqueue([{ action: 'lose' }]);
  const worker = startWorker({ WORKER_LEASE: '2' });
  await pollUntil('the lease', async () => (await value('select count(*) from seen')) === '1');
  // somebody else settles it: only a superuser can know the token
  await pool.query(`select outbox.settle_batch(claim_token, 'failed', retry_at => now())
                    from (select distinct claim_token from outbox.delivery where state = 'leased') held`);
  await untilDelivered(1);
  await stopWorker(worker);
  assert.equal(await value('select id from lost'), id);
  assert.match(worker.log, /lease lost/);
  assert.deepEqual(await rows('select attempts from seen order by attempts'), [{ attempts: 1 }, { attempts: 2 }]);
});

test('SIGTERM: the message at work is settled, the others are given back uncharged', async () => {
  await fresh();
  await enqueue([{ action: 'wait' }, {}, {}]);
  const worker = startWorker();
  await pollUntil('the first message', async () => (await value('select count(*) from seen')) === '1');
  worker.child.kill('SIGTERM');
  await pool.query('insert into go default values');
  const [code] = await worker.ended;
  assert.equal(code, 0, worker.log);
  assert.equal(await inStatus('delivered'), 1);
  assert.deepEqual(
    await rows(`select attempts, status from outbox.messages where subscription = 'work' and status <> 'delivered'`),
    [{ attempts: 0, status: 'ready' }, { attempts: 0, status: 'ready' }],
  );
});

test('kill -9: the lease ends, and another worker takes over', async () => {
  await fresh();
  await enqueue([{}, { action: 'die' }, {}]);
  const first = startWorker({ WORKER_LEASE: '1' });
  await first.ended;
  assert.equal(await inStatus('leased'), 2);
  const second = startWorker({ WORKER_LEASE: '1' });
  await untilDelivered(3);
  await stopWorker(second);
});

test('the worker survives the loss of its connections', async () => {
  await fresh();
  const worker = startWorker();
  await enqueue([{}]);
  await untilDelivered(1);
  await killConnections();
  await enqueue([{}]);
  await untilDelivered(2);
  await stopWorker(worker);
});
