# Push: what a hook meets when a worker calls it, and what becomes of its message.

use strict;
use warnings;

use OutboxTest;
use WorkerTest;
use Test::More;

# Retries at once, where a message is not given its own delay.
my $node = worker_node('push', conf => "outbox.backoff_base = 1ms\noutbox.jitter = 0\n");

database($node, 'postgres');
sql($node, 'CREATE ROLE worker LOGIN; CREATE ROLE nobody;');
sql($node, "SELECT outbox.grant_access('worker', 'consumer')");
sql($node, "SELECT outbox.grant_access('worker', 'producer')");
sql($node, "SELECT outbox.subscribe('theirs', 'their.#')");

# A hook that is a statement or some, in PL/pgSQL, of the message m; registered for messages of its name.
sub hook
{
	my ($name, $body, %params) = @_;
	my $role = $params{role} // 'postgres';
	my $options = $params{options} ? ", $params{options}" : '';

	my ($status, $out, $err) = as_role($node, $role, <<~"SQL");
		CREATE FUNCTION public.hook_$name(m outbox.message) RETURNS void LANGUAGE plpgsql AS \$\$ BEGIN $body END \$\$;
		SELECT outbox.register_hook('$params{message}', 'public.hook_$name'$options);
		SQL
	die $err if $status != 0;
	return;
}

my $insert = 'INSERT INTO public.got (id, name, payload, attempts, note) VALUES (m.id, m.name, m.payload, m.attempts, %s);';

# Delivery
sql($node, "SELECT outbox.register_hook('plain', 'public.take')");
enqueue($node, 'plain', 1, 250);
eventually($node, "SELECT count(*), count(DISTINCT id), min(attempts), max(attempts) FROM got", '250|250|1|1',
	'a hook gets each message once');
eventually($node, states(), 'delivered 250', 'all are delivered');
is_sql($node, 'SELECT count(DISTINCT pid), bool_or(pid = pg_backend_pid()) FROM got', '1|f', 'by one worker');

# What the worker says of itself
is_sql($node, "SELECT kind, database, role, running, handled FROM outbox.workers WHERE kind = 'delivery'",
	'delivery|postgres|postgres|t|250', 'view workers counts them');
is_sql($node, "SELECT usename, application_name, query, state FROM pg_stat_activity WHERE backend_type = 'outbox delivery'",
	'postgres|outbox delivery|delivering messages|idle', 'pg_stat_activity says what it does');
eventually($node, "SELECT application_name, query, state FROM pg_stat_activity WHERE backend_type = 'outbox coordinator'",
	'outbox coordinator|routing messages|idle', 'so does the coordinator');
eventually($node, "SELECT DISTINCT wait_event FROM pg_stat_activity WHERE backend_type ~ '^outbox'",
	wait_name($node), 'and what they wait for');

# Its role's rights, and nothing else
hook('rights', sprintf($insert, "session_user || ' ' || current_user || ' ' || has_table_privilege('pg_authid', 'select')"),
	role => 'worker', message => 'their.rights', options => "subscription => 'theirs'");
hook('secret', 'PERFORM count(*) FROM pg_authid;', role => 'worker', message => 'their.secret',
	options => "subscription => 'theirs', max_attempts => 1");
hook('reset', 'RESET ROLE; RESET SESSION AUTHORIZATION; PERFORM count(*) FROM pg_authid;', role => 'worker', message => 'their.reset',
	options => "subscription => 'theirs', max_attempts => 1");
sql($node, "SELECT outbox.enqueue('their.' || n, '1') FROM unnest('{rights,secret,reset}'::text[]) n");
eventually($node, "SELECT note FROM got WHERE name = 'their.rights'", 'worker worker false', 'a hook runs as the role that registered it');
eventually($node, "SELECT name, last_error_message FROM outbox.dead_letters WHERE subscription = 'theirs' ORDER BY 1",
	"their.reset|permission denied for table pg_authid\ntheir.secret|permission denied for table pg_authid",
	'with its rights only, also after RESET ROLE');
is_sql($node, "SELECT string_agg(DISTINCT usename, ' ' ORDER BY usename) FROM pg_stat_activity WHERE backend_type = 'outbox delivery'",
	'postgres worker', 'each role has its worker');

# search_path
sql($node, <<~'SQL');
	CREATE SCHEMA app;
	CREATE TABLE app.seen (n integer);
	CREATE FUNCTION app.see(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO seen VALUES (1);
		PERFORM set_config('search_path', 'nowhere', false);
		PERFORM set_config('work_mem', '77MB', false);
		PERFORM set_config('my.setting', m.payload::text, false);
	END $$;
	SET search_path = app, public;
	SELECT outbox.register_hook('path.#', 'see');
	SQL
hook('settings', sprintf($insert, q{concat_ws(' ', current_setting('search_path'), current_setting('work_mem'), coalesce(current_setting('my.setting', true), ''))}),
	message => 'settings');
sql($node, "SELECT outbox.enqueue(n, '1') FROM unnest('{path.1,settings,path.2,path.3,settings}'::text[]) n");
eventually($node, 'SELECT count(*) FROM app.seen', '3', 'search_path is that of the registration, for each call');
eventually($node, "SELECT string_agg(note, ',') FROM got WHERE name = 'settings'", '"$user", public 4MB ,"$user", public 4MB ',
	'what a hook sets is put back after it');

# Causation and trace
hook('trace', sprintf($insert, "current_setting('outbox.traceparent') || ' ' || (current_setting('outbox.causation') = m.id::text)::text")
	  . "PERFORM outbox.enqueue('plain', '1000');", message => 'trace');
sql($node, q{SELECT outbox.enqueue('trace', '1', headers => '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}')});
eventually($node, "SELECT note FROM got WHERE name = 'trace'", '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01 true',
	'traceparent and causation are those of the message');
eventually($node, "SELECT count(*) FROM got WHERE payload = '1000'", '1', 'what a hook enqueues is delivered');
is_sql($node, <<~'SQL', 't|t', 'and points to where it came from');
	SELECT n.causation_id = t.id::text, n.headers->>'traceparent' = t.headers->>'traceparent'
	  FROM outbox.log n, outbox.log t WHERE n.payload = '1000' AND t.name = 'trace'
	SQL

# Errors: what is charged, how often it is called, and what is left of it
sql($node, 'CREATE SEQUENCE calls; GRANT ALL ON calls TO public');
hook('raises', "PERFORM nextval('calls'); " . sprintf($insert, 'null') . "RAISE EXCEPTION 'no luck' USING ERRCODE = 'P0042', DETAIL = 'none at all';",
	message => 'raises');
sql($node, "SELECT outbox.enqueue('raises', '1')");
eventually($node, "SELECT attempts, last_error_sqlstate, last_error_message FROM outbox.dead_letters WHERE name = 'raises'",
	'3|P0042|no luck', 'a hook that raises is called three times, then the message is dead');
is_sql($node, "SELECT last_value, (SELECT count(*) FROM got WHERE name = 'raises') FROM calls", '3|0',
	'exactly three, and nothing is left of what it did');

sql($node, "ALTER SEQUENCE calls RESTART");
hook('third', "IF nextval('calls') < 3 THEN RAISE EXCEPTION 'not yet'; END IF; " . sprintf($insert, 'null'), message => 'third',
	options => "max_attempts => 5, retry => '{1 ms}'");
sql($node, "SELECT outbox.enqueue('third', '1')");
eventually($node, "SELECT attempts FROM got WHERE name = 'third'", '3', 'one that succeeds at the third attempt');
is_sql($node, 'SELECT last_value FROM calls', '3', 'is called three times');

sql($node, "ALTER SEQUENCE calls RESTART");
hook('dead', "PERFORM nextval('calls'); RAISE EXCEPTION 'never' USING ERRCODE = 'OB010';", message => 'dead');
sql($node, "SELECT outbox.enqueue('dead', '1')");
eventually($node, "SELECT attempts, last_error_message FROM outbox.dead_letters WHERE name = 'dead'", '1|never', 'OB010: dead at once');
is_sql($node, 'SELECT last_value FROM calls', '1', 'after one call');

sql($node, "ALTER SEQUENCE calls RESTART");
hook('later', "IF nextval('calls') < 6 THEN RAISE EXCEPTION 'later' USING ERRCODE = 'OB011', DETAIL = '10 ms'; END IF; "
	  . sprintf($insert, 'null'), message => 'later');
sql($node, "SELECT outbox.enqueue('later', '1')");
eventually($node, "SELECT attempts FROM got WHERE name = 'later'", '1', 'OB011: later, uncharged');
is_sql($node, 'SELECT last_value FROM calls', '6', 'as often as it says so');

# One that fails takes nobody along.
hook('even', sprintf($insert, 'null') . "IF m.payload::integer % 2 = 0 THEN RAISE EXCEPTION 'even'; END IF;", message => 'even');
enqueue($node, 'even', 1, 40);
eventually($node, "SELECT count(*) FROM outbox.dead_letters WHERE name = 'even'", '20', 'those that fail are dead');
is_sql($node, "SELECT count(*), count(DISTINCT payload), max(attempts) FROM got WHERE name = 'even'", '20|20|1', 'their neighbours are delivered, once');

# Deferred constraints and constraint triggers are the message's own.
sql($node, <<~'SQL');
	CREATE TABLE parent (id integer PRIMARY KEY);
	CREATE TABLE child (id integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
	SQL
hook('deferred', 'INSERT INTO public.child VALUES (m.payload::integer); IF m.payload::integer < 5 THEN INSERT INTO public.parent VALUES (m.payload::integer); END IF;',
	message => 'deferred');
enqueue($node, 'deferred', 1, 6);
eventually($node, "SELECT count(*), min(last_error_sqlstate) FROM outbox.dead_letters WHERE name = 'deferred'", '2|23503',
	'a deferred constraint is checked for each message');
is_sql($node, 'SELECT count(*) FROM child', '4', 'the others are delivered');
sql($node, 'DROP TABLE child, parent');

# Temporary tables, cursors, advisory locks: a hook is in a session as any other.
hook('temporary', 'CREATE TEMP TABLE IF NOT EXISTS scratch (n integer) ON COMMIT DELETE ROWS; INSERT INTO scratch VALUES (1);'
	  . sprintf($insert, '(SELECT count(*) FROM scratch)'), message => 'temporary');
hook('dropped', 'CREATE TEMP TABLE dropped (n integer) ON COMMIT DROP; INSERT INTO dropped VALUES (1);'
	  . sprintf($insert, '(SELECT count(*) FROM dropped)'), message => 'dropped');
enqueue($node, 'temporary', 1, 3);
enqueue($node, 'dropped', 1, 3);
eventually($node, "SELECT name, count(*) FROM got WHERE name IN ('temporary', 'dropped') GROUP BY name ORDER BY name", "dropped|3\ntemporary|3",
	'temporary tables work');
is_sql($node, "SELECT max(note::integer) FROM got WHERE name = 'dropped'", '1', 'ON COMMIT DROP is each message\'s');

# A time limit
hook('slow', sprintf($insert, 'null') . ' PERFORM pg_sleep(1000); /* on purpose */', message => 'slow', options => "timeout => '100 ms', max_attempts => 2");
sql($node, "SELECT outbox.enqueue('slow', '1'); SELECT outbox.enqueue('plain', '2000');");
eventually($node, "SELECT attempts, last_error_message FROM outbox.dead_letters WHERE name = 'slow'", '2|hook timed out after 100 ms',
	'one that takes too long is stopped and charged');
eventually($node, "SELECT count(*) FROM got WHERE payload = '2000'", '1', 'what came after it is delivered');

# NOTIFY
sql($node, "SELECT outbox.subscribe('bells', 'bell.#')");
sql($node, "SELECT outbox.register_notify('bell.#', 'ring', subscription => 'bells', include_data => true)");
my $listener = session($node);
$listener->query_safe('LISTEN ring');
sql($node, "SELECT outbox.enqueue('bell.1', '{\"a\": 1}'); SELECT outbox.enqueue('bell.2', to_jsonb(repeat('x', 9000)))");
eventually($node, states('bells'), 'delivered 2', 'delivery by NOTIFY');
my $heard = $listener->query('SELECT 1');
like($heard, qr/"ring" with payload "[^\n]*"data": \{"a": 1\}[^\n]*"bell\.1"/, 'the envelope is sent');
like($heard, qr/payload "[^\n]*"bell\.2"[^\n]*"datatruncated": true/, 'a big one too');
unlike($heard, qr/xxxxx/, 'without its data');
$listener->quit;

# A function that is missing parks its messages; when it is there again they are delivered, by nobody's asking.
sql($node, 'ALTER FUNCTION take(outbox.message) RENAME TO took');
sql($node, "SELECT outbox.enqueue('plain', '3000')");
eventually($node, "SELECT status, attempts FROM outbox.messages WHERE name = 'plain' AND payload = '3000'", 'unhandled|0', 'a missing hook parks its messages, uncharged');
is_sql($node, "SELECT state FROM outbox.handlers WHERE name_pattern = 'plain'", 'broken', 'and is shown as broken');
sql($node, 'ALTER FUNCTION took(outbox.message) RENAME TO take');
eventually($node, "SELECT count(*) FROM got WHERE payload = '3000'", '1', 'when it is there again they are delivered');

# Nobody matches, later somebody does.
sql($node, "SELECT outbox.enqueue('stray', '1')");
eventually($node, "SELECT status FROM outbox.messages WHERE name = 'stray' AND subscription = 'default'", 'unhandled', 'no handler: unhandled');
sql($node, "SELECT outbox.register_hook('stray', 'public.take')");
eventually($node, "SELECT count(*) FROM got WHERE name = 'stray'", '1', 'registering one delivers it');

# What a hook leaves behind in its session is in nobody's way.
hook('leaves', "PERFORM pg_advisory_lock(4711);" . sprintf($insert, 'null'), message => 'leaves');
sql($node, "SELECT outbox.enqueue('leaves', '1')");
eventually($node, "SELECT count(*) FROM got WHERE name = 'leaves'", '1', 'a hook that takes an advisory lock');
eventually($node, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", '0', 'it is given back');
is_sql($node, "SELECT count(*) FROM outbox.workers WHERE kind = 'delivery' AND role = 'postgres'", '1', 'by a worker that is still there');
for my $left ('CREATE TEMP TABLE left_table (a int);', 'EXECUTE $e$ PREPARE left_plan AS SELECT 1 $e$;',
	'EXECUTE $e$ DECLARE left_cursor CURSOR WITH HOLD FOR SELECT 1 $e$;')
{
	my ($name) = $left =~ /(left_\w+)/;

	hook($name, $left, message => $name);
	enqueue($node, $name, 1, 3);
	eventually($node, "SELECT status, attempts, count(*) FROM outbox.messages WHERE name = '$name' AND subscription = 'default' GROUP BY 1, 2", 'delivered|1|3',
		"$name: the next message finds nothing of it");
}
# what would run at the commit is the message's own; it sleeps on purpose
hook('late', 'EXECUTE $e$ DECLARE c CURSOR WITH HOLD FOR SELECT pg_sleep(1000) /* on purpose */ $e$;', message => 'late', options => "max_attempts => 1, timeout => '100 ms'");
sql($node, "SELECT outbox.enqueue('late', '1')");
eventually($node, "SELECT last_error_sqlstate FROM outbox.dead_letters WHERE name = 'late'", '57014', 'the query of a cursor WITH HOLD has the time limit of the hook');
# a cursor of PL/Perl that is not read to its end; the rest would run at the commit, and sleeps on purpose
sql($node, 'CREATE EXTENSION plperl');
sql($node, <<~'SQL');
	CREATE FUNCTION public.pins(m outbox.message) RETURNS void LANGUAGE plperl AS $$
		my $cursor = spi_query('SELECT n, CASE WHEN n > 1 THEN pg_sleep(1000) END FROM generate_series(1, 2) n');
		spi_fetchrow($cursor);
	$$;
	SELECT outbox.register_hook('pins', 'public.pins');
	SQL
enqueue($node, 'pins', 1, 3);
eventually($node, "SELECT status, count(*) FROM outbox.messages WHERE name = 'pins' AND subscription = 'default' GROUP BY 1", 'delivered|3',
	'a cursor that a language has pinned is closed');
hook('listens', 'LISTEN something;', message => 'listens', options => 'max_attempts => 1');
sql($node, "SELECT outbox.enqueue('listens', '1')");
eventually($node, "SELECT last_error_message FROM outbox.dead_letters WHERE name = 'listens'", 'cannot execute LISTEN within a background process',
	'one that listens is refused by core: nobody would read what comes');

# As many as the setting says, changed by reload
hook('each', sprintf($insert, 'null') . 'PERFORM pg_sleep(0.01); /* on purpose: so that others get some */', message => 'each');
reload($node, 'outbox.workers' => '3', 'outbox.batch_size' => '5');
enqueue($node, 'each', 1, 200);
eventually($node, "SELECT count(*), count(DISTINCT payload), count(DISTINCT pid) FROM got WHERE name = 'each'", '200|200|3', 'three workers share the work');
reload($node, 'outbox.workers' => '0');
eventually($node, "SELECT count(*) FROM outbox.workers WHERE kind = 'delivery'", '0', 'none: they leave');
enqueue($node, 'each', 1000);
eventually($node, "SELECT status FROM outbox.messages WHERE name = 'each' AND payload = '1000' AND subscription = 'default'", 'ready', 'what comes is filed');
is_sql($node, "SELECT count(*) FROM got WHERE payload = '1000' AND name = 'each'", '0', 'and not delivered');
reload($node, 'outbox.workers' => '1');
eventually($node, "SELECT count(*) FROM got WHERE payload = '1000' AND name = 'each'", '1', 'one: delivered');

is_sql($node, 'SELECT count(*) FROM outbox.leases', '0', 'nothing stays leased');
$node->stop;
done_testing();
