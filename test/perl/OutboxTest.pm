# OutboxTest.pm - what the TAP tests share: clusters with the module, and questions that each of
# them asks.
#
# The workers are off unless a test turns them on: a test that shows what SQL does by itself must
# not depend on whether somebody else was faster.  No test waits for a lease: outbox.clock_offset
# moves a session's clock.

package OutboxTest;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(init_node outbox_node outbox_conf sql is_sql sqlstate session all_in_one_run claim_names parallel_always wait_name);

# The settings of every cluster.
sub outbox_conf
{
	my (%params) = @_;
	my $preload = $params{preload} // 1;
	my $conf = "max_prepared_transactions = 10\nclient_min_messages = warning\n";

	$conf .= "shared_preload_libraries = 'outbox'\noutbox.enabled = off\n" if $preload;
	$conf .= $params{conf} if defined $params{conf};
	return $conf;
}

# The superuser is postgres, whoever runs the tests: they name it.
$ENV{PGUSER} = 'postgres';

sub init_node
{
	my ($node, %params) = @_;

	$node->init(%params, extra => [ '--username=postgres', @{ $params{extra} // [] } ]);
}

# A running cluster with the extension in the database postgres.  Parameters: preload (1),
# conf (more settings), extension (1), init (more parameters of initdb).
sub outbox_node
{
	my ($name, %params) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	init_node($node, @{ $params{init} // [] });
	$node->append_conf('postgresql.conf', outbox_conf(%params));
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION outbox') if $params{extension} // 1;
	return $node;
}

# The rows of a statement, in unaligned mode; fails the test where it fails.
sub sql
{
	my ($node, $statement, $database) = @_;

	return $node->safe_psql($database // 'postgres', $statement);
}

# One test: what a statement returns.
sub is_sql
{
	my ($node, $statement, $expected, $what, $database) = @_;

	is(sql($node, $statement, $database), $expected, $what);
}

# The SQLSTATE a statement ends with, 00000 where it does well.
sub sqlstate
{
	my ($node, $statement, $database) = @_;
	my ($status, $out, $err) =
	  $node->psql($database // 'postgres', $statement, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);

	return '00000' if $status == 0;
	return $err =~ /(?:ERROR|FATAL):\s+([0-9A-Z]{5})\b/ ? $1 : "unknown: $err";
}

# A session that stays: query_safe(), query(), quit().  It goes on after an error.
sub session
{
	my ($node, $database) = @_;

	return $node->background_psql($database // 'postgres', on_error_stop => 0);
}

# How many messages the log has, and how many of them are in exactly one run of a subscription.
# Equal numbers: nothing is lost and nothing filed twice.
sub all_in_one_run
{
	my ($node, $database, $subscription) = @_;
	my $name = $subscription // 'default';

	return sql($node, <<"SQL", $database);
SELECT count(*), count(*) FILTER (WHERE q.runs = 1)
  FROM (SELECT (SELECT count(*) FROM outbox.delivery d
				  JOIN outbox.subscription s ON s.id = d.subscription_id
				 WHERE s.name = '$name' AND d.positions \@> l.position) AS runs
		  FROM outbox.log l) q
SQL
}

# The setting that has plans be parallel where they need not be.
sub parallel_always
{
	my ($node) = @_;

	return $node->pg_version < 16 ? 'force_parallel_mode' : 'debug_parallel_query';
}

# What pg_stat_activity says that a process of ours waits for while it has nothing to do.
sub wait_name
{
	my ($node) = @_;

	return $node->pg_version < 17 ? 'Extension' : 'OutboxWork';
}

# The names that a claim gets, sorted, in one line.
sub claim_names
{
	my ($node, $arguments, $database) = @_;
	my $names = sql($node, 'SELECT name FROM outbox.claim_batch(' . ($arguments // '') . ')', $database);

	return join(' ', sort split(/\n/, $names));
}

1;
