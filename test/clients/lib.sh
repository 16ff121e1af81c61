# Shared by the tests of clients: a database of the test's own on the server of the PG* environment, a server of its
# own where workers have to run, and a work folder. Sourced, never executed. What is made is removed at the end.

CLIENT_CLUSTERS=()
CLIENT_TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

skip() { printf 'skipped: %s\n' "$*"; exit 0; }
die() { printf '%s: %s\n' "$0" "$*" >&2; exit 1; }

# new_database NAME: makes it with the extension, and makes it the one that PGDATABASE names.
new_database() {
	CLIENT_DATABASE="outbox_client_${1}_$$"
	psql -X -q -v ON_ERROR_STOP=1 -d "${PGDATABASE:-postgres}" -c "create database $CLIENT_DATABASE"
	CLIENT_MAINTENANCE=${PGDATABASE:-postgres}
	export PGDATABASE=$CLIENT_DATABASE
	PGOPTIONS='-c client_min_messages=warning' psql -X -q -v ON_ERROR_STOP=1 -c 'create extension outbox'
}

drop_database() {
	[ -n "${CLIENT_DATABASE:-}" ] || return 0
	PGOPTIONS='-c client_min_messages=warning' psql -X -q -d "$CLIENT_MAINTENANCE" \
		-c "drop database if exists $CLIENT_DATABASE with (force)" || true
	export PGDATABASE=$CLIENT_MAINTENANCE
	CLIENT_DATABASE=
}

# own_cluster [OPTION...] ['name = value'...]: a server with workers, whose PG* environment replaces the one there was.
own_cluster() {
	local dir env
	dir=$(mktemp -d /tmp/outbox-client-cluster.XXXXXX)
	CLIENT_CLUSTERS+=("$dir")
	chmod 755 "$dir"
	env=$("$CLIENT_TOP/dev/cluster" start "$dir" --no-fsync --tcp "$@")
	eval "$env"
	export PGHOST=127.0.0.1
}

# new_folder: makes one, and sets WORK.
new_folder() {
	WORK=$(mktemp -d /tmp/outbox-client.XXXXXX)
}

clean_up() {
	local status=$? dir
	drop_database
	for dir in "${CLIENT_CLUSTERS[@]}"; do
		[ $status = 0 ] || tail -n 30 "$dir/log"
		"$CLIENT_TOP/dev/cluster" stop "$dir" || true
		rm -rf "$dir"
	done
	[ -z "${WORK:-}" ] || rm -rf "$WORK"
	exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# Which Python has psycopg2: Debian's, or the one that comes first.
find_python() {
	local python
	for python in python3 /usr/bin/python3; do
		if "$python" -c 'import psycopg2' 2>/dev/null; then
			echo "$python"
			return
		fi
	done
	return 1
}
