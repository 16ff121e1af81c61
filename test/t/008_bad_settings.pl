# Settings: each refuses what is out of its range, wherever it is set; at both ends of its range
# everything works, alone and all together; rubbish in the file is reported and ignored; policy is
# the superuser's; and no value keeps a worker busy or stops it without a word.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('bad_settings', conf => "max_worker_processes = 16\n");

# ---- what there is ----

my @settings = map { [ split(/\|/, $_, -1) ] }
  split(/\n/, sql($node, <<'SQL'));
SELECT name, vartype, min_val, max_val, context, boot_val FROM pg_settings WHERE name LIKE 'outbox.%' ORDER BY name
SQL
my %default = map { $_->[0] => $_->[5] } @settings;
my @numbers = grep { $_->[1] =~ /^(integer|real)$/ } @settings;
my %expected = (
	'outbox.lease' => 30000, 'outbox.max_active' => 300000, 'outbox.max_attempts' => 3,
	'outbox.batch_size' => 100, 'outbox.backoff_base' => 1000, 'outbox.backoff_max' => 60000,
	'outbox.jitter' => 0.1, 'outbox.hook_timeout' => 60000, 'outbox.run_length' => 1000,
	'outbox.dedupe_window' => 3 * 24 * 3600, 'outbox.clock_offset' => 0, 'outbox.traceparent' => '');

is($default{$_}, $expected{$_}, "$_: the default") for sort keys %expected;

# ---- out of range ----

for my $setting (@numbers)
{
	my ($name, undef, $min, $max, $context) = @$setting;
	my @values = ("''", "'abc'", "'1e400'", "'99999999999999999999'", "'infinity'", "'1 parsec'");
	my @statements;

	push @values, $min - 1 if $min > -2147483648;
	push @values, $max + 1 if $max < 2147483647;
	push @statements, "ALTER SYSTEM SET $name = $_;\n" for @values;
	push @statements, "SET $name = $_;\n" for $context eq 'sighup' ? () : @values;

	my (undef, undef, $err) = $node->psql('postgres', join('', @statements),
		on_error_stop => 0, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
	my $refused = () = $err =~ /ERROR:  22023$/mg;
	is($refused, scalar(@statements), "$name: refused: @values") or diag($err);
}
is(sqlstate($node, "ALTER SYSTEM SET outbox.enabled = 'maybe'"), '22023', 'outbox.enabled: refused');
is(sqlstate($node, 'SET outbox.leese = 1'), '42602', 'a misspelt name is refused');

# ---- both ends ----

sql($node, <<'SQL');
CREATE TABLE seen (n int);
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE sql AS 'INSERT INTO seen VALUES (1)';
SELECT outbox.subscribe('pushed', 'pushed');
SELECT outbox.register_hook('#', 'hook', 'pushed');
SQL

# Every number is used for something here.  No statement may fail, none may return true.
sub works
{
	my ($what) = @_;
	my ($status, $out, $err) = $node->psql('postgres', <<'SQL', on_error_stop => 1);
SELECT outbox.reset() IS NULL;
SELECT outbox.enqueue('one', '1', dedupe_key => 'k') <> outbox.enqueue('one', '2', dedupe_key => 'k');
SELECT count(*) <> 20 FROM outbox.enqueue_batch('many', (SELECT jsonb_agg(i) FROM generate_series(1, 20) i));
SELECT count(*) <> 10 FROM outbox.claim_batch(10, lease => '1 ms');
SELECT bool_or(outbox.settle(id, claim_token, 'failed') NOT IN ('scheduled', 'ready', 'dead')) FROM outbox.claim_batch();
SELECT bool_or(locked_until <= outbox.clock() - interval '1 min') FROM outbox.claim_batch();
SELECT bool_or(outbox.backoff(i) <= 0 OR outbox.backoff(i) > 2147484) FROM generate_series(1, 100) i;
SELECT outbox.enqueue('pushed', '3') IS NULL;
CALL outbox.drain();
SELECT outbox.maintain() IS NULL;
SELECT count(*) < 3 FROM outbox.messages;
SELECT count(*) <> 2 FROM outbox.status;
SQL
	is($status, 0, "$what: no error") or diag($err);
	unlike($out, qr/^t$/m, "$what: all is as it should be");
}

sub set
{
	my (%values) = @_;

	sql($node, "ALTER SYSTEM SET $_ = '$values{$_}'") for keys %values;
	$node->reload;
	for my $name (keys %values)
	{
		$node->poll_query_until('postgres',
			"SELECT CAST(setting AS numeric) = $values{$name} FROM pg_settings WHERE name = '$name'")
		  or die "$name was not set";
	}
}

sub reset_all
{
	sql($node, "ALTER SYSTEM RESET $_->[0]") for @numbers;
	$node->reload;
	$node->poll_query_until('postgres',
		"SELECT bool_and(setting = boot_val) FROM pg_settings WHERE name LIKE 'outbox.%' AND vartype <> 'bool'");
}

works('as they are');
for my $setting (@numbers)
{
	my ($name, undef, $min, $max) = @$setting;

	for my $value ($min, $max)
	{
		set($name => $value);
		works("$name = $value");
	}
	set($name => $default{$name});
}
for my $end (2, 3)
{
	set(map { $_->[0] => $_->[$end] } grep { $_->[0] ne 'outbox.clock_offset' } @numbers);
	works('all at the ' . ($end == 2 ? 'lowest' : 'highest'));
}
reset_all();

# ---- rubbish in the file ----

my $log = -s $node->logfile;
$node->append_conf('postgresql.conf', "outbox.lease = 'rubbish'\n");
$node->reload;
$node->wait_for_log(qr/invalid value for parameter "outbox\.lease"/, $log);
ok(1, 'rubbish is reported');
works('rubbish in the file');
is_sql($node, 'SHOW outbox.lease', '30s', 'and ignored');
$node->adjust_conf('postgresql.conf', 'outbox.lease', undef);
$node->append_conf('postgresql.conf', "outbox.leese = 1\n");
$node->restart;
works('a misspelt name in the file');
$node->adjust_conf('postgresql.conf', 'outbox.leese', undef);

# ---- who may ----

sql($node, 'CREATE ROLE app LOGIN; CREATE DATABASE other OWNER app');
is(sqlstate($node, "SET ROLE app; SET outbox.lease = '1h'"), '42501', 'policy is not for everybody');
is(sqlstate($node, "SET ROLE app; ALTER DATABASE other SET outbox.lease = '1h'"), '42501', 'nor for the owner of a database');
is(sqlstate($node, "SET ROLE app; SET outbox.clock_offset = '1h'"), '42501', 'nor is the clock');
is(sqlstate($node, "SET ROLE app; SET outbox.traceparent = '00-x-y-01'"), '00000', 'the trace context is');
sql($node, "ALTER DATABASE other SET outbox.lease = '45s'");
is_sql($node, 'SHOW outbox.lease', '45s', 'ALTER DATABASE SET works', 'other');
sql($node, 'DROP DATABASE other');

# ---- workers ----

# They deliver at both ends; an idle one costs next to nothing.
sub seconds_of_cpu
{
	my $pids = sql($node, "SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'");
	my $ticks = 0;

	for my $pid (split(/\n/, $pids))
	{
		next unless -r "/proc/$pid/stat";
		my @fields = split(' ', slurp_file("/proc/$pid/stat") =~ s/^.*\)//sr);
		$ticks += $fields[11] + $fields[12];
	}
	return $ticks / 100;
}

sub delivers
{
	my ($what) = @_;

	sql($node, 'TRUNCATE seen');
	sql($node, "SELECT outbox.enqueue('pushed', '1')");
	ok($node->poll_query_until('postgres', 'SELECT count(*) > 0 FROM seen'), "$what: a worker delivers");
}

for my $end (2, 3)
{
	my $what = 'all at the ' . ($end == 2 ? 'lowest' : 'highest');
	# a worker is wanted, and a hook gets the time that it needs
	my %values = ((map { $_->[0] => $_->[$end] } grep { $_->[0] ne 'outbox.clock_offset' } @numbers),
		$end == 2 ? ('outbox.workers' => 1, 'outbox.hook_timeout' => 60000, 'outbox.max_active' => 60000, 'outbox.lease' => 10000) : ());

	sql($node, 'SELECT outbox.reset()');
	sql($node, 'ALTER SYSTEM SET outbox.enabled = on');
	set(%values);
	delivers($what);

	is_sql($node, "SELECT count(*) > 1 FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'", 't', "$what: workers run");
	my $start = time;
	my $cpu = seconds_of_cpu();
	$node->poll_query_until('postgres', 'SELECT extract(epoch FROM clock_timestamp()) > ' . ($start + 2));
	cmp_ok(seconds_of_cpu() - $cpu, '<', 0.5, "$what: idle workers are idle");
	sql($node, 'ALTER SYSTEM RESET outbox.enabled');
	reset_all();
	ok($node->poll_query_until('postgres',
			"SELECT count(*) <= 1 FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'"),
		"$what: and end when they are not wanted");
}

unlike(slurp_file($node->logfile), qr/PANIC|TRAP|server process .* was terminated|terminated by signal/, 'nothing has crashed');

$node->stop;
done_testing();
