# A restore into a database in which an application is already at work: what it enqueued before the
# data arrived, and while it did, lies behind the restored frontier, and within the ranges of
# restored runs.  After outbox.adopt() it is there, once, and nothing that was routed where the copy
# comes from is delivered again; whoever owns the extension by then.  The guards that pg_restore
# --disable-triggers left half on are on again.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $source = outbox_node('source');
my $target = outbox_node('target', extension => 0);
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';

# Runs that cover all transaction numbers that the target will give in this test: the delivered ones
# of one subscription, the ready ones of another.
sql($source, "SELECT outbox.subscribe('kept')");
sql($source, "SELECT outbox.enqueue('early', '1')");
sql($source, 'CREATE TABLE burn (i int)');
sql($source, "DO \$\$ BEGIN FOR i IN 1..3000 LOOP INSERT INTO burn VALUES (i); COMMIT; END LOOP; END \$\$");
# a message whose time is later than that of the pass that routed it
sql($source, "SET outbox.clock_offset = '1h'; SELECT outbox.enqueue('future', '1')");
sql($source, "SELECT outbox.enqueue('late', '1')");
sql($source, 'SELECT outbox.settle_batch(claim_token) FROM (SELECT DISTINCT claim_token FROM outbox.claim_batch()) c');
is_sql($source, "SELECT subscription, ready, delivered FROM outbox.status ORDER BY 1", "default|0|3\nkept|3|0", 'the original');
my $open = session($source);
$open->query_safe("BEGIN; SELECT outbox.enqueue('open', '1')");
sql($source, "SELECT outbox.enqueue('ready', '1'); SELECT outbox.maintain()");
sql($source, "SELECT outbox.enqueue('pending', '1')");
$open->query_safe('COMMIT');
$open->quit;
# two who may use the same, and are gone: nobody has their numbers
sql($source, 'CREATE ROLE one_gone; CREATE ROLE two_gone');
sql($source, "SELECT outbox.grant_access('one_gone', 'consumer', 'kept'), outbox.grant_access('two_gone', 'consumer')");
sql($source, 'DROP OWNED BY one_gone, two_gone; DROP ROLE one_gone, two_gone');
# one of them was made anew meanwhile, and is not given what the first one had
sql($source, "CREATE ROLE one_gone; SELECT outbox.grant_access('one_gone', 'consumer')");
is_sql($source, 'SELECT role_name, subscription FROM outbox.access ORDER BY 1', "one_gone|\ntwo_gone|", 'a role made anew has none of the rights of the first');
sql($source, 'DROP OWNED BY one_gone; DROP ROLE one_gone');
$source->command_ok([ 'pg_dump', '-Fc', '-f', $dump, $source->connstr('postgres') ], 'pg_dump');
my $horizon = sql($source, 'SELECT max(horizon) FROM outbox.frontier');

# Later than the message from the future.
my $later = "SET outbox.clock_offset = '2h';";

# The data's entries of the dump's list, in two parts: what comes first, and the rest.
sub list_files
{
	my ($first) = @_;
	my ($list, $err);
	my @names = map { "$dump.$_" } 'first', 'rest';

	IPC::Run::run([ 'pg_restore', '-l', '--section=data', $dump ], '>', \$list, '2>', \$err) or die $err;
	unlink @names;
	append_to_file($names[0], '') for 1;
	append_to_file($names[1], '') for 1;
	append_to_file($names[ /$first/ ? 0 : 1 ], "$_\n") for split /\n/, $list;
	return @names;
}

sub restore
{
	my ($database, $what, @options) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$target->command_ok([ 'pg_restore', '--exit-on-error', '-d', $target->connstr($database), @options, $dump ], $what);
}

# Each in a way of its own: alone, several in one transaction, in a savepoint, in a batch.
sub enqueue_strays
{
	my ($database, $prefix) = @_;

	sql($target, "$later SELECT outbox.enqueue('$prefix.alone', '1')", $database);
	sql($target, "$later SELECT count(outbox.enqueue('$prefix.' || i, '1')) FROM generate_series(1, 3) i", $database);
	sql($target, "$later BEGIN; SAVEPOINT s; SELECT outbox.enqueue('$prefix.savepoint', '1'); COMMIT", $database);
	sql($target, "$later SELECT outbox.enqueue_batch('$prefix.batch', '[1, 2]')", $database);
}

my @strays = ('alone', 1 .. 3, 'savepoint', 'batch', 'batch');
my %source = ('default' => [ 'open', 'ready', 'pending' ], 'kept' => [ 'early', 'future', 'late', 'open', 'ready', 'pending' ]);

sub adopted
{
	my ($database, $what, @prefixes) = @_;
	my @new = map { my $prefix = $_; map { "$prefix.$_" } @strays } @prefixes;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	cmp_ok(sql($target, "SELECT pg_current_xact_id()", $database), '<', $horizon, "$what: all this lies behind the restored frontier");
	is(sqlstate($target, 'SELECT * FROM outbox.claim_batch()', $database), '55000', "$what: nothing is claimed before the adoption");
	is_sql($target, 'SELECT outbox.adopt()', 't', "$what: adopted", $database);
	sql($target, "$later SELECT outbox.enqueue('after', '1')", $database);
	for my $subscription (sort keys %source)
	{
		is(claim_names($target, "subscription => '$subscription'", $database),
			join(' ', sort(@{ $source{$subscription} }, @new, 'after')), "$what: $subscription gets each message once");
		is(all_in_one_run($target, $database, $subscription), join('|', (7 + @new) x 2), "$what: each is in one run of $subscription");
	}
	is_sql($target, <<'SQL', '0', "$what: runs have as many messages as they say", $database);
SELECT count(*) FROM outbox.delivery d
 WHERE d.message_count <> (SELECT count(*) FROM outbox.log l WHERE d.positions @> l.position)
SQL
}

# Before the data.
sql($target, 'CREATE DATABASE before');
restore('before', 'the schema', '--section=pre-data');
enqueue_strays('before', 'stray');
restore('before', 'then the data', '--section=data');
restore('before', 'then the rest', '--section=post-data');
adopted('before', 'before the data', 'stray');

# Before it, while it comes, and after it: the identity comes first, so an enqueue meets a foreign one
# with nothing below it.
sql($target, 'CREATE DATABASE between');
restore('between', 'the schema', '--section=pre-data');
enqueue_strays('between', 'before');
my ($first, $rest) = list_files(qr/TABLE DATA outbox identity/);
restore('between', 'the identity', '-L', $first);
enqueue_strays('between', 'between');
restore('between', 'the rest of the data', '-L', $rest);
enqueue_strays('between', 'then');
adopted('between', 'while the data comes', 'before', 'between', 'then');

# And with the frontier: of what the source has not routed yet nobody sees then how far it reaches.
sql($target, 'CREATE DATABASE above');
restore('above', 'the schema', '--section=pre-data');
($first, $rest) = list_files(qr/TABLE DATA outbox (frontier|identity)/);
restore('above', 'identity and frontier', '-L', $first);
enqueue_strays('above', 'between');
restore('above', 'the rest of the data', '-L', $rest);
adopted('above', 'before the log', 'between');

# The log first, as a parallel restore would, and the frontier last.
sql($target, 'CREATE DATABASE backwards');
restore('backwards', 'the schema', '--section=pre-data');
($first, $rest) = list_files(qr/TABLE DATA outbox (?!frontier|identity)/);
restore('backwards', 'the log first', '-L', $first);
enqueue_strays('backwards', 'between');
restore('backwards', 'the rest of the data', '-L', $rest);
adopted('backwards', 'the frontier last', 'between');

# The extension is given to another owner meanwhile, which writes its row in the catalog anew.
sql($target, 'CREATE ROLE restorer SUPERUSER LOGIN; CREATE DATABASE reassigned');
restore('reassigned', 'the schema, as somebody else', '--section=pre-data', '-U', 'restorer');
enqueue_strays('reassigned', 'before');
sql($target, 'REASSIGN OWNED BY restorer TO CURRENT_USER', 'reassigned');
enqueue_strays('reassigned', 'then');
restore('reassigned', 'then the data', '--section=data');
restore('reassigned', 'then the rest', '--section=post-data');
adopted('reassigned', 'another owner', 'before', 'then');

# With triggers disabled: they are enabled as if they were ordinary ones, and adopt() makes them what they were.
my $guards = <<'SQL';
SELECT string_agg(format('%s %s', tgrelid::regclass, tgenabled), ', ' ORDER BY tgrelid::regclass::text)
  FROM pg_trigger WHERE tgrelid::regclass::text ~ '^outbox' AND NOT tgisinternal
   AND tgname IN ('guard_role', 'identity_changed', 'delivery_changed')
SQL
sql($target, 'CREATE DATABASE disabled');
restore('disabled', 'the schema', '--section=pre-data');
my $enabled = sql($target, $guards, 'disabled');
is($enabled, 'outbox.access A, outbox.delivery A, outbox.handler A, outbox.identity A', 'the guards are enabled always');
enqueue_strays('disabled', 'stray');
restore('disabled', 'the data, with triggers disabled', '--section=data', '--disable-triggers');
isnt(sql($target, $guards, 'disabled'), $enabled, 'which leaves them half on');
# as they came, of roles that have each other's numbers there, and of one that was made twice
sql($target, <<~'SQL', 'disabled');
	CREATE ROLE left_one;
	CREATE ROLE right_one;
	SELECT outbox.grant_access('left_one', 'consumer', 'default');
	SET session_replication_role = replica;
	UPDATE outbox.access SET role_oid = CAST('right_one' AS regrole);
	INSERT INTO outbox.access (id, role_name, role_oid, subscription) VALUES (-1, 'right_one', CAST('left_one' AS regrole), 'default'),
		(-2, 'left_one', 1, 'default'), (-3, 'gone', 2, 'default'), (-4, 'right_one', 3, NULL);
	SQL
my $id = sql($target, "SELECT id FROM outbox.log WHERE name = 'late'", 'disabled');
my (undef, undef, $refused) = $target->psql('disabled', "SET ROLE left_one; SELECT outbox.get('$id')");
like($refused, qr/a copy that was not adopted/, 'nobody gets a message there: the limits are of other roles');
adopted('disabled', 'triggers disabled', 'stray');
is_sql($target, 'SELECT role_name, CAST(role_oid AS regrole), subscription FROM outbox.access ORDER BY 1, 3',
	"left_one|left_one|default\nright_one|right_one|default\nright_one|right_one|", 'each right is its role\'s again', 'disabled');
is_sql($target, $guards, $enabled, 'adopt() puts them on again', 'disabled');

$source->stop;
$target->stop;
done_testing();
