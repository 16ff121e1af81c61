# Which databases the workers serve, and how they find them: by CREATE EXTENSION, after a start, after CREATE DATABASE; what
# they leave alone. Each message here is delivered by a hook that nobody calls.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;
use Time::HiRes qw(time);

my $node = worker_node('discovery');
my $databases = q{SELECT string_agg(DISTINCT datname, ' ') FROM pg_stat_activity
	WHERE backend_type IN ('outbox coordinator', 'outbox delivery') AND datname = 'postgres'};

# One test: a message is enqueued in a database and delivered there.
sub is_served
{
	my ($what, $database, $name) = @_;

	$name //= 'message';
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	sql($node, "SELECT outbox.enqueue('$name', '1')", $database);
	return eventually($node, "SELECT count(*) FROM got WHERE name = '$name'", '1', $what, $database);
}

sub register
{
	my ($database) = @_;
	return sql($node, "SELECT outbox.register_hook('#', 'public.take')", $database);
}

# Without the extension nobody is connected to anything.
is_sql($node, "SELECT string_agg(DISTINCT backend_type, ' ') FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'",
	'outbox launcher', 'a server without the extension has a launcher only');

# CREATE EXTENSION
my $s = session($node);
$s->query_safe('BEGIN; CREATE EXTENSION outbox;');
$s->query_safe('ROLLBACK');
sql($node, 'CREATE EXTENSION outbox');
my $took = eventually($node, $databases, 'postgres', 'a database is served after CREATE EXTENSION');
cmp_ok($took, '<', 1, 'within a second');
$s->quit;
hooks($node, 'postgres');
is(register('postgres'), 'created', 'registering');
is_served('its messages are delivered', 'postgres');

# A rolled back CREATE EXTENSION leaves nobody in a database, and no complaint.
my $offset = log_end($node);
sql($node, 'CREATE DATABASE back');
$s = session($node, 'back');
$s->query_safe('BEGIN');
$s->query_safe('CREATE EXTENSION outbox');
$s->query_safe('ROLLBACK');
$s->query_safe('BEGIN');
$s->query_safe('SAVEPOINT s');
$s->query_safe('CREATE EXTENSION outbox');
$s->query_safe('ROLLBACK TO s');
$s->query_safe('COMMIT');
$s->quit;
eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = 'back'", '0',
	'a rolled back CREATE EXTENSION leaves nobody behind');
is(scalar(log_lines($node, qr/(ERROR|WARNING|FATAL):/, $offset)), 0, 'and no complaint in the log');

# A server start
sql($node, "SELECT outbox.enqueue('before', '1')");
eventually($node, "SELECT count(*) FROM got WHERE name = 'before'", '1', 'delivered before the restart');
sql($node, "ALTER SYSTEM SET outbox.enabled = off; SELECT pg_reload_conf()");
eventually($node, "SELECT count(*) FROM outbox.workers WHERE kind <> 'launcher'", '0', 'enabled off by reload: all leave');
sql($node, "SELECT outbox.enqueue('meanwhile', '1')");
sql($node, "ALTER SYSTEM SET outbox.enabled = on");
$node->restart;
$took = eventually($node, $databases, 'postgres',
	'a database is served after a server start');
cmp_ok($took, '<', 2, 'within a second or two');
eventually($node, "SELECT count(*) FROM got WHERE name = 'meanwhile'", '1', 'what was enqueued without workers is delivered');

# enabled by reload
reload($node, 'outbox.enabled' => 'off');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE kind <> 'launcher'", '0', 'off by reload: all leave');
sql($node, "SELECT outbox.enqueue('off', '1')");
reload($node, 'outbox.enabled' => 'on');
eventually($node, "SELECT count(*) FROM got WHERE name = 'off'", '1', 'on by reload: delivered');

# CREATE DATABASE ... TEMPLATE: a copy is recognised and delivers nothing, until somebody says so.
sql($node, "SELECT outbox.enqueue('later', '1', available_at => now() + interval '1 hour')");
$offset = log_end($node);
sql($node, 'CREATE DATABASE copy TEMPLATE postgres');
eventually_log($node, qr/WARNING:  the messages in this database are a copy/, $offset, 'a copy is told of in the log');
is_served('the original goes on', 'postgres', 'original');
sql($node, "SELECT outbox.enqueue('copied', '1')", 'copy');
is_sql($node, "SELECT count(*) FROM outbox.workers WHERE database = 'copy' AND kind = 'delivery'", '0',
	'nobody delivers in the copy');
is_sql($node, "SELECT count(*) FROM got WHERE name = 'copied'", '0', 'nothing is delivered in the copy', 'copy');
sql($node, 'SELECT outbox.adopt()', 'copy');
eventually($node, "SELECT count(*) FROM got WHERE name = 'copied'", '1', 'after adopt() it delivers', 'copy');
is_sql($node, "SELECT count(*) FROM got WHERE name = 'copied'", '0', 'and the original does not get it');
is(scalar(log_lines($node, qr/are a copy/, $offset)), 1, 'it was told once');

# A copy of an outbox that was never used has nothing to protect: served at once.
sql($node, 'CREATE DATABASE model');
sql($node, 'CREATE EXTENSION outbox', 'model');
hooks($node, 'model');
sql($node, 'CREATE DATABASE fresh TEMPLATE model');
is(register('fresh'), 'created', 'the copy of an unused outbox can be used');
is_served('and is served', 'fresh');

# databases
reload($node, 'outbox.databases' => 'fresh, nowhere');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = 'postgres'", '0',
	'databases by reload: others are left');
sql($node, "SELECT outbox.enqueue('left', '1')");
is_served('those on the list are served', 'fresh', 'listed');
is_sql($node, "SELECT count(*) FROM outbox.workers WHERE database = 'postgres'", '0', 'others are not, also after an enqueue');
is_sql($node, "SELECT count(*) FROM got WHERE name = 'left'", '0', 'and nothing is delivered there');
reload($node, 'outbox.databases' => '*');
eventually($node, "SELECT count(*) FROM got WHERE name = 'left'", '1', 'all again by reload: delivered');

# Templates and databases that take no connections
$offset = log_end($node);
sql($node, 'CREATE EXTENSION outbox', 'template1');
sql($node, 'CREATE DATABASE from_template');
is_sql($node, "SELECT count(*) FROM outbox.workers WHERE database = 'template1'", '0', 'nobody is connected to a template');
hooks($node, 'from_template');
register('from_template');
is_served('what is made from it is served', 'from_template');
sql($node, "ALTER DATABASE from_template WITH is_template true");
eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = 'from_template'", '0', 'a database that becomes a template is left');
sql($node, 'CREATE DATABASE from_template2 TEMPLATE from_template');
sql($node, "ALTER DATABASE from_template WITH is_template false");
is_served('and served again when it is none', 'from_template', 'again');

# One that was a template is looked at although it is renamed at once, for which who looks has to make way.
sql($node, 'CREATE DATABASE moves TEMPLATE model');
for my $names ([ 'moves', 'moved' ], [ 'moved', 'moves' ], [ 'moves', 'moved' ])
{
	my ($old, $new) = @$names;

	sql($node, "ALTER DATABASE $old WITH is_template true");
	eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = '$old'", '0', "$old is a template");
	sql($node, "ALTER DATABASE $old WITH is_template false; ALTER DATABASE $old RENAME TO $new");
	eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = '$new' AND kind = 'coordinator'", '1', "and served as $new");
}

sql($node, "ALTER DATABASE fresh WITH allow_connections false");
eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = 'fresh'", '0', 'a database that takes no connections is left');
$node->restart;
eventually($node, "SELECT count(*) FROM outbox.workers WHERE database = 'from_template'", '1', 'served after a restart');
sql($node, "ALTER DATABASE fresh WITH allow_connections true");
is_served('and again when it takes some', 'fresh', 'open again');
is(scalar(log_lines($node, qr/not currently accepting connections|ERROR:/, $offset)), 0, 'no failed attempt in the log');

# Many databases, two coordinators
sql($node, "CREATE DATABASE many_$_ TEMPLATE model", 'postgres') for 1 .. 20;
register("many_$_") for 1 .. 20;
for my $round (1 .. 2)
{
	sql($node, "SELECT outbox.enqueue('round $round', '1')", "many_$_") for 1 .. 20;
	my ($served, $most) = (0, 0);
	my $limit = time + 30;
	while ($served < 20 && time < $limit)
	{
		$served = 0;
		$served += sql($node, "SELECT count(*) FROM got WHERE name = 'round $round'", "many_$_") for 1 .. 20;
		my $running = sql($node, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox coordinator'");
		$most = $running if $running > $most;
	}
	is($served, 20, "20 databases are served, round $round");
	cmp_ok($most, '<=', 2, 'by two coordinators at most');
}

# A due time brings the coordinator of a database back that had to make room.
sql($node, "SELECT outbox.enqueue('due', '1', available_at => clock_timestamp() + interval '1 s')", "many_$_") for 1 .. 20;
eventually($node, "SELECT count(*) FROM got WHERE name = 'due'", '1', "due times are kept: database $_", "many_$_") for 1, 10, 20;

$node->stop;
done_testing();
