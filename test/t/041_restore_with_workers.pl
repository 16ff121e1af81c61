# A restore into a server whose workers find the new database at once, also in parallel and beside the original: they meet data in
# every stage of its arrival and touch nothing. Nothing is delivered there until adopt(), one warning says so, enqueueing goes on, and
# then each message is delivered once. The original goes on meanwhile.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('original');
my $target = worker_node('target');
my $folder = PostgreSQL::Test::Utils::tempdir;

database($node, 'shop');
sql($node, "SELECT outbox.register_hook('pushed', 'public.take'), outbox.subscribe('pulled', 'pulled')", 'shop');
enqueue($node, 'pushed', 1, 50, 'shop');
enqueue($node, 'pulled', 1, 50, 'shop');
eventually($node, 'SELECT count(*) FROM got', '50', 'the original delivers', 'shop');
sql($node, "CREATE TABLE held AS SELECT id, claim_token AS token FROM outbox.claim_batch(20, subscription => 'pulled', lease => '300 s')", 'shop');
sql($node, 'WITH settled AS (DELETE FROM held WHERE id IN (SELECT id FROM held LIMIT 10) RETURNING *) SELECT outbox.settle(id, token) FROM settled', 'shop');
sql($node, "SELECT outbox.enqueue('pushed', to_jsonb(n), available_at => now() + interval '2 h') FROM generate_series(51, 55) n", 'shop');
# business data that takes its time to restore
sql($node, 'CREATE TABLE orders AS SELECT n, repeat(md5(n::text), 20) AS t FROM generate_series(1, 40000) n; CREATE INDEX ON orders (t)', 'shop');
eventually($node, "SELECT sum(pending) FROM outbox.status", '0', 'all is routed', 'shop');
$node->command_ok([ 'pg_dump', '-Fd', '-j2', '-f', "$folder/dump", $node->connstr('shop') ], 'pg_dump in the middle of the work');

sub restored
{
	my ($server, $database, $what, @options) = @_;
	my $offset = log_end($server);
	my $delivering = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND datname = '$database'";

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($server, "CREATE DATABASE $database");
	$server->command_ok([ 'pg_restore', '--exit-on-error', @options, '-d', $server->connstr($database), "$folder/dump" ], "$what: restored");
	eventually_log($server, qr/WARNING:  the messages in this database are a copy.*\n.*The database is "$database"/, $offset, "$what: a warning");
	sql($server, "SELECT outbox.enqueue(n, '100') FROM unnest('{pushed,pulled}'::text[]) n", $database);
	is_sql($server, 'SELECT subscription, pending, scheduled, ready, leased, delivered FROM outbox.status ORDER BY 1',
		"default|2|5|0|0|50\npulled|1|0|30|10|10", "$what: the status tells what waits", $database);
	is(sqlstate($server, "SELECT * FROM outbox.claim_batch(subscription => 'pulled')", $database), '55000', "$what: claims are refused");
	is_sql($server, $delivering, '0', "$what: nobody delivers");
	is_sql($server, 'SELECT count(*) FROM got', '50', "$what: nothing was delivered", $database);

	sql($server, 'SELECT outbox.adopt()', $database);
	eventually($server, 'SELECT count(*), count(DISTINCT id) FROM got', '51|51', "$what: after adopt() the new one is delivered", $database);
	sql($server, "SELECT outbox.requeue_all('default'), count(outbox.cancel(id)) FROM outbox.log WHERE payload = '55' AND name = 'pushed'", $database);
	is_sql($server, "SELECT count(*) FROM outbox.claim_batch(1000, subscription => 'pulled')", '31', "$what: what was not claimed there can be claimed", $database);
	is_sql($server, 'SELECT count(*) FROM held, outbox.settle_batch(token, ids => ARRAY[id]) s WHERE s = 1', '10', "$what: the leases are held", $database);
	is(all_in_one_run($server, $database, 'default'), '107|107', "$what: each message is in one run");
	is(scalar(log_lines($server, qr/WARNING:.*are a copy/, $offset)), 1, "$what: it was told once");
	is(scalar(log_lines($server, qr/outbox \w+ +(ERROR|FATAL|WARNING):(?!.*are a copy)/, $offset)), 0, "$what: no other complaint of a worker");
	return;
}

restored($target, 'serial', 'another cluster');
restored($target, 'parallel', 'another cluster, parallel', '-j4');
restored($node, 'beside', 'the same cluster, parallel', '-j4');
enqueue($node, 'pushed', 60, 60, 'shop');
eventually($node, "SELECT count(*) FROM got WHERE payload = '60'", '1', 'the original goes on', 'shop');

# What is due later comes in its time, in each of them.
reload($target, 'outbox.clock_offset' => '3h');
for my $database ('serial', 'parallel')
{
	eventually($target, "SELECT count(*) FROM got WHERE payload::int BETWEEN 51 AND 55 AND name = 'pushed'", '4', "what is due later comes: $database", $database,
		within => 60);
}

$node->stop;
$target->stop;
done_testing();
