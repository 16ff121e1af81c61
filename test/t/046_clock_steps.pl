# The wall clock is set back and forth under a server at work: created_at goes on growing, leases and due times come at real speed
# after a step back, processes and claims do not wait for the clock to come round again, and nothing is lost or doubled. After a
# restart with a clock that is behind, messages still come later than those before.
#
# A small library moves the wall clock of the server, and leaves the monotonic one alone, as a step of a real clock does.

use strict;
use warnings;

use LoadTest;
use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $folder = PostgreSQL::Test::Utils::tempdir;
my ($library, $file) = ("$folder/stepped_clock.so", "$folder/seconds");

my $output;
IPC::Run::run([ 'cc', '-shared', '-fPIC', '-O1', '-o', $library, 'test/include/stepped_clock.c' ], '>&', \$output)
  or plan skip_all => "no C compiler for the clock of this test: $output";

my $node = worker_node('steps', start => 0,
	conf => "outbox.max_attempts = 1000\noutbox.backoff_base = '1ms'\noutbox.jitter = 0\noutbox.notify_interval = '50ms'\n");

# The wall clock is off by so many seconds, from now on.
sub step
{
	# in place: the server has mapped it
	open(my $seconds, -e $file ? '+<:raw' : '>:raw', $file) or die $!;
	syswrite($seconds, pack('q', shift)) or die $!;
	close $seconds;
	return;
}

sub start
{
	local $ENV{LD_PRELOAD} = $library;
	local $ENV{STEPPED_CLOCK} = $file;
	$node->start;
	return;
}

step(0);
start();
database($node, 'postgres');
prepare_load($node);
sql($node, "SELECT outbox.subscribe('listened', 'listened'); SELECT outbox.subscribe('leased', 'leased')");

my $hour = 3600;
my $began = sql($node, 'SELECT extract(epoch FROM clock_timestamp())');
step($hour);
cmp_ok(sql($node, 'SELECT extract(epoch FROM clock_timestamp())'), '>', $began + $hour - 60, 'the wall clock can be moved');

my $growing = <<'SQL';
SELECT bool_and(created_at > before), bool_and(id > before_id) FROM (
	SELECT created_at, id, lag(created_at) OVER w AS before, lag(id) OVER w AS before_id FROM outbox.log
	 WINDOW w AS (ORDER BY created_at)) q
 WHERE before IS NOT NULL
SQL

# Back and forth, in the middle of the work; each time something is due soon, a lease ends soon, and somebody listens. Nobody claims
# meanwhile: a claim would wake whoever sleeps for too long.
my $load = start_load($node, producers => 2, consumers => 0);
my $n = 0;
for my $now (0, $hour, -$hour, -2 * $hour, $hour, -24 * $hour)
{
	my $what = sprintf('the clock at %+d h', $now / $hour);

	$n++;
	sql($node, "SELECT outbox.enqueue('leased', '$n')");
	is_sql($node, "SELECT count(*) FROM outbox.claim_batch(1, subscription => 'leased', lease => '300 ms')", '1', "$what: claimed before it");
	sql($node, "SELECT outbox.enqueue('load', '\"due $n\"', available_at => outbox.clock() + interval '500 ms')");
	my $before = sql($node, 'SELECT outbox.clock()');
	step($now);
	cmp_ok(sql($node, "SELECT outbox.clock() - '$before' > interval '0'"), 'eq', 't', "$what: the clock of outbox goes on");
	wait_for_load($load, 100);
	eventually($node, "SELECT count(*) FROM got WHERE payload = '\"due $n\"'", '1', "$what: what is due comes", 'postgres', within => 8);
	eventually($node, "SELECT ready FROM outbox.status WHERE subscription = 'leased'", '1', "$what: a lease ends", 'postgres', within => 8);
	is_sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(1, subscription => 'leased')", '1', "$what: claimed again");
	my $listener = session($node);
	$listener->query_safe('LISTEN outbox_ready');
	sql($node, "SELECT outbox.enqueue('listened', '$n')");
	my $heard = '';
	for (1 .. 500)
	{
		$heard .= $listener->query('SELECT 1');
		last if $heard =~ /with payload "listened"/;
	}
	like($heard, qr/with payload "listened"/, "$what: who listens is told");
	$listener->quit;
}
is_sql($node, $growing, 't|t', 'created_at and ids have grown all the time');

# A restart with the clock behind
$node->stop('immediate');
start();
wait_for_load($load, 100);
is_sql($node, $growing, 't|t', 'also over a restart');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE running AND started_at BETWEEN clock_timestamp() - interval '5 min' AND clock_timestamp()",
	'2', 'the view of workers shows times of the wall clock');

# A suspended database is not waited for, either.
sql($node, 'CREATE DATABASE second');
step(-48 * $hour);
sql($node, 'CREATE DATABASE third TEMPLATE second');
sql($node, 'DROP DATABASE second');
wait_for_load($load, 100);
stop_load($load);
for (1 .. 200)
{
	last if sql($node, "SELECT pending + ready + leased FROM outbox.status WHERE subscription = 'pulled'") == 0;
	sql($node, 'CALL consume()');
}
for my $table ('got', 'taken')
{
	eventually($node, <<~"SQL", '0|0', "each has its effect, once: $table");
		SELECT count(*) FILTER (WHERE t.n IS NULL), count(*) FILTER (WHERE t.n > 1)
		  FROM outbox.log l LEFT JOIN (SELECT id, count(*) AS n FROM $table GROUP BY id) t USING (id) WHERE l.name = 'load'
		SQL
}
my @ids = acknowledged($load);
is_sql($node, "SELECT count(*) FROM outbox.log WHERE id IN ('" . join("', '", @ids) . "')", scalar(@ids), 'nothing acknowledged is lost');

$node->stop;
done_testing();
