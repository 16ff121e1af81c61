# The life of the extension: made, dropped and made again in one session and beside others,
# rolled back both ways, in a schema that exists, in several databases.  Sessions that used the one
# that is gone find the new one, or say that there is none.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('extension_life', extension => 0);

# Made, used, dropped, made again, in one session; each starts empty.
is_sql($node, <<'SQL', "first\nsecond\n1|1", 'create, drop, create in one session');
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('first', '1'); END $$;
SELECT name FROM outbox.claim_batch();
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('second', '1'); END $$;
SELECT name FROM outbox.claim_batch();
SELECT count(*), max(id) FROM outbox.subscription;
DROP EXTENSION outbox;
SQL
is_sql($node, "SELECT count(*) FROM pg_namespace WHERE nspname = 'outbox'", '0', 'DROP leaves no schema');
is_sql($node, "SELECT count(*) FROM pg_class WHERE relname LIKE 'delivery%'", '0', 'nor tables');

# In one transaction.
is_sql($node, <<'SQL', 'third', 'all of it in one transaction');
BEGIN;
CREATE EXTENSION outbox;
DROP EXTENSION outbox;
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('third', '1'); END $$;
SELECT name FROM outbox.claim_batch();
COMMIT;
SQL
is_sql($node, 'SELECT ready, leased FROM outbox.status', '0|1', 'and committed');
sql($node, 'DROP EXTENSION outbox');

# Rolled back.
is_sql($node, <<'SQL', "rolled back\n0\nkept", 'CREATE rolled back, then made');
BEGIN;
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('rolled back', '1'); END $$;
SELECT name FROM outbox.claim_batch();
ROLLBACK;
SELECT count(*) FROM pg_extension WHERE extname = 'outbox';
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('kept', '1'); END $$;
SELECT name FROM outbox.claim_batch();
SQL
is_sql($node, <<'SQL', "1\nafter", 'DROP rolled back');
DO $$ BEGIN PERFORM outbox.enqueue('after', '1'); END $$;
BEGIN;
DROP EXTENSION outbox;
ROLLBACK;
SELECT count(*) FROM outbox.claim_batch(1);
SELECT name FROM outbox.log ORDER BY created_at DESC LIMIT 1;
SQL
is_sql($node, <<'SQL', 'again', 'CREATE and DROP in savepoints');
DROP EXTENSION outbox;
BEGIN;
SAVEPOINT s;
CREATE EXTENSION outbox;
SELECT FROM outbox.enqueue('savepoint', '1') WHERE false;
ROLLBACK TO s;
CREATE EXTENSION outbox;
SAVEPOINT t;
DROP EXTENSION outbox;
ROLLBACK TO t;
DO $$ BEGIN PERFORM outbox.enqueue('again', '1'); END $$;
SELECT name FROM outbox.claim_batch();
COMMIT;
SQL

# Other sessions, with all cached, meet the new one.
my $other = session($node);
$other->query_safe("SELECT outbox.enqueue('other', '1')");
$other->query_safe('SELECT name FROM outbox.claim_batch()');
sql($node, 'DROP EXTENSION outbox');
like($other->query("\\set VERBOSITY sqlstate\nSELECT outbox.enqueue('other', '1')") . $other->{stderr}, qr/3F000|42883/,
	'a session that used it is told that it is gone');
$other->{stderr} = '';
sql($node, 'CREATE EXTENSION outbox');
$other->query_safe("SELECT outbox.enqueue('other', '2')");
is($other->query_safe('SELECT name, payload FROM outbox.claim_batch()'), 'other|2', 'and then uses the new one');
is($other->query_safe('SELECT count(*) FROM outbox.messages'), '1', 'which starts empty');

# Prepared statements and functions of a session as well.
$other->query_safe("PREPARE put AS SELECT outbox.enqueue('prepared', '1')");
$other->query_safe("PREPARE take AS SELECT name FROM outbox.claim_batch()");
$other->query_safe('EXECUTE put');
is($other->query_safe('EXECUTE take'), 'prepared', 'prepared statements');
sql($node, 'DROP EXTENSION outbox; CREATE EXTENSION outbox');
$other->query_safe('EXECUTE put');
is($other->query_safe('EXECUTE take'), 'prepared', 'prepared statements after it was made anew');

# DROP waits for who is in the middle, and who comes meanwhile waits for DROP.
$other->query_safe("BEGIN; SELECT outbox.enqueue('open', '1')");
my $dropper = session($node);
my $pid = $dropper->query_safe('SELECT pg_backend_pid()');
$dropper->query_until(qr/dropping/, "\\echo dropping\nDROP EXTENSION outbox;\n\\echo dropped\n");
ok($node->poll_query_until('postgres', "SELECT cardinality(pg_blocking_pids($pid)) > 0"), 'DROP waits for an open enqueue');
my $late = session($node);
my $late_pid = $late->query_safe('SELECT pg_backend_pid()');
$late->query_until(qr/late/, "\\echo late\nSELECT outbox.enqueue('late', '1');\n");
$other->query_safe('COMMIT');
$dropper->query_until(qr/dropped/, '');
is_sql($node, "SELECT count(*) FROM pg_extension WHERE extname = 'outbox'", '0', 'and drops it after the commit');
like($late->query('SELECT 17') . $late->{stderr}, qr/^17.*ERROR/s, 'who came meanwhile is told, and goes on');
$_->quit for ($dropper, $late);

# An empty schema of the same role is taken over: some frameworks create all schemas first.
sql($node, 'CREATE SCHEMA outbox; CREATE EXTENSION outbox');
is_sql($node, "SELECT count(*) FROM pg_depend WHERE classid = 'pg_namespace'::regclass AND objid = 'outbox'::regnamespace AND deptype = 'e'",
	'1', 'an empty schema of the same role belongs to the extension');
sql($node, 'DROP EXTENSION outbox');
is_sql($node, "SELECT count(*) FROM pg_namespace WHERE nspname = 'outbox'", '0', 'and goes with it');

# One that is not empty is refused, whoever's it is.
sql($node, "CREATE SCHEMA outbox; CREATE FUNCTION outbox.enqueue(text) RETURNS text LANGUAGE sql AS 'SELECT \$1'");
is(sqlstate($node, 'CREATE EXTENSION outbox'), '42P06', 'a schema with something in it is refused');
is_sql($node, "SELECT outbox.enqueue('mine')", 'mine', 'and left alone');
sql($node, 'DROP SCHEMA outbox CASCADE; CREATE SCHEMA outbox; CREATE DOMAIN outbox.d AS int');
is(sqlstate($node, 'CREATE EXTENSION outbox'), '42P06', 'so is one with a type in it');
sql($node, 'DROP SCHEMA outbox CASCADE');

# So is an empty one of somebody else.
sql($node, 'CREATE ROLE mallory; CREATE SCHEMA outbox AUTHORIZATION mallory');
is(sqlstate($node, 'CREATE EXTENSION outbox'), '42P06', "somebody else's empty schema is refused");
is_sql($node, "SELECT nspowner::regrole FROM pg_namespace WHERE nspname = 'outbox'", 'mallory', 'and left alone');
sql($node, 'DROP SCHEMA outbox');

# Its place is fixed.
is(sqlstate($node, 'CREATE EXTENSION outbox SCHEMA public'), '0A000', 'another schema cannot be asked for');
sql($node, 'CREATE EXTENSION outbox');
is(sqlstate($node, 'ALTER EXTENSION outbox SET SCHEMA public'), '0A000', 'nor can it be moved');
is(sqlstate($node, 'DROP TABLE outbox.delivery CASCADE'), '2BP01', 'nor taken apart');
is(sqlstate($node, 'DROP SCHEMA outbox CASCADE'), '2BP01', 'not even whole');

# What users made of its types goes only by CASCADE.
sql($node, "CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS ''");
is(sqlstate($node, 'DROP EXTENSION outbox'), '2BP01', 'a hook depends on it');
sql($node, 'DROP EXTENSION outbox CASCADE');
is_sql($node, "SELECT count(*) FROM pg_proc WHERE proname = 'hook'", '0', 'CASCADE takes it along');

# Without it, and in databases of their own.
is(sqlstate($node, "SELECT outbox.enqueue('x', '1')"), '3F000', 'no extension, no schema');
sql($node, 'CREATE EXTENSION outbox');
sql($node, 'CREATE DATABASE second');
is(sqlstate($node, "SELECT outbox.enqueue('x', '1')", 'second'), '3F000', 'another database has none');
sql($node, 'CREATE EXTENSION outbox', 'second');
sql($node, "SELECT outbox.enqueue('one', '1')");
sql($node, "SELECT outbox.enqueue('two', '1')", 'second');
my $router = session($node);
$router->query_safe('BEGIN; SELECT * FROM outbox.claim_batch()');
is(claim_names($node, '', 'second'), 'two', 'routing in one database is nothing to the other');
$router->query_safe('COMMIT');
$router->quit;
sql($node, 'DROP DATABASE second');

# The install script makes no rows, or they would collide with restored ones.
sql($node, 'CREATE DATABASE third');
sql($node, 'CREATE EXTENSION outbox', 'third');
is_sql($node, <<'SQL', '0', 'the install script makes no rows', 'third');
SELECT (SELECT count(*) FROM outbox.log_0) + (SELECT count(*) FROM outbox.identity) + (SELECT count(*) FROM outbox.frontier)
	+ (SELECT count(*) FROM outbox.subscription) + (SELECT count(*) FROM outbox.handler) + (SELECT count(*) FROM outbox.delivery)
	+ (SELECT count(*) FROM outbox.self_routed) + (SELECT count(*) FROM outbox.dedupe) + (SELECT count(*) FROM outbox.access)
SQL
is_sql($node, <<'SQL', '', 'every table and sequence of it is dumped', 'third');
SELECT c.relname FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.classid = 'pg_class'::regclass AND d.deptype = 'e'
  JOIN pg_extension e ON e.oid = d.refobjid
 WHERE e.extname = 'outbox' AND c.relkind IN ('r', 'S') AND NOT c.oid = ANY (e.extconfig)
SQL

$other->quit;
$node->stop;
done_testing();
