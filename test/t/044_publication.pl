# A publication FOR ALL TABLES contains our tables, and a subscriber that has the extension gets their rows: a copy like any other. It
# delivers nothing until adopt(), its workers say so once; after the original is gone and adopt() was called it goes on where the
# replicated state was. Publishing costs the original nothing but WAL: enqueue, routing, claims and hooks go on.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $publisher = worker_node('publisher', streaming => 'logical');
my $subscriber = worker_node('subscriber', streaming => 'logical');

database($publisher, 'postgres');
sql($publisher, "SELECT outbox.register_hook('pushed', 'public.take'), outbox.subscribe('pulled', 'pulled')");
enqueue($publisher, $_, 1, 20) for 'pushed', 'pulled';
eventually($publisher, 'SELECT count(*) FROM got', '20', 'the publisher delivers');
sql($publisher, "CREATE TABLE held AS SELECT payload::int AS nr, id, claim_token AS token FROM outbox.claim_batch(5, subscription => 'pulled', lease => '300 s')");

sql($publisher, 'CREATE PUBLICATION everything FOR ALL TABLES');
is_sql($publisher, "SELECT count(*) > 5 FROM pg_publication_tables WHERE schemaname = 'outbox'", 't', 'FOR ALL TABLES contains our tables');
enqueue($publisher, $_, 21, 30) for 'pushed', 'pulled';
eventually($publisher, 'SELECT count(*) FROM got', '30', 'which does not disturb the publisher');

# The subscriber has the same schema, and hooks of the same names.
database($subscriber, 'postgres');
sql($subscriber, 'CREATE TABLE held (nr int, id uuid, token uuid)');
my $offset = log_end($subscriber);
sql($subscriber, "CREATE SUBSCRIPTION copy CONNECTION '" . $publisher->connstr . " dbname=postgres' PUBLICATION everything");
eventually($subscriber, "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", '0', 'all tables are copied');
$publisher->wait_for_catchup('copy');
my $states = 'SELECT subscription, status, count(*), sum(payload::int) FROM outbox.messages GROUP BY 1, 2 ORDER BY 1, 2';
my $settled = "SELECT count(*) FROM outbox.messages WHERE subscription = 'default' AND status = 'delivered' AND name = 'pushed'";

# Changes follow: what is enqueued, routed, claimed, settled, delivered by hooks.
sql($publisher, 'SELECT outbox.settle(id, token) FROM held WHERE nr <= 2');
enqueue($publisher, $_, 31, 40) for 'pushed', 'pulled';
eventually($publisher, $settled, '40', 'the publisher delivers more');
eventually($publisher, "SELECT pending FROM outbox.status WHERE subscription = 'pulled'", '0', 'and routes it');
$publisher->wait_for_catchup('copy');
is(sql($subscriber, $states), sql($publisher, $states), 'the subscriber has each message in its state');
eventually_log($subscriber, qr/WARNING:  the messages in this database are a copy/, $offset, 'the subscriber\'s workers say that it is a copy');
is(sqlstate($subscriber, "SELECT * FROM outbox.claim_batch(subscription => 'pulled')"), '55000', 'it delivers nothing to those who claim');
is_sql($subscriber, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox delivery'", '0', 'and calls no hooks');

# The publisher is given up.
sql($publisher, 'SELECT outbox.pause(name) FROM outbox.subscriptions');
enqueue($publisher, 'pushed', 41, 43);
enqueue($publisher, 'pulled', 41, 43);
$publisher->wait_for_catchup('copy');
$publisher->stop;
sql($subscriber, "ALTER SUBSCRIPTION copy DISABLE");
sql($subscriber, "ALTER SUBSCRIPTION copy SET (slot_name = NONE)");
sql($subscriber, 'DROP SUBSCRIPTION copy');
is_sql($subscriber, 'SELECT outbox.adopt()', 't', 'the subscriber adopts the data');
sql($subscriber, 'SELECT outbox.resume(name) FROM outbox.subscriptions');
enqueue($subscriber, 'pushed', 51, 51);
enqueue($subscriber, 'pulled', 51, 51);
eventually($subscriber, "SELECT string_agg(payload::text, ' ' ORDER BY payload::int) FROM got WHERE payload::int > 40", '41 42 43 51', 'and delivers what was left, and what comes');
is_sql($subscriber, "SELECT string_agg(payload::text, ' ' ORDER BY payload::int) FROM outbox.claim_batch(1000, subscription => 'pulled')",
	join(' ', 6 .. 43, 51), 'to those who claim as well');
is_sql($subscriber, 'SELECT outbox.settle(id, token) FROM held WHERE nr = 3', 'delivered', 'a lease is held');
is_sql($subscriber, 'SELECT count(*), count(DISTINCT id) FROM got', '44|44', 'nothing twice');
is_sql($subscriber, 'SELECT min(position) FILTER (WHERE payload = \'51\') > max(position) FILTER (WHERE payload <> \'51\') FROM outbox.log', 't', 'new positions lie above the old');
is(scalar(log_lines($subscriber, qr/WARNING:.*are a copy/, $offset)), 1, 'it was told once');

$subscriber->stop;
done_testing();
