# WorkerTest.pm - what the TAP tests of the background workers share: a cluster with the workers on, hooks that leave
# something behind, waiting for a state.
#
# No test sleeps for a duration: eventually() polls for a state and says what it saw instead, where it does not come.
# Where a test is about who wakes whom, poll_interval is so long that only a wake-up explains what is seen in time.

package WorkerTest;

use strict;
use warnings;

use Exporter 'import';
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

our @EXPORT = qw(worker_node database demoted_owner hooks as_role fails eventually heard hears eventually_log log_lines log_end
  worker_pid is_gone is_replaced enqueue states got in_background reload);

# Waiting longer than this is a failure. A machine that runs much else at the same time may be slow.
our $PATIENCE = 30;

# A running cluster with workers. Parameters: preload (1), conf (more settings), start (1), streaming (0), install_path (another
# server than the one that is tested), extra (more options of initdb).
sub worker_node
{
	my ($name, %params) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, install_path => $params{install_path});

	init_node($node, allows_streaming => $params{streaming} // 0, extra => $params{extra});
	$node->append_conf('postgresql.conf',
		outbox_conf(preload => $params{preload}) . <<~'CONF' . ($params{conf} // ''));
		restart_after_crash = on
		log_statement = none
		log_line_prefix = '%m [%p] %b %d '
		max_connections = 50
		max_worker_processes = 16
		CONF
	$node->append_conf('postgresql.conf', "outbox.enabled = on\n") if $params{preload} // 1;
	$node->start if $params{start} // 1;
	return $node;
}

# A database with the extension and with what hooks() makes.
sub database
{
	my ($node, $name) = @_;

	sql($node, "CREATE DATABASE $name") if $name ne 'postgres';
	sql($node, 'CREATE EXTENSION outbox', $name);
	hooks($node, $name);
	return $name;
}

# The extension of role "owner", who was a superuser when he made it. Role "boss" is what he would like to be, table "loot" tells.
sub demoted_owner
{
	my ($node, $database) = @_;

	sql($node, <<~'SQL', $database);
		CREATE ROLE boss SUPERUSER LOGIN;
		CREATE ROLE owner SUPERUSER LOGIN;
		CREATE TABLE loot (what text);
		GRANT ALL ON loot TO public;
		SET ROLE owner;
		CREATE EXTENSION outbox;
		RESET ROLE;
		ALTER ROLE owner NOSUPERUSER;
		SQL
	return;
}

# Some hooks. Each call that is committed leaves a row in "got".
sub hooks
{
	my ($node, $database) = @_;

	sql($node, <<~'SQL', $database);
		CREATE TABLE got (nr bigserial, id uuid, name text, payload jsonb, attempts integer,
			role name DEFAULT current_user, pid integer DEFAULT pg_backend_pid(),
			at timestamptz DEFAULT clock_timestamp(), note text);
		GRANT ALL ON got, got_nr_seq TO public;
		GRANT CREATE ON SCHEMA public TO public;
		CREATE FUNCTION take(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
		END $$;
		-- hangs on purpose, until somebody ends it: at the first attempt, with messages of another name than 'fast'
		CREATE FUNCTION hang(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
			IF m.name <> 'fast' AND m.attempts = 1 THEN
				PERFORM pg_sleep(1000); -- on purpose
			END IF;
		END $$;
		SQL
	return;
}

# A statement in a session of another role; returns status, output and error.
sub as_role
{
	my ($node, $role, $statement, $database) = @_;
	return $node->psql($database // 'postgres', $statement,
		connstr => $node->connstr($database // 'postgres') . " user=$role");
}

# The error a statement ends with.
sub fails
{
	my ($node, $statement, $database) = @_;
	my ($status, $out, $err) = $node->psql($database // 'postgres', $statement);
	return $status == 0 ? "no error, but: $out" : $err;
}

# One test: polls until a query returns what is expected. Parameters: within (seconds). Returns the seconds it took.
sub eventually
{
	my ($node, $query, $expected, $what, $database, %params) = @_;
	my $begin = time;
	my $limit = $begin + ($params{within} // $PATIENCE);
	my ($out, $err);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	do
	{
		# psql may go with the server while it is being written to
		($out, $err) = ('', 'the connection was lost');
		eval { (undef, $out, $err) = $node->psql($database // 'postgres', $query); };
		$out //= '';
		if (!$err && $out eq $expected)
		{
			pass($what);
			return time - $begin;
		}
		usleep(20_000);	# poll
	} while (time < $limit);
	fail($what);
	diag("waited for: $expected\n last seen: $out\n" . ($err // ''));
	return time - $begin;
}

# What a session that listens has heard since it was asked last: payloads, in order.
sub heard
{
	my ($session) = @_;
	return join ' ', $session->query("SELECT 'asked'") =~ /"outbox_ready" with payload "(\w+)"/g;
}

# One test: sooner or later the session has heard this and nothing else.  More than once is no fault: it is a hint.
sub hears
{
	my ($session, $expected, $what) = @_;
	my $limit = time + $PATIENCE;
	my $heard = '';

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	while ($heard ne $expected && time < $limit)
	{
		my %heard = map { $_ => 1 } split(' ', $heard . ' ' . heard($session));

		$heard = join ' ', sort keys %heard;
	}
	return is($heard, $expected, $what);
}

# One test: the same for the server's log, from an offset on. Returns where the log ended.
sub eventually_log
{
	my ($node, $regexp, $offset, $what) = @_;
	my $limit = time + $PATIENCE;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	do
	{
		my $log = slurp_file($node->logfile, $offset);

		if ($log =~ $regexp)
		{
			pass($what);
			return $offset + length $log;
		}
		usleep(20_000);	# poll
	} while (time < $limit);
	fail($what);
	diag("not in the log: $regexp");
	return log_end($node);
}

# The lines of the log since an offset that match.
sub log_lines
{
	my ($node, $regexp, $offset) = @_;
	return grep { $_ =~ $regexp } split /\n/, slurp_file($node->logfile, $offset // 0);
}

sub log_end
{
	my ($node) = @_;
	return -s $node->logfile;
}

# The process id of a launcher, coordinator, delivery or worker, once there is one. Parameters: database, not (a pid).
sub worker_pid
{
	my ($node, $kind, %params) = @_;
	my $limit = time + $PATIENCE;
	my $where = '';

	$where .= " AND datname = '$params{database}'" if $params{database};
	$where .= " AND pid <> $params{not}" if $params{not};
	do
	{
		my (undef, $pid) = eval {
			$node->psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox $kind' $where LIMIT 1");
		};
		return $pid if $pid;
		usleep(20_000);	# poll
	} while (time < $limit);
	die "no $kind, or no other";
}

# One test: a process ends.
sub is_gone
{
	my ($pid, $what, %params) = @_;
	my $limit = time + ($params{within} // $PATIENCE);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	while (time < $limit)
	{
		return pass($what) unless kill 0, $pid;
		usleep(20_000);	# poll
	}
	return fail($what);
}

# One test: a process ends and another one takes its place; returns the new one.
sub is_replaced
{
	my ($node, $kind, $pid, $what, %params) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $new = eval { worker_pid($node, $kind, %params, not => $pid) };
	ok($new, $what);
	return $new;
}

# Messages of that name with payloads from .. to, in one transaction.
sub enqueue
{
	my ($node, $name, $from, $to, $database) = @_;

	$to //= $from;
	sql($node, "SELECT count(outbox.enqueue('$name', to_jsonb(n))) FROM generate_series($from, $to) n", $database);
	return;
}

# A query: how many messages are in which status, as 'delivered 3, ready 1'.
sub states
{
	my ($subscription) = @_;

	$subscription //= 'default';
	return <<~"SQL";
		SELECT string_agg(status || ' ' || n, ', ' ORDER BY status)
		  FROM (SELECT status, count(*) AS n FROM outbox.messages WHERE subscription = '$subscription' GROUP BY status) s
		SQL
}

# A query: which calls were committed, as 'name payload, name payload'.
sub got
{
	return q{SELECT string_agg(name || ' ' || payload, ', ' ORDER BY name, payload::integer, nr) FROM got};
}

# A session that is in the middle of a statement; it ends by itself or with quit_now().
sub in_background
{
	my ($node, $statement, $database) = @_;
	my $session = session($node, $database);

	$session->query_until(qr/begun/, "\\echo begun\n$statement;\n");
	return $session;
}

# Settings of the file, without a restart.
sub reload
{
	my ($node, %settings) = @_;

	# without preloading a session does not know our settings
	sql($node, "LOAD 'outbox'; ALTER SYSTEM SET $_ = '$settings{$_}'") for sort keys %settings;
	sql($node, 'SELECT pg_reload_conf()');
	return;
}

1;
