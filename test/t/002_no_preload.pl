# Without shared_preload_libraries: everything that SQL does works, with the module loaded by the
# first call of each session.  Workers can be started by hand; the rest is the same data, which
# goes on when the server is restarted with the module preloaded, and without it again.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('no_preload', preload => 0, extension => 0);

is_sql($node, 'SHOW shared_preload_libraries', '', 'nothing is preloaded');

# What a newcomer types first.
is_sql($node, <<'SQL', 'a|1|{}', 'create, enqueue and claim in one session');
CREATE EXTENSION outbox;
DO $$ BEGIN PERFORM outbox.enqueue('a', '{}'); END $$;
SELECT name, attempts, payload FROM outbox.claim_batch();
SQL
is_sql($node, "SELECT outbox.reset()", '1', 'reset');

# Pulled: the life of a message, each step in a session of its own.
sql($node, 'CREATE TABLE held (name text, id uuid, token uuid)');
my $hold = 'INSERT INTO held SELECT name, id, claim_token FROM outbox.claim_batch(worker => \'w\')';

sql($node, "SELECT count(*) FROM outbox.enqueue_batch('batch', '[1, 2, 3, 4]')");
sql($node, "INSERT INTO outbox.outgoing (name, payload) VALUES ('row', '5'), ('row', '6')");
is_sql($node, 'SELECT pending, ready FROM outbox.status', '6|0', 'six are pending');
sql($node, $hold);
is_sql($node, 'SELECT count(*) FROM held', '6', 'six are claimed');
is_sql($node, 'SELECT worker, messages, expired FROM outbox.leases', 'w|6|f', 'the view of leases');
is_sql($node, 'SELECT outbox.renew_batch((SELECT DISTINCT token FROM held)) > now()', 't', 'renewed');
is_sql($node, "SELECT outbox.settle(id, token, 'failed', 'broken') FROM held WHERE name = 'row' LIMIT 1",
	'scheduled', 'one is to be tried again');
is_sql($node, "SELECT outbox.settle(id, token, 'dead', 'hopeless') FROM held WHERE name = 'batch' LIMIT 1",
	'dead', 'one is dead');
is_sql($node, "SELECT outbox.settle_batch((SELECT DISTINCT token FROM held))", '4', 'the others are delivered');
is_sql($node, "SELECT name, last_error_message FROM outbox.dead_letters", 'batch|hopeless', 'the view of dead letters');
is_sql($node, "SELECT outbox.requeue_all('default')", '1', 'it is requeued');
is_sql($node, "SET outbox.clock_offset = '70s'; SELECT name, attempts FROM outbox.claim_batch() ORDER BY name",
	"batch|1\nrow|2", 'both come again');
is_sql($node, <<'SQL', "batch|2\nrow|3", 'and again when the lease is over, alone each');
SET outbox.clock_offset = '200s';
WITH one AS (SELECT * FROM outbox.claim_batch()), two AS (SELECT * FROM outbox.claim_batch())
SELECT name, attempts FROM one UNION ALL SELECT name, attempts FROM two ORDER BY name;
SQL
is(all_in_one_run($node), '6|6', 'each message is in one run');

# Views ask for settings, which a session that has not called anything does not know.
is_sql($node, 'SELECT count(removable_at), count(*) FROM (SELECT removable_at FROM outbox.segments) s', '0|4', 'the first query of a session asks for the segments');
is_sql($node, 'SELECT removable_at FROM outbox.segments WHERE segment = \'log_1\'', '', 'and for one');

# Its own messages, and none after a rollback.
is_sql($node, <<'SQL', 'own|delivered', 'a transaction claims and settles what it enqueued');
BEGIN;
DO $$ BEGIN PERFORM outbox.enqueue('own', '1'); END $$;
SELECT name, outbox.settle(id, claim_token) FROM outbox.claim_batch() WHERE name = 'own';
COMMIT;
SQL
sql($node, "BEGIN; SELECT outbox.enqueue('gone', '1'); ROLLBACK");
is_sql($node, "SELECT count(*) FROM outbox.log WHERE name = 'gone'", '0', 'a rolled-back message is not there');

# Pushed: who registers is told that nothing will happen by itself, and what to do.
sql($node, <<'SQL');
CREATE TABLE seen (name text, payload jsonb);
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS 'INSERT INTO seen VALUES ($1.name, $1.payload)';
SELECT outbox.subscribe('pushed', 'p.#');
SQL
my ($status, $out, $err) = $node->psql('postgres',
	"SET client_min_messages = notice; SELECT outbox.register_hook('p.hook', 'hook', 'pushed')");
like($err, qr/NOTICE:.*\n.*HINT:.*outbox\.drain\(\)/s, 'a notice tells of drain()');
sql($node, "SELECT outbox.register_notify('p.notify', 'news', 'pushed', include_data => true)");
sql($node, "SELECT outbox.enqueue('p.hook', '1'), outbox.enqueue('p.hook', '2'), outbox.enqueue('p.notify', '3')");
($status, $out, $err) = $node->psql('postgres', "LISTEN news; CALL outbox.drain()");
is($status, 0, 'drain() delivers');
like($out, qr/Asynchronous notification "news" with payload .*p\.notify/, 'the notification arrives');
is_sql($node, 'SELECT * FROM seen ORDER BY payload', "p.hook|1\np.hook|2", 'the hook was called');
is_sql($node, "SELECT delivered FROM outbox.status WHERE subscription = 'pushed'", '3', 'and all are delivered');
sql($node, "SELECT outbox.enqueue('p.hook', '4')");
sql($node, 'SELECT outbox.deliver()');
is_sql($node, 'SELECT count(*) FROM seen', '3', 'deliver() does the same in one transaction');
sql($node, 'SELECT outbox.maintain()');

# The clock, without shared memory, is each backend's own.
is_sql($node, <<'SQL', 't', 'created_at and ids grow within a session');
DO $$ BEGIN PERFORM outbox.enqueue('tick', to_jsonb(i)) FROM generate_series(1, 1000) i; END $$;
SELECT bool_and(created_at > before AND id > before_id) FROM (
	SELECT created_at, id, lag(created_at) OVER w AS before, lag(id) OVER w AS before_id FROM outbox.log
	 WHERE name = 'tick' WINDOW w AS (ORDER BY position)) q
 WHERE before IS NOT NULL;
SQL

# Nothing of ours runs.
is_sql($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ 'outbox'", '0', 'there is no worker');

# The same data with the module preloaded, and without again.
my $before = sql($node, 'SELECT count(*) FROM outbox.log');
for my $libraries ('outbox', '')
{
	my $what = $libraries eq '' ? 'without preloading again' : 'preloaded';

	$node->append_conf('postgresql.conf', "shared_preload_libraries = '$libraries'\n");
	$node->append_conf('postgresql.conf', "outbox.enabled = off\n") if $libraries ne '';
	$node->adjust_conf('postgresql.conf', 'outbox.enabled', undef) if $libraries eq '';
	$node->restart;
	sql($node, "SELECT outbox.enqueue('$libraries after', '1')");
	is_sql($node, 'SELECT count(*) FROM outbox.log', ++$before, "$what: the messages are there, and a new one");
	is_sql($node, "SELECT count(*) FROM outbox.claim_batch(1, subscription => 'default')", '1', "$what: claimed");
	sql($node, 'SELECT outbox.maintain()');
	is(all_in_one_run($node), "$before|$before", "$what: each message is in one run");
}

$node->stop;
done_testing();
