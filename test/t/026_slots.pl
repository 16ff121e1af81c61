# Too few slots for background workers: the server starts, one warning says so, SQL works as it does without workers, and
# delivery begins by itself when a slot is there.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

# None at all
my $node = worker_node('slots', conf => "max_worker_processes = 0\n");

is(scalar(log_lines($node, qr/too many background workers/)), 2, 'no slot: core says so for the launcher, as for its own');
sql($node, 'CREATE EXTENSION outbox');
hooks($node, 'postgres');
like((as_role($node, 'postgres', "SET client_min_messages = notice; SELECT outbox.register_hook('#', 'public.take')"))[2],
	qr/NOTICE:  no worker delivers in this database/, 'no slot: registering says that no worker delivers');
enqueue($node, 'plain', 1, 3);
sql($node, 'CALL outbox.drain()');
is_sql($node, got(), 'plain 1, plain 2, plain 3', 'no slot: drain() delivers');
is_sql($node, 'SELECT count(*) FROM outbox.workers', '0', 'no slot: the view is empty');

# One for the launcher only: others get none, and one warning says so, however often it is tried.
$node->adjust_conf('postgresql.conf', 'max_worker_processes', '2');
my $offset = log_end($node);
$node->restart;
$offset = eventually_log($node, qr/WARNING:  outbox could not start a probe: no free slot for background workers/, $offset,
	'a slot for the launcher only: a warning');
like((log_lines($node, qr/HINT:/, 0))[-1], qr/Raise max_worker_processes/, 'with a hint');
enqueue($node, 'plain', 4, 6);
enqueue($node, 'plain', 7, 9);
sql($node, 'CALL outbox.drain()');
is_sql($node, 'SELECT count(*) FROM got', '9', 'SQL works');
is_sql($node, "SELECT string_agg(kind, ' ') FROM outbox.workers", 'launcher', 'the launcher is there');
is(scalar(log_lines($node, qr/no free slot/, $offset)), 0, 'one warning is enough');

# Somebody else has the slot that the delivery worker would need: delivery begins when he gives it back.
$node->adjust_conf('postgresql.conf', 'max_worker_processes', '4');
sql($node, 'ALTER SYSTEM SET outbox.enabled = off');
$node->restart;
my $other = session($node);
$other->query_safe('SET ' . parallel_always($node) . ' = on');
$other->query_until(qr/begun/, "\\echo begun\nSELECT pg_sleep(1000) -- on purpose\n;\n");
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'parallel worker'", '1', 'somebody else has a slot');
enqueue($node, 'plain', 10, 12);
$offset = log_end($node);
reload($node, 'outbox.enabled' => 'on');
eventually_log($node, qr/WARNING:  outbox could not start a delivery worker: no free slot for background workers/, $offset,
	'no slot for a delivery worker: a warning');
enqueue($node, 'plain', 13);
is_sql($node, 'SELECT count(*) FROM got', '9', 'nothing is delivered');
is_sql($node, 'SELECT sum(pending + ready) FROM outbox.status', '4', 'messages wait');
# the session that held the slot on purpose
sql($node, "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(1000)%' AND backend_type = 'client backend'");
eventually($node, 'SELECT count(*) FROM got', '13', 'when the slot is free, delivery begins by itself');
is(scalar(log_lines($node, qr/no free slot/, $offset)), 1, 'one warning was enough');
$other->quit;

# Workers that are idle make room for those of other databases.
sql($node, 'CREATE DATABASE second');
sql($node, 'CREATE EXTENSION outbox', 'second');
hooks($node, 'second');
sql($node, "SELECT outbox.register_hook('#', 'public.take')", 'second');
for my $n (1 .. 2)
{
	enqueue($node, 'round', $n, $n, $_) for 'second', 'postgres';
	eventually($node, "SELECT count(*) FROM got WHERE name = 'round'", $n, "two databases, slots for one: $_, round $n", $_) for 'second', 'postgres';
}

$node->stop;
done_testing();
