# Somebody listens and forgets his transaction, so the queue of notifications of the whole cluster is full, and whoever
# notifies gets an error.  The coordinator's hints wait; routing and delivery go on.  A queue that is small enough to be
# filled by a test exists since PostgreSQL 17.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('queue');

if ($node->pg_version < 17)
{
	$node->stop;
	plan skip_all => 'max_notify_queue_pages is there since PostgreSQL 17';
}
$node->append_conf('postgresql.conf', 'max_notify_queue_pages = 64');
$node->restart;

database($node, 'app');
sql($node, "SELECT outbox.register_hook('push.#', 'public.take'); SELECT outbox.subscribe('pulled', 'pull.#')", 'app');
# and channels, of the same subscription and of another
sql($node, "SELECT outbox.register_notify('push.bell', 'ring'); SELECT outbox.register_notify('#', 'ring', subscription => 'pealed')"
	. " FROM outbox.subscribe('pealed', 'push.bell')", 'app');

my $forgotten = session($node, 'app');
$forgotten->query_safe('LISTEN outbox_ready; BEGIN; SELECT 1');

# filled in ever smaller steps, until not even the smallest fits
for my $bytes (7000, 700, 1)
{
	my $fill = "DO \$\$ BEGIN LOOP PERFORM pg_notify('noise', repeat('x', $bytes)); PERFORM pg_notify('noise', repeat('y', $bytes)); COMMIT; END LOOP; END \$\$";

	like(fails($node, $fill, 'app'), qr/too many notifications/, "no room for $bytes bytes");
}
cmp_ok(sql($node, 'SELECT pg_notification_queue_usage()', 'app'), '>', 0.95, 'the queue is full');

enqueue($node, 'push.bell', 0, 0, 'app');
enqueue($node, 'push.a', 1, 3, 'app');
enqueue($node, 'pull.a', 4, 6, 'app');
eventually($node, 'SELECT count(*) FROM got', '3', 'hooks get theirs', 'app');
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(subscription => 'pulled')", '3', 'consumers claim theirs', 'app');
eventually($node, "SELECT subscription, status, attempts FROM outbox.messages WHERE name = 'push.bell' ORDER BY 1", "default|scheduled|0\npealed|scheduled|0",
	'what is to be notified waits, uncharged', 'app');
is(scalar(log_lines($node, qr/outbox coordinator .*ERROR/)), 0, 'the coordinator has met no error');

my $listener = session($node, 'app');
$listener->query_safe('LISTEN outbox_ready');
$forgotten->query_safe('COMMIT');
$forgotten->quit;
enqueue($node, 'pull.a', 7, 7, 'app');
hears($listener, 'pulled', 'and told again when there is room');
eventually($node, "SELECT count(*) FROM outbox.messages WHERE name = 'push.bell' AND status = 'delivered'", '2', 'what was to be notified is', 'app');
$listener->quit;

$node->stop;
done_testing();
