# A transaction that is being prepared is for a moment in the process array twice, and so in a
# snapshot; with synchronous replication the moment lasts for a round trip.  Its messages must
# nevertheless be filed once.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('twice', conf => "wal_level = replica\nmax_wal_senders = 2\nsynchronous_standby_names = 'nobody'\nsynchronous_commit = local\n");

# It waits for a standby that does not exist, in the middle of PREPARE.
my $late = session($node);
$late->query_safe('BEGIN');
$late->query_safe('SET LOCAL synchronous_commit = on');
$late->query_safe("SELECT outbox.enqueue('late', '1')");
$late->query_until(qr/hangs/, "\\echo hangs\nPREPARE TRANSACTION 'late';\n");
ok($node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"), 'PREPARE hangs in the middle');

sql($node, "SELECT outbox.enqueue('other', '1')");
is_sql($node, 'SELECT name FROM outbox.claim_batch()', 'other', 'a claim meanwhile routes past it');
is_sql($node, 'SELECT cardinality(running), running[1] <> ALL (running[2:]) FROM outbox.frontier', '1|t',
	'it is late, once');

$node->append_conf('postgresql.conf', "synchronous_standby_names = ''");
$node->reload;
ok($node->poll_query_until('postgres', 'SELECT count(*) = 1 FROM pg_prepared_xacts'), 'it is prepared');
sql($node, "COMMIT PREPARED 'late'");
is_sql($node, 'SELECT name FROM outbox.claim_batch()', 'late', 'its message is handed out once');
is(all_in_one_run($node), '2|2', 'each message is in one run');

$late->{run}->kill_kill;
$node->stop;
done_testing();
