// graphile-worker by its library: run() claims by itself, so the task counts. Commands are in driver.mjs.
import pg from 'pg';
import { Logger, makeWorkerUtils, run, runMigrations } from 'graphile-worker';
import { main } from './driver.mjs';

const TASK = 'bench';
const logger = new Logger(() => () => {});

// What its performance page recommends for many small jobs; a batch of 1 is without any batching.
function preset(batch) {
  const batched = batch > 1 ? { localQueue: { size: batch }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {};
  return { worker: { concurrentJobs: batch > 1 ? 24 : 1, maxPoolSize: batch > 1 ? 25 : 2, pollInterval: 1000, ...batched } };
}

await main({
  async create() {
    const pgPool = new pg.Pool({ max: 2 });
    pgPool.on('error', (error) => { throw error; });
    await runMigrations({ pgPool, logger });
  },

  // run() is what claims: it is started when the clock is, and ends when so many tasks have run and their ends are written
  async consumer({ batch }) {
    const pgPool = new pg.Pool({ max: batch > 1 ? 25 : 2 });
    pgPool.on('error', (error) => { throw error; });
    const utils = await makeWorkerUtils({ pgPool, logger });
    let runner;
    // of all that have run so far: some may have before anybody waits for them
    let count = 0;
    let wanted = 0;
    let reached = () => {};
    const taskList = {
      [TASK]: async () => {
        count += 1;
        if (count >= wanted) reached();
      },
    };
    const begin = () => run({ pgPool, logger, taskList, noHandleSignals: true, preset: preset(batch) });
    return {
      enqueue: (payloads) => utils.addJobs(payloads.map((payload) => ({ identifier: TASK, payload }))),
      async run(messages) {
        wanted += messages;
        const done = new Promise((resolve) => { reached = resolve; });
        runner ??= await begin();
        if (count < wanted) await done;
        return messages;
      },
      async close() {
        if (runner) await runner.stop();
        await pgPool.end();
      },
    };
  },
});
