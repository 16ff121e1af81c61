# Many sessions settle messages of one claim, and a heartbeat renews it, at once: the rows of a token are locked in one order by
# all of them, also by who finds that a row has changed while he waited.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('one_token', conf => "deadlock_timeout = '10ms'\n");

sql($node, 'CREATE TABLE held (id uuid, token uuid, n int PRIMARY KEY); CREATE SEQUENCE next_one');
# of so many budgets, so that the claim holds so many rows
sql($node, "SELECT count(outbox.enqueue('m', to_jsonb(n), max_attempts => 100 + n / 20)) FROM generate_series(1, 1200) n");
sql($node, "INSERT INTO held SELECT id, claim_token, CAST(payload AS int) FROM outbox.claim_batch(2000, '5 min')");
is_sql($node, "SELECT count(*) > 50, count(DISTINCT claim_token) FROM outbox.delivery WHERE state = 'leased'", 't|1', 'many rows of one token');

$node->pgbench('--no-vacuum --client=6 --jobs=2 --transactions=180', 0, [qr/processed: 1080\/1080/], [qr/^$/], 'settled one by one, and renewed',
	{
		'settle@5' => "SELECT nextval('next_one') AS n \\gset\nSELECT outbox.settle(id, token) FROM held WHERE n = :n;\n",
		'renew@1' => "SELECT outbox.renew_batch(token) FROM held LIMIT 1;\n"
	});
is_sql($node, "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'", '0', 'without a deadlock');
is_sql($node, 'SELECT delivered = (SELECT last_value FROM next_one) FROM outbox.status', 't', 'all are delivered');

$node->stop;
done_testing();
