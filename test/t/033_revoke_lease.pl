# revoke_lease(): a consumer that is known to be dead is not waited for. Who listens is told at once; a hook that is running
# is not disturbed.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('revoke_lease', conf => "outbox.poll_interval = '1h'\noutbox.notify_interval = '10ms'\noutbox.max_active = '2h'\n");

database($node, 'postgres');
sql($node, "SELECT outbox.subscribe('pulled', 'pulled')");
sql($node, 'CREATE ROLE ops LOGIN; CREATE ROLE reader LOGIN');
sql($node, "SELECT outbox.grant_access('ops', 'operator'); SELECT outbox.grant_access('reader', 'reader')");
enqueue($node, 'pulled', 1, 10);

my $claim = "SELECT count(*) FROM outbox.claim_batch(%d, subscription => 'pulled', lease => '1 h', worker => '%s')";
sql($node, "CREATE TABLE held AS SELECT id, claim_token AS token FROM outbox.claim_batch(6, subscription => 'pulled', lease => '1 h', worker => 'dead one')");
is_sql($node, sprintf($claim, 4, 'live one'), '4', 'two consumers have claimed');

my $listener = session($node);
$listener->query_safe('LISTEN outbox_ready');
is_sql($node, "SELECT outbox.revoke_lease('pulled', 'nobody')", '0', 'of nobody: nothing');
my ($status, $out, $err) = as_role($node, 'reader', "SELECT outbox.revoke_lease('pulled', 'dead one')");
like($err, qr/permission denied/, 'a reader may not');
($status, $out, $err) = as_role($node, 'ops', "SELECT outbox.revoke_lease('pulled', 'dead one')");
is($out, '6', 'an operator may; it returns how many messages') or diag($err);
my $heard = '';
for (1 .. 1000)
{
	$heard .= $listener->query('SELECT 1');
	last if $heard =~ /"outbox_ready" with payload "pulled"/;
}
like($heard, qr/"outbox_ready" with payload "pulled"/, 'who listens is told at once');
is_sql($node, 'SELECT worker, sum(messages) FROM outbox.leases GROUP BY worker', 'live one|4', 'the other one keeps its lease');
is(sqlstate($node, 'SELECT outbox.settle(id, token) FROM held LIMIT 1'), 'OB003', 'the dead one, come back, cannot settle');

my $again = sprintf($claim, 100, 'next one');
my $total = 0;
$total += sql($node, $again) for 1 .. 6;
is($total, 6, 'all six are claimed by others, in pieces as after any lost lease');
is_sql($node, "SELECT string_agg(DISTINCT attempts::text, ' ') FROM outbox.messages WHERE worker = 'next one'", '2', 'the attempt was charged');
$listener->quit;

# A worker's lease while its hook runs: the rows are locked, nothing is revoked, and the hook's effects count once.
sql($node, <<~'SQL');
	CREATE FUNCTION waits(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(42);
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
	END $$;
	SELECT outbox.register_hook('waits', 'public.waits');
	SQL
my $holder = session($node);
$holder->query_safe('SELECT pg_advisory_lock(42)');
enqueue($node, 'waits', 1, 5);
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event_type = 'Lock'", '1', 'a hook runs');
my $worker = sql($node, "SELECT DISTINCT worker FROM outbox.leases WHERE subscription = 'default'");
like($worker, qr/^worker \d+$/, 'its worker has a name');
is_sql($node, "SELECT outbox.revoke_lease('default', '$worker')", '0', 'what a hook is working on is not revoked');
$holder->query_safe('SELECT pg_advisory_unlock(42)');
eventually($node, 'SELECT count(*), count(DISTINCT payload), max(attempts) FROM got', '5|5|1', 'it is delivered, once');
$holder->quit;

$node->stop;
done_testing();
