# The role whose hooks a worker calls: it may lose what it needs to connect, be renamed or dropped. Its messages wait,
# uncharged; the log says so once; when it can connect again they are delivered by themselves.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('roles');

database($node, 'postgres');
sql($node, 'CREATE ROLE app LOGIN; CREATE ROLE other LOGIN');
sql($node, "SELECT outbox.subscribe('theirs', 'their'); SELECT outbox.register_hook('#', 'public.take')");
sql($node, "SELECT outbox.grant_access('app', 'consumer'); SELECT outbox.grant_access('other', 'consumer')");
my ($status, $out, $err) = as_role($node, 'app', "SELECT outbox.register_hook('#', 'public.take', subscription => 'theirs')");
is($status, 0, 'a role registers a hook') or diag($err);

my $n = 0;

sub is_served
{
	my ($what, $role) = @_;

	$n++;
	enqueue($node, 'their', $n);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n' AND role = '$role'", '1', $what);
	return;
}

# One test: a message stays where it is, with no attempt used, and a warning says why, once.
sub waits
{
	my ($why, $what, $change, $undo) = @_;
	my $offset = log_end($node);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($node, $change);
	sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IN ('app', 'renamed') AND backend_type = 'outbox delivery'");
	$n++;
	enqueue($node, 'their', $n);
	eventually_log($node, qr/WARNING:  hooks of .* are not called\n.*DETAIL:  \Q$why\E/, $offset, "$what: a warning");
	for my $more (1 .. 5)
	{
		# each is a turn of the coordinator, and serves others
		enqueue($node, 'else', $n * 100 + $more);
		eventually($node, 'SELECT count(*) FROM got WHERE payload = \'' . ($n * 100 + $more) . '\'', '1', "$what: others are served, $more");
	}
	is_sql($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'ready|0',
		"$what: the message waits, uncharged");
	is(scalar(log_lines($node, qr/are not called/, $offset)), 1, "$what: one warning is enough");
	is(scalar(log_lines($node, qr/outbox delivery FATAL:  (?!terminating)/, $offset)), 0, "$what: nobody fails to connect");
	return unless $undo;
	sql($node, $undo);
	eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n'", '1', "$what, and then not: delivered by itself");
	return;
}

is_served('it is served', 'app');
waits('The role is not permitted to log in.', 'NOLOGIN', 'ALTER ROLE app NOLOGIN', 'ALTER ROLE app LOGIN');
reload($node, 'outbox.poll_interval' => '200ms');
waits('The role has no privilege to connect to the database.', 'REVOKE CONNECT', 'REVOKE CONNECT ON DATABASE postgres FROM public',
	'GRANT CONNECT ON DATABASE postgres TO public');

# Renamed: nothing changes.
sql($node, 'ALTER ROLE app RENAME TO renamed');
is_served('renamed: still served', 'renamed');
sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'renamed' AND backend_type = 'outbox delivery'");
is_served('and by a new worker too', 'renamed');

# What cannot be foreseen is tried, at growing intervals, and works again as soon as somebody alters the role.
my $offset = log_end($node);
sql($node, 'ALTER ROLE renamed CONNECTION LIMIT 0');
sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'renamed' AND backend_type = 'outbox delivery'");
$n++;
enqueue($node, 'their', $n);
for my $tries (1 .. 3)
{
	eventually_log($node, qr/(?:too many connections for role "renamed".*){$tries}/s, $offset, "a worker that cannot connect, attempt $tries");
}
my @at = map { /(\d+):(\d+):([\d.]+) UTC/ ? $1 * 3600 + $2 * 60 + $3 : () } log_lines($node, qr/too many connections for role/, $offset);
cmp_ok($at[1] - $at[0], '>', 0.9, 'the second comes after a second or two');
cmp_ok($at[2] - $at[1], '>', 1.5 * ($at[1] - $at[0]), 'the third after twice the time');
is_sql($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'ready|0', 'the message waits, uncharged');
sql($node, 'ALTER ROLE renamed CONNECTION LIMIT -1');
eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n'", '1', 'altered: delivered at once', 'postgres', within => 3);

# Dropped
waits('The role was dropped.', 'DROP ROLE', "SELECT outbox.revoke_access('renamed', 'consumer'); DROP OWNED BY renamed; DROP ROLE renamed");
sql($node, "SELECT outbox.unregister('#', subscription => 'theirs')");
($status, $out, $err) = as_role($node, 'other', "SELECT outbox.register_hook('#', 'public.take', subscription => 'theirs')");
is($status, 0, 'another role takes over') or diag($err);
eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n' AND role = 'other'", '1', 'and what waited is delivered');
is_served('and what comes', 'other');

$node->stop;
done_testing();
