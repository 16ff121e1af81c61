# Databases in other encodings than UTF-8: what can be stored comes back as it was, through enqueue,
# claim, hook, NOTIFY and error texts, whatever the client's encoding; what cannot be is refused
# cleanly, and the session goes on.

use strict;
use warnings;
use utf8;

use Encode;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = outbox_node('encodings', extension => 0);

sql($node, "CREATE DATABASE latin1 ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0", 'postgres');
sql($node, "CREATE DATABASE sql_ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0", 'postgres');
sql($node, "CREATE DATABASE utf8 ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0", 'postgres');

# A statement in the client's encoding; what comes back, decoded.
sub in_encoding
{
	my ($database, $client, $statement) = @_;
	my $perl = { UTF8 => 'UTF-8', LATIN1 => 'ISO-8859-1', LATIN2 => 'ISO-8859-2', SQL_ASCII => 'UTF-8' }->{$client};
	local $ENV{PGCLIENTENCODING} = $client;

	return decode($perl, sql($node, encode($perl, $statement), $database));
}

sub state_in_encoding
{
	my ($database, $client, $statement) = @_;
	local $ENV{PGCLIENTENCODING} = $client;

	return sqlstate($node, encode('UTF-8', $statement), $database);
}

for my $database ('latin1', 'sql_ascii', 'utf8')
{
	sql($node, <<'SQL', $database);
CREATE EXTENSION outbox;
CREATE TABLE seen (name text, payload jsonb);
CREATE FUNCTION hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF m.payload ->> 'fail' IS NOT NULL THEN
		RAISE EXCEPTION '%', m.payload ->> 'fail' USING DETAIL = m.name;
	END IF;
	INSERT INTO seen VALUES (m.name, m.payload);
END
$$;
SELECT outbox.subscribe('pushed', '#', from_earliest => false);
SELECT outbox.register_hook('#', 'hook', 'pushed');
SQL

	# é and ß in everything that is text.
	in_encoding($database, 'UTF8', <<'SQL');
SELECT outbox.enqueue('Bestellung.größe', '{"straße": "café", "list": ["é", "ß"]}', headers => '{"x-é": "ü"}',
	aggregate_type => 'Tür', aggregate_id => 'ä1', tenant_id => 'ö', owner_id => 'ë', correlation_id => 'ï',
	dedupe_key => 'schlüssel', ordering_key => 'ñ')
SQL
	my $all = "name || ' ' || (payload ->> 'straße') || ' ' || (payload -> 'list')::text || ' ' || headers::text || ' ' ||
		aggregate_type || aggregate_id || tenant_id || owner_id || correlation_id || dedupe_key || ordering_key";
	my $expected = 'Bestellung.größe café ["é", "ß"] {"x-é": "ü"} Türä1öëïschlüsselñ';

	is(in_encoding($database, 'UTF8', "SELECT $all FROM outbox.claim_batch(worker => 'wörker')"), $expected, "$database: claimed");
	is(in_encoding($database, 'UTF8', 'SELECT worker FROM outbox.leases'), 'wörker', "$database: the worker's name");
	is(in_encoding($database, 'UTF8', "SELECT $all FROM outbox.messages WHERE subscription = 'default'"), $expected,
		"$database: in the view");
	is(in_encoding($database, 'UTF8', "SELECT outbox.enqueue('Bestellung.größe', '1', dedupe_key => 'schlüssel') = id FROM outbox.log"),
		't', "$database: a dedupe key");
	is(in_encoding($database, 'UTF8', <<'SQL'), 'created|1', "$database: names and patterns of subscriptions");
SELECT outbox.subscribe('größen', '*.größe'), (SELECT count(*) FROM outbox.claim_batch(subscription => 'größen'))
SQL

	# Through a hook, and the error text of one.
	in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('fällt', '{"fail": "Fehler: schön größer"}', max_attempts => 1)});
	sql($node, 'CALL outbox.drain()', $database);
	is(in_encoding($database, 'UTF8', "SELECT name, payload ->> 'straße' FROM seen"), 'Bestellung.größe|café', "$database: the hook");
	is(in_encoding($database, 'UTF8', 'SELECT last_error_message, last_error ->> $$detail$$ FROM outbox.dead_letters'),
		'Fehler: schön größer|fällt', "$database: the error of a hook");
	is(in_encoding($database, 'UTF8', "SELECT outbox.requeue_all('pushed', error_like => '%schön%')"), '1', "$database: found by its error");

	# As a notification.
	my ($status, $out, $err);
	sql($node, "SELECT outbox.subscribe('news', 'news.#', from_earliest => false)", $database);
	in_encoding($database, 'UTF8', "SELECT outbox.register_notify('news.#', 'kanäle', 'news', include_data => true)");
	in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('news.é', '"grün"')});
	{
		local $ENV{PGCLIENTENCODING} = 'UTF8';
		($status, $out, $err) = $node->psql($database, encode('UTF-8', "LISTEN kanäle; CALL outbox.drain()"));
	}
	like(decode('UTF-8', $out), qr/"kanäle" with payload .*"data": "grün".*"type": "news\.é"/, "$database: a notification") or diag($err);

	# What cannot be stored: refused, with nothing left behind, and the session goes on.
	my $log = sql($node, 'SELECT count(*) FROM outbox.log', $database);
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('x', '"\u0000"')}), '22P05', "$database: NUL in the payload");
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('x', '{"\u0000": 1}')}), '22P05', "$database: NUL in a key");
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('x', '1', headers => '{"a": "\u0000"}')}), '22P05',
		"$database: NUL in the headers");
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue_batch('x', '["ok", "\u0000"]')}), '22P05', "$database: NUL in a batch");
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('x', '"\ud83d"')}), '22P02', "$database: half a pair");
	is(state_in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('x', '"\ude00"')}), '22P02', "$database: the other half");
	is_sql($node, <<'SQL', "t\nafter", "$database: the session goes on", $database);
DO $$ BEGIN PERFORM outbox.enqueue('x', '"\u0000"'); EXCEPTION WHEN OTHERS THEN NULL; END $$;
SELECT outbox.enqueue('after', '1') IS NOT NULL;
SELECT name FROM outbox.log ORDER BY created_at DESC LIMIT 1;
SQL
	is_sql($node, 'SELECT count(*) FROM outbox.log', $log + 1, "$database: nothing of it was stored", $database);

	# A backslash that is text stays text.
	in_encoding($database, 'UTF8', q{SELECT outbox.enqueue('backslash', '"\\\\u0000 \\\\ud83d \\\\n"')});
	is(in_encoding($database, 'UTF8', q{SELECT payload #>> '{}' FROM outbox.log WHERE name = 'backslash'}), q{\u0000 \ud83d \n},
		"$database: backslashes that are text");
}

# Clients in another encoding than the database's.
is(in_encoding('latin1', 'LATIN1', q{SELECT name FROM outbox.log WHERE name = 'Bestellung.größe'}), 'Bestellung.größe',
	'latin1: a client in LATIN1');
in_encoding('utf8', 'LATIN2', q{SELECT outbox.enqueue('latin2.ž', '"ő"')});
is(in_encoding('utf8', 'LATIN2', q{SELECT name, payload #>> '{}' FROM outbox.claim_batch() WHERE name LIKE 'latin2%'}), 'latin2.ž|ő',
	'utf8: a client in LATIN2');
is(state_in_encoding('utf8', 'LATIN1', q{SELECT name FROM outbox.log WHERE name LIKE 'latin2%'}), '22P05',
	'utf8: what the client cannot show is refused to it');

# An emoji: not in LATIN1, neither as it is nor escaped; bytes in SQL_ASCII; four bytes in UTF-8.
is(state_in_encoding('latin1', 'UTF8', q{SELECT outbox.enqueue('x', '"😀"')}), '22P05', 'latin1: an emoji in the payload');
is(state_in_encoding('latin1', 'UTF8', q{SELECT outbox.enqueue('😀', '1')}), '22P05', 'latin1: an emoji in the name');
is(state_in_encoding('latin1', 'UTF8', q{SELECT outbox.enqueue('x', '"\ud83d\ude00"')}), '22P05', 'latin1: an emoji escaped');
is(state_in_encoding('sql_ascii', 'SQL_ASCII', q{SELECT outbox.enqueue('x', '"\u00e9"')}), $node->pg_version < 16 ? '0A000' : '22P05', 'sql_ascii: an escaped letter');
for my $database ('sql_ascii', 'utf8')
{
	my $text = "😀 e\x{301} \x{5e9}\x{5dc}\x{5d5}\x{5dd} \x{1d11e}";

	in_encoding($database, $database eq 'utf8' ? 'UTF8' : 'SQL_ASCII', qq{SELECT outbox.enqueue('text', '"$text"')});
	is(in_encoding($database, $database eq 'utf8' ? 'UTF8' : 'SQL_ASCII', q{SELECT payload #>> '{}' FROM outbox.log WHERE name = 'text'}),
		$text, "$database: emoji, combining marks, right to left, four bytes");
}
in_encoding('utf8', 'UTF8', q{SELECT outbox.enqueue('pair', '"\ud83d\ude00"')});
is(in_encoding('utf8', 'UTF8', q{SELECT payload #>> '{}' FROM outbox.log WHERE name = 'pair'}), '😀', 'utf8: an escaped pair');

# A name is measured in bytes, and not cut in the middle of a character.
is(state_in_encoding('utf8', 'UTF8', q{SELECT outbox.enqueue(repeat('é', 127), '1')}), '00000', 'utf8: 254 bytes of name');
is(state_in_encoding('utf8', 'UTF8', q{SELECT outbox.enqueue(repeat('é', 128), '1')}), '22023', 'utf8: 256 are too many');
is(state_in_encoding('latin1', 'UTF8', q{SELECT outbox.enqueue(repeat('é', 255), '1')}), '00000', 'latin1: 255 bytes of name');

# The server has written no surprise.
unlike(slurp_file($node->logfile), qr/PANIC|FATAL|TRAP|server process .* was terminated/, 'nothing worse in the log');

# Settings that come with the connection are in no encoding that anybody has checked.
for my $setting ('causation', 'traceparent')
{
	local $ENV{PGOPTIONS} = "-c outbox.$setting=a\xff";

	is(sqlstate($node, "SELECT outbox.enqueue('bad', '1')", 'utf8'), '22021', "outbox.$setting: bytes that are no text are refused");
	like(sql($node, "SELECT outbox.enqueue('good', '1')", 'latin1'), qr/^[0-9a-f-]{36}$/, "outbox.$setting: where they are text they are taken");
}

# The install script is read in the encoding of the database.
sql($node, "CREATE DATABASE euc_jp ENCODING 'EUC_JP' LOCALE 'C' TEMPLATE template0", 'postgres');
sql($node, 'CREATE EXTENSION outbox', 'euc_jp');
like(sql($node, "SELECT outbox.enqueue('m', '1')", 'euc_jp'), qr/^[0-9a-f-]{36}$/, 'EUC_JP: installed, and in use');

$node->stop;
done_testing();
