# Coordinators that are idle make room: for a delivery worker of another database where slots for background workers are
# scarce, for each other, and where a reload allows fewer of them. What they leave behind brings them back in time.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

# Slots: the launcher, core's logical replication launcher, two more. Nobody polls soon.
my $node = worker_node('coordinators', conf => "max_worker_processes = 4\noutbox.poll_interval = '1h'\n");
my $coordinators = "SELECT count(*) FROM outbox.workers WHERE kind = 'coordinator'";

for my $database ('postgres', 'second')
{
	database($node, $database);
	sql($node, "SELECT outbox.register_hook('#', 'public.take')", $database);
}
eventually($node, $coordinators, '2', 'two databases, a coordinator for each, and no slot is left');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE busy", '0', 'they are idle');

# For a delivery worker
my $offset = log_end($node);
sql($node, "SELECT outbox.enqueue('due', '1', available_at => clock_timestamp() + interval '3 s')", 'second');
eventually($node, "SELECT scheduled FROM outbox.status WHERE subscription = 'default'", '1', 'the second one has something due later', 'second');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE busy", '0', 'they are idle again');
enqueue($node, 'first', 1);
eventually($node, 'SELECT count(*) FROM got', '1', 'a delivery worker gets the slot of an idle coordinator', 'postgres', within => 10);
is(scalar(log_lines($node, qr/no free slot/, $offset)), 0, 'that is worth no warning');
eventually($node, "SELECT at >= m.available_at, at < m.available_at + interval '2 s' FROM got JOIN outbox.messages m USING (id)", 't|t',
	'which is back when its message is due', 'second');

# In turn
for my $n (1 .. 3)
{
	for my $database ('second', 'postgres')
	{
		enqueue($node, 'turn', $n, $n, $database);
		eventually($node, "SELECT count(*) FROM got WHERE name = 'turn'", $n, "in turn: $database, $n", $database);
	}
}
# they may all be busy at a moment
cmp_ok(scalar(log_lines($node, qr/no free slot/, $offset)), '<=', 1, 'with one warning at most');

# max_coordinators by reload
$node->adjust_conf('postgresql.conf', 'max_worker_processes', '16');
$node->restart;
database($node, 'third');
eventually($node, $coordinators, '2', 'three databases, two coordinators');
reload($node, 'outbox.max_coordinators' => '3');
enqueue($node, 'more', 1, 1, $_) for 'postgres', 'second', 'third';
eventually($node, $coordinators, '3', 'max_coordinators raised by reload: three');
reload($node, 'outbox.max_coordinators' => '1');
eventually($node, $coordinators, '1', 'lowered by reload: one, though nobody waits', 'postgres', within => 15);
for my $database ('postgres', 'second')
{
	enqueue($node, 'less', 1, 1, $database);
	eventually($node, "SELECT count(*) FROM got WHERE name = 'less'", '1', "it serves all: $database", $database);
}

# One that fails in each turn keeps no other from being served
sql($node, 'ALTER TABLE outbox.delivery ADD COLUMN more text', 'third');
enqueue($node, 'broken', 1, 1, 'third');
eventually_log($node, qr/outbox coordinator\s+ERROR:  table "outbox.delivery" was altered/, $offset, 'the coordinator of a broken database fails');
for my $n (1 .. 2)
{
	for my $database ('postgres', 'second')
	{
		enqueue($node, 'beside', $n, $n, $database);
		eventually($node, "SELECT count(*) FROM got WHERE name = 'beside'", $n, "and others are served: $database, $n", $database);
	}
}
sql($node, 'ALTER TABLE outbox.delivery DROP COLUMN more', 'third');
eventually($node, "SELECT pending, ready FROM outbox.status WHERE subscription = 'default'", '0|2', 'mended, it is served too', 'third', within => 90);

$node->stop;
done_testing();
