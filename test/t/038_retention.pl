# The ring in the hands of workers: it turns by itself, also under kill -9, loses nothing that is not settled, and
# what is wrong with a segment stops neither routing nor delivery, costs nothing, and is told once.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

# what a killed worker held comes back when its lease is over
my $node = worker_node('retention', conf => "outbox.retention = 2s\noutbox.lease = '1s'\noutbox.max_attempts = 100\n");
my $stored = 'SELECT count(*), (SELECT coalesce(sum(message_count), 0) FROM outbox.delivery) FROM outbox.log';
my $told = qr/settled history could not be removed/;

# Seconds pass, in which whoever has something to do does it.
sub pass_time
{
	my ($seconds) = @_;
	$node->poll_query_until('postgres', sprintf 'SELECT clock_timestamp() > to_timestamp(%f)', time + $seconds);
	return;
}

database($node, 'postgres');
sql($node, "SELECT outbox.register_hook('#', 'public.take')");
sql($node, "SELECT outbox.subscribe('pulled', 'pull')");

# By itself
enqueue($node, 'push', 1, 1000);
enqueue($node, 'pull', 1, 3);
eventually($node, "SELECT count(*) FROM got WHERE name = 'push'", '1000', 'all is delivered');
eventually($node, "$stored WHERE name = 'push'", '0|6', 'then it leaves: the log, and what is known of it');
is_sql($node, "SELECT (SELECT count(*) FROM outbox.log_kept), ready FROM outbox.status WHERE subscription = 'pulled'", '3|3',
	'what is not settled is moved');
is_sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(subscription => 'pulled')", '3', 'and delivered from there');
enqueue($node, 'push', 1001);
eventually($node, $stored, '0|0', 'then all of it leaves');

# Under kill -9: each message is delivered, and all of them leave.
for my $round (1 .. 3)
{
	enqueue($node, "round $round", 1, 300);
	eventually($node, "SELECT count(*) > 0 FROM outbox.segment WHERE condemned_at IS NOT NULL OR sweep_to IS NOT NULL", 't',
		"round $round: in the middle of a turn");
	kill 'KILL', worker_pid($node, 'coordinator');
	eventually($node, "SELECT count(DISTINCT payload) FROM got WHERE name = 'round $round'", '300', "round $round: all is delivered");
}
eventually($node, $stored, '0|0', 'and leaves');
is_sql($node, "SELECT count(*), count(DISTINCT (name, payload)) FROM got WHERE name ~ 'round'", '900|900', 'each of them once');

# Somebody has locked log_kept: sweeping comes to it later, and does not spin meanwhile.
SKIP:
{
	skip 'no /proc', 2 unless -r '/proc/self/status';
	my $locker = session($node);
	$locker->query_safe('BEGIN; LOCK TABLE outbox.log_kept IN SHARE UPDATE EXCLUSIVE MODE');
	sql($node, "UPDATE outbox.segment SET sweep_to = 1, sweep_subscription = 9223372036854775807, sweep_from = 0 WHERE NOT writing");
	my $pid = worker_pid($node, 'coordinator');
	my $sleeps = sub { return slurp_file("/proc/$pid/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m ? $1 : die };
	pass_time(2);
	my $before = $sleeps->();
	pass_time(3);
	cmp_ok($sleeps->() - $before, '<', 30, 'it looks now and then');
	$locker->query_safe('COMMIT');
	$locker->quit;
	eventually($node, 'SELECT count(sweep_to) FROM outbox.segment', '0', 'and goes on when it is free');
}

# The owner has put foreign keys on the segments.
my $offset = log_end($node);
sql($node, <<~'SQL');
	CREATE TABLE stranger_0 (id uuid REFERENCES outbox.log_0 (id));
	CREATE TABLE stranger_1 (id uuid REFERENCES outbox.log_1 (id));
	CREATE TABLE stranger_2 (id uuid REFERENCES outbox.log_2 (id));
	SQL
enqueue($node, 'kept', 1, 3);
eventually_log($node, $told, $offset, 'a segment that cannot be truncated is told');
pass_time(4);
my $slowest = 0;
for my $n (1 .. 5)
{
	enqueue($node, "meanwhile $n", 1);
	my $seconds = eventually($node, "SELECT count(*) FROM got WHERE name = 'meanwhile $n'", '1', "meanwhile message $n is delivered");
	$slowest = $seconds if $seconds > $slowest;
}
cmp_ok($slowest, '<', 0.9, 'none of them waits');
pass_time(2);
is(scalar(log_lines($node, $told, $offset)), 1, 'it is told once');
is(scalar(log_lines($node, qr/ERROR/, $offset)), 0, 'there is no error');
sql($node, 'DROP TABLE stranger_0, stranger_1, stranger_2');
eventually($node, $stored, '0|0', 'when the keys are gone, all leaves');

# A subscription that is stuck keeps its segment, and the others turn.
sql($node, "SELECT count(*) FROM outbox.enqueue_batch('pull', (SELECT jsonb_agg(n) FROM generate_series(1, 10001) n))");
eventually($node, "SELECT state, held_by FROM outbox.segments WHERE held_by ~ 'pulled'",
	'closed|subscription "pulled": 10001 unsettled messages', 'a subscription that is stuck');
enqueue($node, 'beside', 1);
eventually($node, "SELECT count(*), (SELECT count(*) FROM got WHERE name = 'beside') FROM outbox.log WHERE name = 'beside'", '0|1', 'others leave');
is_sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(20000, subscription => 'pulled')", '10001', 'it goes on');
eventually($node, $stored, '0|0', 'then all leaves');

# Without preloading
my $alone = worker_node('retention_alone', preload => 0, conf => "outbox.poll_interval = 100ms\noutbox.retention = 2s\n");
database($alone, 'postgres');
sql($alone, "SELECT outbox.register_hook('#', 'public.take')");
sql($alone, 'SELECT outbox.start_worker()');
enqueue($alone, 'push', 1, 500);
eventually($alone, 'SELECT count(*) FROM got', '500', 'start_worker(): all is delivered');
eventually($alone, $stored, '0|0', 'start_worker(): and leaves');

$node->stop;
$alone->stop;
done_testing();
