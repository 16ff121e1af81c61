// What the README says about arguments and results, with the driver pg and parameters bound by the server.
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import pg from 'pg';

const pool = new pg.Pool({ max: 2 });
const rows = async (sql, values) => (await pool.query(sql, values)).rows;
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;

after(() => pool.end());

test('an object is sent as JSON, an array has to be made JSON first', async () => {
  const [{ id }] = await rows('select outbox.enqueue($1, $2::jsonb) as id', ['driver.object', { a: [1, 'ü', null] }]);
  assert.match(id, UUID);
  await rows('select outbox.enqueue($1, $2::jsonb)', ['driver.array', JSON.stringify([1, 2])]);
  await assert.rejects(rows('select outbox.enqueue($1, $2::jsonb)', ['driver.array', [1, 2]]), { code: '22P02' });
  const claimed = await rows('select * from outbox.claim_batch()');
  assert.deepEqual(claimed.map((message) => message.payload), [{ a: [1, 'ü', null] }, [1, 2]]);
  assert.equal(claimed[0].id, id);
  assert.equal(claimed[0].attempts, 1);
  assert.ok(claimed[0].locked_until instanceof Date);
  assert.deepEqual(await rows('select outbox.settle_batch($1) as n', [claimed[0].claim_token]), [{ n: 2 }]);
});

test('null means the default', async () => {
  await rows(
    `select outbox.enqueue($1, $2, kind => $3, version => $4, available_at => $5, max_attempts => $6, headers => $7)`,
    ['driver.null', {}, null, null, null, null, null],
  );
  const [message] = await rows('select * from outbox.claim_batch($1, $2, $3, $4, $5)', [null, null, 'default', null, null]);
  assert.equal(message.kind, 'event');
  assert.equal(message.version, 1);
  assert.equal(message.max_attempts, 3);
  const settle = 'select outbox.settle($1, $2, $3, $4, $5, $6) as status';
  assert.deepEqual(await rows(settle, [message.id, message.claim_token, null, null, null, null]), [{ status: 'delivered' }]);
});

test('named notation, an interval as text, a time as Date', async () => {
  await rows('select outbox.enqueue($1, $2, available_at => $3)', ['driver.named', {}, new Date(Date.now() - 1000)]);
  const [message] = await rows(
    'select * from outbox.claim_batch(max_messages => $1, lease => $2::interval, worker => $3)',
    [5, '90 seconds', 'driver test'],
  );
  const seconds = (message.locked_until - Date.now()) / 1000;
  assert.ok(seconds > 80 && seconds < 91, `a lease of ${seconds} s`);
  const [{ status }] = await rows(
    `select outbox.settle($1, $2, outcome => 'failed', error => $3, error_detail => $4::jsonb, retry_at => $5) as status`,
    [message.id, message.claim_token, 'busy', JSON.stringify(['busy', 17]), new Date(Date.now() + 3600e3)],
  );
  assert.equal(status, 'scheduled');
});

test('a bare number is no interval of milliseconds', async () => {
  // PostgreSQL reads it as seconds: such a lease would last for hours, and is refused
  await assert.rejects(
    rows('select * from outbox.claim_batch(lease => $1::interval)', [30000]),
    { code: '22023' },
  );
});

test('a batch by ids, and the code to branch on', async () => {
  await rows('select * from outbox.enqueue_batch($1, $2::jsonb)', ['driver.batch', JSON.stringify([1, 2, 3])]);
  const claimed = await rows('select id, claim_token from outbox.claim_batch()');
  const token = claimed[0].claim_token;
  assert.deepEqual(claimed.map((message) => message.claim_token), [token, token, token]);
  const some = claimed.slice(0, 2).map((message) => message.id);
  assert.deepEqual(await rows('select outbox.settle_batch($1, ids => $2::uuid[]) as n', [token, some]), [{ n: 2 }]);
  assert.deepEqual(await rows('select outbox.settle_batch($1, ids => $2::uuid[]) as n', [token, []]), [{ n: 0 }]);
  assert.deepEqual(await rows('select outbox.settle_batch($1) as n', [token]), [{ n: 1 }]);
  await assert.rejects(rows('select outbox.settle_batch($1)', [token]), { code: 'OB003' });
  await assert.rejects(rows('select outbox.renew_batch($1)', [token]), { code: 'OB003' });
});

test('a transaction: rolled back, the message was never there; in it, it can be claimed', async () => {
  const client = await pool.connect();
  try {
    await client.query('begin');
    await client.query('select outbox.enqueue($1, $2)', ['driver.rollback', {}]);
    const { rows: own } = await client.query('select name from outbox.claim_batch()');
    assert.deepEqual(own, [{ name: 'driver.rollback' }]);
    await client.query('rollback');
  } finally {
    client.release();
  }
  assert.deepEqual(await rows('select * from outbox.claim_batch()'), []);
});

test('always FROM: else a row is one text, or each column a call', async () => {
  await rows('select outbox.enqueue($1, $2)', ['driver.from', {}]);
  const [{ claim_batch: text }] = await rows('select outbox.claim_batch()');
  assert.match(text, /^\([0-9a-f-]{36},.*driver\.from/);
  const [, id, token] = text.match(/^\(([0-9a-f-]{36}),([0-9a-f-]{36}),/);
  await rows('select outbox.settle($1, $2)', [id, token]);
  await pool.query(`
    create function hook(outbox.message) returns void language sql as '';
    select outbox.subscribe('driver_push', from_earliest => false);
    select outbox.register_hook('#', 'hook', subscription => 'driver_push')`);
  for (const [call, delivered] of [['(outbox.deliver()).*', '0'], ['* from outbox.deliver()', '1']]) {
    await rows('select outbox.enqueue($1, $2)', ['driver.from', {}]);
    const [counts] = await rows(`select ${call}`);
    assert.deepEqual([counts.claimed, counts.delivered], ['1', delivered]);
  }
  await pool.query(`
    select outbox.unsubscribe('driver_push');
    select outbox.skip('default', 'infinity')`);
});

test('rows written by an ORM: the view outgoing', async () => {
  const [{ id }] = await rows('insert into outbox.outgoing (name, payload) values ($1, $2) returning id', ['driver.view', {}]);
  assert.match(id, UUID);
  const [message] = await rows('select * from outbox.claim_batch()');
  assert.equal(message.id, id);
  await rows('select outbox.settle($1, $2)', [id, message.claim_token]);
});
