// What the tests have a worker do: the payload says.
import pg from 'pg';

const pool = new pg.Pool({ max: 1 });
pool.on('error', () => {});

const state = async (sql, values) => (await pool.query(sql, values)).rows[0];

async function pollUntil(sql, values) {
  while (!(await state(sql, values)).ok) {
    await new Promise((done) => setTimeout(done, 20)); // poll
  }
}

export default async function handle(message, signal) {
  const { action } = message.payload;
  await pool.query('insert into seen (id, attempts) values ($1, $2)', [message.id, message.attempts]);
  if (action === 'fail') throw new TypeError(`no ${message.payload.what}`);
  // until the lease that it was claimed with has ended, and was renewed
  if (action === 'outlive') {
    await pollUntil(
      `select clock_timestamp() > $1::timestamptz
              and (select bool_and(locked_until > clock_timestamp()) from outbox.leases) as ok`,
      [message.locked_until],
    );
  }
  // until the test says so, the first time
  if (action === 'wait' && message.attempts === 1) {
    await pollUntil('select exists (select from go) as ok');
  }
  // until the lease is lost
  if (action === 'lose' && message.attempts === 1) {
    await new Promise((done) => signal.addEventListener('abort', done));
    await pool.query('insert into lost values ($1)', [message.id]);
  }
  if (action === 'die' && message.attempts === 1) process.kill(process.pid, 'SIGKILL');
}
