// The worker of docs/examples, as a process: it delivers, fails, keeps its lease, loses it, stops and dies.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { after, afterEach, before, test } from 'node:test';
import pg from 'pg';

const pool = new pg.Pool({ max: 2 });
const rows = async (sql, values) => (await pool.query(sql, values)).rows;
const value = async (sql, values) => Object.values((await rows(sql, values))[0] ?? { none: undefined })[0];
const workers = new Set();

async function pollUntil(what, condition, seconds = 30) {
  const end = performance.now() + seconds * 1000;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`in vain: ${what}`);
    await new Promise((done) => setTimeout(done, 20)); // poll
  }
}

function startWorker(settings = {}) {
  const child = spawn(process.execPath, ['worker.mjs', 'work', './handler.mjs'], {
    env: { ...process.env, WORKER_POLL: '0.05', WORKER_BATCH: '10', ...settings },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const worker = { child, log: '', ended: once(child, 'exit') };
  child.stderr.on('data', (text) => { worker.log += text; });
  workers.add(worker);
  return worker;
}

async function stopWorker(worker) {
  worker.child.kill('SIGTERM');
  const [code] = await worker.ended;
  assert.equal(code, 0, worker.log);
}

const enqueue = (payloads) => rows('select * from outbox.enqueue_batch($1, $2::jsonb)', ['task', JSON.stringify(payloads)]);
const inStatus = async (status) => Number(
  await value(`select count(*) from outbox.messages where subscription = 'work' and status = $1`, [status]),
);
const untilDelivered = (n) => pollUntil(`${n} delivered`, async () => (await inStatus('delivered')) === n);

before(async () => {
  await pool.query(`
    create table seen (id uuid, attempts int);
    create table go ();
    create table lost (id uuid);
    select outbox.unsubscribe('default', discard_pending => true)`);
});

// Each test has a subscription that begins with it.
async function fresh(options = '') {
  await pool.query(`truncate seen, go, lost`);
  await pool.query(`select outbox.subscribe('work', from_earliest => false ${options})`);
}

afterEach(async () => {
  for (const { child } of workers) child.kill('SIGKILL');
  for (const { ended } of workers) await ended;
  workers.clear();
  await pool.query(`select outbox.unsubscribe('work', discard_pending => true)`);
});

after(() => pool.end());

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
  await pool.query(`alter database ${process.env.PGDATABASE} set outbox.backoff_base = '20ms'`);
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

test('a notification saves waiting for the next look', async () => {
  await fresh();
  const worker = startWorker({ WORKER_POLL: '600' });
  await pollUntil('the listener and the first look', async () => (
    await value(`select count(*) = 2 and bool_or(query ~ '^listen') and bool_or(query ~ 'claim_batch')
                 from pg_stat_activity where application_name ~ ':[0-9]+$' and state = 'idle' and datname = current_database()`)
  ));
  await enqueue([{}]);
  await pollUntil('delivery', async () => {
    await pool.query(`notify outbox_ready, 'work'`);
    return (await inStatus('delivered')) === 1;
  });
  await stopWorker(worker);
});

test('the worker survives the loss of its connections', async () => {
  await fresh();
  const worker = startWorker();
  await enqueue([{}]);
  await untilDelivered(1);
  await pool.query(`select pg_terminate_backend(pid) from pg_stat_activity
                    where application_name ~ ':[0-9]+$' and datname = current_database()`);
  await enqueue([{}]);
  await untilDelivered(2);
  await stopWorker(worker);
});
