# Settings of databases and roles that make life hard for a session reach the workers too: they work all the same.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('hostile_settings', conf => "outbox.backoff_base = 1ms\n");

database($node, 'shop');
sql($node, 'CREATE ROLE app LOGIN; CREATE ROLE boss');
sql($node, 'GRANT boss TO app');
sql($node, "SELECT outbox.subscribe('theirs', 'their'); SELECT outbox.subscribe('pulled', 'pulled'); SELECT outbox.grant_access('app', 'consumer')", 'shop');
sql($node, <<~'SQL', 'shop');
	CREATE FUNCTION fails_once(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF m.attempts = 1 AND m.payload::integer % 2 = 0 THEN
			RAISE EXCEPTION 'once';
		END IF;
		PERFORM pg_sleep(0.01); -- on purpose: longer than the timeouts below
		INSERT INTO public.got (id, name, payload, attempts, note)
		VALUES (m.id, m.name, m.payload, m.attempts, current_setting('transaction_isolation') || ' ' || current_setting('transaction_read_only'));
	END $$;
	SELECT outbox.register_hook('#', 'public.fails_once');
	SQL
my ($status, $out, $err) = as_role($node, 'app', "SELECT outbox.register_hook('#', 'public.fails_once', subscription => 'theirs')", 'shop');
is($status, 0, 'another role registers too') or diag($err);
sql($node, "SELECT count(*) FROM outbox.claim_batch(subscription => 'pulled')", 'shop');

# The sessions of this test have their own settings, which come before those of databases and roles.
$ENV{PGOPTIONS} = join ' ', map { "-c $_" } 'default_transaction_read_only=off', 'statement_timeout=0', 'lock_timeout=0',
	'idle_in_transaction_session_timeout=0', 'idle_session_timeout=0', 'search_path=public', 'default_transaction_isolation=read\\ committed',
	'exit_on_error=off', 'client_min_messages=warning', 'session_replication_role=origin', 'jit=off', parallel_always($node) . '=off',
	$node->pg_version < 17 ? () : 'transaction_timeout=0';

my $n = 0;

# One test: a database or all roles have these settings, and messages are delivered all the same.
sub survives
{
	my ($what, @settings) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	for my $target ('DATABASE shop', 'ROLE ALL')
	{
		$n += 4;
		sql($node, join '', map { "ALTER $target SET $_;" } @settings);
		sql($node, "SELECT outbox.enqueue(name, to_jsonb(n)) FROM generate_series($n - 3, $n) n, unnest('{ours,their,pulled}'::text[]) name", 'shop');
		eventually($node, "SELECT count(*), count(DISTINCT payload) FROM public.got WHERE payload::integer > $n - 4", '16|4', "$what, $target: delivered", 'shop');
		eventually($node, "SELECT pending, ready FROM outbox.status WHERE subscription = 'pulled'", "0|$n", "$what, $target: routed", 'shop');
		sql($node, join '', map { "ALTER $target RESET " . (/^(\S+)/)[0] . ';' } @settings);
	}
	return;
}

survives('timeouts', "statement_timeout = '5ms'", "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '1ms'", "idle_session_timeout = '1ms'");
survives('transaction_timeout', "transaction_timeout = '5ms'") if $node->pg_version >= 17;
survives('read only', 'default_transaction_read_only = on');
survives('serializable', "default_transaction_isolation = 'serializable'", 'default_transaction_deferrable = on');
survives('repeatable read', "default_transaction_isolation = 'repeatable read'");
survives('search_path', "search_path = 'nowhere'");
survives('formats', "DateStyle = 'German'", "IntervalStyle = 'sql_standard'", "TimeZone = 'Asia/Kathmandu'", "bytea_output = 'escape'",
	'extra_float_digits = -5', "client_encoding = 'LATIN1'", 'array_nulls = off');
survives('plans', 'enable_indexscan = off', 'enable_indexonlyscan = off', 'enable_bitmapscan = off', 'enable_hashjoin = off', parallel_always($node) . ' = on',
	'jit = on', 'jit_above_cost = 0', "plan_cache_mode = 'force_generic_plan'", "work_mem = '64kB'");
survives('exit_on_error', 'exit_on_error = on');
survives('triggers', "session_replication_role = 'replica'", 'row_security = off');
survives('synchronous_commit', 'synchronous_commit = off', "client_min_messages = 'debug5'", "log_min_error_statement = 'panic'");

# A role that becomes another one at connecting
sql($node, 'ALTER ROLE app SET role = boss');
$n += 2;
sql($node, "SELECT outbox.enqueue('their', to_jsonb(n)) FROM generate_series($n - 1, $n) n", 'shop');
eventually($node, "SELECT count(*) FROM got WHERE payload::integer > $n - 2 AND role = 'app'", '2', 'role: hooks run as who registered them', 'shop');

is_sql($node, "SELECT DISTINCT note FROM got", 'read committed off', 'hooks run at read committed, and may write', 'shop');
is_sql($node, "SELECT sum(dead), sum(unhandled), sum(leased) FROM outbox.status", '0|0|0', 'nothing is dead, parked or left', 'shop');
is_sql($node, "SELECT max(attempts) FROM outbox.messages", '2', 'no attempt was lost', 'shop');
$node->stop;
done_testing();
