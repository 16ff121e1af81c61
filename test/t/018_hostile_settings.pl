# Settings of roles, databases and sessions that make life hard: the functions of outbox do the same under each of them, or
# refuse with PostgreSQL's own error and change nothing.  032 shows the same for the workers.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('hostile');

sql($node, <<'SQL');
CREATE ROLE app LOGIN; CREATE ROLE boss;
GRANT boss TO app;
CREATE TABLE seen (name text, payload jsonb);
GRANT ALL ON seen TO public;
CREATE FUNCTION see(m outbox.message) RETURNS void LANGUAGE sql AS 'INSERT INTO public.seen VALUES ($1.name, $1.payload)';
SELECT outbox.subscribe('pushed', 'pushed.#'), outbox.subscribe('pulled', 'pulled.#');
SELECT outbox.grant_access('app', k) FROM unnest('{producer,consumer,operator,reader}'::text[]) k;
SELECT outbox.grant_access('boss', k) FROM unnest('{producer,consumer,operator,reader}'::text[]) k;
SQL
$node->psql('postgres', "SELECT outbox.register_hook('pushed.#', 'public.see', 'pushed')", connstr => $node->connstr('postgres') . ' user=app');

# A schema full of things that bear the names of what our functions use.
sql($node, <<'SQL');
CREATE SCHEMA trap; GRANT USAGE ON SCHEMA trap TO public;
CREATE FUNCTION trap.sprung() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'sprung'; END $$;
CREATE VIEW trap.log AS SELECT trap.sprung() AS position;
CREATE VIEW trap.delivery AS SELECT trap.sprung() AS id;
CREATE VIEW trap.subscription AS SELECT trap.sprung() AS id;
CREATE VIEW trap.handler AS SELECT trap.sprung() AS id;
CREATE VIEW trap.pg_roles AS SELECT trap.sprung() AS oid;
CREATE VIEW trap.pg_trigger AS SELECT trap.sprung() AS oid;
CREATE FUNCTION trap.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT trap.sprung()::text::timestamptz';
CREATE FUNCTION trap.count(anyelement) RETURNS bigint LANGUAGE sql AS 'SELECT trap.sprung()::bigint';
CREATE FUNCTION trap.eq(text, text) RETURNS bool LANGUAGE sql AS 'SELECT trap.sprung() = 1';
CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.eq);
CREATE FUNCTION trap.eq8(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT trap.sprung() = 1';
CREATE OPERATOR trap.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = trap.eq8);
CREATE FUNCTION trap.see(m outbox.message) RETURNS void LANGUAGE sql AS 'SELECT trap.sprung()';
CREATE DOMAIN trap.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN trap.uuid AS pg_catalog.uuid CHECK (false);
SQL

# The life of messages, as one role, each step in a session of its own: enqueue, claim, renew, settle, retry, expiry, requeue, discard, hooks.
my $round = 0;

sub life
{
	my ($what, $target, @settings) = @_;
	my $as_app = $node->connstr('postgres') . ' user=app';
	my @steps;

	$round++;
	sql($node, "ALTER $target SET $_") for @settings;
	my $step = sub {
		my ($statement) = @_;
		my ($status, $out, $err) = $node->psql('postgres', $statement, connstr => $as_app);
		push @steps, $status == 0 ? $out : $err;
		return $out;
	};
	$step->("SELECT pg_catalog.count(outbox.enqueue(n, '$round')) FROM pg_catalog.unnest('{pulled.a,pulled.b,pulled.c,pushed.a,pushed.b}'::pg_catalog.text[]) n");
	my $claims = $step->("SELECT name, id, claim_token FROM outbox.claim_batch(10, subscription => 'pulled', lease => '100 s') ORDER BY created_at");
	my ($a, $b, $c) = map { [ split /\|/ ] } split /\n/, $claims;
	$steps[-1] = join ' ', map { $_->[0] // '' } $a, $b, $c;
	if ($c && $c->[1])
	{
		$step->("SELECT outbox.settle('$a->[1]', '$a->[2]')");
		$step->("SELECT outbox.settle('$b->[1]', '$b->[2]', 'dead', 'hopeless')");
		$step->("SELECT outbox.settle('$c->[1]', '$c->[2]', 'failed', 'later', retry_at => outbox.clock() + interval '1 hour')");
		$step->("SELECT outbox.requeue('$b->[1]')");
		$step->("SELECT outbox.discard('$b->[1]', reason => 'no')");
		$step->("SELECT outbox.cancel('$c->[1]')");
	}
	$step->("CALL outbox.drain()");
	$steps[-1] =~ s/\|.*//;
	$step->("SELECT (outbox.maintain()).expired");
	$step->("SELECT pushed.delivered, pulled.delivered, pulled.discarded, pulled.cancelled FROM outbox.status pushed, outbox.status pulled"
		  . " WHERE pushed.subscription::pg_catalog.bpchar OPERATOR(pg_catalog.=) 'pushed' AND pulled.subscription::pg_catalog.bpchar OPERATOR(pg_catalog.=) 'pulled'");
	sql($node, "ALTER $target RESET " . (/^(\S+)/)[0]) for @settings;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $done = $round * 2;
	is(join("\n", @steps), <<~"EXPECTED" =~ s/\n$//r, "$what ($target)");
		5
		pulled.a pulled.b pulled.c
		delivered
		dead
		scheduled
		1
		2
		2
		2
		0
		$done|$round|$round|$round
		EXPECTED
	is_sql($node, "SELECT count(*) FROM seen WHERE payload = '$round'", '2', "$what ($target): hooks were called once");
	return;
}

life('nothing special', 'ROLE app', "my.setting = 'none'");
for my $target ('ROLE app', 'DATABASE postgres')
{
	life('search_path', $target, 'search_path = trap, pg_temp, pg_catalog');
	life('serializable, deferrable', $target, "default_transaction_isolation = 'serializable'", 'default_transaction_deferrable = on');
	next unless $target eq 'ROLE app';
	life('no search_path', $target, "search_path = ''");
	life('repeatable read', $target, "default_transaction_isolation = 'repeatable read'");
	life('timeouts', $target, "lock_timeout = '1s'", "statement_timeout = '20s'", "idle_in_transaction_session_timeout = '1s'", "idle_session_timeout = '10s'");
	life('triggers', $target, 'row_security = off', 'exit_on_error = on', 'transform_null_equals = on');
	life('formats', $target, "DateStyle = 'German'", "IntervalStyle = 'sql_standard'", "TimeZone = 'Asia/Kathmandu'", "bytea_output = 'escape'",
		'extra_float_digits = -5', "client_encoding = 'LATIN1'", 'array_nulls = off', 'quote_all_identifiers = on', 'standard_conforming_strings = off',
		'backslash_quote = off');
	life('plans', $target, 'enable_indexscan = off', 'enable_seqscan = off', 'enable_bitmapscan = off', parallel_always($node) . ' = on', 'jit_above_cost = 0',
		"plan_cache_mode = 'force_generic_plan'", "work_mem = '64kB'", 'from_collapse_limit = 1');
	life('another table', $target, "default_tablespace = ''", "default_table_access_method = 'heap'", "temp_tablespaces = ''", 'synchronous_commit = off',
		"default_toast_compression = 'pglz'", "client_min_messages = 'debug1'", 'check_function_bodies = off');
}
# A superuser may set it for a role: guards are enabled always.
life('replica', 'ROLE app', "session_replication_role = 'replica'");

# A role that becomes another one when it connects: what it does, it does with that one's rights; hooks are those of who registered them.
sql($node, 'ALTER ROLE app SET role = boss');
my ($status, $out, $err) = $node->psql('postgres', "SELECT current_user, count(outbox.enqueue('pulled.x', '1')); CALL outbox.drain()",
	connstr => $node->connstr('postgres') . ' user=app');
is($status, 0, 'role: it works') or diag($err);
like($out, qr/^boss\|1$/m, 'role: as the other one');
sql($node, 'ALTER ROLE app RESET role');

# Read only: refused with PostgreSQL's own error, but what only reads.
sql($node, 'ALTER ROLE app SET default_transaction_read_only = on');
for my $call ("outbox.enqueue('x', '1')", 'outbox.claim_batch()', 'outbox.maintain()', "outbox.subscribe('x')", "outbox.requeue_all('pulled')")
{
	(undef, undef, $err) = $node->psql('postgres', "SELECT * FROM $call", connstr => $node->connstr('postgres') . ' user=app',
		extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
	like($err, qr/25006/, "read only: $call is refused");
}
(undef, $out, $err) = $node->psql('postgres', "SELECT count(*) FROM outbox.status", connstr => $node->connstr('postgres') . ' user=app');
is($out, '3', 'read only: the views work');
sql($node, 'ALTER ROLE app RESET default_transaction_read_only');

# Timeouts that are too short: an error, and nothing of it happened.
my $holder = session($node);
my ($id, $token) = split /\|/, sql($node, "SELECT id, claim_token FROM outbox.claim_batch(1, subscription => 'pulled')");
$holder->query_safe("BEGIN; SELECT outbox.renew('$id', '$token')");
my ($status1, $out1, $err1) = $node->psql('postgres', "SET lock_timeout = '50ms'; SELECT outbox.settle('$id', '$token')", extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
like($err1, qr/55P03/, 'lock_timeout ends a settlement that has to wait');
($status1, $out1, $err1) = $node->psql('postgres', "SET statement_timeout = '50ms'; SELECT outbox.settle('$id', '$token')", extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
like($err1, qr/57014/, 'so does statement_timeout');
$holder->query_safe('COMMIT');
$holder->quit;
is_sql($node, "SELECT outbox.settle('$id', '$token')", 'delivered', 'afterwards it is settled as ever');

my $idle = session($node);
$idle->query_safe("SET idle_in_transaction_session_timeout = '20ms'");
$idle->query_until(qr/begun/, "BEGIN;\nSELECT outbox.enqueue('pulled.idle', '1');\nSELECT count(*) FROM outbox.claim_batch();\n\\echo begun\n");
ok($node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"),
	'idle_in_transaction_session_timeout ends a forgotten transaction');
is_sql($node, "SELECT count(*) FROM outbox.log WHERE name = 'pulled.idle'", '0', 'and what it did');
$idle->{run}->kill_kill;
is_sql($node, <<'SQL', '0', 'each message is in one run');
SELECT count(*) FROM outbox.log l WHERE l.name LIKE 'pulled%'
   AND 1 <> (SELECT count(*) FROM outbox.delivery d JOIN outbox.subscription s ON s.id = d.subscription_id
			  WHERE s.name = 'pulled' AND d.positions @> l.position)
SQL

$node->stop;
done_testing();
