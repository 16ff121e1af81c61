# The clock across restarts.  created_at and the ids made of it go on growing, also where the wall
# clock has been set back: the clock starts above the time in the newest frontier row.  After that
# it goes at real speed, so leases still end.  Tests cannot set the wall clock; a frontier row from
# the future looks the same to the server.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('restart_clock');

# A thousand messages by four sessions at once.
sub enqueue_some
{
	my ($name) = @_;

	$node->pgbench('--no-vacuum --client=4 --transactions=250', 0, [qr{actually processed: 1000/1000}], [qr{^$}],
		"$name: enqueued", { "003_$name" => "SELECT outbox.enqueue('$name', '1')" });
}

sub is_growing
{
	my ($what) = @_;

	is_sql($node, <<'SQL', 't|t|t', $what);
SELECT count(*) = count(DISTINCT created_at), count(*) = count(DISTINCT id),
	   bool_and(later) FROM (
	SELECT created_at, id, id > lag(id) OVER w IS NOT FALSE AS later FROM outbox.log
	WINDOW w AS (ORDER BY created_at)) q
SQL
}

enqueue_some('one');
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(500)", '500', 'routed');
is_growing('times and ids differ and agree, across sessions');

for my $mode ('fast', 'immediate')
{
	sql($node, "CREATE TABLE before_$mode AS SELECT max(created_at) AS newest FROM outbox.log");
	$node->stop($mode);
	$node->start;
	enqueue_some($mode);
	is_sql($node, "SELECT min(created_at) > (SELECT newest FROM before_$mode) FROM outbox.log WHERE name = '$mode'",
		't', "$mode restart: what comes after it is later");
	is_growing("$mode restart: times and ids differ and agree");
}

# A session's own offset is its own, and is gone with the restart.
is_sql($node, "SET outbox.clock_offset = '2h'; SELECT outbox.clock() - clock_timestamp() > '119 min'", 't', 'moved');
is_sql($node, "SELECT outbox.clock() - clock_timestamp() < '1 min'", 't', 'but for nobody else');

# ALTER SYSTEM moves everybody, sessions that are there too.
my $session = session($node);
$session->query_safe('SELECT outbox.clock()');
sql($node, "ALTER SYSTEM SET outbox.clock_offset = '2h'");
$node->reload;
ok($node->poll_query_until('postgres', "SELECT outbox.clock() - clock_timestamp() > '119 min'"), 'everybody is moved');
is($session->query_safe("SELECT outbox.clock() - clock_timestamp() > '119 min'"), 't', 'also who was there before');
sql($node, "SELECT outbox.enqueue('moved', '1')");
sql($node, 'ALTER SYSTEM RESET outbox.clock_offset');
$node->reload;
ok($node->poll_query_until('postgres', "SELECT outbox.clock() - clock_timestamp() < '1 min'"),
	'and moved back: the offset was not stored in the clock');
$session->quit;

# A wall clock that was set back by an hour while the server was down.
sql($node, "SELECT outbox.enqueue('routed', '1'); SELECT outbox.maintain()");
sql($node, "CREATE TABLE held AS SELECT id, claim_token AS token FROM outbox.claim_batch(1)");
sql($node, <<'SQL');
UPDATE outbox.frontier SET created_at = created_at + interval '1 hour' WHERE id = (SELECT max(id) FROM outbox.frontier);
UPDATE outbox.log_0 SET created_at = created_at + interval '1 hour' WHERE name = 'routed';
SQL
$node->restart;
sql($node, "SELECT outbox.enqueue('set back', '1')");
is_sql($node, <<'SQL', 't', 'the first message after it is later than what was routed before');
SELECT (SELECT created_at FROM outbox.log WHERE name = 'set back') > (SELECT max(created_at) FROM outbox.frontier)
SQL
is_sql($node, "SELECT outbox.clock() BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '61 min'", 't',
	'the clock is ahead of the wall clock by that hour');
ok($node->poll_query_until('postgres',
		"SELECT outbox.clock() > (SELECT created_at + interval '20 ms' FROM outbox.log WHERE name = 'set back')"),
	'it does not stand still');
is_sql($node, <<'SQL', 't', 'so a lease is as long as ever');
SELECT bool_and(locked_until - outbox.clock() BETWEEN interval '25 s' AND interval '30 s') FROM outbox.claim_batch(1, '30 s')
SQL

$node->stop;
done_testing();
