# What a role tries against the workers that wants more than it was given. Each of these must stay in vain.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('rights');

database($node, 'postgres');
sql($node, "CREATE ROLE app LOGIN; SELECT outbox.subscribe('theirs', 'their'); SELECT outbox.subscribe('pulled', '#')");
sql($node, "SELECT outbox.unsubscribe('default', true); SELECT outbox.grant_access('app', 'consumer')");
my ($status, $out, $err) = as_role($node, 'app', "SELECT outbox.register_hook('#', 'public.take', subscription => 'theirs')");
is($status, 0, 'a role registers a hook') or diag($err);

my $n = 0;

sub delivered
{
	my ($what) = @_;

	enqueue($node, 'their', ++$n);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eventually($node, "SELECT count(*) FROM got WHERE payload = '$n'", '1', $what);
	return;
}

# One test: a message is routed, and stays ready, uncharged.
sub kept
{
	my ($what) = @_;

	enqueue($node, 'their', ++$n);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	for (1 .. 5)
	{
		# each is a turn of the coordinator; what it wakes has another turn to do harm
		enqueue($node, 'none', 0);
		eventually($node, 'SELECT max(pending) FROM outbox.status', '0', "$what: routed");
	}
	is_sql($node, "SELECT status, attempts FROM outbox.messages WHERE subscription = 'theirs' AND payload = '$n'", 'ready|0', $what);
	return;
}

# A consumer whose right was taken away gets nothing any more, by its hooks neither.
delivered('as long as it may');
my $offset = log_end($node);
sql($node, "SELECT outbox.revoke_access('app', 'consumer')");
kept('after revoke_access() the hook is not called');
eventually_log($node, qr/WARNING:  hooks of role "app" in .* are not called\n.*DETAIL:  The role has no privilege to call outbox\.drain\(\)/,
	$offset, 'and the log says why');
sql($node, "SELECT outbox.grant_access('app', 'consumer', 'pulled')");
kept('nor with the right to another subscription');
sql($node, "SELECT outbox.grant_access('app', 'consumer', 'theirs')");
eventually($node, "SELECT count(*) FROM got WHERE name = 'their' AND payload IN ('2', '3')", '2', 'granted again: delivered by itself');

$node->stop;
done_testing();
