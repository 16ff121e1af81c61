# Shared by the scripts of this repository: who runs PostgreSQL, where it is, how the tree is built.
# Sourced, never executed. Every script works for root, who runs PostgreSQL through the unprivileged user
# "postgres", and for an ordinary user, who runs it himself and installs with sudo.

OUTBOX_TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The server of Debian's release; 15 elsewhere.
case $(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release 2>/dev/null) in
	trixie) PG_MAJOR=17 ;;
	forky) PG_MAJOR=18 ;;
	*) PG_MAJOR=15 ;;
esac
: "${PG_CONFIG:=/usr/lib/postgresql/$PG_MAJOR/bin/pg_config}"
export PG_CONFIG

say() { printf '== %s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" = 0 ]; }

# Prints the header comment of a script: its help text.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }

# The path of a server or client program.
pg_bin() { printf '%s/%s' "$("$PG_CONFIG" --bindir)" "$1"; }

# Runs a command as root, with the environment of the caller's choice in front: as_root env A=b command.
as_root() {
	if is_root; then
		"$@"
	elif have sudo; then
		sudo "$@"
	else
		die "needs root or sudo for: $*"
	fi
}

# The user that runs PostgreSQL, who may not be root.
pg_user() { if is_root; then echo postgres; else id -un; fi; }

# Runs a command as that user, in a folder that he can read.
as_pg() (
	cd /
	if is_root; then
		exec runuser -u postgres -- env HOME=/tmp "$@"
	else
		exec "$@"
	fi
)

# Makes a folder that belongs to the user that runs PostgreSQL, and prints its name.
make_workdir() {
	local dir
	dir=$(mktemp -d "/tmp/outbox-$1.XXXXXX")
	chmod 755 "$dir"
	! is_root || chown postgres: "$dir"
	echo "$dir"
}

# Copies the tree, without what a build leaves behind, to where the user that runs PostgreSQL can build it:
# the checkout itself may lie in a folder that he cannot read.
stage_tree() {
	local dir=$1
	as_pg mkdir -p "$dir"
	tar -C "$OUTBOX_TOP" --exclude=./.git --exclude='*.o' --exclude='*.bc' --exclude='*.so' \
		--exclude=node_modules --exclude=./results --exclude=./output_iso --exclude=./tmp_check -cf - . |
		as_pg tar -C "$dir" --no-same-owner -xf -
}

# Builds and installs a staged tree; warnings are errors. JIT bitcode is left out, since it only costs time here.
build_and_install() {
	local dir=$1
	as_pg make -s -C "$dir" -j"$(nproc)" with_llvm=no COPT='-Wall -Werror' "PG_CONFIG=$PG_CONFIG" all
	if [ -w "$("$PG_CONFIG" --pkglibdir)" ]; then
		make -s -C "$dir" with_llvm=no "PG_CONFIG=$PG_CONFIG" install
	else
		as_root make -s -C "$dir" with_llvm=no "PG_CONFIG=$PG_CONFIG" install
	fi
}
