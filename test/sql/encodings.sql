-- encodings: databases that are not in UTF8.
\set ECHO none
\getenv dir PG_ABS_SRCDIR
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_outbox_latin1;
DROP DATABASE IF EXISTS regress_outbox_ascii;
\set ECHO all

-- LATIN1: what it has goes in and out, in the client's encoding; what it has not is refused.
CREATE DATABASE regress_outbox_latin1 TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C';
\c regress_outbox_latin1
\set ECHO none
\i :dir/include/engine.sql
\set ECHO all
SET client_encoding = 'UTF8';
SELECT outbox.enqueue('café', '{"é": "à", "escaped": "\u00e9"}', headers => '{"ö": "ß"}', aggregate_id => 'ñ', dedupe_key => 'ü') IS NOT NULL;
SELECT name, payload, headers, aggregate_id FROM outbox.claim_batch(worker => 'Zoë');
SELECT worker FROM outbox.leases;
\set VERBOSITY sqlstate
SELECT outbox.enqueue('t', '"\ud83d\ude00"');
SELECT outbox.enqueue('t', '"\u20ac"');
\set VERBOSITY default
SELECT outbox.enqueue('😀', '1');
SELECT outbox.enqueue(repeat('é', 255), '1') IS NOT NULL AS bytes_of_the_server;
SELECT length(name), length(convert_to(name, 'UTF8')) AS utf8 FROM outbox.claim_batch();
SELECT count(*) FROM outbox.log;
SELECT * FROM pg_temp.broken();

-- SQL_ASCII: bytes.
CREATE DATABASE regress_outbox_ascii TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C';
\c regress_outbox_ascii
\set ECHO none
\i :dir/include/engine.sql
\set ECHO all
SET client_encoding = 'UTF8';
SELECT outbox.enqueue('café', '{"é": "😀"}', headers => '{"ö": "ß"}') IS NOT NULL;
SELECT name, payload, headers FROM outbox.claim_batch(worker => 'Zoë');
-- PostgreSQL 15 says that it does not support this conversion.
DO $$
BEGIN
    PERFORM outbox.enqueue('t', '"\u00e9"');
EXCEPTION WHEN untranslatable_character OR feature_not_supported THEN
    RAISE NOTICE 'refused';
END $$;
SELECT outbox.enqueue('t', '"\u0041"') IS NOT NULL;
SELECT payload FROM outbox.claim_batch();
SELECT * FROM pg_temp.broken();

\c contrib_regression
DROP DATABASE regress_outbox_latin1;
DROP DATABASE regress_outbox_ascii;
