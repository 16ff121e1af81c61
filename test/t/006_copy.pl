# Copies: a dump that is restored, a database made from a template.  A copy of production on a test
# machine must not deliver production's messages: everything but enqueue stops until
# outbox.adopt(); after it nothing is lost, what was delivered stays delivered, and what was
# enqueued before and after the adoption is there.  An empty outbox adopts itself.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('copy');
my $target = outbox_node('copy_target', extension => 0);
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';

# Transaction numbers far above those of the target.
sql($node, 'CREATE TABLE burn (i int)');
sql($node, "DO \$\$ BEGIN FOR i IN 1..3000 LOOP INSERT INTO burn VALUES (i); COMMIT; END LOOP; END \$\$");

# Messages in each state, some not routed, some enqueued in a transaction that is open.
sql($node, 'CREATE ROLE consumer LOGIN');
sql($target, 'CREATE ROLE other; CREATE ROLE consumer LOGIN');
sql($node, "SELECT outbox.subscribe('second', 'm.*')");
sql($node, "SELECT outbox.grant_access('consumer', 'consumer', 'second')");
sql($node, "SELECT count(outbox.enqueue('m.' || i, '1', dedupe_key => 'k' || i)) FROM generate_series(1, 20) i");
sql($node, "CREATE TABLE held AS SELECT name, id, claim_token AS token FROM outbox.claim_batch(10, lease => '290 s')");
sql($node, "SELECT outbox.settle(id, token) FROM held WHERE name IN ('m.1', 'm.2', 'm.3')");
sql($node, "SELECT outbox.settle(id, token, 'dead', 'hopeless') FROM held WHERE name = 'm.4'");
sql($node, "SELECT outbox.settle(id, token, 'failed', retry_at => now() + '1 hour') FROM held WHERE name = 'm.5'");
my $open = session($node);
$open->query_safe("BEGIN; SELECT outbox.enqueue('m.open', '1')");
sql($node, "SELECT outbox.maintain()");
sql($node, "SELECT count(outbox.enqueue('new.' || i, '1')) FROM generate_series(1, 5) i");

my $counts = "SELECT subscription, pending, scheduled, ready, leased, delivered, dead FROM outbox.status ORDER BY 1";
my $before = sql($node, $counts);
is($before, "default|5|1|10|5|3|1\nsecond|0|0|20|0|0|0", 'the original');

sub refused
{
	my ($node, $database, $what) = @_;
	my ($id, $token) = split(/\|/, sql($node, "SELECT id, token FROM held WHERE name = 'm.6'", $database));

	is_sql($node, $counts, $before, "$what: the views show what was copied", $database);
	for my $call ('claim_batch()', "claim_batch(subscription => 'second')", "settle('$id', '$token')", "settle_batch('$token')",
		"renew('$id', '$token')", 'maintain()', 'deliver()', "subscribe('third')", "skip('default', 'infinity')")
	{
		is(sqlstate($node, "SELECT outbox.$call", $database), '55000', "$what: $call is refused");
	}
	is(sqlstate($node, 'CALL outbox.drain()', $database), '55000', "$what: drain() is refused");
	my ($status, $out, $err) = $node->psql($database, 'SELECT * FROM outbox.claim_batch()');
	like($err, qr/HINT:.*outbox\.adopt\(\)/, "$what: the hint tells of adopt()");
}

# The rest of a copy's life: enqueue, adopt, deliver; each message once, but for those that were
# leased or delivered there.
sub adopted
{
	my ($node, $database, $what) = @_;

	sql($node, "SELECT count(outbox.enqueue('early.' || i, '1')) FROM generate_series(1, 5) i", $database);
	my $slow = session($node, $database);
	$slow->query_safe("BEGIN; SELECT outbox.enqueue('early.6', '1')");
	$slow->query_safe('COMMIT');
	$slow->quit;
	is(sqlstate($node, 'SELECT * FROM outbox.claim_batch()', $database), '55000', "$what: still refused after an enqueue");
	is_sql($node, "SELECT outbox.enqueue('m.1', '2', dedupe_key => 'k1') = (SELECT id FROM outbox.log WHERE name = 'm.1')",
		't', "$what: dedupe keys are copied", $database);

	is_sql($node, 'SELECT outbox.adopt()', 't', "$what: adopted", $database);
	is_sql($node, 'SELECT outbox.adopt()', 'f', "$what: once", $database);
	sql($node, "SELECT count(outbox.enqueue('late.' || i, '1')) FROM generate_series(1, 5) i", $database);
	is_sql($node, 'SELECT count(*), count(DISTINCT position) FROM outbox.log', '36|36', "$what: no position twice", $database);
	is_sql($node, <<'SQL', 't', "$what: new positions lie above the old", $database);
SELECT min(position) FILTER (WHERE name ~ '^(early|late)') > max(position) FILTER (WHERE name !~ '^(early|late)') FROM outbox.log
SQL

	is(claim_names($node, '', $database),
		join(' ', sort(map({ "m.$_" } 11 .. 20), map({ "new.$_" } 1 .. 5), map({ "early.$_" } 1 .. 6), map({ "late.$_" } 1 .. 5))),
		"$what: what was ready, what was not routed, what came before the adoption and after");
	is(claim_names($node, "subscription => 'second'", $database), join(' ', sort(map({ "m.$_" } 1 .. 20))),
		"$what: the other subscription");
	is_sql($node, "SELECT outbox.settle(id, token) FROM held WHERE name = 'm.6'", 'delivered',
		"$what: a lease that was copied may be settled", $database);
	is_sql($node, <<'SQL', "m.10|2 m.7|2 m.8|2 m.9|2", "$what: or runs out", $database);
SET outbox.clock_offset = '330s';
SELECT string_agg(c.name || '|' || c.attempts, ' ' ORDER BY c.name) FROM (
	SELECT * FROM outbox.claim_batch(1) UNION ALL SELECT * FROM outbox.claim_batch(1) UNION ALL
	SELECT * FROM outbox.claim_batch(1) UNION ALL SELECT * FROM outbox.claim_batch(1)) c
SQL
	is_sql($node, "SELECT outbox.requeue_all('default')", '1', "$what: the dead letter can be requeued", $database);
	is(all_in_one_run($node, $database), '36|36', "$what: each message is in one run");
	is_sql($node, "SELECT role_name FROM outbox.access WHERE role_oid = 'consumer'::regrole", 'consumer',
		"$what: rights are those of the role of that name", $database);
}

# pg_dump and pg_restore into another cluster.
$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('postgres') ], 'pg_dump');
sql($target, 'CREATE DATABASE restored');
$target->command_ok([ 'pg_restore', '--exit-on-error', '-d', $target->connstr('restored'), $dump ], 'pg_restore');
refused($target, 'restored', 'restored');
adopted($target, 'restored', 'restored');

# Into the same cluster: another database, although it is the same system.
sql($node, 'CREATE DATABASE beside');
$node->command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('beside'), $dump ], 'pg_restore beside the original');
refused($node, 'beside', 'beside');
adopted($node, 'beside', 'beside');

# A plain dump, restored after somebody has created the extension and used nothing.
my $plain = PostgreSQL::Test::Utils::tempdir . '/plain.sql';
$node->command_ok([ 'pg_dump', '-f', $plain, $node->connstr('postgres') ], 'pg_dump in plain text');
sql($target, 'CREATE DATABASE plain');
$target->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $target->connstr('plain'), '-f', $plain ], 'psql restores it');
refused($target, 'plain', 'plain');
is_sql($target, 'SELECT outbox.adopt()', 't', 'plain: adopted', 'plain');
is(claim_names($target, '', 'plain'), join(' ', sort(map({ "m.$_" } 11 .. 20), map({ "new.$_" } 1 .. 5))),
	'plain: adopted before anything was enqueued');

# CREATE DATABASE ... TEMPLATE.
$open->query_safe('COMMIT');
$open->quit;
sql($node, 'DROP DATABASE beside');
sql($node, "DELETE FROM outbox.log_0 WHERE name = 'm.open'");
$before = sql($node, $counts);
sql($node, 'CREATE DATABASE copied TEMPLATE postgres', 'template1');
refused($node, 'copied', 'template');
adopted($node, 'copied', 'template');

# The original does not mind.
is_sql($node, 'SELECT outbox.adopt()', 'f', 'the original has nothing to adopt');
is(claim_names($node), join(' ', sort(map({ "m.$_" } 11 .. 20), map({ "new.$_" } 1 .. 5))), 'and goes on');

# Nothing but messages that nobody has ever routed: they are not lost either.
sql($node, 'CREATE DATABASE unrouted');
sql($node, "CREATE EXTENSION outbox; SELECT count(outbox.enqueue('u', to_jsonb(i))) FROM generate_series(1, 3) i", 'unrouted');
sql($node, 'CREATE DATABASE unrouted_copy TEMPLATE unrouted', 'template1');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dump.2", $node->connstr('unrouted') ], 'pg_dump of what was never routed');
sql($target, 'CREATE DATABASE unrouted_copy');
$target->command_ok([ 'pg_restore', '--exit-on-error', '-d', $target->connstr('unrouted_copy'), "$dump.2" ], 'pg_restore of it');
for my $copy ([ $node, 'template' ], [ $target, 'restored' ])
{
	my ($where, $what) = @$copy;

	sql($where, "SELECT outbox.enqueue('v', '4')", 'unrouted_copy');
	sql($where, 'SELECT outbox.adopt()', 'unrouted_copy');
	sql($where, "SELECT outbox.enqueue('v', '5')", 'unrouted_copy');
	is(claim_names($where, '', 'unrouted_copy'), 'u u u v v', "$what, never routed: all is there");
}

# An empty outbox adopts itself: a template with the extension in it.
sql($node, 'CREATE DATABASE empty');
sql($node, "CREATE EXTENSION outbox; SELECT outbox.subscribe('own', 'o.#'); SELECT * FROM outbox.claim_batch()", 'empty');
sql($node, 'CREATE DATABASE from_empty TEMPLATE empty', 'template1');
sql($node, "SELECT outbox.enqueue('o.1', '1')", 'from_empty');
is(claim_names($node, '', 'from_empty'), 'o.1', 'an empty copy adopts itself');
is(claim_names($node, "subscription => 'own'", 'from_empty'), 'o.1', 'with its subscriptions');

# Whose handlers and limits are those of a copy that adopts itself?  In one of the same cluster the numbers of roles are
# right, and a name may be old.
sql($node, 'CREATE ROLE alice LOGIN; CREATE DATABASE model');
sql($node, <<~'SQL', 'model');
	CREATE EXTENSION outbox;
	SELECT outbox.subscribe('pull', 'p.#'), outbox.subscribe('secret', 's.#');
	CREATE FUNCTION public.hook(outbox.message) RETURNS void LANGUAGE sql AS 'SELECT';
	SELECT outbox.grant_access('alice', 'consumer', 'default'), outbox.grant_access('consumer', 'consumer', 'default');
	SET ROLE consumer;
	SELECT outbox.register_hook('#', 'public.hook');
	RESET ROLE;
	SELECT outbox.reset();
	SQL
sql($node, 'ALTER ROLE alice RENAME TO alicia');
sql($node, 'CREATE DATABASE renamed TEMPLATE model', 'template1');
sql($node, 'SELECT outbox.maintain()', 'renamed');
is(sqlstate($node, "SET ROLE alicia; SELECT * FROM outbox.claim_batch(subscription => 'secret')", 'renamed'), '42501',
	'a role that was renamed keeps its limits in a copy by template');
is_sql($node, "SELECT role_oid = CAST('consumer' AS regrole) FROM outbox.handler", 't', 'and others their handlers', 'renamed');
sql($node, "SELECT outbox.enqueue('s.1', '1')", 'model');
sql($node, 'CREATE DATABASE renamed_full TEMPLATE model', 'template1');
sql($node, "SELECT outbox.enqueue('s.2', '2')", 'renamed_full');
is_sql($node, 'SELECT outbox.adopt()', 't', 'one with messages is adopted', 'renamed_full');
is(sqlstate($node, "SET ROLE alicia; SELECT * FROM outbox.claim_batch(subscription => 'secret')", 'renamed_full'), '42501',
	'and the limit is kept there too');
sql($node, 'SELECT outbox.reset()', 'model');

# In one that comes from another cluster the names count, also where the guards were off, and whatever is called first:
# a claim, which has the deliveries open, or an enqueue, which makes the identity.
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dump.3", $node->connstr('model') ], 'pg_dump of an outbox without messages');
for my $first ("SELECT count(*) FROM outbox.claim_batch(subscription => 'pull')", "SELECT outbox.enqueue('x', '1')")
{
	my ($what) = $first =~ /outbox\.(\w+)/;
	my $database = "first_$what";

	sql($target, "CREATE DATABASE $database");
	$target->command_ok([ 'pg_restore', '--exit-on-error', '--no-privileges', '-d', $target->connstr($database), "--section=$_->[0]", @$_[1 .. $#$_], "$dump.3" ],
		"restored: $_->[0]")
	  for [ 'pre-data' ], [ 'data', '--disable-triggers' ], [ 'post-data' ];
	is_sql($target, "SELECT role_name, role_oid = CAST('consumer' AS regrole) FROM outbox.handler", 'consumer|f', 'the number is that of the other cluster', $database);
	sql($target, $first, $database);
	is_sql($target, "SELECT role_oid = CAST('consumer' AS regrole) FROM outbox.handler", 't', "$what comes first: the handler is its role's", $database);
	is_sql($target, "SELECT role_name, role_oid = CAST('consumer' AS regrole) FROM outbox.access", 'consumer|t', 'so is the limit, and that of nobody is gone', $database);
}
# The identity was left out of the copy: that the guards are half on is all that tells of it.
sql($target, "DELETE FROM outbox.identity; SET session_replication_role = replica; UPDATE outbox.handler SET role_oid = 1", 'first_claim_batch');
sql($target, 'SELECT outbox.maintain()', 'first_claim_batch');
is_sql($target, "SELECT role_oid = CAST('consumer' AS regrole) FROM outbox.handler", 't', 'without an identity too', 'first_claim_batch');

$node->stop;
$target->stop;
done_testing();
