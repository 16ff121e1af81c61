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
	is_sql($node, "SELECT DISTINCT state FROM outbox.handlers WHERE subscription = 'theirs'", 'forbidden', "$what: the view says so");
	is_sql($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'ready|0',
		"$what: the message waits, uncharged");
	is(scalar(log_lines($node, qr/are not called/, $offset)), 1, "$what: one warning is enough");
	is(scalar(log_lines($node, qr/outbox delivery\s+FATAL:  (?!terminating)/, $offset)), 0, "$what: nobody fails to connect");
	return unless $undo;
	sql($node, $undo);
	eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n' AND role <> 'postgres'", '1', "$what, and then not: delivered by itself");
	is_sql($node, "SELECT DISTINCT state FROM outbox.handlers WHERE subscription = 'theirs'", 'ok', "$what, and then not: the view says so");
	return;
}

is_served('it is served', 'app');
waits('The role is not permitted to log in.', 'NOLOGIN', 'ALTER ROLE app NOLOGIN', 'ALTER ROLE app LOGIN');
reload($node, 'outbox.poll_interval' => '200ms');
waits('The role has no privilege to connect to the database.', 'REVOKE CONNECT', 'REVOKE CONNECT ON DATABASE postgres FROM public',
	'GRANT CONNECT ON DATABASE postgres TO public');

# Renamed: nothing changes, and what a dump would say of it is right, also if somebody else is called so now.
sql($node, 'ALTER ROLE app RENAME TO renamed; CREATE ROLE app');
eventually($node, "SELECT role, state FROM outbox.handlers WHERE subscription = 'theirs'", 'renamed|ok', 'renamed: the view says so');
is_served('renamed: still served', 'renamed');
sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'renamed' AND backend_type = 'outbox delivery'");
is_served('and by a new worker too', 'renamed');

# A turn of the coordinator that saw another name and failed: the next one writes it.
sql($node, <<~'SQL');
	CREATE SEQUENCE turns;
	CREATE TABLE turn_done ();
	CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF (SELECT backend_type FROM pg_stat_activity WHERE pid = pg_backend_pid()) = 'outbox coordinator' THEN
			IF nextval('public.turns') = 1 THEN RAISE 'not now'; END IF;
			INSERT INTO public.turn_done DEFAULT VALUES;
		END IF;
		RETURN NULL;
	END $$;
	CREATE TRIGGER fail AFTER INSERT ON outbox.frontier FOR EACH ROW EXECUTE FUNCTION fail();
	ALTER TABLE outbox.frontier ENABLE ALWAYS TRIGGER fail;
	BEGIN;
	ALTER ROLE renamed RENAME TO again;
	SELECT outbox.enqueue('else', '1000');
	COMMIT;
	SQL
for my $more (1001 .. 1100)
{
	# who delivers may route it in the place of the coordinator
	last if sql($node, 'SELECT EXISTS (SELECT FROM turn_done)') eq 't';
	enqueue($node, 'else', $more);
	eventually($node, "SELECT count(*) FROM got WHERE payload = '$more'", '1', "renamed in a turn that fails: $more");
}
is_sql($node, "SELECT role_name FROM outbox.handler WHERE role_name <> 'postgres'", 'again', 'renamed in a turn that fails: the next one has written it');
sql($node, 'DROP TRIGGER fail ON outbox.frontier; ALTER ROLE again RENAME TO renamed');
eventually($node, "SELECT role_name FROM outbox.handler WHERE role_name <> 'postgres'", 'renamed', 'and again without a failure');

# A worker that dies again and again, for a reason that cannot be foreseen, is started at growing intervals; as soon as somebody
# alters the role it is tried at once.
my $offset = log_end($node);
sql($node, <<~'SQL');
	CREATE FUNCTION ends_itself(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_terminate_backend(pg_backend_pid());
		PERFORM pg_sleep(1000); -- on purpose
	END $$;
	SET ROLE renamed;
	SELECT outbox.register_hook('their', 'public.ends_itself', subscription => 'theirs', max_attempts => 4, retry => '{1 ms}');
	SQL
$n++;
enqueue($node, 'their', $n);
my @claims = ();
for my $tries (1 .. 3)
{
	eventually($node, "SELECT attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", $tries, "a worker that ends in its hook, attempt $tries");
	push @claims, sql($node, "SELECT extract(epoch FROM claimed_at) FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'");
}
cmp_ok($claims[2] - $claims[1], '>', 1.4 * ($claims[1] - $claims[0]), 'it is followed by another after growing intervals');
sql($node, 'ALTER ROLE renamed CONNECTION LIMIT -1');
eventually($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'dead|4', 'the role altered: at once',
	'postgres', within => 3);
sql($node, "SET ROLE renamed; SELECT outbox.unregister('their', subscription => 'theirs')");

# Dropped
waits('The role was dropped.', 'DROP ROLE', "SELECT outbox.revoke_access('renamed', 'consumer'); DROP OWNED BY renamed; DROP ROLE renamed");
sql($node, "SELECT outbox.unregister('#', subscription => 'theirs')");
($status, $out, $err) = as_role($node, 'other', "SELECT outbox.register_hook('#', 'public.take', subscription => 'theirs')");
is($status, 0, 'another role takes over') or diag($err);
eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload = '$n' AND role = 'other'", '1', 'and what waited is delivered');
is_served('and what comes', 'other');

$node->stop;
done_testing();
