# In the mode in which pg_upgrade starts a server nothing of outbox runs: what is moved must not be delivered meanwhile.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('binary_upgrade');

database($node, 'postgres');
sql($node, "SELECT outbox.register_hook('#', 'public.take')");
enqueue($node, 'before', 1);
eventually($node, 'SELECT count(*) FROM got', '1', 'it is served');
$node->stop;

command_ok([ 'pg_ctl', '-w', '-D', $node->data_dir, '-l', $node->logfile, '-o', '-b', 'start' ], 'started as pg_upgrade does');
sql($node, "SELECT outbox.enqueue('meanwhile', '2')");
is_sql($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'", '0', 'nothing of outbox runs');
is_sql($node, 'SELECT count(*) FROM outbox.workers', '0', 'the view says so');
is_sql($node, 'SHOW outbox.lease', '30s', 'its settings are known');
is_sql($node, 'SELECT count(*) FROM got', '1', 'nothing is delivered');
command_ok([ 'pg_ctl', '-w', '-D', $node->data_dir, '-m', 'fast', 'stop' ], 'stopped');

$node->start;
eventually($node, 'SELECT count(*) FROM got', '2', 'started as ever: delivered');
$node->stop;
done_testing();
