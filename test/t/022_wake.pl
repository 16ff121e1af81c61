# Who is woken, by what, and that nobody has to poll for it: poll_interval is an hour here, so whatever is seen within seconds
# came by a wake-up or by an exact timer.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('wake', conf => "outbox.poll_interval = '1h'\noutbox.jitter = 0\n");

database($node, 'push');
database($node, 'pull');
sql($node, "SELECT outbox.register_hook('#', 'public.take')", 'push');
sql($node, "SELECT outbox.unsubscribe('default'); SELECT outbox.subscribe('one', 'one.#'); SELECT outbox.subscribe('two', 'two.#')", 'pull');

# One test: a message with this payload gets to the hook.
sub arrives
{
	my ($payload, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return eventually($node, "SELECT count(*) FROM got WHERE payload = '$payload'", '1', $what, 'push');
}

# From commit to hook
for my $n (1 .. 5)
{
	enqueue($node, 'now', $n, $n, 'push');
	my $took = arrives($n, "a commit wakes, message $n");
	cmp_ok($took, '<', 5, 'at once') if $n > 1;
}

# In the order of commits; what is rolled back wakes for nothing.
my $early = session($node, 'push');
$early->query_safe("BEGIN; SELECT outbox.enqueue('early', '100');");
enqueue($node, 'now', 101, 101, 'push');
arrives(101, 'an open transaction holds nobody up');
$early->query_safe('COMMIT');
arrives(100, 'and is delivered when it commits');
$early->query_safe("BEGIN; SELECT outbox.enqueue('x', '102'); SAVEPOINT s; SELECT outbox.enqueue('x', '103'); ROLLBACK TO s; COMMIT;");
arrives(102, 'with a savepoint rolled back');
$early->query_safe("BEGIN; SAVEPOINT s; SELECT outbox.enqueue('x', '104'); ROLLBACK TO s; COMMIT;");
$early->query_safe("BEGIN; SELECT outbox.enqueue('x', '105'); ROLLBACK;");
$early->query_safe("BEGIN; SAVEPOINT s; SELECT outbox.enqueue('x', '106'); RELEASE s; COMMIT;");
arrives(106, 'with a savepoint released');
is_sql($node, "SELECT count(*) FROM got WHERE payload IN ('103', '104', '105')", '0', 'what was rolled back is not delivered', 'push');
$early->quit;

# Prepared transactions
sql($node, "BEGIN; SELECT outbox.enqueue('prepared', '200'); PREPARE TRANSACTION 'p'", 'push');
enqueue($node, 'now', 201, 201, 'push');
arrives(201, 'a prepared transaction holds nobody up');
is_sql($node, "SELECT count(*) FROM got WHERE payload = '200'", '0', 'and is not delivered', 'push');
sql($node, "COMMIT PREPARED 'p'", 'push');
arrives(200, 'COMMIT PREPARED wakes');

# Due times are exact: rounded up to a tenth of a second, no sooner, not much later.
sql($node, <<~'SQL', 'push');
	SELECT outbox.enqueue('due', to_jsonb(300 + n), available_at => clock_timestamp() + n * interval '300 ms') FROM generate_series(1, 5) n
	SQL
eventually($node, "SELECT count(*) FROM got WHERE name = 'due'", '5', 'due times are kept', 'push');
is_sql($node, <<~'SQL', 't|t', 'none too early, none more than a second late', 'push');
	SELECT bool_and(g.at >= l.available_at), bool_and(g.at < l.available_at + interval '1.1 s')
	  FROM got g JOIN outbox.log l USING (id) WHERE g.name = 'due'
	SQL

# So are retries.
sql($node, <<~'SQL', 'push');
	CREATE FUNCTION second(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF m.attempts < 2 THEN
			RAISE EXCEPTION 'not yet';
		END IF;
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
	END $$;
	SELECT outbox.register_hook('second', 'public.second', retry => '{500 ms}');
	SQL
enqueue($node, 'second', 400, 400, 'push');
arrives(400, 'a retry comes at its time');
is_sql($node, "SELECT g.at - l.created_at BETWEEN interval '0.5 s' AND interval '3 s' FROM got g JOIN outbox.log l USING (id) WHERE g.payload = '400'",
	't', 'no sooner, not much later', 'push');

# What makes messages ready by SQL wakes too.
sql($node, "SELECT outbox.pause('default')", 'push');
enqueue($node, 'paused', 500, 500, 'push');
eventually($node, 'SELECT ready FROM outbox.status', '1', 'while paused, messages wait', 'push');
sql($node, "SELECT outbox.resume('default')", 'push');
arrives(500, 'resume() wakes');
sql($node, "SELECT outbox.unregister('#')", 'push');
enqueue($node, 'parked', 600, 600, 'push');
eventually($node, "SELECT status FROM outbox.messages WHERE payload = '600'", 'unhandled', 'without a handler a message waits', 'push');
sql($node, "SELECT outbox.register_hook('#', 'public.take')", 'push');
arrives(600, 'register_hook() wakes');
sql($node, "SELECT outbox.pause('default'); SELECT outbox.enqueue('discarded', '601')", 'push');
sql($node, "SELECT outbox.discard(id) FROM outbox.messages WHERE payload = '601'; SELECT outbox.resume('default')", 'push');
sql($node, "SELECT outbox.requeue(id, 'default') FROM outbox.messages WHERE payload = '601'", 'push');
arrives(601, 'requeue() wakes');

# Pulling clients hear of new messages, each subscription of its own, at most once per interval.
my $listener = session($node, 'pull');
$listener->query_safe('LISTEN outbox_ready');
reload($node, 'outbox.notify_interval' => '1h');
enqueue($node, 'one.a', 1, 1, 'pull');
hears($listener, 'one', 'a subscription is notified');
enqueue($node, 'one.a', $_, $_, 'pull') for 2 .. 6;
enqueue($node, 'two.a', 1, 1, 'pull');
hears($listener, 'two', 'another one too, while the first was told within the interval');
eventually($node, "SELECT sum(pending) FROM outbox.status", '0', 'all is routed', 'pull');
is(heard($listener), '', 'and is not told again');
reload($node, 'outbox.notify_interval' => '10ms');
hears($listener, 'one', 'what was held back comes when the interval is over');
sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(subscription => 'two')", 'pull');
enqueue($node, 'one.a', 7, 7, 'pull');
hears($listener, 'one', 'and then each time');
reload($node, 'outbox.notify_interval' => '0');
enqueue($node, 'one.a', 8, 8, 'pull');
eventually($node, "SELECT sum(pending) FROM outbox.status", '0', 'interval 0: all is routed', 'pull');
is(heard($listener), '', 'nobody is told');
reload($node, 'outbox.notify_interval' => '10ms');
hears($listener, 'one', 'switched on again');

# A lease that ends: its messages are ready again by themselves, and the subscription is told.
is_sql($node, "SELECT count(*) FROM outbox.claim_batch(100, subscription => 'one', lease => '700 ms', worker => 'dies')", '8', 'a claim', 'pull');
enqueue($node, 'two.a', 2, 2, 'pull');
hears($listener, 'two', 'others go on meanwhile');
hears($listener, 'one', 'at the end of the lease its subscription is told');
eventually($node, "SELECT ready, leased FROM outbox.status WHERE subscription = 'one'", '8|0', 'its messages are ready, nobody asked', 'pull');

# What is given back is told of: also where it was due before the coordinator could see it, or at the time at which its
# lease would have ended, or by COMMIT PREPARED.
sql($node, "SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch(subscription => 'two')", 'pull');
my $claim = q(SELECT DISTINCT claim_token FROM outbox.claim_batch(100, subscription => 'one', lease => '%s'));
my $giver = session($node, 'pull');
my $token = sql($node, sprintf($claim, '4 min'), 'pull');
$giver->query_safe("BEGIN; SELECT outbox.settle_batch('$token', 'failed', retry_at => clock_timestamp() + interval '100 ms')");
$giver->query_safe(<<~'SQL');
	DO $$
	DECLARE
		due timestamptz := (SELECT max(available_at) FROM outbox.delivery WHERE state = 'ready');
	BEGIN
		WHILE clock_timestamp() <= due LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$
	SQL
$giver->query_safe('COMMIT');
$giver->quit;
hears($listener, 'one', 'a message that was due when its settlement was committed');
$token = sql($node, sprintf($claim, '5 s'), 'pull');
sql($node, "SELECT outbox.settle_batch('$token', 'released', retry_at => (SELECT max(locked_until) FROM outbox.delivery WHERE claim_token = '$token'))", 'pull');
hears($listener, 'one', 'given back until the end of its lease');
$token = sql($node, sprintf($claim, '4 min'), 'pull');
sql($node, "BEGIN; SELECT outbox.settle_batch('$token', 'released'); PREPARE TRANSACTION 'q'", 'pull');
is(heard($listener), '', 'nothing is told of what is only prepared');
sql($node, "COMMIT PREPARED 'q'", 'pull');
hears($listener, 'one', 'given back by COMMIT PREPARED');
$listener->quit;

# claim_batch() has the coordinator route: a transaction that has claimed and stays open hides nothing from others.
my $open = session($node, 'pull');
enqueue($node, 'two.b', 10, 10, 'pull');
$open->query_safe('BEGIN');
is($open->query_safe("SELECT count(*) FROM outbox.claim_batch(100, subscription => 'two')"), '1', 'an open transaction has claimed all there is');
enqueue($node, 'two.b', 11, 11, 'pull');
is_sql($node, "SELECT payload FROM outbox.claim_batch(100, subscription => 'two')", '11', 'what comes later is claimed by others', 'pull');
is_sql($node, "SELECT count(*) FROM outbox.status WHERE router_pid IS NOT NULL", '0', 'nobody holds the routing lock', 'pull');
$open->query_safe("SELECT outbox.enqueue('two.b', '12')");
is($open->query_safe("SELECT payload FROM outbox.claim_batch(100, subscription => 'two')"), '12', 'it claims what it enqueues itself');
$open->query_safe('COMMIT');

# The same for one that has claimed and found nothing.
$open->query_safe('BEGIN');
is($open->query_safe("SELECT count(*) FROM outbox.claim_batch(100, subscription => 'two')"), '0', 'an open transaction has found nothing');
enqueue($node, 'two.b', 13, 13, 'pull');
is_sql($node, "SELECT payload FROM outbox.claim_batch(100, subscription => 'two')", '13', 'what comes later is claimed by others', 'pull');
$open->query_safe('COMMIT');

# The same for one that claims so soon after a commit that it may be the first to look.
my $hidden = 0;
for my $round (1 .. 30)
{
	# the second comes while the coordinator gathers what follows the first
	$open->query_safe("SELECT outbox.enqueue('two.r', '0'); SELECT outbox.enqueue('two.r', '1'); BEGIN; SELECT count(*) FROM outbox.claim_batch(100, subscription => 'two');");
	enqueue($node, 'two.r', 2, 2, 'pull');
	$hidden++ if sql($node, "SELECT payload FROM outbox.claim_batch(100, subscription => 'two')", 'pull') ne '2';
	$open->query_safe('COMMIT');
}
is($hidden, 0, 'thirty open transactions that claimed right after a commit: none has hidden what came next');

# A coordinator that does not answer holds nobody up for long.
my $pid = worker_pid($node, 'coordinator', database => 'pull');
kill 'STOP', $pid;
enqueue($node, 'two.c', 20, 20, 'pull');
is_sql($node, "SELECT payload FROM outbox.claim_batch(100, subscription => 'two')", '20', 'a claim routes itself where the coordinator does not answer', 'pull');
kill 'CONT', $pid;

# In the hands of a claim of another role, at REPEATABLE READ, in a snapshot that is old.
$open->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
$open->query_safe('SELECT count(*) FROM outbox.log');
enqueue($node, 'two.d', 30, 30, 'pull');
is($open->query_safe("SELECT payload FROM outbox.claim_batch(100, subscription => 'two')"), '30', 'a claim sees what came after its snapshot');
$open->query_safe('COMMIT');
$open->quit;

$node->stop;
done_testing();
