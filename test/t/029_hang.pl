# A hook that does not come back: its time limit cancels it; one that catches that is ended with its worker. Either way the
# attempt is charged, and the others are delivered.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

my $node = worker_node('hang', conf => "outbox.poll_interval = '1h'\noutbox.backoff_base = 1ms\noutbox.lease = '1h'\noutbox.max_active = '2h'\n");

database($node, 'postgres');
sql($node, <<~'SQL');
	CREATE SEQUENCE calls;
	-- on purpose: catches whatever is done to it
	CREATE FUNCTION stubborn(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
		IF m.payload = '5' THEN
			PERFORM nextval('public.calls');
			LOOP
				BEGIN
					PERFORM pg_sleep(1000); -- on purpose
				EXCEPTION WHEN query_canceled THEN
					NULL;
				END;
			END LOOP;
		END IF;
	END $$;
	-- on purpose: catches one, and goes on as if nothing had been
	CREATE FUNCTION forgetful(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
		IF m.payload = '5' THEN
			PERFORM nextval('public.calls');
			BEGIN
				PERFORM pg_sleep(1000); -- on purpose
			EXCEPTION WHEN query_canceled THEN
				NULL;
			END;
		END IF;
	END $$;
	SELECT outbox.register_hook('stubborn', 'public.stubborn', timeout => '200 ms', max_attempts => 2);
	SELECT outbox.register_hook('forgetful', 'public.forgetful', timeout => '200 ms', max_attempts => 2);
	SELECT outbox.register_hook('patient', 'public.hang', timeout => '200 ms', max_attempts => 2);
	SQL

for my $hook ('patient', 'forgetful', 'stubborn')
{
	my $offset = log_end($node);
	my $ends = ($hook eq 'stubborn') ? 2 : 0;

	sql($node, 'TRUNCATE got; ALTER SEQUENCE calls RESTART');
	enqueue($node, $hook, 1, 20) if $hook ne 'patient';
	# its 20 messages would all hang, so there is one
	enqueue($node, $hook, 5) if $hook eq 'patient';
	if ($hook eq 'patient')
	{
		eventually($node, "SELECT status, attempts FROM outbox.messages WHERE name = '$hook'", 'delivered|2', 'cancelled by its time limit, tried again');
	}
	else
	{
		eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE name = '$hook' GROUP BY 1 ORDER BY 1", "dead|1\ndelivered|19",
			"$hook: it is dead, the others are delivered");
		is_sql($node, "SELECT attempts, payload FROM outbox.dead_letters WHERE name = '$hook'", '2|5', "$hook: both attempts are charged");
		is_sql($node, 'SELECT last_value FROM calls', '2', "$hook: it was called twice");
		is_sql($node, 'SELECT count(*), count(DISTINCT payload) FROM got', '19|19', "$hook: effects are there once, and nothing of its own");
	}
	is(scalar(log_lines($node, qr/LOG:  terminating outbox delivery worker/, $offset)), $ends, "$hook: workers ended: $ends");
}
is_sql($node, "SELECT last_error_sqlstate, last_error_message FROM outbox.dead_letters WHERE name = 'forgetful'", '57014|hook timed out after 200 ms',
	'one that returns after it was cancelled has timed out');
is_sql($node, "SELECT last_error_sqlstate FROM outbox.dead_letters WHERE name = 'stubborn'", '57P01', 'one that was ended: so it says');
is_sql($node, 'SELECT count(*) FROM outbox.leases', '0', 'nothing stays leased');

# A worker that was ended is not held against the role: what comes next is delivered soon.
enqueue($node, 'stubborn', 100, 120);
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE name = 'stubborn' AND payload::int >= 100 GROUP BY 1", 'delivered|21', 'and it goes on');

# While the only worker is in a hook that hangs, whoever pulls depends on nobody: leases that ended are taken back by the next claim.
sql($node, <<~'SQL');
	CREATE FUNCTION stuck(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(17);
	END $$;
	SELECT outbox.register_hook('stuck', 'public.stuck'), outbox.subscribe('pulled', 'pulled');
	SQL
my $gate = session($node);
$gate->query_safe('SELECT pg_advisory_lock(17)');
enqueue($node, 'stuck', 0);
eventually($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", '1', 'the only worker is in a hook that hangs');
enqueue($node, 'pulled', 1);
sql($node, "CREATE TABLE held AS SELECT id FROM outbox.claim_batch(subscription => 'pulled', lease => '10 ms', worker => 'dead one')");
eventually($node, "SELECT id = (SELECT id FROM held), attempts FROM outbox.claim_batch(subscription => 'pulled')", 't|2',
	'what a dead consumer had is claimed by the next one');
is_sql($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", '1', 'the hook hangs still');
$gate->query_safe('SELECT pg_advisory_unlock(17)');
$gate->quit;

$node->stop;
done_testing();
