// What the drivers of Node peers share: commands, processes that start together, answers as JSON. See node.py.
//
// A driver calls main({create, consumer, enqueueBatch}). consumer(options) connects and returns {claim, settle, settleEach,
// run, close}: run(messages) is for libraries that claim by themselves; else claim(n) and settle(rows) are called in turn.
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { performance } from 'node:perf_hooks';
import { fileURLToPath } from 'node:url';
import pg from 'pg';

const options = JSON.parse(process.argv[3] ?? '{}');

export async function main(peer) {
  const command = process.argv[2];
  if (process.env.BENCH_CHILD) return child(peer);
  if (command === 'create') {
    await peer.create();
    answer({ created: true });
  } else if (command === 'consume') {
    await parent();
  } else if (command === 'loop') {
    await loop(peer);
  } else if (command === 'probe') {
    await probe(peer);
  } else {
    throw new Error(`unknown command: ${command}`);
  }
  process.exit(0);
}

function answer(result) {
  process.stdout.write(`${JSON.stringify(result)}\n`);
}

// One process per consumer. All are connected before the first one begins.
async function parent() {
  const children = [];
  for (let i = 0; i < options.consumers; i += 1) {
    children.push(fork(process.argv[1], process.argv.slice(2), { env: { ...process.env, BENCH_CHILD: '1' } }));
  }
  await Promise.all(children.map((one) => once(one, 'message')));
  const begin = Date.now();
  const results = children.map((one) => once(one, 'message'));
  children.forEach((one) => one.send('go'));
  let messages = 0;
  let end = begin;
  for (const [result] of await Promise.all(results)) {
    messages += result.messages;
    end = Math.max(end, result.end);
  }
  answer({ messages, seconds: (end - begin) / 1000 });
}

async function child(peer) {
  const consumer = await peer.consumer(options);
  process.send('ready');
  await once(process, 'message');
  const share = Math.floor(options.messages / options.consumers);
  const messages = consumer.run ? await consumer.run(share) : await work(consumer, share);
  await new Promise((done) => process.send({ messages, end: Date.now() }, done));
  await consumer.close();
  process.exit(0);
}

async function work(consumer, share) {
  let done = 0;
  while (done < share) {
    const rows = await consumer.claim(options.batch);
    if (rows.length === 0) break;
    if (options.each) {
      for (const row of rows) await consumer.settleEach(row);
    } else {
      await consumer.settle(rows);
    }
    done += rows.length;
  }
  return done;
}

async function loop(peer) {
  const client = new pg.Client();
  await client.connect();
  const { rows } = await client.query('select value from bench.input where name = $1', [options.input]);
  await client.end();
  const payloads = JSON.parse(rows[0].value);
  const consumer = await peer.consumer(options);
  const begin = performance.now();
  let messages = 0;
  while (messages < options.messages) {
    await consumer.enqueue(payloads);
    messages += consumer.run ? await consumer.run(payloads.length) : await claimAndSettle(consumer);
  }
  answer({ messages, seconds: (performance.now() - begin) / 1000 });
  await consumer.close();
}

async function claimAndSettle(consumer) {
  const rows = await consumer.claim(options.batch);
  await consumer.settle(rows);
  return rows.length;
}

async function probe(peer) {
  const consumer = await peer.consumer({ ...options, consumers: 1 });
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    const claims = [];
    const settlements = [];
    for (let i = 0; i < request.times; i += 1) {
      const begin = performance.now();
      const rows = await consumer.claim(request.batch);
      claims.push(performance.now() - begin);
      if (request.empty) continue;
      if (rows.length === 0) throw new Error('a claim has found nothing');
      const middle = performance.now();
      await consumer.settle(rows);
      settlements.push(performance.now() - middle);
    }
    answer({ claims, settlements });
  }
  await consumer.close();
}

export const isMain = (url) => process.argv[1] === fileURLToPath(url);
