-- contract: what every object of the schema has to be, whatever it is for.  A new table,
-- view or function is found here by itself.
BEGIN;
SELECT plan(23);

-- the objects, once
CREATE TEMP VIEW our_relations AS
SELECT c.* FROM pg_class c WHERE c.relnamespace = 'outbox'::regnamespace;
CREATE TEMP VIEW our_functions AS
SELECT p.* FROM pg_proc p WHERE p.pronamespace = 'outbox'::regnamespace;
CREATE TEMP VIEW our_columns AS
SELECT c.relname, c.relkind, a.attname, a.attnum, t.typname, t.typtype
  FROM our_relations c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_type t ON t.oid = a.atttypid;

SELECT cmp_ok((SELECT count(*) FROM our_relations WHERE relkind = 'r'), '>=', 8::bigint, 'there are tables');
SELECT cmp_ok((SELECT count(*) FROM our_relations WHERE relkind = 'v'), '>=', 7::bigint, 'there are views');
SELECT cmp_ok((SELECT count(*) FROM our_functions), '>=', 20::bigint, 'there are functions');

-- relations

SELECT is_empty($$
    SELECT c.relname FROM our_relations c
     WHERE c.relkind IN ('r', 'p')
       AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'p')
$$, 'every table has a primary key');

SELECT is_empty($$
    SELECT c.relname, c.relpersistence FROM our_relations c WHERE c.relpersistence <> 'p'
$$, 'everything is permanent: nothing is lost in a crash');

SELECT is_empty($$
    SELECT relname, attname, typname FROM our_columns WHERE relkind IN ('r', 'p') AND typname ~ '^_?reg'
$$, 'no column of a type that pg_upgrade refuses');

SELECT is_empty($$
    SELECT c.relname, k.conname FROM our_relations c JOIN pg_constraint k ON k.conrelid = c.oid
     WHERE k.contype = 'f' OR NOT k.convalidated
$$, 'no foreign keys, and every constraint is valid');

SELECT is_empty($$
    SELECT c.relname FROM our_relations c JOIN pg_sequence s ON s.seqrelid = c.oid
     WHERE s.seqtypid <> 'bigint'::regtype OR s.seqmax <> 9223372036854775807
$$, 'every sequence is a bigint to its end');

SELECT is_empty($$
    SELECT c.relname FROM our_relations c
     WHERE c.relkind IN ('r', 'p', 'S')
       AND c.oid NOT IN (SELECT unnest(e.extconfig) FROM pg_extension e WHERE e.extname = 'outbox')
$$, 'every table and sequence is dumped with its rows');

SELECT is_empty($$
    SELECT relname FROM our_relations WHERE relkind IN ('r', 'p') AND (relrowsecurity OR relforcerowsecurity)
$$, 'no row security on tables');

-- views

SELECT is_empty($$
    SELECT relname, attname, typname FROM our_columns
     WHERE relkind = 'v'
       AND (typname ~ '^_?(interval|reg.*|xid8?|cid|tid|oid)$' OR typtype IN ('r', 'm', 'p') OR typname ~ 'range$')
$$, 'no column of a view has a type that drivers stumble over');

SELECT is_empty($$
    SELECT relname, attname FROM our_columns WHERE relkind = 'v' AND attname ~ 'token'
$$, 'no view shows a claim token');

SELECT is_empty($$
    SELECT c.relname FROM our_relations c
     WHERE c.relkind = 'v' AND obj_description(c.oid, 'pg_class') IS NULL
$$, 'every view has a comment');

-- functions

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p WHERE obj_description(p.oid, 'pg_proc') IS NULL
$$, 'every function has a comment');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p
     WHERE p.prosecdef AND (p.prosqlbody IS NULL OR p.proconfig IS DISTINCT FROM ARRAY['search_path=pg_catalog, pg_temp'])
$$, 'no function is a security definer, but for those whose body was parsed at creation, with search_path pinned');

-- null in, null out is right for what only computes
SELECT set_eq($$
    SELECT p.proname::text FROM our_functions p WHERE p.proisstrict
$$, ARRAY['cloudevent'], 'no function is strict but where null means null');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p WHERE p.proparallel <> 'u' AND p.proname NOT IN ('backoff', 'cloudevent')
$$, 'every function is parallel unsafe, but those that only compute');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p
     WHERE p.prokind <> 'p' AND p.prorettype = 'void'::regtype
$$, 'no function returns void');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p
     WHERE p.pronargs > 0
       AND (p.proargnames IS NULL OR '' = ANY (p.proargnames[1:p.pronargs]))
$$, 'every argument has a name');

-- what is left out and what is passed as null are the same thing
SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p
     WHERE p.prokind = 'f' AND pg_get_function_arguments(p.oid) ~ 'DEFAULT (?!NULL|true|false|''default''|''#''|''delivered'')'
$$, 'defaults are null, or what null means');

-- rights

SELECT is_empty($$
    SELECT c.relname, a.privilege_type FROM our_relations c,
           aclexplode(coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner))) a
     WHERE a.grantee = 0
$$, 'nothing is granted to PUBLIC on relations');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM our_functions p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
     WHERE a.grantee = 0
$$, 'nothing is granted to PUBLIC on functions');

SELECT is_empty($$
    SELECT n.nspname, a.privilege_type
      FROM pg_namespace n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
     WHERE n.nspname = 'outbox' AND a.grantee = 0
$$, 'nothing is granted to PUBLIC on the schema');

SELECT * FROM finish();
ROLLBACK;
