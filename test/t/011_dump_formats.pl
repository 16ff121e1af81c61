# Every way in which pg_dump writes and psql or pg_restore reads: nothing is lost and nothing doubled.
# Before outbox.adopt() everything but enqueue is refused; after it each subscription gets
# what was not settled, once, and new positions lie above the old ones.  006 shows what else a copy can and cannot do.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

# claims of tests outlive a machine that is slow
my $node = outbox_node('dumped', conf => "outbox.lease = '1h'\noutbox.max_active = '2h'\n");
my $target = outbox_node('restored', extension => 0, conf => "outbox.lease = '1h'\noutbox.max_active = '2h'\n");
my $folder = PostgreSQL::Test::Utils::tempdir;

# Transaction numbers above those of the target; a message in every state; business data that depends on our types.
sql($node, 'CREATE ROLE consumer LOGIN; CREATE ROLE elsewhere LOGIN');
sql($target, 'CREATE ROLE before_it; CREATE ROLE consumer LOGIN; CREATE ROLE elsewhere LOGIN');
sql($node, 'CREATE TABLE burn (i int)');
sql($node, "DO \$\$ BEGIN FOR i IN 1..5000 LOOP INSERT INTO burn VALUES (i); COMMIT; END LOOP; END \$\$");
sql($node, <<'SQL');
CREATE TABLE orders (id int PRIMARY KEY, message outbox.message);
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS 'INSERT INTO public.orders (id) VALUES (($1.payload)::int)';
SELECT outbox.subscribe('pushed', 'pushed.#'), outbox.subscribe('paused', 'plain'), outbox.subscribe('other', 'plain', 'job');
SELECT outbox.register_hook('pushed.known', 'hook', 'pushed', max_attempts => 5);
SELECT outbox.pause('paused');
SELECT outbox.grant_access('consumer', 'consumer', 'default'), outbox.grant_access('elsewhere', 'reader');
SQL
sql($node, "SELECT count(outbox.enqueue('plain', to_jsonb(i), dedupe_key => 'key ' || i, headers => '{\"h\": \"\\\\u00e9\"}'))"
	. ' FROM generate_series(1, 40) i');
sql($node, "CREATE TABLE held AS SELECT payload::int AS nr, id, claim_token AS token FROM outbox.claim_batch(20, worker => 'w', lease => '290 s')");
sql($node, 'SELECT outbox.settle(id, token) FROM held WHERE nr <= 5');
sql($node, "SELECT outbox.settle(id, token, 'dead', E'hopeless\\nindeed') FROM held WHERE nr IN (6, 7)");
sql($node, "SELECT outbox.settle(id, token, 'failed', 'later', retry_at => now() + interval '1 day') FROM held WHERE nr = 8");
sql($node, "SELECT outbox.discard(id, reason => 'no') FROM held WHERE nr = 6");
sql($node, "SELECT outbox.settle(id, token, 'released') FROM held WHERE nr = 9");
sql($node, "SELECT outbox.enqueue('pushed.known', '101'), outbox.enqueue('pushed.unknown', '102')");
sql($node, 'CALL outbox.drain()');
sql($node, "SELECT outbox.enqueue('pushed.known', '103')");
sql($node, "SELECT outbox.enqueue('plain', '41', kind => 'job')");
my $open = session($node);
$open->query_safe("BEGIN; SELECT outbox.enqueue('plain', '42')");
sql($node, 'SELECT outbox.maintain()');
sql($node, "SELECT outbox.enqueue('plain', '43'), outbox.enqueue('pushed.known', '104')");
$open->query_safe('COMMIT');
$open->quit;

my $states = <<'SQL';
SELECT subscription, status, count(*), sum(payload::int), sum(attempts) FROM outbox.messages GROUP BY 1, 2 ORDER BY 1, 2
SQL
my $all = sql($node, $states);
my $tables = <<'SQL';
SELECT (SELECT string_agg(concat_ws(' ', name, pattern, kind, mode, paused), ', ' ORDER BY name) FROM outbox.subscriptions),
	(SELECT string_agg(concat_ws(' ', name_pattern, function, role, state, max_attempts), ', ') FROM outbox.handlers),
	(SELECT string_agg(concat_ws(' ', role_name, subscription), ', ') FROM outbox.access),
	(SELECT count(*) FROM outbox.log WHERE headers ->> 'h' = 'é')
SQL
my $rest = sql($node, $tables);
like($all, qr/default\|dead\|1.*default\|leased\|11.*pushed\|unhandled\|1/s, 'the original has messages in each state');

# One way of copying it: what pg_dump writes and who reads it.  Parameters: into (a database with the extension in it already).
my $n = 0;

sub copy
{
	my ($what, $dump, $restore, %params) = @_;
	my $database = 'copy_' . ++$n;
	my $file = "$folder/dump_$n";
	my $server = $params{server} // $target;
	my @read = "@$restore" eq 'psql'
	  ? ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $file, '-d', $server->connstr($database))
	  : ('pg_restore', @$restore, '--exit-on-error', '-d', $server->connstr($database), $file);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($server, "CREATE DATABASE $database");
	sql($server, $params{first}, $database) if $params{first};
	$node->command_ok([ 'pg_dump', @$dump, '-f', $file, $node->connstr('postgres') ], "$what: pg_dump");
	$server->command_ok(\@read, "$what: restored");
	return ($server, $database);
}

sub is_complete
{
	my ($what, $server, $database) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is_sql($server, $states, $all, "$what: each message is in its state", $database);
	is_sql($server, $tables, $rest, "$what: subscriptions, handlers, rights", $database);
	for my $call ('outbox.claim_batch()', "outbox.claim_batch(subscription => 'pushed')", 'outbox.maintain()', 'outbox.deliver()')
	{
		is(sqlstate($server, "SELECT * FROM $call", $database), '55000', "$what: $call is refused");
	}
	sql($server, "SELECT outbox.enqueue('plain', '44')", $database);
	is(sqlstate($server, 'SELECT * FROM outbox.claim_batch()', $database), '55000', "$what: also after an enqueue");
	is_sql($server, 'SELECT outbox.adopt(), outbox.adopt()', 't|f', "$what: adopted, once", $database);
	sql($server, "SELECT outbox.enqueue('plain', '45')", $database);
	is_sql($server, <<'SQL', 't', "$what: new positions lie above the old", $database);
SELECT min(position) FILTER (WHERE payload IN ('44', '45')) > max(position) FILTER (WHERE payload NOT IN ('44', '45')) FROM outbox.log
SQL
	is_sql($server, "SELECT string_agg(payload::text, ' ' ORDER BY payload::int) FROM outbox.claim_batch(1000)",
		join(' ', 9, 21 .. 45, 101 .. 104), "$what: what was not settled, what was not routed, what is new", $database);
	is_sql($server, "SELECT sum(n) FROM (SELECT count(*) AS n FROM held, outbox.settle_batch(token, ids => ARRAY[id]) s WHERE nr > 9 AND s = 1) q",
		'11', "$what: leases are held", $database);
	sql($server, 'CALL outbox.drain()', $database);
	is_sql($server, 'SELECT string_agg(id::text, \' \' ORDER BY id) FROM orders', '101 103 104', "$what: hooks are called, once", $database);
	is(all_in_one_run($server, $database), '49|49', "$what: each message is in one run");
	is_sql($server, "SELECT has_function_privilege('consumer', f, 'EXECUTE') FROM pg_proc p, CAST(p.oid AS regprocedure) f WHERE proname = 'claim_batch'", 't',
		"$what: rights on functions", $database);
	sql($server, "DROP DATABASE $database");
}

is_complete('plain', copy('plain', [], ['psql']));
is_complete('plain, into the same cluster', copy('same cluster', [], ['psql'], server => $node));
is_complete('custom', copy('custom', ['-Fc'], []));
is_complete('tar', copy('tar', ['-Ft'], ['--single-transaction']));
is_complete('directory, parallel', copy('directory, parallel', [ '-Fd', '-j3' ], ['-j3']));
is_complete('custom, parallel, triggers disabled', copy('parallel', ['-Fc'], [ '-j4', '--disable-triggers' ], server => $node));
is_complete('inserts', copy('inserts', [ '--inserts', '--rows-per-insert=7' ], ['psql']));
is_complete('over one that is in use', copy('clean', ['-Fc'], [ '--clean', '--if-exists' ],
		first => "CREATE EXTENSION outbox; SELECT outbox.enqueue('gone', '1'); SELECT count(*) FROM outbox.claim_batch(); SELECT outbox.enqueue('gone', '2')"));

# The schema first, the data later, each of two ways.
my $schema = "$folder/schema.sql";
$node->command_ok([ 'pg_dump', '--schema-only', '-f', $schema, $node->connstr('postgres') ], 'schema only: pg_dump');

sub schema_only
{
	my ($database) = @_;

	sql($target, "CREATE DATABASE $database");
	$target->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $schema, '-d', $target->connstr($database) ], 'schema only: restored');
}

schema_only('schema');
is_sql($target, 'SELECT count(*) FROM outbox.log', '0', 'schema only: no messages', 'schema');
sql($target, "SELECT outbox.enqueue('plain', '1')", 'schema');
is(claim_names($target, '', 'schema'), 'plain', 'schema only: an outbox that works at once');
is_sql($target, 'SELECT outbox.adopt()', 'f', 'schema only: nothing to adopt', 'schema');
is_sql($target, "SELECT proacl::text ~ 'consumer=X' FROM pg_proc WHERE proname = 'claim_batch'", 't', 'schema only: with its rights', 'schema');

$node->command_ok([ 'pg_dump', '--data-only', '-f', "$folder/data.sql", $node->connstr('postgres') ], 'data only: pg_dump');
schema_only('data');
$target->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$folder/data.sql", '-d', $target->connstr('data') ], 'data only: restored');
is_complete('data only', $target, 'data');

# Without the messages, as docs/operations.md says.
my $docs = slurp_file('docs/operations.md');
my ($recipe) = $docs =~ /^pg_dump (--exclude-table-data=\S+) /m;
ok($recipe, 'docs/operations.md says how to leave the messages out');
my ($pattern, @names) = split /[{,}]/, $recipe;
my ($server, $database) = copy('without messages', [ '-Fc', map { "$pattern$_" } @names ], []);
is_sql($server, 'SELECT count(*) FROM outbox.log', '0', 'without messages: none', $database);
is_sql($server, $tables, $rest =~ s/\|\d+$/|0/r, 'without messages: subscriptions, handlers, rights', $database);
sql($server, "SELECT outbox.enqueue('plain', '1')", $database);
is(claim_names($server, '', $database), 'plain', 'without messages: it works at once');
is_sql($server, 'SELECT outbox.adopt()', 'f', 'without messages: nothing to adopt', $database);

is_sql($node, $states, $all, 'the original is what it was');

# Nothing was ever routed, so no row says whose it is; and the log before the rest, as a parallel restore may have it.
sql($node, 'CREATE DATABASE unrouted');
sql($node, "CREATE EXTENSION outbox; SELECT outbox.enqueue('one', '1'); SELECT outbox.enqueue('two', '2')", 'unrouted');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$folder/unrouted", $node->connstr('unrouted') ], 'never routed: pg_dump');
for my $copy ([ $node, 'the same cluster' ], [ $target, 'another cluster' ])
{
	my ($where, $what) = ($copy->[0], "never routed, into $copy->[1]");

	sql($where, 'CREATE DATABASE unrouted_copy');
	$where->command_ok([ 'pg_restore', '--exit-on-error', '-d', $where->connstr('unrouted_copy'), "$folder/unrouted" ], "$what: restored");
	is(sqlstate($where, 'SELECT * FROM outbox.claim_batch()', 'unrouted_copy'), '55000', "$what: a claim is refused");
	sql($where, "SELECT outbox.enqueue('three', '3')", 'unrouted_copy');
	is(sqlstate($where, 'SELECT * FROM outbox.claim_batch()', 'unrouted_copy'), '55000', "$what: also after an enqueue");
	is_sql($where, 'SELECT outbox.adopt(), outbox.adopt()', 't|f', "$what: adopted, once", 'unrouted_copy');
	is(claim_names($where, '', 'unrouted_copy'), 'one three two', "$what: all is there");
}
sql($node, 'CREATE DATABASE log_first');
$node->command_ok([ 'pg_restore', '--exit-on-error', '--section=pre-data', '-d', $node->connstr('log_first'), "$folder/dump_3" ], 'the schema');
$node->command_ok([ 'pg_restore', '--exit-on-error', '--section=data', '-d', $node->connstr('log_first'), "$folder/dump_3",
		map { ('-t', $_) } 'log_0', 'log_1', 'log_2', 'log_kept', 'subscription' ], 'the log first');
is(sqlstate($node, 'SELECT * FROM outbox.claim_batch()', 'log_first'), '55000', 'the log first: a claim is refused');
$node->stop;
$target->stop;
done_testing();
