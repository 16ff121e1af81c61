-- clock: time goes on strictly, and a test can move it, for its own session or for all.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
\i :dir/include/engine.sql
SET client_min_messages = warning;
CREATE EXTENSION dblink;
SELECT dblink_connect('other', format('dbname=%s user=%s host=%s port=%s', current_database(), current_user,
           trim(split_part(current_setting('unix_socket_directories'), ',', 1)), current_setting('port'))) IS NOT NULL AS connected \gset
RESET client_min_messages;
CREATE FUNCTION pg_temp.other(command text) RETURNS text LANGUAGE sql AS $$ SELECT dblink_exec('other', $1) $$;
-- how far the clock of outbox is from the wall clock, in tenths of a minute
CREATE FUNCTION pg_temp.ahead() RETURNS numeric LANGUAGE sql AS $$
    SELECT round(extract(epoch FROM outbox.clock() - clock_timestamp()) / 6) * 6
$$;
\set ECHO all

-- It is the wall clock, and does not stand still in a transaction.
SELECT pg_temp.ahead();
BEGIN;
SELECT outbox.clock() AS one \gset
SELECT outbox.clock() > :'one' AS goes_on, outbox.clock() > now() AS after_begin;
COMMIT;
-- created_at grows strictly over sessions that take turns.
DO $$
BEGIN
    FOR n IN 1 .. 50 LOOP
        PERFORM outbox.enqueue('here', to_jsonb(2 * n));
        COMMIT;
        PERFORM pg_temp.other(format('DO ''BEGIN PERFORM outbox.enqueue(''''there'''', to_jsonb(%s)); END''', 2 * n + 1));
    END LOOP;
END
$$;
SELECT count(*), count(DISTINCT created_at) AS times, count(DISTINCT name) AS sessions,
       count(*) FILTER (WHERE payload <> to_jsonb(nr + 1)) AS out_of_order,
       count(*) FILTER (WHERE NOT grows) AS ids_out_of_order
  FROM (SELECT *, row_number() OVER w AS nr, id > lag(id) OVER w AS grows FROM outbox.log WINDOW w AS (ORDER BY created_at)) l;
-- and a claim, whose clock is never behind that, gets them all
SELECT count(*) FROM outbox.claim_batch(200);

-- clock_offset moves it: for created_at, ids, due times, leases.
SELECT pg_temp.anew();
SET outbox.clock_offset = '1h';
SELECT pg_temp.ahead();
SELECT outbox.enqueue('t', '1') IS NOT NULL;
INSERT INTO held SELECT * FROM outbox.claim_batch();
SELECT round(extract(epoch FROM created_at - clock_timestamp()) / 60) AS created, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS due,
       round(extract(epoch FROM locked_until - clock_timestamp()) / 60 - 0.5) AS locked,
       CAST(CAST('x' || replace(left(CAST(id AS text), 13), '-', '') AS bit(48)) AS bigint)
           = CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS id_of_that_time
  FROM held;
SELECT outbox.settle(pg_temp.id(1), pg_temp.token(1));
SELECT round(extract(epoch FROM settled_at - clock_timestamp()) / 60) AS settled FROM outbox.messages;
SET outbox.clock_offset = -60000;
SELECT pg_temp.ahead();
SET outbox.clock_offset = '20d';
SELECT pg_temp.ahead() = 20 * 24 * 3600 AS twenty_days;
SET outbox.clock_offset = '-20d';
SELECT pg_temp.ahead() = -20 * 24 * 3600 AS twenty_days;
SET outbox.clock_offset = 2147483647;
SELECT outbox.clock() > clock_timestamp() + interval '24 days' AS most;
SET outbox.clock_offset = -2147483648;
SELECT outbox.clock() < clock_timestamp() - interval '24 days' AS least;
SET outbox.clock_offset = 2147483648;
SET outbox.clock_offset = 'soon';
-- Moved back, it is as if it had never been moved: nothing of an offset is kept.
RESET outbox.clock_offset;
SELECT pg_temp.ahead();
SELECT outbox.enqueue('t', '2') IS NOT NULL;
SELECT abs(extract(epoch FROM created_at - clock_timestamp())) < 60 AS now FROM outbox.log WHERE payload = '2';
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload;
SELECT outbox.settle(pg_temp.id(2), pg_temp.token(2));
-- only here
SET outbox.clock_offset = '1h';
SELECT round(ahead) FROM dblink('other', 'SELECT extract(epoch FROM outbox.clock() - clock_timestamp()) / 60') AS o (ahead numeric);
RESET outbox.clock_offset;
BEGIN;
SET LOCAL outbox.clock_offset = '1h';
SELECT pg_temp.ahead();
ROLLBACK;
SELECT pg_temp.ahead();
-- for everybody who connects to the database
ALTER DATABASE contrib_regression SET outbox.clock_offset = '2h';
SELECT dblink_disconnect('other');
SELECT dblink_connect('other', format('dbname=%s user=%s host=%s port=%s', current_database(), current_user,
           trim(split_part(current_setting('unix_socket_directories'), ',', 1)), current_setting('port')));
SELECT round(ahead) FROM dblink('other', 'SELECT extract(epoch FROM outbox.clock() - clock_timestamp()) / 60') AS o (ahead numeric);
ALTER DATABASE contrib_regression RESET outbox.clock_offset;
SELECT dblink_disconnect('other');
SELECT dblink_connect('other', format('dbname=%s user=%s host=%s port=%s', current_database(), current_user,
           trim(split_part(current_setting('unix_socket_directories'), ',', 1)), current_setting('port')));

-- A message of a session whose clock is ahead is due for all at once; a lease is judged by the clock of who asks.
SET outbox.clock_offset = '1h';
SELECT outbox.enqueue('t', '3') IS NOT NULL;
RESET outbox.clock_offset;
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload;
SELECT count(*) FROM outbox.claim_batch();
SET outbox.clock_offset = '31s';
INSERT INTO held SELECT * FROM outbox.claim_batch() RETURNING payload, attempts;
RESET outbox.clock_offset;

-- A role that is no superuser cannot move it.
CREATE ROLE regress_outbox_somebody;
SET ROLE regress_outbox_somebody;
SET outbox.clock_offset = '1h';
RESET ROLE;
DROP ROLE regress_outbox_somebody;

-- The last routing pass says where the clock goes on after a restart; one of another age does not.
BEGIN;
UPDATE outbox.frontier SET created_at = '2100-01-01 00:00+00';
SET LOCAL timezone = 'UTC';
SELECT outbox.enqueue('t', '4') IS NOT NULL;
SELECT routed FROM outbox.maintain();
SELECT outbox.clock() < '2090-01-01' AS still_ours;
ROLLBACK;
SELECT * FROM pg_temp.broken();
SELECT dblink_disconnect('other');
DROP EXTENSION dblink;
