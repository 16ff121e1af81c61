# Behind an open snapshot nothing is removed from the indexes of outbox.delivery. What was settled must not be walked over
# again and again all the same, by nobody: leases that were settled in time lie in the future, where no floor helps.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('snapshot');

# So many messages, each claimed and settled; a claim that asks for a hundred has the coordinator take a turn.
sub loops
{
	my ($count) = @_;

	sql($node, <<~"SQL", 'app');
		DO \$\$
		DECLARE
			token uuid;
		BEGIN
			FOR n IN 1 .. $count LOOP
				PERFORM outbox.enqueue('x', '1');
				COMMIT;
				SELECT claim_token INTO STRICT token FROM outbox.claim_batch(100);
				COMMIT;
				PERFORM outbox.settle_batch(token);
				COMMIT;
			END LOOP;
		END \$\$
		SQL
	return sql($node, "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'delivery_lease_idx'", 'app');
}

database($node, 'app');
worker_pid($node, 'coordinator', database => 'app');
my $reader = session($node, 'app');
$reader->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');

my $before = loops(200);
my $after = loops(200);
is_sql($node, 'SELECT delivered FROM outbox.status', '400', 'all are delivered', 'app');
cmp_ok($after - $before, '<', 20000, 'turns do not walk over two hundred settled leases each');

# While commits keep coming only what ends before the next look is looked at.
$before = loops(3000);
my $begin = time;
$after = loops(12000);
# two looks a second, at ten thousand each
cmp_ok(($after - $before) / (time - $begin), '<', 6000, 'looks do not walk over thousands of settled leases each');

$reader->query_safe('COMMIT');
$reader->quit;
$node->stop;
done_testing();
