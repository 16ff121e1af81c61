-- isolation_levels: an old snapshot hides nothing from our functions. What other sessions commit
-- in the middle of a repeatable read or serializable transaction is claimed and settled in it.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
-- another session
SET client_min_messages = warning;
CREATE EXTENSION dblink;
SELECT dblink_connect('other', format('dbname=%s user=%s host=%s port=%s', current_database(), current_user,
           trim(split_part(current_setting('unix_socket_directories'), ',', 1)), current_setting('port'))) IS NOT NULL AS connected \gset
RESET client_min_messages;
CREATE FUNCTION pg_temp.other(command text) RETURNS text LANGUAGE sql AS $$ SELECT dblink_exec('other', $1) $$;
\set ECHO all

-- Repeatable read: messages committed after its snapshot.
SELECT outbox.enqueue('t', '1') IS NOT NULL;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM outbox.log;
SELECT pg_temp.other($$ DO 'BEGIN PERFORM outbox.enqueue_batch(''t'', ''[2, 3]''); END' $$);
SELECT count(*) AS old_snapshot FROM outbox.log;
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
SELECT pg_temp.other($$ DO 'BEGIN PERFORM outbox.enqueue_batch(''t'', ''[4]''); END' $$);
SELECT outbox.enqueue('t', '5') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT array_agg(payload ORDER BY payload) FROM held;
SELECT outbox.settle(pg_temp.id(2), pg_temp.token(2));
SELECT outbox.settle_batch(pg_temp.token(1));
SELECT outbox.settle_batch(pg_temp.token(4), 'released');
COMMIT;
SELECT * FROM pg_temp.states();
SELECT * FROM pg_temp.broken();

-- Serializable: what was claimed elsewhere is settled and renewed here, and the other way round.
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 6) n;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM outbox.log;
SELECT id, claim_token FROM dblink('other', 'SELECT id, claim_token FROM outbox.claim_batch(2) ORDER BY created_at')
       AS c (id uuid, claim_token uuid) LIMIT 1 \gset theirs_
INSERT INTO held SELECT * FROM outbox.claim_batch(2) RETURNING payload, attempts;
SELECT outbox.renew(:'theirs_id', :'theirs_claim_token', '200 s') IS NOT NULL AS renewed;
SELECT outbox.settle(:'theirs_id', :'theirs_claim_token');
COMMIT;
SELECT settled FROM dblink('other', format('SELECT outbox.settle_batch(%L)', :'theirs_claim_token')) AS s (settled integer);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM outbox.log;
SELECT settled FROM dblink('other', format('SELECT outbox.settle_batch(%L)', pg_temp.token(3))) AS s (settled integer);
-- settled by another session after the snapshot: that is told, it is no serialization failure
CALL pg_temp.try($$ SELECT outbox.settle_batch(pg_temp.token(3)) $$);
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(3), pg_temp.token(3)) $$);
CALL pg_temp.try($$ SELECT outbox.renew_batch(pg_temp.token(3)) $$);
COMMIT;
SELECT * FROM pg_temp.states();

-- A lease that another session's clock saw end, and took over, after the snapshot.
SELECT pg_temp.anew();
SELECT outbox.enqueue('t', '1') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch();
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM outbox.log;
SELECT pg_temp.other('SET outbox.clock_offset = ''31s''');
SELECT attempts FROM dblink('other', 'SELECT attempts FROM outbox.claim_batch()') AS c (attempts integer);
CALL pg_temp.try($$ SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1)) $$);
COMMIT;
SELECT pg_temp.other('RESET outbox.clock_offset');

-- Dedupe keys and subscriptions that others made after the snapshot count.
SELECT pg_temp.anew();
SET client_min_messages = warning;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM outbox.log;
SELECT id AS first FROM dblink('other', $$ SELECT outbox.enqueue('t', '1', dedupe_key => 'k') $$) AS e (id uuid) \gset
SELECT outbox.enqueue('t', '2', dedupe_key => 'k') = :'first' AS same;
SELECT pg_temp.other($$ DO 'BEGIN PERFORM outbox.subscribe(''theirs''); PERFORM outbox.pause(''default''); END' $$);
SELECT payload FROM outbox.claim_batch(subscription => 'theirs');
SELECT payload FROM outbox.claim_batch();
COMMIT;
SELECT outbox.resume('default');
SELECT payload FROM outbox.claim_batch();

-- Where it is the default of the database it is the same.
SET default_transaction_isolation = 'serializable';
SELECT pg_temp.anew();
SELECT count(outbox.enqueue('t', to_jsonb(n))) FROM generate_series(1, 3) n;
SELECT array_agg(payload) FROM outbox.claim_batch();
SELECT array_agg(payload) FROM outbox.claim_batch(subscription => 'theirs');
RESET default_transaction_isolation;
SELECT * FROM pg_temp.broken();
SELECT dblink_disconnect('other');
DROP EXTENSION dblink;
