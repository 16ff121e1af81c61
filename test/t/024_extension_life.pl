# DROP EXTENSION and CREATE EXTENSION, in any order, in one transaction or several, with workers connected and in the middle
# of a hook: nobody waits for long, nobody fills the log, and what is made again is served again.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('extension_life', conf => "outbox.poll_interval = '1h'\n");

database($node, 'postgres');

sub use_it
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($node, "DELETE FROM got; SELECT outbox.register_hook('#', 'public.take'); SELECT outbox.enqueue('plain', '1');");
	eventually($node, "SELECT count(*) FROM got", '1', $what);
	return;
}

# The functions of hooks() depend on the type outbox.message.
my $functions = <<~'SQL';
	CREATE FUNCTION take(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
	END $$;
	SQL

use_it('served');
my $coordinator = worker_pid($node, 'coordinator');
my $delivery = worker_pid($node, 'delivery');

# Dropped
sql($node, 'SET lock_timeout = 5000; DROP EXTENSION outbox CASCADE');
is_gone($coordinator, 'DROP EXTENSION: the coordinator leaves');
is_gone($delivery, 'and the delivery worker');
is_sql($node, "SELECT string_agg(DISTINCT backend_type, ' ') FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'",
	'outbox launcher', 'nobody stays but the launcher');

# Made again
sql($node, "CREATE EXTENSION outbox; $functions");
use_it('made again: served again');

# In one transaction
for my $n (1 .. 3)
{
	sql($node, "BEGIN; DROP EXTENSION outbox CASCADE; CREATE EXTENSION outbox; $functions COMMIT;");
	use_it("dropped and made in one transaction: served again, $n");
}

# In transactions that follow at once
for my $n (1 .. 3)
{
	sql($node, "DROP EXTENSION outbox CASCADE; CREATE EXTENSION outbox; $functions");
	use_it("dropped and made at once: served again, $n");
}

# Rolled back
my $session = session($node);
$session->query_safe("BEGIN; DROP EXTENSION outbox CASCADE; CREATE EXTENSION outbox; ROLLBACK;");
use_it('dropped, made, and rolled back: still served');
$session->query_safe('BEGIN');
$session->query_safe('DROP EXTENSION outbox CASCADE');
$session->query_safe('ROLLBACK');
use_it('dropped and rolled back: still served');

# While a hook hangs: it is waited for, as for any other transaction that uses it; once it is over, so is the extension.
sql($node, <<~'SQL');
	CREATE FUNCTION wait_for_lock(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(42);
	END $$;
	SELECT outbox.register_hook('waits', 'public.wait_for_lock');
	SQL
my $holder = session($node);
$holder->query_safe('SELECT pg_advisory_lock(42)');
sql($node, "SELECT count(outbox.enqueue('waits', to_jsonb(n))) FROM generate_series(1, 120) n");
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event_type = 'Lock'", '1', 'a hook waits');
my $dropper = in_background($node, 'DROP EXTENSION outbox CASCADE');
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DROP EXTENSION%' AND wait_event_type = 'Lock'", '1',
	'DROP EXTENSION waits for it');
$holder->query_safe('SELECT pg_advisory_unlock(42)');
my $begin = time;
$dropper->quit;
cmp_ok(time - $begin, '<', 5, 'it has the next turn: not only when all messages are delivered');
is_sql($node, "SELECT count(*) FROM pg_extension WHERE extname = 'outbox'", '0', 'it is dropped');
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type IN ('outbox coordinator', 'outbox delivery')", '0', 'everybody leaves');
sql($node, "CREATE EXTENSION outbox; $functions");
use_it('made again: served again');

# With a hook in flight that is ended with its worker
sql($node, <<~'SQL');
	CREATE FUNCTION hang_again(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_sleep(1000); -- on purpose
	END $$;
	SELECT outbox.register_hook('hangs', 'public.hang_again');
	SELECT outbox.enqueue('hangs', '1');
	SQL
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event = 'PgSleep'", '1', 'a hook hangs');
$dropper = in_background($node, 'DROP EXTENSION outbox CASCADE');
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DROP EXTENSION%' AND wait_event_type = 'Lock'", '1',
	'DROP EXTENSION waits for it');
sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox delivery'");
$dropper->quit;
is_sql($node, "SELECT count(*) FROM pg_extension WHERE extname = 'outbox'", '0', 'its worker terminated: dropped');
$holder->quit;
$session->quit;

# Nobody is left, and the log says little.
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type IN ('outbox coordinator', 'outbox delivery')", '0', 'everybody has left');
my @lines = log_lines($node, qr/outbox.*(ERROR|WARNING|FATAL):/);
cmp_ok(scalar(@lines), '<=', 4, 'few complaints in the log') or diag(join "\n", @lines);
$node->stop;
done_testing();
