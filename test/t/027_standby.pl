# A standby: nothing of outbox runs there, its functions say that it is read-only; after the promotion the workers start and
# deliver what the primary had not.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use Test::More;

my $primary = worker_node('primary', streaming => 1);

database($primary, 'postgres');
sql($primary, "SELECT outbox.register_hook('#', 'public.take')");
enqueue($primary, 'before', 1, 3);
eventually($primary, 'SELECT count(*) FROM got', '3', 'the primary delivers');

$primary->backup('copy');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'copy', has_streaming => 1);
$standby->start;

# What the primary leaves undone
reload($primary, 'outbox.enabled' => 'off');
eventually($primary, "SELECT count(*) FROM outbox.workers WHERE kind <> 'launcher'", '0', 'the primary\'s workers are off');
enqueue($primary, 'left', 4, 6);
$primary->wait_for_catchup($standby);

my $ours = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'";
is_sql($standby, $ours, '0', 'on the standby nothing of outbox runs');
is_sql($standby, 'SELECT delivered, pending FROM outbox.status', '3|3', 'the views can be read');
for my $call ("outbox.enqueue('x', '1')", 'outbox.claim_batch()', 'outbox.maintain()', "outbox.register_hook('#', 'public.take')", 'outbox.start_worker()')
{
	is(sqlstate($standby, "SELECT * FROM $call"), '25006', "on the standby: $call");
}
is_sql($standby, $ours, '0', 'still nothing');

$primary->stop('immediate');
$standby->promote;
eventually($standby, 'SELECT count(*) FROM got', '6', 'after the promotion workers deliver what was left');
is_sql($standby, 'SELECT count(*), count(DISTINCT payload) FROM got', '6|6', 'and nothing twice');
enqueue($standby, 'after', 7, 9);
eventually($standby, 'SELECT count(*) FROM got', '9', 'and what comes now');
is(scalar(log_lines($standby, qr/ERROR:(?!.*read-only|.*during recovery)|WARNING:|are a copy/)), 0, 'no complaint in its log');

$standby->stop;
done_testing();
