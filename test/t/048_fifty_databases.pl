# Many databases: those without the extension cost one look after a start, by one process at a time, and nothing afterwards; fifty
# with it, each with messages for a hook, are served by a bounded number of processes: two coordinators, and delivery workers in what
# slots there are, which make room for one another. So a thousand databases without the extension are a thousand looks, one after
# the other, of some milliseconds each; nothing else of outbox counts databases that it has not found.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;
use Time::HiRes qw(time);

my ($count, $without) = (50, 20);
my $node = worker_node('many', conf => "max_worker_processes = 8\nautovacuum = off\n");

database($node, 'model');
sql($node, 'ALTER DATABASE model WITH allow_connections false');
# where nothing is flushed, this is the quicker way
sql($node, "CREATE DATABASE without_$_ TEMPLATE template0 STRATEGY file_copy") for 1 .. $without;
sql($node, "CREATE DATABASE with_$_ TEMPLATE model STRATEGY file_copy") for 1 .. $count;

# What runs, and what was done in the databases without the extension.
my $running = "SELECT string_agg(backend_type || ' ' || n, ', ' ORDER BY 1) FROM (SELECT backend_type, count(*) AS n FROM pg_stat_activity
	WHERE backend_type LIKE 'outbox %' GROUP BY 1) s";
my $elsewhere = "SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'without_%'";
my $looked = "SELECT count(*) FROM pg_stat_database d JOIN seen s USING (datname) WHERE d.xact_commit > s.xact_commit";
my $strangers = 0;

eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox probe'", '0', 'all that were made have been looked at');
sql($node, "CREATE TABLE seen AS SELECT datname, xact_commit FROM pg_stat_database WHERE datname LIKE 'with%'");

# A start: everybody is looked at, one at a time.
my $begin = time;
my %most;
my $offset = log_end($node);
$node->restart;

sub watch
{
	my $line = sql($node, $running);

	$strangers += sql($node, $elsewhere);

	while ($line =~ /outbox (\w+) (\d+)/g)
	{
		$most{$1} = $2 if $2 > ($most{$1} // 0);
	}
	return;
}

for (1 .. 2000)
{
	watch();
	last if sql($node, $looked) == $count + $without
	  && sql($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox probe'") == 0;
}
note(sprintf('%d databases were looked at in %.1f s', $count + $without + 1, time - $begin));
cmp_ok($most{probe} // 0, '<=', 1, 'one at a time is looked at');
eventually($node, $elsewhere, '0', 'nobody stays in a database without the extension');
$strangers = 0;

# All of them have messages at once, several times.
sql($node, "SELECT outbox.register_hook('#', 'public.take')", "with_$_") for 1 .. $count;
for my $round (1 .. 2)
{
	my $limit = time + 60;
	my @left = 1 .. $count;

	enqueue($node, "round_$round", 1, 20, "with_$_") for @left;
	while (@left && time < $limit)
	{
		watch();
		@left = grep { sql($node, "SELECT count(*) FROM got WHERE name = 'round_$round'", "with_$_") != 20 } @left;
	}
	is(scalar(@left), 0, "round $round: all $count databases are served");
}
is($most{coordinator}, 2, 'by two coordinators');
cmp_ok($most{delivery}, '<=', 5, 'and delivery workers in the slots that are left: ' . $most{delivery});
is_sql($node, "SELECT bool_and(n = 40) FROM (SELECT count(*) AS n FROM got) s", 't', 'each message was delivered once', "with_$count");
is_sql($node, $elsewhere, '0', 'nobody is in a database without the extension');
is($strangers, 0, 'and nobody was');
is(scalar(log_lines($node, qr/(ERROR|FATAL|PANIC):(?!.*terminating)/, $offset)), 0, 'no error in the log');

$node->stop;
done_testing();
