# LoadTest.pm - what the TAP tests that disturb a working system share: clients that go on through crashes, and the question
# whether anything was lost or doubled.
#
# A producer prints the id of each message when its commit is acknowledged: those are the messages that must not be lost. A
# consumer claims in one transaction, and takes and settles in another, so that what it took is there once. Hooks leave
# something in "got", see WorkerTest.pm. Clients whose session ends connect again until they are told to stop.

package LoadTest;

use strict;
use warnings;

use Exporter 'import';
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);
use WorkerTest;

our @EXPORT = qw(prepare_load start_load stop_load acknowledged wait_for_load all_arrived);

my $number = 0;

# Two subscriptions of what producers enqueue: one is pushed, one is pulled.
sub prepare_load
{
	my ($node, $database) = @_;

	sql($node, <<~'SQL', $database);
		SELECT outbox.subscribe('pulled', 'load');
		SELECT outbox.register_hook('load', 'public.take');
		CREATE TABLE taken (id uuid);
		CREATE PROCEDURE consume() LANGUAGE plpgsql AS $$
		DECLARE
			token uuid;
			ids uuid[];
		BEGIN
			FOR i IN 1 .. 100 LOOP
				SELECT (array_agg(c.claim_token))[1], array_agg(c.id) INTO token, ids FROM outbox.claim_batch(20, subscription => 'pulled') c;
				COMMIT;
				EXIT WHEN token IS NULL;
				INSERT INTO public.taken SELECT unnest(ids);
				PERFORM outbox.settle_batch(token);
				COMMIT;
			END LOOP;
		END $$;
		SQL
	return;
}

# Clients of a node. Parameters: database, producers (2), consumers (1).
sub start_load
{
	my ($node, %params) = @_;
	my $database = $params{database} // 'postgres';
	my $folder = PostgreSQL::Test::Utils::tempdir('load_' . ++$number);
	my $load = { folder => $folder, clients => [], files => [] };
	my $psql = 'psql -X -A -t -q -d "$1"';

	append_to_file("$folder/enqueue.sql", "SELECT outbox.enqueue('load', '1');\n" x 50);
	append_to_file("$folder/consume.sql", "CALL public.consume();\n" x 10);
	for my $n (1 .. ($params{producers} // 2) + ($params{consumers} // 1))
	{
		my $script = $n <= ($params{producers} // 2) ? 'enqueue' : 'consume';
		my $file = "$folder/$script.$n";

		push @{ $load->{files} }, $file if $script eq 'enqueue';
		push @{ $load->{clients} }, IPC::Run::start([ 'sh', '-c', 'while [ ! -e "$2/stop" ]; do ' . "$psql -f \"\$2/$script.sql\"; done",
				'sh', $node->connstr($database), $folder ], '<', \undef, '>>', $file, '2>>', "$folder/errors");
	}
	return $load;
}

sub stop_load
{
	my ($load) = @_;

	append_to_file("$load->{folder}/stop", '');
	$_->finish for @{ $load->{clients} };
	return;
}

# The ids of messages whose commit was acknowledged so far.
sub acknowledged
{
	my ($load) = @_;
	my @ids;

	for my $file (grep { -e $_ } @{ $load->{files} })
	{
		push @ids, slurp_file($file) =~ /^([0-9a-f-]{36})$/mg;
	}
	return @ids;
}

# Polls until so many more were acknowledged.
sub wait_for_load
{
	my ($load, $more) = @_;
	my $wanted = acknowledged($load) + $more;

	for (1 .. 3000)
	{
		return 1 if acknowledged($load) >= $wanted;
		usleep(10_000);	# poll
	}
	die "producers are stuck: " . slurp_file("$load->{folder}/errors");
}

# Tests: nothing acknowledged is lost, and everything arrives, once, both ways.
sub all_arrived
{
	my ($node, $what, $database, @loads) = @_;
	my @ids = map { acknowledged($_) } @loads;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	cmp_ok(scalar(@ids), '>', 0, "$what: " . scalar(@ids) . ' messages were acknowledged');
	sql($node, 'CREATE TABLE acknowledged (id uuid)', $database);
	sql($node, 'INSERT INTO acknowledged VALUES ' . join(', ', map { "('$_')" } @ids), $database);
	is_sql($node, 'SELECT count(*) FROM acknowledged a WHERE NOT EXISTS (SELECT FROM outbox.log l WHERE l.id = a.id)', '0',
		"$what: none of them is lost", $database);
	for my $subscription ('default', 'pulled')
	{
		eventually($node, "SELECT pending + scheduled + ready + leased, dead, unhandled FROM outbox.status WHERE subscription = '$subscription'",
			'0|0|0', "$what: all are delivered, $subscription", $database);
		is_sql($node, "SELECT delivered = (SELECT count(*) FROM outbox.log) FROM outbox.status WHERE subscription = '$subscription'", 't',
			"$what: and counted", $database);
	}
	for my $table ('got', 'taken')
	{
		is_sql($node, <<~"SQL", '0|0', "$what: each has its effect, once: $table", $database);
			SELECT count(*) FILTER (WHERE t.n IS NULL), count(*) FILTER (WHERE t.n > 1)
			  FROM outbox.log l LEFT JOIN (SELECT id, count(*) AS n FROM $table GROUP BY id) t USING (id)
			SQL
	}
	is_sql($node, <<~'SQL', 't|t', "$what: each message is in one run", $database);
		SELECT bool_and(runs = 2), bool_and(subscriptions = 2)
		  FROM (SELECT count(*) AS runs, count(DISTINCT d.subscription_id) AS subscriptions
				  FROM outbox.log l JOIN outbox.delivery d ON d.positions @> l.position GROUP BY l.position) q
		SQL
	return;
}

1;
