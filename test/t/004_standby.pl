# A standby: what writes is refused with PostgreSQL's own error, the views work.  Promotion:
# nothing that was replicated is lost, nothing is copied data to be adopted, leases and prepared
# transactions are held as before, and messages go on coming in order.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = PostgreSQL::Test::Cluster->new('primary');
init_node($primary, allows_streaming => 1);
$primary->append_conf('postgresql.conf', outbox_conf());
$primary->start;
sql($primary, 'CREATE EXTENSION outbox');

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

# A message in every state, and some that are not routed.
sql($primary, <<'SQL');
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS '';
SELECT outbox.subscribe('pushed', 'p.#');
SELECT outbox.register_hook('p.known', 'hook', 'pushed');
CREATE TABLE held (name text, id uuid, token uuid);
SQL
sql($primary, "SELECT count(outbox.enqueue('m' || i, '1')) FROM generate_series(1, 20) i");
sql($primary, "INSERT INTO held SELECT name, id, claim_token FROM outbox.claim_batch(10)");
sql($primary, "SELECT outbox.settle(id, token) FROM held WHERE name = 'm1'");
sql($primary, "SELECT outbox.settle(id, token, 'dead', 'hopeless') FROM held WHERE name = 'm2'");
sql($primary, "SELECT outbox.settle(id, token, 'failed', 'broken', retry_at => now() + '1 hour') FROM held WHERE name = 'm3'");
sql($primary, "SELECT outbox.discard(id) FROM outbox.log WHERE name = 'm20'");
sql($primary, "SELECT outbox.enqueue('new', '1')");
sql($primary, "BEGIN; SELECT outbox.enqueue('prepared', '1'); PREPARE TRANSACTION 'enqueued'");
my $open = session($primary);
$open->query_safe("BEGIN; SELECT outbox.enqueue('open', '1')");
$primary->wait_for_catchup($standby);

# What the views show is the same on both.
for my $view ('messages', 'dead_letters', 'leases', 'subscriptions', 'handlers')
{
	my $columns = $view eq 'leases' ? 'subscription, worker, claimed_at, locked_until, messages' : '*';
	my $query = "SELECT $columns FROM outbox.$view v ORDER BY CAST(v.* AS text)";
	my $expected = sql($primary, $query);

	isnt($expected, '', "$view: has rows on the primary");
	is(sql($standby, $query), $expected, "$view: the same on the standby");
}
my $counts = "SELECT subscription, pending, scheduled, ready, leased, delivered, dead, discarded FROM outbox.status ORDER BY 1";
is_sql($standby, $counts, "default|1|1|9|7|1|1|1\npushed|0|0|0|0|0|0|0", 'status: counts, on the standby');
is_sql($standby, $counts, sql($primary, $counts), 'status: the same on both');
is_sql($standby, "SELECT (outbox.get(id)).name FROM outbox.log WHERE name = 'm5'", 'm5', 'get() reads');
is(sqlstate($standby, 'SELECT * FROM outbox.workers'), '00000', 'the view of workers works');

# Everything that writes is refused there, with the right code.
my $id = sql($primary, "SELECT id FROM held WHERE name = 'm5'");
my $token = sql($primary, "SELECT token FROM held WHERE name = 'm5'");
for my $call (
	"enqueue('x', '1')", "enqueue_batch('x', '[1]')", 'claim_batch()',
	"settle('$id', '$token')", "settle_batch('$token')",
	"renew('$id', '$token')", "renew_batch('$token')",
	"subscribe('x')", "unsubscribe('pushed')", "skip('default', now())",
	"pause('default')", "resume('default')",
	"register_hook('y', 'hook', 'pushed')", "register_notify('y', 'channel', 'pushed')", "unregister('p.known', 'pushed')",
	"requeue('$id')", "requeue_all('default')", "discard('$id')", "discard_all('default')",
	"cancel('$id')", 'deliver()', 'maintain()', 'adopt()', 'reset()',
	"grant_access('postgres', 'producer')", "revoke_access('postgres', 'producer')")
{
	is(sqlstate($standby, "SELECT outbox.$call"), '25006', "$call on a standby");
}
is(sqlstate($standby, 'CALL outbox.drain()'), '25006', 'drain() on a standby');
is(sqlstate($standby, "INSERT INTO outbox.outgoing (name, payload) VALUES ('x', '1')"), '25006', 'outgoing on a standby');
is(sqlstate($primary, "BEGIN READ ONLY; SELECT outbox.enqueue('x', '1')"), '25006', 'the same in a read-only transaction');
is(sqlstate($primary, "BEGIN READ ONLY; SELECT outbox.claim_batch()"), '25006', 'and for claims');

# Promotion after the primary is gone.
$primary->stop('immediate');
$standby->promote;
$open->{run}->kill_kill;

is_sql($standby, $counts, "default|1|1|9|7|1|1|1\npushed|0|0|0|0|0|0|0", 'after promotion the counts are as before');
is_sql($standby, "SELECT outbox.settle(id, token) FROM held WHERE name = 'm5'", 'delivered', 'a lease is held as before');
is(claim_names($standby), 'm11 m12 m13 m14 m15 m16 m17 m18 m19 new', 'what was ready and what was new is claimed');
sql($standby, "COMMIT PREPARED 'enqueued'");
sql($standby, "SELECT outbox.enqueue('promoted', '1')");
is(claim_names($standby), 'prepared promoted', 'so is what was prepared, and what comes after');
is_sql($standby, "SELECT count(*) FROM outbox.log WHERE name = 'open'", '0', 'what was not committed is gone');
is_sql($standby, 'SELECT outbox.adopt()', 'f', 'there is nothing to adopt');
is_sql($standby, <<'SQL', 't', 'created_at goes on growing');
SELECT (SELECT created_at FROM outbox.log WHERE name = 'promoted') > (SELECT max(created_at) FROM outbox.log WHERE name <> 'promoted')
SQL
is(all_in_one_run($standby), '23|23', 'each message is in one run');

$standby->stop;
done_testing();
