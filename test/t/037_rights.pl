# What a role tries against the workers that wants more than it was given. Each of these must stay in vain.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('rights', conf => "outbox.retention = '100s'\n");

database($node, 'postgres');
sql($node, "CREATE ROLE app LOGIN; SELECT outbox.subscribe('theirs', 'their'); SELECT outbox.subscribe('pulled', '#')");
sql($node, "SELECT outbox.unsubscribe('default', true); SELECT outbox.grant_access('app', 'consumer')");
my ($status, $out, $err) = as_role($node, 'app', "SELECT outbox.register_hook('#', 'public.take', subscription => 'theirs')");
is($status, 0, 'a role registers a hook') or diag($err);

my $n = 0;

sub delivered
{
	my ($what) = @_;

	enqueue($node, 'their', ++$n);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eventually($node, "SELECT count(*) FROM got WHERE payload = '$n'", '1', $what);
	return;
}

# One test: a message is routed, and stays ready, uncharged.
sub kept
{
	my ($what) = @_;

	enqueue($node, 'their', ++$n);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	for (1 .. 5)
	{
		# each is a turn of the coordinator; what it wakes has another turn to do harm
		enqueue($node, 'none', 0);
		eventually($node, 'SELECT max(pending) FROM outbox.status', '0', "$what: routed");
	}
	is_sql($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'ready|0', $what);
	return;
}

# A consumer whose right was taken away gets nothing any more, by its hooks neither.
delivered('as long as it may');
my $offset = log_end($node);
sql($node, "SELECT outbox.revoke_access('app', 'consumer')");
kept('after revoke_access() the hook is not called');
eventually_log($node, qr/WARNING:  hooks of role "app" in .* are not called\n.*DETAIL:  The role has no privilege to call outbox\.drain\(\)/,
	$offset, 'and the log says why');
sql($node, "SELECT outbox.grant_access('app', 'consumer', 'pulled')");
kept('nor with the right to another subscription');
sql($node, "SELECT outbox.grant_access('app', 'consumer', 'theirs')");
eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload IN ('2', '3')", '2', 'granted again: delivered by itself');

# Locks that anybody can take: core's own on the extension, held or waited for.
sql($node, 'CREATE ROLE nobody LOGIN');
my $nobody = $node->background_psql('postgres', on_error_stop => 0, extra_params => [ '-U', 'nobody' ]);
$nobody->query_safe(<<~'SQL');
	BEGIN;
	CREATE FUNCTION pg_temp.f() RETURNS integer LANGUAGE sql AS 'SELECT 1';
	ALTER FUNCTION pg_temp.f() DEPENDS ON EXTENSION outbox;
	SQL
is_sql($node, "SELECT count(*) FROM pg_locks WHERE classid = CAST('pg_extension' AS regclass) AND mode = 'AccessExclusiveLock' AND objsubid = 0", '1',
	'the extension is locked by somebody without any right');
delivered('workers do not care');
$nobody->query_safe('ROLLBACK');
sql($node, <<~'SQL');
	CREATE FUNCTION waits(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_lock(17);
		PERFORM pg_advisory_unlock(17);
	END $$;
	SQL
sql($node, "SELECT outbox.subscribe('slow', 'slow'); SELECT outbox.register_hook('#', 'public.waits', subscription => 'slow')");
my $gate = session($node);
$gate->query_safe('SELECT pg_advisory_lock(17)');
enqueue($node, 'slow', 0);
eventually($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", '1', 'a hook runs');
$nobody->query_until(qr/begun/, "\\echo begun\nDROP EXTENSION outbox;\n");
delivered('while a hook runs and somebody without any right tries to drop the extension');
$gate->query_safe('SELECT pg_advisory_unlock(17)');
$nobody->quit;
$gate->quit;

# Who may signal other roles' processes ends the workers of roles, which come back, and nobody who serves others.
sql($node, 'GRANT pg_signal_backend TO nobody');
for my $process ('launcher', 'coordinator')
{
	my $pid = worker_pid($node, $process);

	($status, $out, $err) = as_role($node, 'nobody', "SELECT pg_terminate_backend($pid)");
	like($err, qr/must be a superuser|permission denied/i, "pg_signal_backend: the $process is not theirs");
	is(worker_pid($node, $process), $pid, "the $process is still there");
}
delivered('a delivery worker of theirs is there');
my ($theirs) = split /\n/, sql($node, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND usename = 'app'");
($status, $out, $err) = as_role($node, 'nobody', "SELECT pg_terminate_backend($theirs)");
is($out, 't', 'pg_signal_backend: a delivery worker of an ordinary role is ended') or diag($err);
is_gone($theirs, 'it ends');
delivered('another one comes');

# Who owns the tables and is no superuser (any more): what he puts on them is done as himself, and workers lend him no role.
database($node, 'demoted');
sql($node, 'DROP EXTENSION outbox CASCADE', 'demoted');
demoted_owner($node, 'demoted');
($status, $out, $err) = as_role($node, 'owner', <<~'SQL', 'demoted');
	CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.loot SELECT current_user WHERE current_user <> 'owner';
		BEGIN
			PERFORM set_config('role', 'boss', false);
			INSERT INTO public.loot SELECT 'became ' || current_user;
		EXCEPTION WHEN OTHERS THEN NULL;
		END;
		RETURN coalesce(new, old);
	END $$;
	CREATE TRIGGER trap BEFORE INSERT OR UPDATE ON outbox.delivery FOR EACH ROW EXECUTE FUNCTION trap();
	CREATE TRIGGER trap BEFORE INSERT OR UPDATE ON outbox.segment FOR EACH ROW EXECUTE FUNCTION trap();
	CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS $$ INSERT INTO public.loot SELECT 'hook as ' || current_user $$;
	SELECT outbox.register_hook('mine', 'public.hook');
	SELECT outbox.subscribe('forged');
	ALTER TABLE outbox.handler DISABLE TRIGGER guard_role;
	INSERT INTO outbox.handler (subscription_id, name_pattern, function, role_name, role_oid, search_path, created_at)
	SELECT id, '#', 'public.hook', 'boss', CAST('boss' AS regrole), 'public', now() FROM outbox.subscription WHERE name = 'forged';
	UPDATE outbox.subscription SET mode = 'pushed' WHERE name = 'forged';
	SQL
is($status, 0, 'an owner sets his traps') or diag($err);
$offset = log_end($node);
enqueue($node, 'mine', 1, 1, 'demoted');
eventually($node, "SELECT delivered FROM outbox.status WHERE subscription = 'default'", '1', 'his own hooks are called', 'demoted');
eventually_log($node, qr/WARNING:  hooks of role "boss" in .* are not called\n.*DETAIL:  The owner of the extension's tables has not/, $offset,
	'nobody else\'s');
is_sql($node, "SELECT state FROM outbox.handlers WHERE role = 'boss'", 'forbidden', 'as the view says', 'demoted');
# the ring too is written with his rights, whoever turns it
($status, $out, $err) = as_role($node, 'owner', "SELECT outbox.purge('infinity')", 'demoted');
is($status, 0, 'he has a segment condemned') or diag($err);
is_sql($node, 'SELECT count(*) FROM outbox.segment WHERE condemned_at IS NOT NULL', '1', 'and it is', 'demoted');
eventually($node, 'SELECT count(*) FROM outbox.segment WHERE condemned_at IS NOT NULL', '0', 'the coordinator truncates it', 'demoted');
is_sql($node, "SELECT string_agg(DISTINCT what, ', ') FROM loot", 'hook as owner', 'and nothing runs with other rights than his', 'demoted');
sql($node, 'GRANT boss TO owner', 'demoted');
eventually($node, "SELECT count(*) > 0 FROM loot WHERE what = 'hook as boss'", 't', 'but for roles that are his', 'demoted');

$node->stop;
done_testing();
