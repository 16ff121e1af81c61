# Retention and everybody who looks at the database with an old snapshot, or has written and not yet
# committed: prepared transactions, pg_dump, a standby, other databases.  Each of them keeps what it
# needs, outbox.segments says who it is, and when it is gone the segment goes.  Copies that were made in
# the middle of a turn lose nothing; neither does a crash.

use strict;
use warnings;

use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('retention');
init_node($node, allows_streaming => 1);
$node->append_conf('postgresql.conf', outbox_conf(conf => "autovacuum = off\nwal_keep_size = 64MB\n"));
$node->start;
sql($node, 'CREATE EXTENSION outbox; CREATE TABLE other (i int)');
my $tempdir = PostgreSQL::Test::Utils::tempdir;

my $ring = "SELECT string_agg(state, ' ' ORDER BY segment) FROM outbox.segments WHERE segment <> 'log_kept'";
my $log = "SELECT string_agg(name, ' ' ORDER BY created_at) FROM outbox.log";
# what is past its retention: days later
my $held = "SET outbox.clock_offset = '10d'; SELECT segment, held_by FROM outbox.segments WHERE held_by IS NOT NULL";

sub put
{
	my ($name, $where, $database) = @_;
	return sql($where // $node, "SELECT outbox.enqueue('$name', '1')", $database);
}

sub deliver
{
	my ($where, $database) = @_;
	return sql($where // $node, 'SELECT count(outbox.settle(id, claim_token)) FROM outbox.claim_batch()', $database);
}

# Decides, whatever the retention; so many messages.
sub purge
{
	my ($where, $database) = @_;
	return sql($where // $node, "SELECT outbox.purge('infinity')", $database);
}

# How many segments were emptied.
sub rotated
{
	my ($where, $database) = @_;
	return sql($where // $node, 'SELECT rotated FROM outbox.maintain()', $database);
}

sub anew
{
	sql($node, 'SELECT outbox.reset()');
	put('first');
	deliver();
	return;
}

# ---- prepared transactions ----

anew();
sql($node, "BEGIN; SELECT outbox.enqueue('prepared', '1'); PREPARE TRANSACTION 'writer'");
is(purge(), '0', 'a prepared transaction that has enqueued keeps the segment');
like(sql($node, $held), qr/^log_0\|prepared transaction "writer", for \d+ seconds$/, 'the view names it');
$node->stop('immediate');
$node->start;
is(purge(), '0', 'after a crash too');
sql($node, "COMMIT PREPARED 'writer'");
is(purge(), '1', 'it is committed: the segment may go');
is(rotated(), '1', 'and goes');
is(claim_names($node), 'prepared', 'and its message is there');

anew();
my $id = put('discarded');
sql($node, "SELECT outbox.discard('$id', 'default')");
sql($node, "BEGIN; SELECT outbox.requeue('$id', 'default'); PREPARE TRANSACTION 'requeue'");
is(purge(), '0', 'a prepared requeue keeps the segment');
sql($node, "COMMIT PREPARED 'requeue'");
purge();
is(rotated(), '1', 'then it goes');
is(claim_names($node), 'discarded', 'but for what was requeued');

anew();
put('second');
sql($node, 'CREATE TABLE held AS SELECT id, claim_token FROM outbox.claim_batch()');
sql($node, "BEGIN; SELECT outbox.settle(id, claim_token) FROM held; PREPARE TRANSACTION 'settlement'");
is(purge(), '1', 'a prepared settlement does not keep it');
is_sql($node, $ring, 'condemned writing empty', 'it may go');
is(rotated(), '0', 'but is older than the decision');
like(sql($node, $held), qr/^log_0\|prepared transaction "settlement", for \d+ seconds$/, 'the view names it');
sql($node, "ROLLBACK PREPARED 'settlement'");
is(rotated(), '1', 'then it goes');
is_sql($node, 'SELECT outbox.settle(id, claim_token) FROM held', 'delivered', 'and the message can be settled');
sql($node, 'DROP TABLE held');

is(sqlstate($node, "BEGIN; SELECT outbox.purge(now()); PREPARE TRANSACTION 'x'"), '0A000', 'who has decided cannot be prepared');

# ---- a dump in progress ----

anew();
put('open');
my $reader = session($node);
$reader->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
my $snapshot = $reader->query_safe('SELECT pg_export_snapshot()');
deliver();
is(purge(), '2', 'all is delivered');
is(rotated(), '0', 'but somebody has an old snapshot');
like(sql($node, $held), qr/^log_0\|process \d+, idle in transaction, in a transaction for \d+ seconds$/, 'the view names him');
$node->command_ok([ 'pg_dump', '-Fc', "--snapshot=$snapshot", '-f', "$tempdir/old", $node->connstr('postgres') ], 'pg_dump with it');
is($reader->query_safe($log), 'first open', 'he sees the messages');
$reader->query_safe('COMMIT');
is(rotated(), '1', 'then it goes');
sql($node, 'CREATE DATABASE old');
$node->command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('old'), "$tempdir/old" ], 'pg_restore');
sql($node, 'SELECT outbox.adopt()', 'old');
my ($status, $out, $err) = $node->psql('old', 'SELECT name FROM outbox.claim_batch()');
is("$out$err", 'open', 'what was open in the dump is there, with its message');

# ---- who only reads, or works in another database ----

anew();
$reader->query_safe('BEGIN');
$reader->query_safe('SELECT count(*) FROM outbox.log');
is(purge(), '1', 'somebody has read the log, and has no snapshot any more');
is(rotated(), '0', 'he still has its lock');
like(sql($node, $held), qr/^log_0\|process \d+, idle in transaction/, 'the view names him');
$reader->query_safe('COMMIT');
is(rotated(), '1', 'then it goes');

anew();
my $elsewhere = session($node, 'old');
$elsewhere->query_safe('BEGIN; INSERT INTO other VALUES (1)');
purge();
is(rotated(), '0', 'a transaction of another database is older than the decision');
like(sql($node, $held), qr/^log_0\|process \d+, idle in transaction, .* of database "old"$/, 'the view names it');
$elsewhere->query_safe("PREPARE TRANSACTION 'elsewhere'");
is(rotated(), '0', 'it is prepared');
like(sql($node, $held), qr/^log_0\|prepared transaction "elsewhere", .* of database "old"$/, 'the view names it');
$elsewhere->query_safe("COMMIT PREPARED 'elsewhere'");
is(rotated(), '1', 'then it goes');
$elsewhere->quit;

# gone since PostgreSQL 16
if ($node->pg_version < 16)
{
	anew();
	sql($node, "ALTER SYSTEM SET vacuum_defer_cleanup_age = 20; SELECT pg_reload_conf()");
	purge();
	is(rotated(), '0', 'vacuum_defer_cleanup_age defers it');
	sql($node, 'DO $$ BEGIN FOR i IN 1..30 LOOP INSERT INTO other VALUES (i); COMMIT; END LOOP; END $$');
	is(rotated(), '1', 'by so many transactions');
	sql($node, "ALTER SYSTEM RESET vacuum_defer_cleanup_age; SELECT pg_reload_conf()");
}

# ---- a standby ----

$node->backup('backup');
sql($node, "SELECT pg_create_physical_replication_slot('standby')");
my $standby = PostgreSQL::Test::Cluster->new('retention_standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->append_conf('postgresql.conf', "primary_slot_name = 'standby'\nhot_standby_feedback = on\nwal_receiver_status_interval = 1\n");
$standby->start;
anew();
put('kept');
my $last = session($standby);
$node->wait_for_catchup($standby);
$last->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
$node->poll_query_until('postgres', "SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'standby'");
purge();
is(rotated(), '0', 'a reader on a standby with hot_standby_feedback');
is_sql($node, $held, 'log_0|replication slot "standby"', 'the view names the slot');
$node->wait_for_catchup($standby);
is_sql($standby, $ring, 'condemned writing empty', 'the view works on a standby');
is(sqlstate($standby, 'SELECT outbox.purge(now())'), '25006', 'purge() is refused there');
is($last->query_safe($log), 'first kept', 'the reader sees all of it');
$last->query_safe('COMMIT');
$last->quit;
ok($node->poll_query_until('postgres', 'SELECT rotated = 1 FROM outbox.maintain()'), 'then it goes');
anew();
put('kept');
purge();
$node->wait_for_catchup($standby);
$node->stop('immediate');
$standby->promote;
is_sql($standby, $ring, 'condemned writing empty', 'condemned, then the standby is promoted');
is(rotated($standby), '1', 'it goes there');
is(claim_names($standby), 'kept', 'but for what was moved');
$standby->stop;
$node->start;
sql($node, "SELECT pg_drop_replication_slot('standby')");

# ---- a crash in the middle ----

anew();
put('kept');
purge();
$reader = session($node);
$reader->query_safe('BEGIN');
is($reader->query_safe('SELECT rotated FROM outbox.maintain()'), '1', 'truncated, and not yet committed');
$node->stop('immediate');
$node->start;
is_sql($node, $ring, 'condemned writing empty', 'a crash undoes it');
is_sql($node, $log, 'first kept', 'all messages are there');
is(rotated(), '1', 'and again');
is_sql($node, $log, 'kept', 'what nobody needs is gone');
is_sql($node, "SELECT string_agg(state, ' ' ORDER BY state) FROM outbox.delivery", 'delivered ready', 'what is known of it is not');
$node->stop('immediate');
$node->start;
rotated();
is_sql($node, "SELECT string_agg(state, ' ' ORDER BY state) FROM outbox.delivery", 'ready', 'a crash later it is swept');
is(claim_names($node), 'kept', 'and the rest is there');

# ---- rewrites of the tables, foreign keys ----

anew();
put('kept');
purge();
sql($node, $_) for 'VACUUM FULL outbox.log_0', 'CLUSTER outbox.log_0 USING log_0_pkey', 'REINDEX TABLE outbox.log_1',
  'VACUUM FULL outbox.segment', 'REINDEX TABLE CONCURRENTLY outbox.log_kept';
is(rotated(), '1', 'a segment that was rewritten goes');
is(claim_names($node), 'kept', 'and loses nothing');

anew();
purge();
sql($node, 'CREATE TABLE stranger (id uuid REFERENCES outbox.log_0 (id))');
put('new');
($status, $out, $err) = $node->psql('postgres', 'SELECT routed, rotated FROM outbox.maintain()');
is($out, '1|0', 'a foreign key on a segment: maintain() goes on with the rest');
like($err, qr/WARNING:  settled history could not be removed: cannot truncate a table referenced in a foreign key/, 'and says so');
sql($node, 'DROP TABLE stranger');
is(rotated(), '1', 'without it the segment goes');

# ---- a copy from the middle of a turn ----

anew();
sql($node, "SELECT count(outbox.enqueue('dead', '1')) FROM generate_series(1, 3)");
sql($node, "SELECT outbox.settle_batch(claim_token, 'dead') FROM outbox.claim_batch() LIMIT 1");
purge();
rotated();
$id = put('discarded');
sql($node, "SELECT outbox.discard('$id', 'default')");
put('open');
is(purge(), '1', 'one segment is condemned, and log_kept has messages');
is_sql($node, "SELECT count(*) FROM outbox.log_kept", '4', 'so many');
put('last');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$tempdir/turn", $node->connstr('postgres') ], 'pg_dump');
my $target = outbox_node('retention_target', extension => 0);
for my $copy ([ $target, 'a cluster with lower transaction numbers' ], [ $node, 'the same cluster' ])
{
	my ($where, $what) = @$copy;

	sql($where, 'CREATE DATABASE turn');
	$where->command_ok([ 'pg_restore', '--exit-on-error', '-d', $where->connstr('turn'), "$tempdir/turn" ], "pg_restore in $what");
	is_sql($where, $ring, 'empty condemned writing', "$what: the ring is as it was", 'turn');
	is(sqlstate($where, "SELECT outbox.purge('infinity')", 'turn'), '55000', "$what: purge() is refused before adopt()");
	is(sqlstate($where, 'SELECT outbox.maintain()', 'turn'), '55000', "$what: maintain() is, too");
	put('copied', $where, 'turn');
	is_sql($where, "SELECT count(*) FROM outbox.log_2 WHERE name = 'copied'", '1', "$what: new messages go to the segment that is written", 'turn');
	sql($where, 'SELECT outbox.adopt()', 'turn');
	is_sql($where, $ring, 'empty closed writing', "$what: what was decided elsewhere is struck out", 'turn');
	is_sql($where, "SELECT outbox.requeue('$id', 'default')", '1', "$what: what was discarded can be requeued", 'turn');
	is_sql($where, "SELECT outbox.requeue_all('default')", '3', "$what: and dead letters in log_kept", 'turn');
	purge($where, 'turn');
	is(rotated($where, 'turn'), '2', "$what: the ring turns");
	is(claim_names($where, '', 'turn'), 'copied dead dead dead discarded last open', "$what: nothing is lost");
}
$target->stop;

# ---- without preloading ----

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
is_sql($node, "SELECT count(*) FROM outbox.segments WHERE held_by IS NULL", '4', 'the view in a session that has not loaded the library');
is_sql($node, "SELECT count(*) FROM outbox.status WHERE holds IS NULL", '1', 'and the status');
anew();
put('kept');
purge();
is(rotated(), '1', 'the ring turns');
is(claim_names($node), 'kept', 'and loses nothing');

$node->stop;
done_testing();
