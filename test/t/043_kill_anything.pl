# kill -9 of anything at any moment, the postmaster too, while producers enqueue, a hook is pushed and a consumer pulls: nothing that
# was acknowledged is lost, every effect in the database is there once, and nobody has to repair anything.

use strict;
use warnings;

use LoadTest;
use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('kill', conf => "outbox.lease = '500ms'\noutbox.max_attempts = 1000\noutbox.backoff_base = '1ms'\n");

database($node, 'postgres');
prepare_load($node);
my $load = start_load($node, producers => 2, consumers => 2);

# The process that does it: the one with the lowest or highest number of a kind, so that it is sometimes the old, sometimes the new.
my %kinds = (
	'a producer' => "query LIKE '%enqueue%'",
	'a consumer' => "query LIKE '%consume%'",
	'the coordinator' => "backend_type = 'outbox coordinator'",
	'the delivery worker' => "backend_type = 'outbox delivery'",
	'the launcher' => "backend_type = 'outbox launcher'",
	'the checkpointer' => "backend_type = 'checkpointer'",
	'the WAL writer' => "backend_type = 'walwriter'",
);

sub server_is_back
{
	my ($what) = @_;

	eventually($node, 'SELECT true', 't', "$what: the server is back");
	wait_for_load($load, 100);
}

for my $round (1 .. 2)
{
	for my $kind (sort keys %kinds)
	{
		my $pid = '';

		for (1 .. 500)
		{
			(undef, $pid) = eval {
				$node->psql('postgres',
					"SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND $kinds{$kind} ORDER BY pid * (-1) ^ $round LIMIT 1");
			};
			last if $pid;
		}
		ok($pid, "$kind is there") or next;
		kill 'KILL', $pid;
		server_is_back("$kind is killed, $round");
	}
}

# The whole server
for my $mode ('immediate', 'kill')
{
	my $postmaster = $node->{_pid};

	$mode eq 'kill' ? $node->kill9 : $node->stop($mode);
	is_gone($postmaster, "the server, $mode: it is gone");
	$node->start;
	server_is_back("the server, $mode");
}

stop_load($load);
sql($node, 'CALL consume()');
# what a consumer had when it was killed comes back in pieces, when its lease is over
for (1 .. 300)
{
	last if sql($node, "SELECT pending + scheduled + ready + leased FROM outbox.status WHERE subscription = 'pulled'") == 0;
	sql($node, 'CALL consume()');
}
all_arrived($node, 'after all that', 'postgres', $load);
$node->command_ok([ 'pg_amcheck', '--install-missing', '--heapallindexed', '--schema=outbox', 'postgres' ], 'tables and indexes are sound');
is(scalar(log_lines($node, qr/PANIC:/)), 0, 'nothing panicked');

$node->stop;
done_testing();
