# What a signal does to a process of outbox, and what becomes of the messages it had: terminated, cancelled, killed, stopped
# with the server. An attempt is charged for the message whose hook was running, and for nobody else.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

# The WAL writer is slow, so that what nobody flushes is lost in a crash.
my $node = worker_node('signals', conf => "outbox.backoff_base = 1ms\noutbox.lease = '1h'\noutbox.max_active = '2h'\nwal_writer_delay = '10s'\n");
my $hanging = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event = 'PgSleep'";

database($node, 'postgres');
sql($node, "SELECT outbox.register_hook('#', 'public.hang')");

# Messages before and after one whose hook hangs; returns the worker's process id.
my $batch = 0;

sub hang
{
	my ($what) = @_;

	$batch++;
	sql($node, <<~"SQL");
		TRUNCATE got;
		SELECT count(outbox.enqueue(CASE n WHEN 5 THEN 'hang' ELSE 'fast' END, to_jsonb(n), correlation_id => '$batch'))
		  FROM generate_series(1, 20) n
		SQL
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eventually($node, $hanging, '1', "$what: a hook hangs");
	return worker_pid($node, 'delivery');
}

# One test: all of them are delivered, once, and only the one that hung took more than an attempt.
sub all_delivered
{
	my ($what, $attempts) = @_;

	$attempts //= 2;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eventually($node, "SELECT status, count(*), count(DISTINCT id) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY status",
		'delivered|20|20', "$what: all are delivered");
	is_sql($node, "SELECT name, min(attempts), max(attempts) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY name ORDER BY name",
		"fast|1|1\nhang|$attempts|$attempts", "$what: charged is the one whose hook was stopped");
	is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '20|20', "$what: effects are there once");
	return;
}

# The launcher
my $launcher = worker_pid($node, 'launcher');
sql($node, "SELECT pg_cancel_backend($launcher)");
enqueue($node, 'fast', 100);
eventually($node, 'SELECT count(*) FROM got', '1', 'launcher cancelled: messages are delivered');
is(worker_pid($node, 'launcher'), $launcher, 'and it goes on');
sql($node, "SELECT pg_terminate_backend($launcher)");
enqueue($node, 'fast', 101);
eventually($node, 'SELECT count(*) FROM got', '2', 'launcher terminated: messages are delivered');
is_replaced($node, 'launcher', $launcher, 'another one takes its place');

# The coordinator
my $coordinator = worker_pid($node, 'coordinator');
sql($node, "SELECT pg_cancel_backend($coordinator)");
enqueue($node, 'fast', 102);
eventually($node, 'SELECT count(*) FROM got', '3', 'coordinator cancelled: messages are delivered');
is(worker_pid($node, 'coordinator'), $coordinator, 'it goes on');
sql($node, "SELECT pg_terminate_backend($coordinator)");
is_gone($coordinator, 'coordinator terminated');
enqueue($node, 'fast', 103);
eventually($node, 'SELECT count(*) FROM got', '4', 'messages are delivered');
is_replaced($node, 'coordinator', $coordinator, 'another one takes its place');

# The delivery worker, idle
my $delivery = worker_pid($node, 'delivery');
sql($node, "SELECT pg_cancel_backend($delivery)");
enqueue($node, 'fast', 104);
eventually($node, 'SELECT count(*) FROM got', '5', 'delivery worker cancelled while idle: messages are delivered');
sql($node, "SELECT pg_terminate_backend($delivery)");
is_gone($delivery, 'delivery worker terminated while idle');
enqueue($node, 'fast', 105);
eventually($node, 'SELECT count(*) FROM got', '6', 'messages are delivered');

# The delivery worker in the middle of a hook
$delivery = hang('terminated in a hook');
sql($node, "SELECT pg_terminate_backend($delivery)");
is_gone($delivery, 'it ends');
all_delivered('terminated in a hook');
isnt(worker_pid($node, 'delivery'), $delivery, 'another one has taken its place');

$delivery = hang('cancelled in a hook');
sql($node, "SELECT pg_cancel_backend($delivery)");
all_delivered('cancelled in a hook');
is(worker_pid($node, 'delivery'), $delivery, 'it goes on');

# A worker that cannot even give back what it had still listens; the end of the lease gives back then.
sql($node, <<~'SQL');
	CREATE TABLE raises (why text);
	CREATE FUNCTION raises() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF EXISTS (SELECT FROM public.raises) THEN
			RAISE 'nothing is given back now';
		END IF;
		RETURN new;
	END $$;
	CREATE TRIGGER raises BEFORE UPDATE ON outbox.delivery FOR EACH ROW EXECUTE FUNCTION raises();
	SQL
$delivery = hang('not given back');
sql($node, "INSERT INTO raises VALUES ('now')");
sql($node, "SELECT pg_cancel_backend($delivery)");
eventually($node, "SELECT wait_event FROM pg_stat_activity WHERE pid = $delivery", wait_name($node), 'not given back: the worker pauses');
is_sql($node, 'SELECT sum(messages) FROM outbox.leases', '20', 'its lease stays');
sql($node, 'DROP TRIGGER raises ON outbox.delivery; DROP FUNCTION raises(); DROP TABLE raises');
sql($node, "SELECT pg_terminate_backend($delivery)");
is_gone($delivery, 'terminated, it ends');
sql($node, "SELECT outbox.revoke_lease(subscription, worker) FROM outbox.leases");
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY status", 'delivered|20', 'all are delivered');
is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '20|20', 'once');

# Reload in the middle of a hook changes nothing.
$delivery = hang('reload');
reload($node, 'outbox.batch_size' => '50');
is_sql($node, $hanging, '1', 'reload: the hook goes on');
sql($node, "SELECT pg_cancel_backend($delivery)");
all_delivered('reload');

# Switched off in the middle of a hook: the worker ends when the hook has; on again: it goes on.
$delivery = hang('switched off');
reload($node, 'outbox.enabled' => 'off');
sql($node, "SELECT pg_terminate_backend($delivery)");
is_gone($delivery, 'switched off: it ends');
is_sql($node, "SELECT leased FROM outbox.status", '0', 'switched off: nothing stays leased');
is_sql($node, "SELECT attempts, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY attempts ORDER BY attempts", "0|19\n1|1",
	'what was not begun is given back uncharged, the other one charged');
is_sql($node, "SELECT last_error->>'sqlstate' FROM outbox.messages WHERE correlation_id = '$batch' AND name = 'hang'", '57P01', 'with what happened');
reload($node, 'outbox.enabled' => 'on');
all_delivered('switched on again');

# Switched off between two hooks: no other subscription is begun.
sql($node, <<~'SQL');
	CREATE FUNCTION waits(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(17);
	END $$;
	SELECT outbox.subscribe(s, 'fast', from_earliest => false) FROM unnest('{first,second}'::text[]) s;
	SELECT outbox.register_hook('#', 'public.waits', subscription => 'first'), outbox.register_hook('#', 'public.take', subscription => 'second');
	SQL
my $gate = session($node);
$gate->query_safe('SELECT pg_advisory_lock(17)');
enqueue($node, 'fast', 200, 202);
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event = 'advisory'", '1', 'a hook waits');
$delivery = worker_pid($node, 'delivery');
reload($node, 'outbox.enabled' => 'off');
$gate->quit;
is_gone($delivery, 'switched off between two hooks: it ends');
is_sql($node, "SELECT subscription, ready > 0, delivered FROM outbox.status WHERE subscription = 'second'", 'second|t|0', 'and begins nothing else');
sql($node, "SELECT outbox.unsubscribe(s, true) FROM unnest('{first,second}'::text[]) s");
reload($node, 'outbox.enabled' => 'on');

# Shutdown with a hook that hangs: in time, and everything given back.
for my $mode ('fast', 'smart')
{
	hang("$mode shutdown");
	my $begin = time;
	$node->stop($mode);
	cmp_ok(time - $begin, '<', 5, "$mode shutdown with a hook that hangs, in time");
	# without workers, to see what they left
	$node->append_conf('postgresql.conf', 'outbox.enabled = off');
	unlink $node->data_dir . '/postgresql.auto.conf';
	append_to_file($node->data_dir . '/postgresql.auto.conf', '');
	$node->start;
	is_sql($node, "SELECT status, attempts, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY 1, 2 ORDER BY 2", "ready|0|19\nready|1|1",
		"$mode shutdown: given back uncharged, but for the one in the hook");
	reload($node, 'outbox.enabled' => 'on');
	all_delivered("$mode shutdown");
}

# Immediate shutdown: leases stay until they end. They are an hour long here, so the clock is moved.
hang('immediate shutdown');
my $begin = time;
$node->stop('immediate');
cmp_ok(time - $begin, '<', 5, 'immediate shutdown with a hook that hangs, in time');
$node->start;
is_sql($node, "SELECT DISTINCT status, attempts FROM outbox.messages WHERE correlation_id = '$batch'", 'leased|1', 'the lease is held');
reload($node, 'outbox.clock_offset' => '2h');
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY 1", 'delivered|20', 'when it has ended all are delivered');
is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '20|20', 'once');
is_sql($node, "SELECT DISTINCT attempts FROM outbox.messages WHERE correlation_id = '$batch'", '2', 'a lost lease is charged to the batch');

# kill -9 of a worker in a hook: the server restarts its processes, and the hook's message is charged although nobody could say so.
reload($node, 'outbox.clock_offset' => '0', 'outbox.lease' => '1s');
$delivery = hang('killed in a hook');
$launcher = worker_pid($node, 'launcher');
kill 'KILL', $delivery;
is_gone($launcher, 'killed: the launcher goes with it');
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY 1", 'delivered|20',
	'killed in a hook: workers come back, and all are delivered');
is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '20|20', 'once');
is_sql($node, "SELECT attempts FROM outbox.messages WHERE correlation_id = '$batch' AND name = 'hang'", '2', 'charged');

# Poison: a message whose hook kills the server, each time. It ends as a dead letter, its neighbours are delivered.
sql($node, <<~'SQL');
	CREATE FUNCTION poison(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
		IF m.payload = '7' THEN
			EXECUTE format('COPY (SELECT 1) TO PROGRAM ''kill -9 %s''', pg_backend_pid());
		END IF;
	END $$;
	SELECT outbox.register_hook('poison', 'public.poison');
	SQL
sql($node, 'ALTER SYSTEM SET outbox.lease = \'300ms\'; SELECT pg_reload_conf(); TRUNCATE got');
# The claim is on disk before the hook is called, also where sessions do not ask for that: or no attempt would ever be charged.
$ENV{PGOPTIONS} = '-c synchronous_commit=on';
my $offset = log_end($node);
sql($node, "ALTER ROLE postgres SET synchronous_commit = off; SELECT outbox.pause('default')");
enqueue($node, 'poison', 1, 30);
sql($node, "SELECT outbox.resume('default')");
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE name = 'poison' GROUP BY 1 ORDER BY 1", "dead|1\ndelivered|29",
	'poison ends as a dead letter, its neighbours are delivered', 'postgres', within => 60);
is_sql($node, "SELECT payload, attempts, last_error_sqlstate FROM outbox.dead_letters WHERE name = 'poison'", '7|3|OB006', 'abandoned after three attempts');
is(scalar(log_lines($node, qr/was terminated by signal 9/, $offset)), 3, 'three crashes, not one more');
is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '29|29', 'effects are there once');

# The postmaster dies: everybody follows.
hang('the postmaster dies');
my @pids = split /\n/, sql($node, "SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'");
is(scalar(@pids), 3, 'launcher, coordinator and delivery worker are there');
$node->kill9;
is_gone($_, "the postmaster dies: $_ follows") for @pids;
$node->start;
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE correlation_id = '$batch' GROUP BY 1", 'delivered|20', 'after a start all are delivered');

is_sql($node, "SELECT count(*) FROM outbox.leases", '0', 'nothing stays leased');
$node->stop;
done_testing();
