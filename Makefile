# Builds, installs and tests the extension with PGXS. The version is written once, in outbox.control.
#
#   make && make install         PG_CONFIG=... chooses another server
#   make installcheck            regression, isolation and TAP tests, against the server of PGHOST and PGPORT
#   make pgtap                   contract tests in pgTAP, against the same server
#   make model, bench, style     the model check, the benchmarks, the cheap checks of the sources
#
# test/run does all of it on a bare machine, with a server of its own.

EXTENSION = outbox
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" outbox.control)

MODULE_big = outbox
OBJS = \
	src/access.o \
	src/admin.o \
	src/adopt.o \
	src/catalog.o \
	src/check.o \
	src/claim.o \
	src/clock.o \
	src/constraints.o \
	src/counter_file.o \
	src/counters.o \
	src/cover.o \
	src/dead.o \
	src/dedupe.o \
	src/deliver.o \
	src/drain.o \
	src/enqueue.o \
	src/enqueue_sql.o \
	src/entries.o \
	src/envelope.o \
	src/expire.o \
	src/filing.o \
	src/floor.o \
	src/frontier.o \
	src/group.o \
	src/guard.o \
	src/handler.o \
	src/history.o \
	src/identity.o \
	src/lease.o \
	src/lease_look.o \
	src/leftovers.o \
	src/log.o \
	src/maintain.o \
	src/notice.o \
	src/outbox.o \
	src/park.o \
	src/position.o \
	src/pushers.o \
	src/recent.o \
	src/register.o \
	src/reset.o \
	src/retry.o \
	src/rights.o \
	src/rotate.o \
	src/route.o \
	src/rows.o \
	src/run.o \
	src/run_row.o \
	src/segment.o \
	src/settings.o \
	src/settle.o \
	src/skip.o \
	src/standalone.o \
	src/statement.o \
	src/status.o \
	src/subscribe.o \
	src/subscription.o \
	src/sweep.o \
	src/targets.o \
	src/topic.o \
	src/coordinator.o \
	src/delivery_worker.o \
	src/launcher.o \
	src/session.o \
	src/utility.o \
	src/wake.o \
	src/worker_state.o \
	src/workers.o \
	src/uuid.o

# Only entry points leave the module: PG_FUNCTION_INFO_V1 and PGDLLEXPORT, see src/export.h.
PG_CFLAGS = -fvisibility=hidden
PG_CPPFLAGS = -include src/export.h

# The install script is one file, or numbered parts joined in the order of their names.
SQL_PARTS := $(or $(sort $(wildcard sql/parts/*.sql)),sql/outbox.sql)
DATA_built = outbox--$(EXTVERSION).sql
DATA := $(wildcard sql/outbox--*--*.sql)

# A test is found by its name: adding one needs no change here.
REGRESS := $(patsubst test/sql/%.sql,%,$(sort $(wildcard test/sql/*.sql)))
REGRESS_OPTS = --inputdir=test --encoding=UTF8 --load-extension=outbox
ISOLATION := $(patsubst test/specs/%.spec,%,$(sort $(wildcard test/specs/iso_*.spec)))
ISOLATION_OPTS = --inputdir=test --encoding=UTF8 --load-extension=outbox
PROVE_TESTS := $(sort $(wildcard test/t/*.pl))
TAP_TESTS := $(if $(PROVE_TESTS),1)
override PROVE_FLAGS += -I test/perl
PGTAP_TESTS := $(sort $(wildcard test/pgtap/*.sql))
PGTAP_DB = outbox_pgtap
PG_PROVE = pg_prove

EXTRA_CLEAN = results output_iso tmp_check regression.diffs regression.out

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# PGXS does not follow includes: any header may matter to any file.
$(OBJS): $(wildcard src/*.h)

$(DATA_built): $(SQL_PARTS)
	cat $^ > $@

.PHONY: pgtap model bench style

pgtap:
ifneq ($(PGTAP_TESTS),)
	$(bindir)/dropdb --if-exists $(PGTAP_DB)
	$(bindir)/createdb $(PGTAP_DB)
	$(bindir)/psql -X -q -v ON_ERROR_STOP=1 -d $(PGTAP_DB) -c 'CREATE EXTENSION pgtap' -c 'CREATE EXTENSION outbox'
	PATH="$(bindir):$$PATH" $(PG_PROVE) $(PGTAP_FLAGS) -d $(PGTAP_DB) $(PGTAP_TESTS)
endif

model:
	test/model/run $(MODEL_FLAGS)

ifneq ($(wildcard bench/run),)
bench:
	bench/run $(BENCH_FLAGS)
endif

style:
	dev/style
