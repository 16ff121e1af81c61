# Many claimers at once, under each isolation level: every message goes to one of them, once, with a
# token that nobody else has; nobody waits for anybody, and the only error is the one that
# PostgreSQL tells clients to try again after.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('rivals');

sql($node, 'CREATE TABLE got (id uuid, token uuid, attempts int, settled text)');
sql($node, 'SELECT * FROM outbox.claim_batch()');

# Claim, settle, in transactions of their own; the settlement of a claim that is empty is one of nothing.
my $claim = <<'SQL';
INSERT INTO got SELECT id, claim_token, attempts FROM outbox.claim_batch(10, separate_tokens => true)
SQL
my $claim_and_settle = <<'SQL';
WITH claim AS (SELECT * FROM outbox.claim_batch(10))
INSERT INTO got SELECT id, claim_token, attempts, outbox.settle(id, claim_token) FROM claim
SQL

sub rivals
{
	my ($level, $clients, $messages, $script, $leased, $delivered) = @_;
	my $what = "$clients claimers, $level";

	sql($node, 'SELECT outbox.reset(); TRUNCATE got');
	sql($node, "ALTER DATABASE postgres SET default_transaction_isolation = '$level'");
	sql($node, "SELECT count(*) FROM outbox.enqueue_batch('m', (SELECT jsonb_agg(i) FROM generate_series(1, $messages / 2) i))");
	sql($node, "SELECT count(outbox.enqueue('m', to_jsonb(i))) FROM generate_series(1, $messages / 2) i");

	for (1 .. 20)
	{
		my ($out, $err);
		my $name = $node->basedir . '/claim.sql';

		open(my $file, '>', $name) or die $!;
		print $file "$script;\n";
		close($file);
		IPC::Run::run([ 'pgbench', '-n', '-c', $clients, '-t', 40, '--max-tries=1000', '-f', $name, $node->connstr('postgres') ],
			'>', \$out, '2>', \$err);
		is($err =~ s/^pgbench \(.*\n//r, '', "$what: no error but those that are tried again");
		last if sql($node, 'SELECT pending + ready FROM outbox.status') == 0;
	}
	is_sql($node, 'SELECT count(*), count(DISTINCT id), max(attempts) FROM got', "$messages|$messages|1", "$what: each message once");
	is_sql($node, 'SELECT leased, delivered FROM outbox.status', "$leased|$delivered", "$what: counted");
	is(all_in_one_run($node), "$messages|$messages", "$what: each message is in one run");
}

rivals('read committed', 8, 5000, $claim, 5000, 0);
is_sql($node, 'SELECT count(DISTINCT token) FROM got', '5000', 'every message has a token of its own');
rivals('read committed', 8, 5000, $claim_and_settle, 0, 5000);
rivals('repeatable read', 4, 1000, $claim_and_settle, 0, 1000);
rivals('serializable', 4, 1000, $claim_and_settle, 0, 1000);

my $log = slurp_file($node->logfile);
my %errors;
$errors{$1}++ while $log =~ /ERROR:  (.*)/g;
delete @errors{ grep { /^could not serialize access/ } keys %errors };
is(join("\n", keys %errors), '', 'no other errors in the log');

$node->stop;
done_testing();
