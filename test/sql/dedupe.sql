-- dedupe: a key, within its name, keeps a second message out as long as its window lasts.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
\set ECHO all

-- The second call returns the id of the first message, and writes nothing.
SELECT outbox.enqueue('order', '1', dedupe_key => 'k') AS first \gset
SELECT outbox.enqueue('order', '2', dedupe_key => 'k') = :'first' AS same;
SELECT outbox.enqueue('order', '3', dedupe_key => 'k', kind => 'job', version => 2) = :'first' AS same;
SELECT payload, dedupe_key FROM outbox.log;
-- as the caller can see
BEGIN;
SELECT outbox.enqueue('order', '4', dedupe_key => 'k') = :'first' AS same;
SELECT count(*) FROM outbox.outgoing;
COMMIT;
-- Another key, another name, no key: other messages.
SELECT outbox.enqueue('order', '5', dedupe_key => 'K') = :'first' AS same;
SELECT outbox.enqueue('order', '6', dedupe_key => 'k ') = :'first' AS same;
SELECT outbox.enqueue('other', '7', dedupe_key => 'k') = :'first' AS same;
SELECT outbox.enqueue('order', '8') = :'first' AS same;
SELECT count(DISTINCT outbox.enqueue('order', '9', dedupe_key => key)) FROM (VALUES (NULL), (NULL), (''), ('')) v (key);
SELECT count(*) FROM outbox.log;
-- A given id does not matter where there is a first message; nor do claim and settlement of that.
SELECT outbox.enqueue('order', '10', dedupe_key => 'k', id => '01900000-0000-7000-8000-000000000010') = :'first' AS same;
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT outbox.enqueue('order', '11', dedupe_key => 'k') = :'first' AS same;
SELECT outbox.settle_batch(pg_temp.token(1));
SELECT outbox.enqueue('order', '12', dedupe_key => 'k') = :'first' AS same;

-- Within a transaction, a batch, and at every isolation level.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outbox.enqueue('tx', '1', dedupe_key => 'k') AS first \gset tx_
SELECT outbox.enqueue('tx', '2', dedupe_key => 'k') = :'tx_first' AS same;
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT outbox.enqueue('tx', '3', dedupe_key => 'k') = :'tx_first' AS same;
COMMIT;
SELECT count(*), count(DISTINCT b)
  FROM outbox.enqueue_batch('[{"name": "batch", "payload": 1, "dedupe_key": "a"}, {"name": "batch", "payload": 2, "dedupe_key": "b"},
                              {"name": "batch", "payload": 3, "dedupe_key": "a"}, {"name": "tx", "payload": 4, "dedupe_key": "k"}]') b;
SELECT name, payload FROM outbox.log WHERE name IN ('tx', 'batch') ORDER BY position;

-- What was rolled back leaves no key.
BEGIN;
SELECT outbox.enqueue('back', '1', dedupe_key => 'k') IS NOT NULL;
ROLLBACK;
SELECT outbox.enqueue('back', '2', dedupe_key => 'k') IS NOT NULL;
BEGIN;
SAVEPOINT s;
SELECT outbox.enqueue('back', '3', dedupe_key => 'point') AS gone \gset
ROLLBACK TO s;
SELECT outbox.enqueue('back', '4', dedupe_key => 'point') = :'gone' AS same;
COMMIT;
BEGIN;
SELECT outbox.enqueue('back', '5', dedupe_key => 'prepared') AS gone \gset
PREPARE TRANSACTION 'dedupe';
ROLLBACK PREPARED 'dedupe';
SELECT outbox.enqueue('back', '6', dedupe_key => 'prepared') = :'gone' AS same;
-- a duplicate id leaves none either
CALL pg_temp.try(format($$ SELECT outbox.enqueue('back', '7', id => %L, dedupe_key => 'id') $$, :'first'));
SELECT outbox.enqueue('back', '8', dedupe_key => 'id') IS NOT NULL;
SELECT payload, dedupe_key FROM outbox.log WHERE name = 'back' ORDER BY position;

-- The window begins with the first message, and is three days; later ones do not extend it.
SELECT outbox.enqueue('window', '1', dedupe_key => 'k') AS first \gset
SET outbox.clock_offset = '2d';
SELECT outbox.enqueue('window', '2', dedupe_key => 'k') = :'first' AS same;
SET outbox.clock_offset = '259000s';
SELECT outbox.enqueue('window', '3', dedupe_key => 'k') = :'first' AS same;
SET outbox.clock_offset = '259201s';
SELECT outbox.enqueue('window', '4', dedupe_key => 'k') = :'first' AS same;
-- an expired row is written over, and the new message has a window of its own
SELECT count(*) FROM outbox.dedupe WHERE name = 'window';
SELECT outbox.enqueue('window', '5', dedupe_key => 'k') = id AS same FROM outbox.log WHERE name = 'window' AND payload = '4';
SET outbox.clock_offset = '518000s';
SELECT outbox.enqueue('window', '6', dedupe_key => 'k') = id AS same FROM outbox.log WHERE name = 'window' AND payload = '4';
SELECT payload FROM outbox.log WHERE name = 'window' ORDER BY position;
-- rolled back, the old row is as it was
SET outbox.clock_offset = '518500s';
BEGIN;
SELECT outbox.enqueue('window', '7', dedupe_key => 'k') IS NOT NULL;
ROLLBACK;
SET outbox.clock_offset = '518000s';
SELECT outbox.enqueue('window', '8', dedupe_key => 'k') = id AS same FROM outbox.log WHERE name = 'window' AND payload = '4';
RESET outbox.clock_offset;
-- its length is a setting
SET outbox.dedupe_window = '1h';
SELECT outbox.enqueue('short', '1', dedupe_key => 'k') AS first \gset
SET outbox.clock_offset = '3500s';
SELECT outbox.enqueue('short', '2', dedupe_key => 'k') = :'first' AS same;
SET outbox.clock_offset = '3601s';
SELECT outbox.enqueue('short', '3', dedupe_key => 'k') = :'first' AS same;
RESET outbox.clock_offset;
RESET outbox.dedupe_window;

-- Keys up to 1 kB, kept as a hash beside the log.
SELECT outbox.enqueue('long', '1', dedupe_key => repeat('k', 1024)) AS first \gset
SELECT outbox.enqueue('long', '2', dedupe_key => repeat('k', 1024)) = :'first' AS same;
SELECT outbox.enqueue('long', '3', dedupe_key => repeat('k', 1023) || 'l') = :'first' AS same;
SELECT max(length(key_hash)) <= 64 AS hashed FROM outbox.dedupe;
CALL pg_temp.try($$ SELECT outbox.enqueue('long', '4', dedupe_key => repeat('é', 513)) $$);

-- Every message is delivered, however its key fared.
SELECT count(*) FROM outbox.claim_batch(1000);
SELECT * FROM pg_temp.broken();
