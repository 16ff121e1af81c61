# outbox.check(), the part that needs a server of its own: each finding about preloading, workers, slots, roles, other
# sessions, standbys and notifications is provoked, and goes when its remedy is carried out. The rest is in
# test/sql/check.sql.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $findings = 'SELECT severity, subject, what FROM outbox.check()';
# by then everything is old that has begun
my $later = "SET outbox.clock_offset = '400s'; ";

# Carries out the remedies, as somebody would who pastes them.
sub mend
{
	my ($node, %params) = @_;
	my $remedies = sql($node, ($params{before} // '') . 'SELECT remedy FROM outbox.check()');

	$node->psql('postgres', $_) for map { split /(?<=;) / } split /\n/, $remedies;
	$node->restart if $remedies =~ /restart the server/;
	return $remedies;
}

# Not preloaded
my $bare = outbox_node('bare', preload => 0, conf => "shared_preload_libraries = 'auto_explain, \"passwordcheck\"'\n");
is_sql($bare, $findings, 'notice|shared_preload_libraries|the library is not preloaded',
	'not preloaded: said in a session that has not loaded the library either');
is_sql($bare, 'SELECT count(*) FROM outbox.counters', '0', 'the counters are empty');
sql($bare, 'CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS $$$$');
sql($bare, "SELECT outbox.register_hook('#', 'hook')");
is_sql($bare, 'SELECT severity FROM outbox.check()', 'warning', 'it matters more where something is pushed');
sql($bare, 'SELECT outbox.start_worker()');
is_sql($bare, 'SELECT severity FROM outbox.check()', 'notice', 'and less where a worker was started by hand');
is(mend($bare), "ALTER SYSTEM SET shared_preload_libraries = 'auto_explain', 'passwordcheck', 'outbox'; -- and restart the server",
	'the remedy keeps what is preloaded');
eventually($bare, $findings, '', 'preloaded: nothing is found');
$bare->stop;

# Workers
my $node = worker_node('check', streaming => 1);
database($node, 'postgres');
eventually($node, $findings, '', 'workers run: nothing is found');

reload($node, 'outbox.enabled' => 'off');
eventually($node, $findings, 'notice|outbox.enabled|the workers are switched off', 'switched off');
mend($node);
eventually($node, $findings, '', 'switched on');

sql($node, 'CREATE ROLE hooks LOGIN');
sql($node, "SELECT outbox.grant_access('hooks', 'consumer')");
sql($node, 'GRANT USAGE ON SCHEMA public TO hooks');
is((as_role($node, 'hooks', "SELECT outbox.register_hook('h', 'public.take')"))[0], 0, 'hooks are registered');
is_sql($node, $findings, '', 'that is no finding');
reload($node, 'outbox.workers' => '0');
eventually($node, $findings, 'warning|outbox.workers|no delivery worker may be started', 'no delivery workers');
mend($node);
eventually($node, $findings, '', 'one');
reload($node, 'outbox.databases' => 'other');
eventually($node, $findings, 'warning|outbox.databases|the workers do not serve this database; outbox.databases is "other"',
	'another database');
mend($node);
eventually($node, $findings, '', 'this one, too');
is_sql($node, 'SHOW outbox.databases', 'other, postgres', 'beside the other one');
reload($node, 'outbox.databases' => '*');
sql($node, 'ALTER DATABASE postgres IS_TEMPLATE true');
is_sql($node, 'SELECT subject FROM outbox.check()', 'outbox.databases', 'a template');
mend($node);
is_sql($node, $findings, '', 'a template no longer');

# The role of the hooks
sql($node, 'ALTER ROLE hooks NOLOGIN');
is_sql($node, $findings, 'warning|role "hooks"|it may not log in', 'no login');
mend($node);
sql($node, 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC');
is_sql($node, $findings, 'warning|role "hooks"|it may not connect to this database', 'no connection');
mend($node);
is_sql($node, $findings, '', 'it may');

# Somebody else's transaction, in this database; as a reader, who does not see it in pg_stat_activity
sql($node, "CREATE ROLE reader LOGIN; SELECT outbox.grant_access('reader', 'reader')");
sql($node, 'GRANT CONNECT ON DATABASE postgres TO PUBLIC; CREATE DATABASE other');
my $session = session($node);
my $elsewhere = session($node, 'other');
$_->query_safe('BEGIN') for $session, $elsewhere;
$_->query_safe('SELECT pg_current_xact_id()') for $session, $elsewhere;
my $pid = $session->query_safe('SELECT pg_backend_pid()');
is_sql($node, $findings, '', 'a transaction that has just begun');
# who reads may not move the clock: the server's is moved
reload($node, 'outbox.clock_offset' => '400s');
eventually($node, 'SHOW outbox.clock_offset', '400s', 'time passes');
like((as_role($node, 'reader', 'SELECT severity, subject, what, remedy FROM outbox.check()'))[1],
	qr/\Awarning\|process $pid\|it has been in a transaction for 4\d\d seconds \(idle in transaction, postgres, [^)]*\)\|SELECT pg_terminate_backend\($pid\);\z/,
	'an old one, and not one of another database');
mend($node);
eventually($node, $findings, '', 'it is gone');
sql($node, $_) for 'ALTER SYSTEM RESET outbox.clock_offset', 'SELECT pg_reload_conf()';
$session->{run}->kill_kill;
$elsewhere->quit;

# Slots for processes: none at all, none for a probe beside core's own process; and what is short, or was, is told apart
$node->append_conf('postgresql.conf', "max_worker_processes = 0\n");
$node->restart;
is_sql($node, $findings, 'error|launcher|the launcher does not run', 'no slot for the launcher');
mend($node);
eventually($node, $findings, '', 'there is one');
sql($node, 'ALTER SYSTEM RESET max_worker_processes');
$node->append_conf('postgresql.conf', "max_worker_processes = 2\n");
$node->restart;
eventually($node, $findings,
	'warning|max_worker_processes|a process could not be started: no free slot for background workers', 'no slot for a probe');
is_sql($node, $later . $findings,
	'notice|max_worker_processes|2 background workers are allowed, outbox alone may start 5 for this database',
	'a while after, that there may be too few');
mend($node);
eventually($node, $findings, '', 'enough of them');

# Notifications. What fills the queue is gigabytes, so a function of core's is given another body, which is inlined.
my ($usage, $body) = ("CREATE OR REPLACE FUNCTION pg_catalog.pg_notification_queue_usage() RETURNS double precision LANGUAGE",
	"PARALLEL RESTRICTED AS 'SELECT 0.72 :: pg_catalog.float8'");
sql($node, "$usage sql VOLATILE $body");
$session = session($node, 'other');
$session->query_safe('LISTEN something');
$session->query_safe('BEGIN');
$session->query_safe('SELECT 1');
$pid = $session->query_safe('SELECT pg_backend_pid()');
is_sql($node, $findings, 'warning|NOTIFY|72 % of the queue of notifications are used', 'the queue of notifications fills');
is(mend($node), "SELECT pg_terminate_backend($pid);", 'the oldest transaction is ended, whatever its database');
is_gone($pid, 'it is gone');
$session->{run}->kill_kill;
sql($node, "$usage internal VOLATILE PARALLEL RESTRICTED STRICT AS 'pg_notification_queue_usage'");
is_sql($node, $findings, '', 'the queue is empty');

# A query on a standby, which tells the primary of it; with a slot it is the slot's
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->append_conf('postgresql.conf', "hot_standby_feedback = on\nwal_receiver_status_interval = 1\noutbox.enabled = on\n");
$standby->start;
is_sql($standby, $findings, '', 'on a standby it is no finding that nothing runs');
for my $slot ('', 'kept')
{
	my $subject = $slot ? 'replication slot "kept"' : 'standby "standby"';

	if ($slot)
	{
		sql($node, "SELECT pg_create_physical_replication_slot('kept')");
		$standby->append_conf('postgresql.conf', "primary_slot_name = 'kept'\n");
		$standby->restart;
	}
	my $reader = session($standby);
	$reader->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
	$reader->query_safe('SELECT count(*) FROM outbox.log');
	eventually($node, 'SELECT count(*) FROM (SELECT backend_xmin FROM pg_stat_replication UNION SELECT xmin FROM pg_replication_slots) x WHERE backend_xmin IS NOT NULL',
		'1', "$subject: told of");
	is_sql($node, $findings, '', 'a recent one is no finding');
	sql($node, 'SET synchronous_commit = off; DO $$ BEGIN FOR i IN 1 .. 100010 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$');
	eventually($node, 'SELECT severity, subject FROM outbox.check()', "warning|$subject", "$subject: an old one is");
	like(sql($node, 'SELECT what, remedy FROM outbox.check()'), qr/snapshot of 1\d{5} transactions ago\|.*-- on the standby\z/, 'with what to do');
	$reader->quit if !$slot;
	$standby->stop if $slot;
	eventually($node, $findings, '', 'it is gone') if !$slot;
}
is_sql($node, 'SELECT remedy FROM outbox.check()', "SELECT pg_drop_replication_slot('kept'); -- if its standby does not come back",
	'a slot whose standby is gone');
mend($node);
is_sql($node, $findings, '', 'the slot is gone');

$node->stop;
done_testing();
