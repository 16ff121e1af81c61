# Without preloading: start_worker() runs one worker for a database and a role.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('no_preload', preload => 0, conf => "outbox.poll_interval = '50ms'\noutbox.backoff_base = '1ms'\n");
my $workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox worker'";
my $hanging = "$workers AND wait_event = 'PgSleep'";

database($node, 'shop');
sql($node, 'CREATE ROLE app LOGIN; CREATE ROLE nobody');
sql($node, "SELECT outbox.grant_access(r, 'consumer') FROM unnest('{app,nobody}'::name[]) r", 'shop');
like((as_role($node, 'postgres', "SET client_min_messages = notice; SELECT outbox.register_hook('#', 'public.take')", 'shop'))[2],
	qr/HINT:.*outbox\.start_worker\(\)/, 'registering says what to do');
enqueue($node, 'early', 1, 3, 'shop');

# It delivers.
my $pid = sql($node, 'SELECT outbox.start_worker()', 'shop');
like($pid, qr/^\d+$/, 'start_worker() returns a process id');
eventually($node, 'SELECT count(*) FROM got', '3', 'it delivers what is there', 'shop');
is_sql($node, 'SELECT DISTINCT pid, role FROM got', "$pid|postgres", 'itself, as the role that started it', 'shop');
enqueue($node, 'later', 4, 250, 'shop');
eventually($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '250|250', 'and what comes', 'shop');
eventually($node, states(), 'delivered 250', 'all is settled', 'shop');
sql($node, "SELECT outbox.enqueue('due', '1', available_at => clock_timestamp() + interval '500 ms')", 'shop');
eventually($node, "SELECT count(*) FROM got WHERE name = 'due'", '1', 'also what is due later', 'shop');
is_sql($node, "SELECT usename, application_name FROM pg_stat_activity WHERE pid = $pid", 'postgres|outbox worker', 'pg_stat_activity names it');

# It takes back leases.
sql($node, "SELECT outbox.subscribe('pulled', 'pulled.#')", 'shop');
enqueue($node, 'pulled.a', 1, 1, 'shop');
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(subscription => 'pulled', lease => '100 ms')", '1', 'somebody claims', 'shop');
eventually($node, "SELECT ready FROM outbox.status WHERE subscription = 'pulled'", '1', 'it takes back leases that have ended', 'shop');

# One is enough.
my ($status, $out, $err) = as_role($node, 'postgres', 'SET client_min_messages = notice; SELECT outbox.start_worker() IS NULL', 'shop');
is("$status $out", '0 t', 'a second one is not started');
like($err, qr/NOTICE:  a worker of role "postgres" runs already in this database/, 'politely');
is_sql($node, $workers, '1', 'there is one');

# An advisory lock that a hook leaves behind is given back, and the worker's own lock is not.
sql($node, <<~'SQL', 'shop');
	CREATE FUNCTION leaves(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_lock(4711);
		INSERT INTO public.got (id, name, payload) VALUES (m.id, m.name, m.payload);
	END $$;
	SELECT outbox.register_hook('leaves', 'public.leaves');
	SELECT outbox.enqueue('leaves', '1');
	SQL
eventually($node, "SELECT count(*) FROM got WHERE name = 'leaves'", '1', 'a hook that takes an advisory lock', 'shop');
eventually($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", '0', 'it is given back');
is_sql($node, 'SELECT outbox.start_worker() IS NULL', 't', 'the worker is still the only one', 'shop');
is_sql($node, $workers, '1', 'and there');

# Another role has its own, and it calls its own hooks.
as_role($node, 'app', "SELECT outbox.register_hook('pulled.#', 'public.take', subscription => 'pulled')", 'shop');
sql($node, "SELECT outbox.subscribe('theirs', 'their.#')", 'shop');
($status, $out, $err) = as_role($node, 'app', "SELECT outbox.register_hook('their.#', 'public.take', subscription => 'theirs')", 'shop');
is($status, 0, 'another role registers') or diag($err);
enqueue($node, 'their.a', 1, 1, 'shop');
is_sql($node, "SELECT count(*) FROM got WHERE name = 'their.a' AND role = 'app'", '0', 'no worker of that role', 'shop');
($status, $out, $err) = as_role($node, 'app', 'SELECT outbox.start_worker()', 'shop');
like($out, qr/^\d+$/, 'it starts its own') or diag($err);
eventually($node, "SELECT string_agg(role, ' ' ORDER BY role) FROM got WHERE name = 'their.a'", 'app postgres', 'each calls its own hooks', 'shop');

# A role that cannot log in cannot have one.
($status, $out, $err) = as_role($node, 'postgres', '\set VERBOSITY verbose
	SET ROLE nobody; SELECT outbox.start_worker()', 'shop');
like($err, qr/55000: role "nobody" cannot log in, so no worker can run as it.*HINT:.*ALTER ROLE nobody LOGIN/s, 'a role without LOGIN is refused');

# Terminated in a hook: charged is that message, the others come back at once; nobody starts the worker again.
sql($node, "SELECT outbox.register_hook('#', 'public.hang', replace => true)", 'shop');
sql($node, "TRUNCATE got; SELECT count(outbox.enqueue(CASE n WHEN 2 THEN 'hang' ELSE 'fast' END, to_jsonb(n))) FROM generate_series(1, 5) n", 'shop');
eventually($node, $hanging, '1', 'a hook hangs');
sql($node, "SELECT pg_terminate_backend($pid)");
is_gone($pid, 'terminated in it');
is_sql($node, "SELECT status, attempts, count(*) FROM outbox.messages WHERE subscription = 'default' AND name IN ('fast', 'hang') GROUP BY 1, 2 ORDER BY 2",
	"ready|0|4\nready|1|1", 'its message is charged, the others are given back', 'shop');
$pid = sql($node, 'SELECT outbox.start_worker()', 'shop');
eventually($node, "SELECT count(*) FROM got WHERE role = 'postgres'", '5', 'another one delivers them', 'shop');

# Reload
reload($node, 'outbox.enabled' => 'off');
eventually($node, $workers, '0', 'enabled off by reload: they leave');
reload($node, 'outbox.enabled' => 'on');

# It makes way for who wants the database alone, and for DROP EXTENSION.
sub makes_way
{
	my ($command, $what) = @_;

	sql($node, 'SELECT outbox.start_worker()', 'shop');
	eventually($node, $workers, '1', "$what: one runs");
	my ($status, $out, $err) = $node->psql($command =~ /EXTENSION/ ? 'shop' : 'postgres', $command);
	is($status, 0, $what) or diag($err);
	eventually($node, $workers, '0', "$what: it has left");
	return;
}

makes_way('CREATE DATABASE copy TEMPLATE shop', 'CREATE DATABASE TEMPLATE');
makes_way('ALTER DATABASE shop RENAME TO store; ALTER DATABASE store RENAME TO shop;', 'RENAME');
makes_way('DROP EXTENSION outbox CASCADE', 'DROP EXTENSION');
sql($node, 'CREATE EXTENSION outbox', 'shop');
makes_way('DROP DATABASE shop', 'DROP DATABASE');

# Tables that a superuser made who is none any more: what he puts on them is done as himself, whoever starts the worker.
sql($node, 'CREATE DATABASE demoted');
demoted_owner($node, 'demoted');
sql($node, <<~'SQL', 'demoted');
	CREATE SCHEMA evil;
	GRANT USAGE ON SCHEMA evil TO public;
	CREATE FUNCTION evil.helper() RETURNS void LANGUAGE sql AS $$ INSERT INTO public.loot SELECT 'helps ' || current_user $$;
	ALTER ROLE postgres IN DATABASE demoted SET search_path = evil;
	SET ROLE owner;
	CREATE FUNCTION outbox.trap() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.loot SELECT current_user;
		BEGIN
			PERFORM helper();
		EXCEPTION WHEN undefined_function THEN NULL;
		END;
		BEGIN
			PERFORM set_config('role', 'boss', false);
			INSERT INTO public.loot SELECT 'became ' || current_user;
		EXCEPTION WHEN OTHERS THEN NULL;
		END;
		RETURN new;
	END $$;
	CREATE TRIGGER trap BEFORE INSERT OR UPDATE ON outbox.delivery FOR EACH ROW EXECUTE FUNCTION outbox.trap();
	SQL
sql($node, 'SELECT outbox.start_worker()', 'demoted');
enqueue($node, 'routed', 1, 1, 'demoted');
eventually($node, 'SELECT string_agg(DISTINCT what, $$, $$) FROM public.loot', 'owner', 'a demoted owner\'s trigger runs as himself, and finds no functions of who has started the worker', 'demoted');

$node->stop;
done_testing();
