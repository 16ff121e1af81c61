# What it costs to have workers: nothing is held while they wait, they hardly wake while there is nothing to do, their memory
# does not grow, and the log has neither payloads nor the same line twice.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('manners', conf => "outbox.backoff_base = 1ms\n");

database($node, 'postgres');
sql($node, 'CREATE DATABASE elsewhere');
sql($node, "SELECT outbox.register_hook('#', 'public.take')");
sql($node, "SELECT outbox.subscribe('pulled', 'plain')");
enqueue($node, 'plain', 1, 100);
eventually($node, 'SELECT count(*) FROM got', '100', 'it works');

my %pid = map { $_ => worker_pid($node, $_) } qw(launcher coordinator delivery);

# Waiting
eventually($node, <<~'SQL', '3|0|0|0', 'while they wait: no snapshot, no transaction, and idle is what they say');
	SELECT count(*), count(backend_xmin), count(xact_start), count(*) FILTER (WHERE state <> 'idle')
	  FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'
	SQL
is_sql($node, 'SELECT count(*) FROM pg_locks WHERE pid IN (' . join(',', values %pid) . ')', '0', 'and no lock');
is_sql($node, "SELECT string_agg(DISTINCT wait_event_type || ' ' || wait_event, ',') FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'",
	'Extension ' . wait_name($node), 'their wait has a name');

# Nobody else has changed a run here: so autovacuum is told of what they do.
eventually($node, "SELECT n_tup_ins > 0, n_tup_upd > 0 FROM pg_stat_all_tables WHERE relid = 'outbox.delivery'::regclass", 't|t',
	'what they change is counted, for autovacuum');

# Idle: how often each of them goes to sleep in a while, as the kernel counts it. The poll is at its slowest.
SKIP:
{
	skip 'no /proc', 3 unless -r "/proc/$pid{launcher}/status";

	my $sleeps = sub {
		my ($process) = @_;
		return slurp_file("/proc/$pid{$process}/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m ? $1 : die;
	};
	reload($node, 'outbox.poll_interval' => '10s');
	eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox%' AND wait_event_type = 'Extension'", '3', 'all sleep');
	my %before = map { $_ => $sleeps->($_) } keys %pid;
	$node->poll_query_until('elsewhere', sprintf 'SELECT clock_timestamp() > to_timestamp(%f)', time + 6);
	for my $process (sort keys %pid)
	{
		my $woken = $sleeps->($process) - $before{$process};
		cmp_ok($woken, '<=', 2, "$process: woken $woken times in 6 s");
	}
}

# Memory: as much after many turns as after some.
sub memory
{
	my ($process) = @_;
	my $offset = log_end($node);

	sql($node, "SELECT pg_log_backend_memory_contexts($pid{$process})");
	for (1 .. 1500)
	{
		return $1 if slurp_file($node->logfile, $offset) =~ /\[$pid{$process}\].*Grand total: .* (\d+) used/;
		Time::HiRes::usleep(20_000);	# poll
	}
	die 'no memory contexts in the log';
}

# Turns of all kinds: delivered, retried, dead, later, timed out, unhandled; new and removed subscriptions.
sql($node, <<~'SQL');
	CREATE FUNCTION mixed(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		CASE CAST(m.payload AS integer) % 5
			WHEN 0 THEN RAISE EXCEPTION 'fails';
			WHEN 1 THEN RAISE EXCEPTION 'dead' USING ERRCODE = 'OB010';
			WHEN 2 THEN
				IF m.attempts = 1 AND clock_timestamp() < m.created_at + interval '5 ms' THEN
					RAISE EXCEPTION 'later' USING ERRCODE = 'OB011', DETAIL = '5 ms';
				END IF;
			ELSE NULL;
		END CASE;
	END $$;
	SELECT outbox.register_hook('mixed', 'public.mixed');
	SQL

sub turns
{
	my ($from, $to) = @_;
	my $session = session($node);

	for my $n ($from .. $to)
	{
		$session->query_safe("SELECT outbox.enqueue('mixed', '$n'); SELECT outbox.enqueue('plain', '$n')");
		$session->query_safe("SELECT outbox.subscribe('s$n', 'mixed'); SELECT outbox.unsubscribe('s$n', discard_pending => true)") if $n % 20 == 0;
		$session->query_safe("SELECT outbox.settle_batch(t) FROM (SELECT DISTINCT claim_token AS t FROM outbox.claim_batch(subscription => 'pulled')) c") if $n % 10 == 0;
	}
	$session->quit;
	eventually($node, "SELECT pending + ready + scheduled + leased FROM outbox.status WHERE subscription = 'default'", '0', "turns $from to $to");
	return;
}

turns(1, 300);
my %used = map { $_ => memory($_) } qw(coordinator delivery);
turns(301, 1500);
for my $process ('coordinator', 'delivery')
{
	my $more = memory($process) - $used{$process};
	cmp_ok($more, '<', 30_000, "$process: $more bytes more after four times as many turns");
}
is(worker_pid($node, $_), $pid{$_}, "$_: still the same") for sort keys %pid;

# The log
my $offset = log_end($node);
sql($node, <<~'SQL');
	CREATE FUNCTION tells(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF m.payload::text LIKE '%sleeps%' THEN
			PERFORM pg_sleep(1000); -- on purpose
		END IF;
		RAISE EXCEPTION 'this is wrong: %', m.payload USING DETAIL = m.payload::text;
	END $$;
	SELECT outbox.register_hook('tells', 'public.tells');
	SELECT outbox.register_hook('tells.soon', 'public.tells', timeout => '50 ms');
	SELECT outbox.enqueue('tells', '"HUSH fails"'), outbox.enqueue('tells.soon', '"HUSH sleeps"');
	SQL
eventually($node, "SELECT count(*) FROM outbox.dead_letters WHERE name LIKE 'tells%'", '2', 'hooks that fail');
is(scalar(log_lines($node, qr/\] outbox (coordinator|delivery)/, $offset)), 0, 'leave no line in the log');
sql($node, "SELECT outbox.enqueue('tells', '\"HUSH sleeps\"', max_attempts => 2)");
my $hanging = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event = 'PgSleep'";
eventually($node, $hanging, '1', 'one hangs');
sql($node, "SELECT pg_cancel_backend($pid{delivery})");
eventually($node, "SELECT attempts FROM outbox.messages WHERE name = 'tells' AND subscription = 'default' AND status = 'leased'", '2', 'cancelled, and tried again');
eventually($node, $hanging, '1', 'it hangs again');
sql($node, "SELECT pg_terminate_backend($pid{delivery})");
eventually($node, "SELECT count(*) FROM outbox.dead_letters WHERE name = 'tells'", '2', 'terminated');
is(scalar(log_lines($node, qr/HUSH/, $offset)), 0, 'no payload in the log');

# An error of our own that stays: said once, then less and less often, however much is enqueued.
$offset = log_end($node);
sql($node, 'ALTER TABLE outbox.self_routed RENAME TO hidden');
for my $n (1 .. 40)
{
	sql($node, "SELECT outbox.enqueue('plain', '$n')");
}
my $errors = () = log_lines($node, qr/outbox coordinator\s+ERROR:/, $offset);
cmp_ok($errors, '<=', 4, "an error that stays: $errors lines for 40 commits");
cmp_ok($errors, '>', 0, 'but some');
sql($node, 'ALTER TABLE outbox.hidden RENAME TO self_routed');
enqueue($node, 'plain', 5000);
eventually($node, "SELECT count(*) FROM got WHERE payload = '5000'", '1', 'when it is gone, all goes on');

$node->stop;
done_testing();
