# The disk of the log's tablespace is full: enqueue fails with 53100 and its transaction with it, nothing that was committed is lost,
# claims, hooks and settlements go on; with space again all goes on by itself. The same for the disk of the deliveries: no attempt is
# used up, the workers say it now and then, and come back by themselves.
#
# The small disk is a tmpfs in a mount namespace of the server's own.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $disk = PostgreSQL::Test::Utils::tempdir('disk');
my ($uid, $gid) = ($<, (split / /, $()[0]);
my $mount = 'mount -t tmpfs -o size=24m,mode=0700 tmpfs "$0"';
my @inside = ('unshare', '--user', '--map-root-user', '--mount', 'sh', '-c',
	"$mount && exec unshare --user --map-user=$uid --map-group=$gid \"\$@\"", $disk);

IPC::Run::run([ @inside, 'test', '-w', $disk ], '>&', \my $refused)
  or plan skip_all => 'no disk of our own: user and mount namespaces are not available here';

my $node = worker_node('full', start => 0, conf => "outbox.backoff_base = '1ms'\nallow_in_place_tablespaces = off\n");

sub start
{
	system_or_bail(@inside, 'pg_ctl', '-w', '-D', $node->data_dir, '-l', $node->logfile, '-o', "--cluster-name=full", 'start');
	$node->_update_pid(1);
	return;
}

start();
database($node, 'postgres');
sql($node, "CREATE TABLESPACE small LOCATION '$disk'");

# Tables of ours whose name begins so, with their indexes and what is kept outside of the row, go to another disk.
sub move
{
	my ($tables, $space) = @_;

	sql($node, <<~"SQL");
		DO \$\$
		DECLARE
			command text;
		BEGIN
			FOR command IN
				SELECT format('ALTER %s %s SET TABLESPACE $space', CASE relkind WHEN 'i' THEN 'INDEX' ELSE 'TABLE' END, oid::regclass)
				  FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relname ~ '^$tables' AND relkind IN ('r', 'i')
			LOOP
				EXECUTE command;
			END LOOP;
		END \$\$
		SQL
	return;
}

# All that is left, but for what others have begun already.
sub fill
{
	sql($node, "CREATE TABLE IF NOT EXISTS ballast (t text) TABLESPACE small; ALTER TABLE ballast ALTER t SET STORAGE EXTERNAL");
	for my $bytes (1_000_000, 100_000, 8000, 2000, 100)
	{
		1 while sqlstate($node, "INSERT INTO ballast VALUES (repeat('x', $bytes))") eq '00000';
	}
	return;
}

sub make_room
{
	sql($node, 'DROP TABLE ballast; CHECKPOINT');
	return;
}

move('log', 'small');
sql($node, "SELECT outbox.subscribe('pulled', 'pulled'), outbox.register_hook('#', 'public.take')");
enqueue($node, 'pulled', 1, 100);
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(10, subscription => 'pulled')", '10', 'some are claimed before');
eventually($node, 'SELECT count(*) FROM got', '100', 'pushed messages are delivered before');

# The log's disk
fill();
my $big = "SELECT outbox.enqueue('big', to_jsonb(repeat(md5(random()::text), 8000)))";
is(sqlstate($node, $big), '53100', 'the log\'s disk is full: enqueue fails');
is(sqlstate($node, "CREATE TABLE business (i int); SELECT outbox.enqueue('plain', to_jsonb(i)) FROM generate_series(1, 100000) i"), '53100',
	'also a small message, when the last page is full');
is(sqlstate($node, "BEGIN; CREATE TABLE change (i int); $big; COMMIT"), '53100', 'in a business transaction too');
is_sql($node, "SELECT to_regclass('change') IS NULL", 't', 'which is undone');
is_sql($node, "BEGIN; SAVEPOINT s; CREATE TABLE kept (i int); COMMIT; SELECT to_regclass('kept')", 'kept', 'other work goes on');
is_sql($node, "SELECT count(*) FROM outbox.log WHERE name <> 'pulled'", '0', 'nothing of it is in the log');
sql($node, "CREATE TABLE held AS SELECT id, claim_token AS token FROM outbox.claim_batch(20, subscription => 'pulled')");
is_sql($node, 'SELECT outbox.settle_batch((SELECT DISTINCT token FROM held))', '20', 'claims and settlements go on');
is_sql($node, 'SELECT count(*) FROM outbox.messages', '200', 'so do the views');
is_sql($node, 'SELECT count(*) FROM outbox.maintain()', '1', 'and what cron calls');

my $errors = scalar(log_lines($node, qr/outbox \w+ +(ERROR|FATAL|PANIC|WARNING):/));
is($errors, 0, 'the workers have nothing to complain of');

make_room();
sql($node, $big);
enqueue($node, 'pulled', 101, 103);
eventually($node, "SELECT count(*) FROM got WHERE name = 'big'", '1', 'with space again enqueue works, and the workers deliver');
eventually($node, 'SELECT count(*), count(DISTINCT id) FROM got', '104|104', 'each once');
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'pulled')", '73', 'pulling goes on as well');
is(all_in_one_run($node), '104|104', 'each message is in one run');

# The disk of the deliveries
move('log', 'pg_default');
sql($node, "SELECT outbox.skip('pulled', 'infinity'); DELETE FROM got");
move('delivery', 'small');
fill();
my $offset = log_end($node);
for my $n (1 .. 20)
{
	# each commit wakes the coordinator
	enqueue($node, 'push', $n * 1000 + 1, $n * 1000 + 100);
}
is_sql($node, "SELECT count(*) FROM outbox.log WHERE name = 'push'", '2000', 'the disk of the deliveries is full: enqueueing goes on');
eventually_log($node, qr/outbox coordinator +ERROR:  could not extend file/, $offset, 'the coordinator says so');
my $claims = 0;
for (1 .. 200)
{
	my $state = sqlstate($node, "SELECT * FROM outbox.claim_batch(1, subscription => 'pulled')");

	$claims++ if $state eq '53100';
	last if $state eq '53100';
}
is($claims, 1, 'claims fail with 53100 as soon as they need room');
my $delivered = sql($node, 'SELECT count(*) FROM got');
cmp_ok(scalar(log_lines($node, qr/outbox \w+ +(ERROR|FATAL|WARNING):/, $offset)), '<=', 12, 'the workers do not fill the log');
make_room();
# what was claimed with the last of the space, and could not be given back, comes when its lease is over
eventually($node, 'SELECT count(*), count(DISTINCT id) FROM got', '2000|2000', 'with space again all is delivered, once', 'postgres', within => 90);
is_sql($node, "SELECT max(attempts) <= 2 FROM got", 't', 'at most one claim was in vain');
is_sql($node, "SELECT dead, unhandled, ready, leased, pending FROM outbox.status WHERE subscription = 'default'", '0|0|0|0|0', 'nothing is left');
is(all_in_one_run($node), '2104|2104', 'each message is in one run');
is(scalar(log_lines($node, qr/PANIC:|terminated by signal/)), 0, 'nothing crashed');

$node->stop;
done_testing();
