# Crashes: a killed backend, an immediate shutdown.  What was committed is there, what was not is
# gone, leases and prepared transactions survive, and nobody needs to be told that anything
# happened: what a dead consumer had is claimed again when its lease is over.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('crash', conf => "restart_after_crash = on\n");

# Everything that is stored is stored for good.
is_sql($node, <<'SQL', '', 'no relation is unlogged or temporary');
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'outbox' AND c.relkind IN ('r', 'i', 'S') AND c.relpersistence <> 'p'
SQL

# Around a checkpoint.
sql($node, "SELECT count(*) FROM outbox.enqueue_batch('before', (SELECT jsonb_agg(i) FROM generate_series(1, 100) i))");
sql($node, 'CHECKPOINT');
sql($node, "SELECT count(*) FROM outbox.enqueue_batch('after', (SELECT jsonb_agg(i) FROM generate_series(1, 100) i))");
sql($node, "CREATE TABLE held AS SELECT 'first' AS who, id, claim_token AS token, attempts FROM outbox.claim_batch(20)");
sql($node, "BEGIN; SELECT outbox.enqueue('prepared', '1'); PREPARE TRANSACTION 'enqueued'");
sql($node, <<'SQL');
BEGIN;
INSERT INTO held SELECT 'prepared', id, claim_token, attempts FROM outbox.claim_batch(10);
PREPARE TRANSACTION 'claimed';
SQL

# A claiming backend is killed while it has a claim, a settlement and a message uncommitted.
sub kill_in_transaction
{
	my ($signal, $what) = @_;
	my $worker = session($node);
	my $pid = $worker->query_safe('SELECT pg_backend_pid()');

	$worker->query_safe('BEGIN');
	is($worker->query_safe('SELECT count(*) FROM outbox.claim_batch(30)'), '30', "$what: claims 30");
	$worker->query_safe("SELECT outbox.settle_batch((SELECT token FROM held WHERE who = 'first' LIMIT 1))");
	$worker->query_safe("SELECT outbox.enqueue('uncommitted', '1')");
	kill $signal, $pid;
	eventually($node, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)", 't', "$what: is gone");
	$worker->{run}->kill_kill;
}

sub as_before
{
	my ($what) = @_;

	is_sql($node, "SELECT count(*) FROM outbox.log", '200', "$what: 200 messages");
	is_sql($node, "SELECT pending, scheduled, ready, leased, delivered, dead FROM outbox.status",
		'0|0|180|20|0|0', "$what: the open claim is as if it had not been, the lease is held");
	is_sql($node, 'SELECT gid FROM pg_prepared_xacts ORDER BY gid', "claimed\nenqueued",
		"$what: prepared transactions are there");
	is(all_in_one_run($node), '200|200', "$what: each message is in one run");
}

# The backend ends, the server goes on.
kill_in_transaction('TERM', 'terminated');
as_before('terminated');

# The server restarts all its processes.
kill_in_transaction('KILL', 'killed');
eventually($node, 'SELECT true', 't', 'killed: the server is back');
as_before('killed');

# The server is gone.
$node->stop('immediate');
$node->start;
as_before('immediate shutdown');

# The lease is still held by its token, one message at a time or all.
is_sql($node, "SELECT outbox.settle(id, token) FROM held WHERE who = 'first' LIMIT 1", 'delivered',
	'a message of the lease is settled after the crashes');
is_sql($node, "SELECT outbox.settle_batch((SELECT token FROM held WHERE who = 'first' LIMIT 1))", '19',
	'so is the rest');
sql($node, "COMMIT PREPARED 'enqueued'");
sql($node, "COMMIT PREPARED 'claimed'");
is_sql($node, "SELECT count(*), max(attempts) FROM held WHERE who = 'prepared'", '10|1', 'the prepared claim is committed');

# A consumer that dies without a word: claimed again after the lease, by whoever asks, and charged.
sql($node, "INSERT INTO held SELECT 'dead', id, claim_token, attempts FROM outbox.claim_batch(10)");
$node->stop('immediate');
$node->start;
sql($node, "INSERT INTO held SELECT 'rest', id, claim_token, attempts FROM outbox.claim_batch(500)");
is_sql($node, "SELECT count(*), count(DISTINCT id) FROM held WHERE who <> 'first'", '181|181',
	'during the lease nobody else gets its messages');
is_sql($node, "SELECT outbox.settle_batch((SELECT token FROM held WHERE who = 'rest' LIMIT 1))", '161',
	'all others are delivered');
sql($node, <<'SQL');
SET outbox.clock_offset = '40s';
DO $$
DECLARE
	n int;
BEGIN
	LOOP
		WITH claim AS (SELECT * FROM outbox.claim_batch())
		INSERT INTO held SELECT 'again', id, claim_token, attempts FROM claim;
		GET DIAGNOSTICS n = ROW_COUNT;
		EXIT WHEN n = 0;
		PERFORM outbox.settle_batch(t.token) FROM (SELECT DISTINCT token FROM held WHERE who = 'again') t
		  WHERE EXISTS (SELECT FROM outbox.delivery d WHERE d.claim_token = t.token AND d.state = 'leased');
	END LOOP;
END
$$;
SQL
is_sql($node, "SELECT count(*), count(DISTINCT id), min(attempts), max(attempts) FROM held WHERE who = 'again'",
	'20|20|2|2', 'after it each comes once more, for the second time');
is_sql($node, 'SELECT pending, scheduled, ready, leased, delivered, dead FROM outbox.status',
	'0|0|0|0|201|0', 'everything is delivered');
is(sqlstate($node, "SELECT outbox.settle(id, token) FROM held WHERE who = 'dead' LIMIT 1"), 'OB003',
	'the dead one, come back, cannot settle');
is(all_in_one_run($node), '201|201', 'each message is in one run');

$node->command_ok([ 'pg_amcheck', '--install-missing', '--heapallindexed', '--schema=outbox', 'postgres' ],
	'tables and indexes are sound');

$node->stop;
done_testing();
