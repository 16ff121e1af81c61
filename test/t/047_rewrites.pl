# Maintenance of our tables while producers, hooks and consumers are at work: REINDEX, VACUUM FULL, CLUSTER, ANALYZE, indexes of
# users, rewrites by ALTER TABLE, and pg_repack where it is installed. Nothing is lost or doubled, nobody meets a deadlock or an
# error, and no command waits for long.

use strict;
use warnings;

use LoadTest;
use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('rewrites', conf => "outbox.lease = '5s'\nautovacuum_naptime = 1s\n");

database($node, 'postgres');
prepare_load($node);
my $load = start_load($node, producers => 2, consumers => 1);
wait_for_load($load, 100);

my @tables = split /\n/, sql($node, <<'SQL');
SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND relname !~ '^(handler|access)$' ORDER BY 1
SQL
my @log = grep { /^log_/ } @tables;
my $longest = 0;

sub maintain
{
	my ($what, @commands) = @_;

	for my $command (@commands)
	{
		my $begin = time;
		my ($status, $out, $err) = $node->psql('postgres', $command);
		my $took = time - $begin;

		$longest = $took if $took > $longest;
		local $Test::Builder::Level = $Test::Builder::Level + 1;
		ok($status == 0 && $err !~ /ERROR/, $command) or diag($err);
	}
	wait_for_load($load, 30);
	return;
}

maintain('REINDEX', 'REINDEX SCHEMA outbox', 'REINDEX SCHEMA CONCURRENTLY outbox', 'REINDEX TABLE outbox.delivery');
maintain('VACUUM FULL', map { "VACUUM (FULL, ANALYZE) outbox.$_" } @tables);
maintain('VACUUM FREEZE', 'VACUUM (FREEZE, ANALYZE, DISABLE_PAGE_SKIPPING)');
maintain('CLUSTER', 'CLUSTER outbox.delivery USING delivery_pkey', 'CLUSTER outbox.frontier USING frontier_pkey', map { "CLUSTER outbox.$_ USING ${_}_pkey" } @log);
maintain('ANALYZE', map { "ANALYZE outbox.$_" } @tables);
maintain('index', map { ("CREATE INDEX CONCURRENTLY mine_$_ ON outbox.$_ (created_at)", "DROP INDEX CONCURRENTLY outbox.mine_$_") } @log);
maintain('ALTER TABLE', 'ALTER TABLE outbox.delivery SET (fillfactor = 60)', 'ALTER TABLE outbox.delivery SET UNLOGGED', 'ALTER TABLE outbox.delivery SET LOGGED',
	(map { ("ALTER TABLE outbox.$_ SET UNLOGGED", "ALTER TABLE outbox.$_ SET LOGGED") } @log, 'frontier', 'subscription', 'segment', 'identity'));

SKIP:
{
	my $installed = sql($node, "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_repack'");

	skip 'pg_repack is not installed', 1 unless $installed && grep { -x "$_/pg_repack" } split /:/, $ENV{PATH};
	sql($node, 'CREATE EXTENSION pg_repack');
	for my $table (@tables)
	{
		next if $table eq 'identity';
		$node->command_ok([ 'pg_repack', '-k', '-D', '-T', '20', '-d', 'postgres', '-h', $node->host, '-p', $node->port, '-t', "outbox.$table" ], "pg_repack $table");
	}
	wait_for_load($load, 30);
	sql($node, 'DROP EXTENSION pg_repack');
}

stop_load($load);
cmp_ok($longest, '<', 10, 'no command waited for long');
for (1 .. 100)
{
	last if sql($node, "SELECT pending + scheduled + ready + leased FROM outbox.status WHERE subscription = 'pulled'") == 0;
	sql($node, 'CALL consume()');
}
all_arrived($node, 'after all that', 'postgres', $load);
is_sql($node, 'SELECT max(attempts) FROM got', '1', 'no attempt was lost');
# pg_repack tries for its locks with a timeout
my $repack = qr/client backend postgres ERROR:  canceling statement due to (?:statement|lock) timeout/;
is(join("\n", grep { !/$repack/ } log_lines($node, qr/(ERROR|FATAL|WARNING|PANIC):|deadlock/)), '', 'nobody met an error');
is(slurp_file("$load->{folder}/errors"), '', 'no client either');
$node->command_ok([ 'pg_amcheck', '--install-missing', '--heapallindexed', '--schema=outbox', 'postgres' ], 'tables and indexes are sound');

$node->stop;
done_testing();
