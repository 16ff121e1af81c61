# The counters over the life of a server and of its databases: a clean restart keeps them, a crash and an immediate stop
# do not, nor does a standby that is promoted; those of a dropped database or extension are gone. And they count what
# workers do.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = worker_node('counters', streaming => 1, start => 0);
$node->append_conf('postgresql.conf', "outbox.enabled = off\n");
$node->start;
my $file = $node->data_dir . '/pg_stat/outbox.stat';
my $counted = "SELECT coalesce(subscription, '-'), enqueued, routed, claimed, delivered, settlement_refused FROM outbox.counters";

database($node, 'postgres');
database($node, 'second');
enqueue($node, 'plain', 1, 3);
enqueue($node, 'plain', 1, 5, 'second');
sql($node, 'SELECT outbox.settle_batch((SELECT claim_token FROM outbox.claim_batch(2) LIMIT 1))');
is(sqlstate($node, 'SELECT outbox.settle_batch(gen_random_uuid())'), 'OB003', 'a settlement is refused');
my $before = "-|3||||1\ndefault||3|2|2|0";
is_sql($node, $counted, $before, 'counted');
my $reset = sql($node, 'SELECT max(stats_reset) FROM outbox.counters');

# A clean restart
$node->stop;
ok(-s $file, 'a clean stop leaves a file');
$node->start;
is_sql($node, $counted, $before, 'a clean restart keeps the counters');
is_sql($node, 'SELECT max(stats_reset) FROM outbox.counters', $reset, 'and since when they count');
ok(!-e $file, 'and the file is gone');
is_sql($node, $counted, '-|5||||0', 'so it does in another database', 'second');
enqueue($node, 'plain', 4);
is_sql($node, 'SELECT enqueued FROM outbox.counters WHERE subscription IS NULL', '4', 'they go on');

# One that the server cannot read
$node->stop;
my $content = slurp_file($file);
truncate($file, length($content) - 1);
my $offset = log_end($node);
$node->start;
is_sql($node, 'SELECT count(*) FROM outbox.counters', '2', 'a file that is cut off keeps nobody from starting');
is(scalar(log_lines($node, qr{LOG:  ignoring invalid data in file "pg_stat/outbox.stat"}, $offset)), 1, 'and is mentioned');

# A reset is kept, too
sql($node, 'SELECT outbox.reset_counters()');
$node->restart;
is_sql($node, "SELECT sum(enqueued), sum(claimed), min(stats_reset) > '$reset' FROM outbox.counters", '0|0|t', 'a reset is kept');

# A crash of one backend, and of all
for my $crash ('kill -9', 'immediate')
{
	enqueue($node, 'plain', 1);
	isnt(sql($node, 'SELECT sum(enqueued) FROM outbox.counters'), '0', "$crash: counted before");
	if ($crash eq 'immediate')
	{
		$node->stop('immediate');
		ok(!-e $file, 'an immediate stop leaves no file');
		$node->start;
	}
	else
	{
		my $session = session($node);
		my $pid = $session->query_safe('SELECT pg_backend_pid()');
		kill 'KILL', $pid;
		$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $pid")
		  or die 'the server did not come back';
		$session->{run}->kill_kill;
	}
	is_sql($node, 'SELECT sum(enqueued), sum(routed) FROM outbox.counters', '0|0', "$crash: they begin at zero");
	is_sql($node, "SELECT min(stats_reset) > '$reset' FROM outbox.counters", 't', "$crash: and say so");
}

# A file of a server that has crashed since, or of another one, is none of ours
enqueue($node, 'plain', 1);
$node->stop;
$node->backup_fs_cold('cold');
my $copy = PostgreSQL::Test::Cluster->new('standby');
$copy->init_from_backup($node, 'cold', has_streaming => 1);
ok(-s $copy->data_dir . '/pg_stat/outbox.stat', 'a cold copy has the file');
$node->start;
$copy->start;
ok(!-e $copy->data_dir . '/pg_stat/outbox.stat', 'a standby removes it');
is_sql($copy, 'SELECT sum(enqueued), sum(routed) FROM outbox.counters', '0|0', 'and shows nothing of it');
is(sqlstate($copy, 'SELECT outbox.reset_counters()'), '25006', 'there is nothing to reset on a standby');
$copy->stop;
ok(!-e $copy->data_dir . '/pg_stat/outbox.stat', 'nor does it write one');
$copy->start;
$copy->promote;
enqueue($copy, 'plain', 1, 2);
is_sql($copy, 'SELECT sum(enqueued) FROM outbox.counters', '2', 'promoted it counts what it does itself');
$copy->stop;

# What workers do, in whichever process; exactly
sql($node, 'SELECT outbox.reset_counters()');
sql($node, "SELECT outbox.subscribe('pushed', 'p'), outbox.register_hook('p', 'public.take', 'pushed')");
reload($node, 'outbox.enabled' => 'on');
enqueue($node, 'p', 1, 300);
eventually($node, "SELECT delivered FROM outbox.status WHERE subscription = 'pushed'", '300', 'workers deliver');
eventually($node, "SELECT enqueued, routed, claimed, delivered FROM outbox.counters WHERE subscription IS NULL OR subscription = 'pushed'",
	"300|||\n|300|300|300", 'and count');
is_sql($node, "SELECT hook_time_ms > 0 FROM outbox.counters WHERE subscription = 'pushed'", 't', 'and take the time of hooks');

# Prepared transactions count when they are prepared
sql($node, 'SELECT outbox.reset_counters()');
sql($node, "BEGIN; SELECT outbox.enqueue('prepared', '1'); PREPARE TRANSACTION 'p'");
sql($node, "COMMIT PREPARED 'p'");
is_sql($node, 'SELECT enqueued FROM outbox.counters WHERE subscription IS NULL', '1', 'a prepared transaction is counted once');

# Those of a dropped database go, whoever served it, and those of a subscription with it
sql($node, 'DROP DATABASE second');
reload($node, 'outbox.enabled' => 'off');
sql($node, 'CREATE DATABASE third');
sql($node, 'CREATE EXTENSION outbox', 'third');
sql($node, "SELECT outbox.enqueue('a', '1')", 'third');
sql($node, 'DROP EXTENSION outbox', 'third');
sql($node, 'CREATE EXTENSION outbox', 'third');
is_sql($node, 'SELECT enqueued FROM outbox.counters', '0', 'a new installation begins at zero', 'third');
sql($node, "SELECT outbox.enqueue('a', '1')", 'third');
$node->restart;
sql($node, 'DROP DATABASE third');
sql($node, "SELECT outbox.unsubscribe('pushed', discard_pending => true)");
my $rest = sql($node, 'SELECT count(*) FROM outbox.counters');
$node->stop;
is(unpack('x4 l', slurp_file($file)), $rest, 'the file has entries of this database and its subscriptions only');
unlink $file;
$node->start;
is_sql($node, 'SELECT sum(enqueued) FROM outbox.counters', '0', 'without the file all begin at zero');

$node->stop;
done_testing();
