// What the tests of the worker share: workers as processes, a database, and waiting for a state.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { after, afterEach, before } from 'node:test';
import pg from 'pg';

export const pool = new pg.Pool({ max: 2 });
export const rows = async (sql, values) => (await pool.query(sql, values)).rows;
export const value = async (sql, values) => Object.values((await rows(sql, values))[0] ?? { none: undefined })[0];

const workers = new Set();
let workerSettings;

// To be called once, with the environment of workers that a test does not say otherwise of.
export function prepare(settings) {
  workerSettings = settings;
  before(async () => {
    await pool.query(`
      create table seen (id uuid, attempts int);
      create table go ();
      create table lost (id uuid);
      select outbox.unsubscribe('default', discard_pending => true);
      alter database ${process.env.PGDATABASE} set outbox.backoff_base = '20ms'`);
  });
  afterEach(async () => {
    for (const { child } of workers) child.kill('SIGKILL');
    for (const { ended } of workers) await ended;
    workers.clear();
    await pool.query(`select outbox.unsubscribe('work', discard_pending => true)`);
  });
  after(() => pool.end());
}

// Each test has a subscription that begins with it.
export async function fresh(options = '') {
  await pool.query(`truncate seen, go, lost`);
  await pool.query(`select outbox.subscribe('work', from_earliest => false ${options})`);
}

export async function pollUntil(what, condition, seconds = 30) {
  const end = performance.now() + seconds * 1000;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`in vain: ${what}`);
    await new Promise((done) => setTimeout(done, 20)); // poll
  }
}

export function startWorker(settings = {}) {
  const child = spawn(process.execPath, ['worker.mjs', 'work', './handler.mjs'], {
    env: { ...process.env, WORKER_BATCH: '10', ...workerSettings, ...settings },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const worker = { child, log: '', ended: once(child, 'exit') };
  child.stderr.on('data', (text) => { worker.log += text; });
  workers.add(worker);
  return worker;
}

export async function stopWorker(worker) {
  worker.child.kill('SIGTERM');
  const [code] = await worker.ended;
  assert.equal(code, 0, worker.log);
}

// Of all workers: those of the tests are the only clients with such names.
export const killConnections = () => rows(
  `select pg_terminate_backend(pid) from pg_stat_activity
   where application_name ~ ':[0-9]+$' and datname = current_database()`,
);

export const enqueue = (payloads) => rows(
  'select * from outbox.enqueue_batch($1, $2::jsonb)',
  ['task', JSON.stringify(payloads)],
);

export const inStatus = async (status) => Number(
  await value(`select count(*) from outbox.messages where subscription = 'work' and status = $1`, [status]),
);

export const untilDelivered = (n) => pollUntil(`${n} delivered`, async () => (await inStatus('delivered')) === n);
