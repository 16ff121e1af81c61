# pg_upgrade: the new cluster has another system identifier, so its data is a copy.  It loses nothing, enqueueing goes on, the
# workers wait and say so once, and after one adopt() all is delivered.  What was settled is not delivered again; messages that lay
# in a log of another database are not touched.
#
# The environment's oldinstall, as for core's own test, is the folder of an older server that has the extension; without it both
# clusters are of one version.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# whether there are checksums must be the same, and is not by default
my $old = worker_node('old', install_path => $ENV{oldinstall}, extra => ['--data-checksums']);
my $new = worker_node('new', start => 0, extra => ['--data-checksums']);
note('from ' . $old->pg_version . ' to ' . $new->pg_version);

database($old, 'postgres');
database($old, 'shop');
sql($old, 'CREATE DATABASE without');
sql($old, 'CREATE ROLE app LOGIN; CREATE ROLE stranger');

# A message in each state: pushed, pulled, leased, scheduled, dead, parked, prepared is not allowed by pg_upgrade itself.
sql($old, "SELECT outbox.register_hook('pushed', 'public.take')", 'shop');
sql($old, "SELECT outbox.subscribe('pulled', 'pulled.#'), outbox.subscribe('theirs', 'their.#'), outbox.grant_access('app', 'consumer')", 'shop');
is((as_role($old, 'app', "SELECT outbox.register_hook('their.#', 'public.take', subscription => 'theirs')", 'shop'))[0], 0, 'two roles have hooks');
enqueue($old, 'pushed', 1, 5, 'shop');
enqueue($old, 'their.one', 6, 6, 'shop');
enqueue($old, 'pulled.a', 11, 20, 'shop');
enqueue($old, 'unknown', 21, 21, 'shop');
eventually($old, got(), 'pushed 1, pushed 2, pushed 3, pushed 4, pushed 5, their.one 6', 'the old cluster delivers', 'shop');
eventually($old, "SELECT unhandled FROM outbox.status WHERE subscription = 'default'", '12', 'and parks what nobody wants', 'shop');
sql($old, "CREATE TABLE held AS SELECT payload::int AS nr, id, claim_token AS token FROM outbox.claim_batch(6, subscription => 'pulled', lease => '200s')", 'shop');
sql($old, 'SELECT outbox.settle(id, token) FROM held WHERE nr = 11', 'shop');
sql($old, "SELECT outbox.settle(id, token, 'dead', 'hopeless') FROM held WHERE nr = 12", 'shop');
sql($old, "SELECT outbox.settle(id, token, 'failed', 'later', retry_at => now() + interval '1 day') FROM held WHERE nr = 13", 'shop');
sql($old, "SELECT outbox.enqueue('pushed', '1000', available_at => now() + interval '1 day')", 'shop');
sql($old, "SELECT outbox.register_hook('#', 'public.take')");
reload($old, 'outbox.enabled' => 'off');
eventually($old, "SELECT count(*) FROM outbox.workers WHERE kind <> 'launcher'", '0', 'its workers are off');
enqueue($old, 'pushed', 31, 33, 'shop');
enqueue($old, 'pulled.a', 34, 34, 'shop');
enqueue($old, 'rest', 41, 43);

my $states = 'SELECT subscription, status, count(*), sum(payload::int), sum(attempts) FROM outbox.messages GROUP BY 1, 2 ORDER BY 1, 2';
my $before = sql($old, $states, 'shop');
my $counts = sql($old, 'SELECT pending, ready, leased, delivered FROM outbox.status ORDER BY subscription', 'shop');
my $newest = sql($old, 'SELECT max(position) FROM outbox.log', 'shop');
$old->stop;

# The workers of the new one must not deliver while it is being made.
my @upgrade = ('pg_upgrade', '--no-sync', '-d', $old->data_dir, '-D', $new->data_dir, '-b', $old->config_data('--bindir'),
	'-B', $new->config_data('--bindir'),
	'-s', $new->host, '-p', $old->port, '-P', $new->port, '-U', 'postgres');
chdir $PostgreSQL::Test::Utils::tmp_check;
command_ok([ @upgrade, '--check' ], 'pg_upgrade --check');
command_ok(\@upgrade, 'pg_upgrade');

$new->start;
is_sql($new, $states, $before, 'each message is in its state', 'shop');
my $told = qr/WARNING:  the messages in this database are a copy.*\n.*DETAIL:  The database is/;
eventually_log($new, qr/$told "shop"/, 0, 'the workers say that it is a copy');
eventually_log($new, qr/$told "postgres"/, 0, 'of each database');
my $offset = log_end($new);
eventually($new, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery'", '0', 'nothing is delivered');

# Enqueueing goes on, and wakes nobody.
enqueue($new, 'pushed', 51, 53, 'shop');
enqueue($new, 'pulled.a', 54, 54, 'shop');
is_sql($new, "SELECT min(position) > $newest FROM outbox.log WHERE payload IN ('51', '52', '53', '54')", 't', 'new positions lie above the old', 'shop');
is(sqlstate($new, "SELECT * FROM outbox.claim_batch(subscription => 'pulled')", 'shop'), '55000', 'claims are refused');
is_sql($new, 'SELECT count(*) FROM got', '6', 'and nothing was delivered', 'shop');

# One adopt() in each database.
is_sql($new, 'SELECT outbox.adopt()', 't', 'adopted', 'shop');
eventually($new, "SELECT string_agg(payload::text, ' ' ORDER BY payload::int) FROM got", '1 2 3 4 5 6 31 32 33 51 52 53', 'what was left and what is new is delivered, once', 'shop');
is_sql($new, "SELECT string_agg(payload::text, ' ' ORDER BY payload::int) FROM outbox.claim_batch(subscription => 'pulled')", '17 18 19 20 34 54',
	'also to those who claim', 'shop');
is_sql($new, 'SELECT outbox.settle(id, token) FROM held WHERE nr = 14', 'delivered', 'a lease of the old cluster is held', 'shop');
is_sql($new, "SELECT state, role FROM outbox.handlers ORDER BY 2", "ok|app\nok|postgres", 'hooks are those of the same roles', 'shop');
is_sql($new, 'SELECT count(*) FROM got', '0', 'the other database waits for its own', 'postgres');
sql($new, 'SELECT outbox.adopt()');
eventually($new, got(), 'rest 41, rest 42, rest 43', 'and then delivers');
is(all_in_one_run($new, 'shop'), '26|26', 'each message is in one run');
is(scalar(log_lines($new, qr/WARNING:.*are a copy/)), 2, 'it was told once in each database');
is(scalar(log_lines($new, qr/(ERROR|FATAL|PANIC):(?!.*are a copy)/, $offset)), 0, 'and there is no other complaint in the log');

# A message of a new day.
enqueue($new, 'pushed', 61, 61, 'shop');
eventually($new, "SELECT count(*) FROM got WHERE payload = '61'", '1', 'and it goes on', 'shop');

$new->stop;
done_testing();
