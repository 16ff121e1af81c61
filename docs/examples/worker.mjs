// A worker that pulls the messages of one subscription: claim, commit, work, settle.
//
//   npm install pg
//   node worker.mjs SUBSCRIPTION HANDLER.mjs
//
// HANDLER.mjs exports by default what is done with a message:
//
//   export default async function (message, signal) { ... }     // throws: tried again later
//
// The signal is aborted when the lease was lost and somebody else may have the message.
// Delivery is at least once: the handler must bear a message that it has seen before
// (message.id tells). The database is that of the PG* environment variables. As many of
// these as you like may run side by side. SIGTERM lets the message at work end and gives
// the others back.
//
// It waits for the notifications of the database's coordinator, and looks every ten seconds
// all the same. Where no coordinator runs there are none: then set WORKER_POLL=1.
import { hostname } from 'node:os';
import { resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import pg from 'pg';

const [subscription, handlerFile] = process.argv.slice(2);
if (!handlerFile) {
  console.error('usage: node worker.mjs SUBSCRIPTION HANDLER.mjs');
  process.exit(2);
}
const { default: handle } = await import(pathToFileURL(resolve(handlerFile)));

const batchSize = Number(process.env.WORKER_BATCH ?? 20); // messages in one claim
const leaseSeconds = Number(process.env.WORKER_LEASE ?? 30);
const pollSeconds = Number(process.env.WORKER_POLL ?? 10);
const errorPauseSeconds = 1;
const lease = `${leaseSeconds} seconds`; // an interval, never a bare number
const worker = `${hostname()}:${process.pid}`; // for people: shown in outbox.leases
const CLAIM_NOT_HELD = 'OB003';

const log = (text) => console.error(`${worker}: ${text}`);

// Each query is a transaction of its own, so a claim is committed before the work begins.
// There are two connections, so that the heartbeat waits for nothing. An answer that takes
// longer than a lease is none.
const pool = new pg.Pool({
  max: 2,
  application_name: worker,
  connectionTimeoutMillis: leaseSeconds * 1000,
  query_timeout: leaseSeconds * 1000,
});
pool.on('error', (error) => log(`idle connection: ${error.message}`)); // without this the process ends

let stopping = false;
let ready = false; // there may be something to claim
let endPause = () => {};
let listener;

function wake() {
  ready = true;
  endPause();
}

function pause(seconds) {
  if (ready || stopping) return undefined;
  return new Promise((done) => {
    const timer = setTimeout(done, seconds * 1000);
    endPause = () => {
      clearTimeout(timer);
      done();
    };
  });
}

async function claim() {
  const { rows } = await pool.query(
    `select * from outbox.claim_batch(max_messages => $1::int, lease => $2::interval,
                                      subscription => $3::text, worker => $4::text)`,
    [batchSize, lease, subscription, worker],
  );
  return rows;
}

// Renews the whole batch three times in the length of a lease. A renewal that fails for
// another reason than a lost claim is tried again, until the lease must have ended.
function startHeartbeat(token, lost) {
  let leaseEnd = performance.now() + leaseSeconds * 1000;
  const timer = setInterval(async () => {
    const asked = performance.now();
    try {
      await pool.query('select outbox.renew_batch($1::uuid, $2::interval)', [token, lease]);
      leaseEnd = asked + leaseSeconds * 1000;
    } catch (error) {
      if (error.code === CLAIM_NOT_HELD || performance.now() > leaseEnd) lost.abort(error);
      else log(`heartbeat: ${error.message}`);
    }
  }, (leaseSeconds * 1000) / 3);
  return () => clearInterval(timer);
}

async function settle(message, outcome, error) {
  await pool.query(
    `select outbox.settle($1::uuid, $2::uuid, outcome => $3::text, error => $4::text,
                          error_detail => $5::jsonb)`,
    [message.id, message.claim_token, outcome, error?.message ?? null,
      error ? JSON.stringify({ name: error.name, stack: error.stack }) : null],
  );
}

// The server decides whether a failed message is tried again or becomes a dead letter.
async function deliver(message, lost) {
  let failure;
  try {
    await handle(message, lost.signal);
  } catch (error) {
    failure = error instanceof Error ? error : new Error(String(error));
    log(`${message.name} ${message.id}, attempt ${message.attempts}: ${failure.message}`);
  }
  if (lost.signal.aborted) return;
  try {
    await settle(message, failure ? 'failed' : 'delivered', failure);
  } catch (error) {
    if (error.code !== CLAIM_NOT_HELD) throw error; // the lease ends, and the message comes again
    lost.abort(error);
  }
}

// One token covers the batch, so that renewing or releasing it is one call.
async function work(messages) {
  const token = messages[0].claim_token;
  const lost = new AbortController();
  const stopHeartbeat = startHeartbeat(token, lost);
  let done = 0;
  try {
    while (done < messages.length && !stopping && !lost.signal.aborted) {
      await deliver(messages[done], lost);
      done += 1;
    }
  } finally {
    stopHeartbeat();
  }
  if (lost.signal.aborted) log(`lease lost: ${lost.signal.reason.message}`);
  else if (done < messages.length) await pool.query(`select outbox.settle_batch($1::uuid, 'released')`, [token]);
}

// A notification only saves waiting for the next look: it may be missing or come too often.
async function listen() {
  if (stopping) return;
  listener = new pg.Client({ application_name: worker });
  listener.on('notification', ({ payload }) => payload === subscription && wake());
  listener.on('error', (error) => log(`listener: ${error.message}`));
  listener.on('end', () => stopping || setTimeout(listen, errorPauseSeconds * 1000));
  try {
    await listener.connect();
    await listener.query('listen outbox_ready');
    wake(); // what was said before, nobody has heard
  } catch (error) {
    log(`listener: ${error.message}`);
  }
}

async function main() {
  listen();
  while (!stopping) {
    ready = false;
    try {
      const messages = await claim();
      if (messages.length > 0) await work(messages);
      else await pause(pollSeconds);
    } catch (error) {
      log(error.message); // what is claimed comes again when the lease has ended
      await pause(errorPauseSeconds);
    }
  }
  await Promise.allSettled([pool.end(), listener.end()]);
  process.exit(0); // whatever the handler has left open
}

function stop() {
  if (stopping) process.exit(1); // asked twice: at once
  stopping = true;
  endPause();
}
process.on('SIGTERM', stop);
process.on('SIGINT', stop);

main();
