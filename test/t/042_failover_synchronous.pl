# Failover with synchronous replication, in the middle of the work: the standby refuses politely before; after its promotion the
# workers start, nothing that was acknowledged is lost, every effect is there once, and an attempt that was under way counts.

use strict;
use warnings;

use LoadTest;
use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = worker_node('primary', streaming => 1, conf => "outbox.lease = '1s'\noutbox.backoff_base = '1ms'\n");

database($primary, 'postgres');
prepare_load($primary);
sql($primary, <<~'SQL');
	CREATE FUNCTION fails(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF m.attempts < 3 THEN
			RAISE EXCEPTION 'attempt %', m.attempts;
		END IF;
		INSERT INTO public.got (id, name, payload, attempts) VALUES (m.id, m.name, m.payload, m.attempts);
	END $$;
	SELECT outbox.register_hook('hang', 'public.hang', timeout => '300 s'), outbox.register_hook('fails', 'public.fails', retry => '{1 ms, 1 h}');
	SELECT outbox.unsubscribe('pulled', discard_pending => true), outbox.subscribe('pulled', '#');
	SQL

$primary->backup('copy');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'copy', has_streaming => 1);
$standby->start;
sql($primary, "ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf()");
eventually($primary, "SELECT sync_state FROM pg_stat_replication", 'sync', 'the standby is synchronous');

# Two attempts that failed, and a third one that is due in an hour
enqueue($primary, 'fails', 1);
eventually($primary, "SELECT status, attempts FROM outbox.messages WHERE name = 'fails' AND subscription = 'default'", 'scheduled|2', 'two attempts have failed');

# Work in full swing, and a hook in the middle of its first attempt
my $load = start_load($primary, producers => 2, consumers => 1);
wait_for_load($load, 300);
enqueue($primary, 'hang', 1);
eventually($primary, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery' AND wait_event = 'PgSleep'", '1', 'a hook is in its first attempt');
wait_for_load($load, 200);
for my $call ("outbox.enqueue('x', '1')", 'outbox.claim_batch()', 'outbox.adopt()', 'outbox.maintain()')
{
	is(sqlstate($standby, "SELECT * FROM $call"), '25006', "on the standby: $call");
}
is_sql($standby, "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'", '0', 'on the standby nothing of outbox runs');

# The primary is gone, and is not asked.
$primary->stop('immediate');
stop_load($load);
$standby->promote;
is_sql($standby, "SELECT status, attempts, last_error ->> 'message' FROM outbox.messages WHERE name = 'fails' AND subscription = 'default'",
	'scheduled|2|attempt 2', 'attempts are those that were made');
my $more = start_load($standby, producers => 1, consumers => 1);
wait_for_load($more, 100);
eventually($standby, "SELECT attempts FROM got WHERE name = 'hang'", '2', 'the attempt that was under way counts');
reload($standby, 'outbox.clock_offset' => '2h');
eventually($standby, "SELECT attempts FROM got WHERE name = 'fails'", '3', 'the third attempt comes in its time');
stop_load($more);

# The consumer of the primary is gone with what it had claimed.
for (1 .. 100)
{
	last if sql($standby, "SELECT pending + scheduled + ready + leased FROM outbox.status WHERE subscription = 'pulled'") == 0;
	reload($standby, 'outbox.clock_offset' => (2 + $_) . 'h');
	sql($standby, 'CALL consume()');
}
all_arrived($standby, 'after the failover', 'postgres', $load, $more);
is_sql($standby, 'SELECT outbox.adopt()', 'f', 'there was nothing to adopt');

$standby->stop;
done_testing();
