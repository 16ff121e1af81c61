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

# A row that was the first of one token is the second of another: who settles in that locks the first too.
sql($node, 'SELECT outbox.reset()');
sql($node, "SELECT outbox.enqueue('low', '1', available_at => outbox.clock() + interval '1 hour')");
sql($node, "SELECT outbox.enqueue('high', to_jsonb(n)) FROM generate_series(1, 3) n");
my $consumer = session($node);
$consumer->query_safe('CREATE TEMP TABLE mine AS SELECT * FROM outbox.claim_batch()');
$consumer->query_safe("SELECT outbox.settle(id, claim_token) FROM mine WHERE payload = '1'");
$consumer->query_safe("SELECT outbox.settle_batch(claim_token, 'released') FROM mine LIMIT 1");
$consumer->query_safe("SET outbox.clock_offset = '2h'; DROP TABLE mine; CREATE TEMP TABLE mine AS SELECT * FROM outbox.claim_batch()");
is($consumer->query_safe('SELECT count(DISTINCT claim_token), count(*) FROM mine'), '1|3', 'a token with two rows');
$consumer->query_safe("BEGIN; SELECT outbox.settle(id, claim_token) FROM mine WHERE name = 'high' AND payload = '2'");
is_sql($node, "SELECT count(*) FROM outbox.delivery WHERE state = 'leased'", '2', 'that is, two rows');
is_sql($node, "SELECT count(*) FROM (SELECT FROM outbox.delivery WHERE state = 'leased' FOR UPDATE SKIP LOCKED) d", '0', 'both are locked');
$consumer->query_safe('COMMIT');
$consumer->quit;

$node->stop;
done_testing();
