# What is secret stays out of the server's log, pg_stat_activity and pg_stat_statements, whatever the server is told to log: payloads,
# headers, claim tokens. The clients' statements of this test hold neither, so whatever is found is our own doing.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('silence', conf => <<~'CONF');
	shared_preload_libraries = 'outbox, pg_stat_statements, auto_explain'
	pg_stat_statements.track = all
	auto_explain.log_min_duration = 0
	auto_explain.log_nested_statements = on
	auto_explain.log_verbose = on
	auto_explain.log_triggers = on
	log_statement = all
	log_min_duration_statement = 0
	log_parameter_max_length = -1
	log_parameter_max_length_on_error = -1
	log_error_verbosity = verbose
	log_min_messages = debug1
	log_lock_waits = on
	deadlock_timeout = 10ms
	track_activity_query_size = 32768
	outbox.backoff_base = 1ms
	CONF

database($node, 'postgres');
sql($node, <<~'SQL');
	CREATE EXTENSION pg_stat_statements;
	SELECT outbox.subscribe('pulled', 'pull'); SELECT outbox.subscribe('notified', 'push');
	CREATE TABLE word AS SELECT CAST(gen_random_uuid() AS text) AS w;
	CREATE TABLE given AS SELECT n, to_jsonb(w || '-' || n) AS payload, jsonb_build_object('h', w) AS headers FROM word, generate_series(1, 10) n;
	CREATE TABLE unique_value (v text PRIMARY KEY);
	-- what its own statements say is its own affair
	CREATE FUNCTION fails(m outbox.message) RETURNS void LANGUAGE plpgsql SET auto_explain.log_min_duration = -1 SET log_lock_waits = off AS $$
	BEGIN
		CASE split_part(m.payload #>> '{}', '-', 6)
			WHEN '1' THEN EXECUTE format('INSERT INTO unique_value VALUES (%1$L), (%1$L)', m.payload);
			WHEN '2' THEN PERFORM CAST(m.payload #>> '{}' AS integer);
			WHEN '3' THEN EXECUTE format('SELECT pg_advisory_xact_lock(17), %L', m.payload);
			ELSE NULL;
		END CASE;
	END $$;
	SELECT outbox.register_hook('push', 'public.fails');
	SELECT outbox.register_notify('push', 'channel', 'notified', include_data => true);
	SQL
my $gate = session($node);
$gate->query_safe('SELECT pg_advisory_lock(17)');
my $word = sql($node, 'SELECT w FROM word');
my $offset = log_end($node);
sql($node, "SELECT outbox.enqueue(name, payload, headers => headers, dedupe_key => name || n) FROM given, unnest('{push,pull}'::text[]) name");

# a hook that is cancelled while it runs a statement with its payload
eventually($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", '1', 'a hook runs');
is_sql($node, "SELECT count(*) FROM pg_stat_activity JOIN word ON position(w IN query) > 0", '0', 'pg_stat_activity does not show what it works on');
sql($node, "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox delivery'");
eventually_log($node, qr/outbox delivery +ERROR: .*canceling statement due to user request/, $offset, 'it is cancelled');
$gate->query_safe('SELECT pg_advisory_unlock(17)');
eventually($node, states(), 'dead 2, delivered 8, unhandled 10', 'the others are delivered, or fail');

# a consumer, with every outcome, and what is refused
sql($node, <<~'SQL');
	CREATE TABLE held AS SELECT * FROM outbox.claim_batch(subscription => 'pulled', separate_tokens => true);
	SELECT outbox.renew(id, claim_token) FROM held;
	SELECT outbox.settle(id, claim_token, 'failed', 'it failed', payload) FROM held WHERE payload::text LIKE '%1"';
	SELECT outbox.settle(id, claim_token, 'dead', payload::text) FROM held WHERE payload::text LIKE '%2"';
	SELECT outbox.settle(id, claim_token) FROM held WHERE payload::text LIKE '%3"';
	SQL
for my $refused ("SELECT outbox.settle(id, claim_token) FROM held WHERE payload::text LIKE '%3\"'", "SELECT outbox.settle(id, id) FROM held",
	"SELECT outbox.renew(gen_random_uuid(), claim_token) FROM held", "SELECT outbox.renew_batch(claim_token, '10 h') FROM held WHERE payload::text LIKE '%4\"'",
	'SELECT outbox.enqueue(payload::text, payload, kind => repeat(payload::text, 1000)) FROM given',
	'SELECT outbox.enqueue(name, payload, id => id) FROM held')
{
	ok(fails($node, $refused) !~ /$word/, "refused: $refused");
}
sql($node, "SELECT * FROM outbox.maintain()");

my $log = slurp_file($node->logfile, $offset);
unlike($log, qr/$word/, 'no payload or header is in the log');
my @tokens = split /\n/, sql($node, 'SELECT claim_token FROM held');
is(scalar(@tokens), 10, 'there are tokens');
is(scalar(grep { $log =~ /$_/ } @tokens), 0, 'none of them is in the log');
is_sql($node, "SELECT count(*) FROM pg_stat_statements JOIN word ON position(w IN query) > 0", '0', 'nor a payload in pg_stat_statements');

# Statements of ours are constant: however much is done, the statistics extension hardly gets more entries.
sql($node, "SELECT outbox.subscribe('counted', 'counted.#'); SELECT outbox.register_hook('counted.#', 'public.take', 'counted')");
sql($node, "SELECT outbox.subscribe('counted_too', 'counted.#')");
my $turns = 0;

sub statements
{
	$turns++;
	sql($node, "SELECT outbox.enqueue('counted.' || $turns || '.' || n, to_jsonb(n), dedupe_key => 'turn $turns ' || n) FROM generate_series(1, 50) n");
	sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(50, subscription => 'counted_too')");
	sql($node, 'SELECT * FROM outbox.maintain()');
	eventually($node, "SELECT count(*) FROM got WHERE name LIKE 'counted.%'", 50 * $turns, "turn $turns is delivered");
	return sql($node, 'SELECT count(*) FROM pg_stat_statements');
}

statements() for 1 .. 3;
my $before = statements();
statements() for 1 .. 5;
my $after = statements();
# some are run now and then only
cmp_ok($after - $before, '<', 20, "after 300 messages more: $before statements, $after");
$gate->quit;
$node->stop;
done_testing();
