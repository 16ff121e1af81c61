# Through pgbouncer in transaction mode, where each transaction may get another session, and with DISCARD ALL between them: claims,
# renewals, settlements, hooks by drain() and the view "outgoing" work; no session-level lock, prepared statement or setting
# of ours stays behind.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my ($pgbouncer) = grep { -x $_ } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
plan skip_all => 'pgbouncer is not installed' unless $pgbouncer;

my $node = outbox_node('pooled');
my $folder = PostgreSQL::Test::Utils::tempdir_short;
my $port = PostgreSQL::Test::Cluster::get_free_port();

append_to_file("$folder/pgbouncer.ini", <<"INI");
[databases]
postgres = host=@{[ $node->host ]} port=@{[ $node->port ]} dbname=postgres user=postgres
[pgbouncer]
listen_port = $port
listen_addr =
unix_socket_dir = $folder
auth_type = any
pool_mode = transaction
default_pool_size = 3
server_reset_query = DISCARD ALL
server_reset_query_always = 1
logfile = $folder/log
pidfile = $folder/pid
INI
my $running = IPC::Run::start([ $pgbouncer, "$folder/pgbouncer.ini" ], '<', \undef, '>&', "$folder/output");
my $pooled = "host=$folder port=$port dbname=postgres user=postgres";

sub pooled
{
	my ($statement) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $statement, connstr => $pooled);

	die $err if $status != 0;
	return $out;
}

for (1 .. 500)
{
	last if eval { pooled('SELECT 1') };
	usleep(20_000);	# poll
}
is(pooled('SELECT 1'), '1', 'connected through pgbouncer');

# Each of several clients keeps its connection to the pool; which session it gets is the pool's affair.
my @clients = map { pooled_session() } 1 .. 5;

sub pooled_session
{
	# background_psql() asks for nothing else
	no warnings 'redefine';
	local *PostgreSQL::Test::Cluster::connstr = sub { return $pooled };
	return session($node);
}

sub client
{
	my ($n, $statement) = @_;
	return $clients[ $n % @clients ]->query_safe($statement);
}

sql($node, <<'SQL');
CREATE TABLE seen (payload jsonb);
CREATE FUNCTION see(m outbox.message) RETURNS void LANGUAGE sql AS 'INSERT INTO public.seen VALUES ($1.payload)';
SELECT outbox.subscribe('pushed', 'pushed');
SELECT outbox.register_hook('pushed', 'public.see', 'pushed');
CREATE TABLE got (id uuid, token uuid, client int);
SQL

# Somebody has a session now and then, so that the others get another one.
my $holder = pooled_session();
for my $n (1 .. 40)
{
	$holder->query_safe("BEGIN; SELECT outbox.enqueue('pushed', '$n') IS NULL") if $n % 4 == 1;
	$holder->query_safe('ROLLBACK') if $n % 4 == 3;
	client($n, "SELECT outbox.enqueue('plain', '$n')");
	client($n + 1, "BEGIN; SELECT outbox.enqueue('plain', '0'); SAVEPOINT s; SELECT outbox.enqueue('plain', '-1'); ROLLBACK TO s; COMMIT");
	client($n + 2, "INSERT INTO outbox.outgoing (name, payload) VALUES ('pushed', '$n')");
	client($n + 3, "INSERT INTO got SELECT id, claim_token, $n FROM outbox.claim_batch(3, lease => '100 s')");
	client($n + 4, "SELECT outbox.renew(id, token) FROM got WHERE client = $n LIMIT 1");
	client($n + 5, "SELECT outbox.settle(id, token) FROM got WHERE client = $n LIMIT 1");
	client($n + 6, "SELECT outbox.settle_batch(token) FROM (SELECT token FROM got WHERE client = $n LIMIT 1) g") if $n % 5;
	client($n + 7, 'SELECT * FROM outbox.maintain()') if $n % 10 == 0;
	client($n + 8, 'CALL outbox.drain()') if $n % 10 == 0;
}
$holder->quit;
my $sessions = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
is_sql($node, $sessions, '2', 'two sessions were used by six clients');
is_sql($node, 'SELECT count(*), count(DISTINCT id) FROM got', '120|120', 'each message was claimed once');
is_sql($node, "SELECT leased, delivered, ready + pending FROM outbox.status WHERE subscription = 'default'", '16|104|0',
	'settled by whichever session');
is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM seen', '40|40', 'hooks were called, once');

# A claim and its settlement in two transactions of one session that was used by others in between, under REPEATABLE READ.
client(1, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT outbox.enqueue('late', '1'); COMMIT");
client(2, "BEGIN ISOLATION LEVEL REPEATABLE READ; INSERT INTO got SELECT id, claim_token, 100 FROM outbox.claim_batch(); COMMIT");
is(client(3, 'SELECT outbox.settle(id, token) FROM got WHERE client = 100'), 'delivered', 'a token is of the message, not of the session');

# What a client sets with SET LOCAL is gone, what it leaves behind with SET is reset by the pool; neither is ours.
is_sql($node, <<'SQL', '', 'no lock stays behind');
SELECT l.locktype || ' ' || l.mode FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE a.pid <> pg_backend_pid() AND a.state = 'idle' AND l.locktype IN ('object', 'advisory', 'relation')
SQL
$_->quit for @clients;
is(pooled("SELECT (SELECT count(*) FROM pg_prepared_statements) + (SELECT count(*) FROM pg_listening_channels())"), '0', 'no prepared statement, nothing that listens');

# LISTEN does not work through such a pool: who pulls polls, or listens over a connection of its own.
kill 'INT', slurp_file("$folder/pid") + 0;
$running->finish;
$node->stop;
done_testing();
