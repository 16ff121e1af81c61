# Commands that want a database to themselves just work while workers are connected, also while a hook hangs; workers come
# back where the database is still there. All without FORCE.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('database_commands', conf => "outbox.poll_interval = '1h'\noutbox.backoff_base = 1ms\n");

# What the others are made from: an outbox that was never used
database($node, 'model');

# A database with a worker that is idle, or in the middle of a hook.
sub busy_database
{
	my ($name, $state) = @_;

	sql($node, "CREATE DATABASE $name TEMPLATE model");
	sql($node, "SELECT outbox.register_hook('#', 'public.hang')", $name);
	sql($node, "SELECT outbox.enqueue('fast', '1')", $name);
	eventually($node, "SELECT count(*) FROM got", '1', "$name: a worker is there", $name);
	return unless $state eq 'hanging';
	sql($node, "SELECT outbox.enqueue('hangs', '2')", $name);
	eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE datname = '$name' AND backend_type = 'outbox delivery' AND wait_event = 'PgSleep'",
		'1', "$name: a hook hangs");
	return;
}

# One test: a command works, and soon.
sub works
{
	my ($command, $what, $database) = @_;
	my $begin = time;
	my ($status, $out, $err) = $node->psql($database // 'postgres', $command);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($status == 0, $what) or diag($err);
	cmp_ok(time - $begin, '<', 4, "$what, soon");
	return;
}

# One test: workers deliver there.
sub is_served
{
	my ($what, $database) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($node, "SELECT outbox.enqueue('fast', '1000')", $database);
	eventually($node, "SELECT count(*) > 0 FROM got WHERE payload = '1000'", 't', $what, $database);
	sql($node, "DELETE FROM got WHERE payload = '1000'", $database);
	return;
}

for my $state ('idle', 'hanging')
{
	busy_database("d_$state", $state);
	works("DROP DATABASE d_$state", "DROP DATABASE, $state");

	busy_database("r_$state", $state);
	works("ALTER DATABASE r_$state RENAME TO renamed_$state", "RENAME, $state");
	is_served('served under its new name', "renamed_$state");

	my $space = PostgreSQL::Test::Utils::tempdir("space_$state");
	sql($node, "CREATE TABLESPACE space_$state LOCATION '$space'");
	busy_database("s_$state", $state);
	works("ALTER DATABASE s_$state SET TABLESPACE space_$state", "SET TABLESPACE, $state");
	is_served('served in its new place', "s_$state");

	busy_database("c_$state", $state);
	works("CREATE DATABASE copy_$state TEMPLATE c_$state", "CREATE DATABASE TEMPLATE, $state");
	is_served('the template is served again', "c_$state");
	works("CREATE DATABASE copy2_$state TEMPLATE c_$state", "from a session in the template, $state", "c_$state");
	is_served('and again', "c_$state");
}

# What the hanging hooks were stopped for was charged once each time, and no neighbour suffers.
is_sql($node, "SELECT bool_and(attempts = 1) FROM outbox.messages WHERE name = 'fast'", 't', 'others are not charged', 'c_hanging');

# A command that fails brings the workers back.
my $user = session($node, 'c_idle');
$user->query_safe('SELECT 1');
like(fails($node, 'DROP DATABASE c_idle'), qr/is being accessed by other users/, 'somebody else is connected: DROP DATABASE fails');
is_served('the workers come back', 'c_idle');
$user->quit;
like(fails($node, 'ALTER DATABASE c_idle RENAME TO postgres'), qr/already exists/, 'RENAME to a name that is taken fails');
is_served('the workers come back', 'c_idle');
like(fails($node, 'BEGIN; DROP DATABASE c_idle'), qr/cannot run inside a transaction block/, 'DROP DATABASE in a transaction fails');
is_served('the workers come back', 'c_idle');
like(fails($node, 'CREATE DATABASE renamed_idle TEMPLATE c_idle'), qr/already exists/, 'CREATE DATABASE with a name that is taken fails');
is_served('the workers come back', 'c_idle');

# So does one whose session dies in the middle.
$user = session($node, 'c_idle');
$user->query_safe('SELECT 1');
my $dropper = in_background($node, 'DROP DATABASE c_idle');
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE datname = 'c_idle' AND backend_type LIKE 'outbox%'", '0', 'workers make way');
sql($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'DROP DATABASE c_idle;' AND pid <> pg_backend_pid()");
$dropper->{run}->finish;
is_served('a session that died in the middle: the workers come back', 'c_idle');
$user->quit;

# Who may not do it stops nobody.
sql($node, 'CREATE ROLE stranger LOGIN CREATEDB');
my $pid = worker_pid($node, 'coordinator', database => 'c_idle');
for my $command ('DROP DATABASE c_idle', 'ALTER DATABASE c_idle RENAME TO mine', 'ALTER DATABASE c_idle SET TABLESPACE space_idle',
	'CREATE DATABASE mine TEMPLATE c_idle')
{
	my ($status, $out, $err) = as_role($node, 'stranger', $command);
	like($err, qr/must be owner|permission denied/, "a stranger may not: $command");
}
is(worker_pid($node, 'coordinator', database => 'c_idle'), $pid, 'and has stopped nobody by trying');

# While a transaction that has renamed it is open, nobody is started for it, who would wait for its locks and take others' place.
busy_database('half_renamed', 'idle');
my $renamer = session($node, 'postgres');
$renamer->query_safe('BEGIN; ALTER DATABASE half_renamed RENAME TO other_name');
is_served('others are served meanwhile', 'c_idle');
is_sql($node, "SELECT count(*) FROM outbox.workers WHERE database IN ('half_renamed', 'other_name')", '0', 'nobody waits for its locks', 'c_idle');
$renamer->query_safe('ROLLBACK');
$renamer->quit;
is_served('served when that is over', 'half_renamed');

# DROP DATABASE ... WITH (FORCE), and IF EXISTS of what does not exist
busy_database('forced', 'hanging');
works('DROP DATABASE forced WITH (FORCE)', 'DROP DATABASE WITH (FORCE)');
works('DROP DATABASE IF EXISTS no_such_database', 'DROP DATABASE IF EXISTS');

# Two who drop the same one: both wait for somebody who comments on it, and the second finds nothing any more.
busy_database('twice', 'idle');
my $commenter = session($node, 'postgres');
$commenter->query_safe(q(BEGIN; COMMENT ON DATABASE twice IS 'holds it'));
my @droppers = map { in_background($node, 'DROP DATABASE IF EXISTS twice') } 1 .. 2;
eventually($node, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DROP DATABASE IF EXISTS twice%' AND wait_event_type = 'Lock'", '2',
	'two who drop one database wait');
$commenter->query_safe('ROLLBACK');
$_->query_safe('SELECT 1') for @droppers;
$_->quit for $commenter, @droppers;
is_sql($node, "SELECT count(*) FROM pg_database WHERE datname = 'twice'", '0', 'it is gone, and the server is not');
is_served('and others are served', 'c_idle');

# Copies side by side, as parallel tests make them
my @copies = map { in_background($node, "CREATE DATABASE side_$_ TEMPLATE c_idle") } 1 .. 6;
$_->quit for @copies;
is_sql($node, "SELECT count(*) FROM pg_database WHERE datname LIKE 'side_%'", '6', 'copies side by side');
is_served('the template is served again', 'c_idle');

# Again and again: as many databases as one likes in the life of a server, made, used and dropped.
my $failed = 0;
for my $n (1 .. 5)
{
	sql($node, 'CREATE DATABASE again TEMPLATE model');
	sql($node, "SELECT outbox.register_hook('#', 'public.take'); SELECT outbox.enqueue('fast', '1')", 'again');
	$failed++ unless $node->poll_query_until('again', 'SELECT count(*) = 1 FROM got');
	my ($status) = $node->psql('postgres', 'DROP DATABASE again');
	$failed++ if $status != 0;
}
is($failed, 0, 'five times made from a template, used and dropped');

# Settings of databases and roles are seen, once they are committed.
my $settings = "SELECT outbox.enqueue('settings', '1')";
sql($node, <<~'SQL', 'c_idle');
	CREATE FUNCTION show(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.got (name, note) VALUES (m.name, current_setting('work_mem') || ' ' || current_setting('my.setting', true));
	END $$;
	SELECT outbox.register_hook('settings', 'public.show');
	SQL
sql($node, 'ALTER DATABASE c_idle SET work_mem = \'11MB\'; ALTER ROLE postgres SET my.setting = \'a\'');
sql($node, $settings, 'c_idle');
eventually($node, "SELECT note FROM got WHERE name = 'settings'", '11MB a', 'ALTER DATABASE SET and ALTER ROLE SET are seen', 'c_idle');
sql($node, 'DELETE FROM got', 'c_idle');
my $owner = session($node);
$owner->query_safe("BEGIN; ALTER DATABASE c_idle SET work_mem = '12MB';");
sql($node, $settings, 'c_idle');
eventually($node, "SELECT note FROM got WHERE name = 'settings'", '11MB a', 'not before they are committed', 'c_idle');
$owner->query_safe('COMMIT');
sql($node, "DELETE FROM got; $settings", 'c_idle');
eventually($node, "SELECT note FROM got WHERE name = 'settings'", '12MB a', 'but then', 'c_idle');
$owner->quit;
sql($node, "ALTER ROLE postgres IN DATABASE c_idle SET my.setting = 'b'");
sql($node, "DELETE FROM got; $settings", 'c_idle');
eventually($node, "SELECT note FROM got WHERE name = 'settings'", '12MB b', 'ALTER ROLE IN DATABASE SET too', 'c_idle');
sql($node, "ALTER DATABASE c_idle SET outbox.max_attempts = 7");
sql($node, "SELECT outbox.enqueue('fast', '7')", 'c_idle');
eventually($node, "SELECT max_attempts, status FROM outbox.messages WHERE payload = '7'", '7|delivered', 'settings of outbox as well', 'c_idle');

is(scalar(log_lines($node, qr/ERROR:  (?!.*(must be owner|permission denied|already exists|transaction block|other users))/)), 0,
	'no error in the log beside those that were provoked');
$node->stop;
done_testing();
