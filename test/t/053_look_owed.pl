# A coordinator that cannot work, since somebody holds the extension, forgets nothing of what it was told meanwhile: when a
# lease ends, and that something is ready.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('look_owed');

database($node, 'app');
worker_pid($node, 'coordinator', database => 'app');
sql($node, "SELECT outbox.subscribe('other'); SELECT outbox.enqueue('x', '1')", 'app');
eventually($node, "SELECT ready = 1 FROM outbox.status WHERE subscription = 'other'", 't', 'a message is there', 'app');

# The commit that tells of a short lease comes while DROP EXTENSION has the lock, and is waiting for the one that claims.
my $claimer = session($node, 'app');
my $end = $claimer->query_safe(q(BEGIN; SELECT locked_until FROM outbox.claim_batch(1, subscription => 'other', lease => '3s')));
my $dropper = in_background($node, "BEGIN;\nDROP EXTENSION outbox CASCADE", 'app');
eventually($node, q(SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DROP EXTENSION%' AND wait_event_type = 'Lock'), '1',
	'DROP EXTENSION waits');
$claimer->query_safe('COMMIT');
eventually($node, "SELECT clock_timestamp() > '$end'::timestamptz - interval '1.5 s'", 't', 'the coordinator has tried for a second');
$dropper->query_safe('ROLLBACK');
eventually($node, "SELECT leased = 0 FROM outbox.status WHERE subscription = 'other'", 't', 'the lease has ended', 'app');
is_sql($node, "SELECT clock_timestamp() - '$end'::timestamptz < interval '3 s'", 't', 'and was taken back soon', 'app');

$_->quit for $claimer, $dropper;
$node->stop;
done_testing();
