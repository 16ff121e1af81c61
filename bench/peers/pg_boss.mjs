// pg-boss by its library: fetch() claims a batch, complete() settles it. Commands are in driver.mjs.
import { PgBoss } from 'pg-boss';
import { main } from './driver.mjs';

const QUEUE = 'bench';
// One connection per consumer. Its own maintenance is left to others, so that every consumer is like the next.
const connection = { host: process.env.PGHOST, port: Number(process.env.PGPORT), user: process.env.PGUSER, database: process.env.PGDATABASE, max: 1 };

async function start(settings) {
  const boss = new PgBoss({ ...connection, ...settings });
  boss.on('error', (error) => { throw error; });
  await boss.start();
  return boss;
}

await main({
  async create() {
    const boss = await start({ supervise: false, schedule: false, max: 2 });
    await boss.createQueue(QUEUE);
    await boss.stop({ graceful: false });
  },

  async consumer() {
    const boss = await start({ supervise: false, schedule: false, migrate: false });
    return {
      enqueue: (payloads) => boss.insert(QUEUE, payloads.map((data) => ({ data }))),
      claim: (batchSize) => boss.fetch(QUEUE, { batchSize }),
      settle: (jobs) => boss.complete(QUEUE, jobs.map((job) => job.id)),
      settleEach: (job) => boss.complete(QUEUE, job.id),
      close: () => boss.stop({ graceful: false }),
    };
  },
});
