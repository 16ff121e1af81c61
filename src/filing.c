/*
 * filing.c
 *		Cutting new messages into runs.
 *
 * For each subscription the messages that match are gathered in the order of their
 * positions and then cut into runs of equal due time and budget.  What a run's ranges
 * cover is what a claim will read, with a later snapshot.  So they may cover positions
 * that nobody used, but never
 *
 *	 - a transaction that is still in progress: it will be filed when it is complete;
 *	 - a message that belongs elsewhere: to another run, to nobody, to a transaction
 *	   that has filed it itself;
 *	 - anything outside the index range in which the run was found.
 *
 * Each of them would be delivered twice, or to the wrong consumer.
 */
#include "filing.h"

#include "log.h"
#include "run.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* Messages gathered for all subscriptions before they are filed: bounds memory. */
#define GATHERED_MAX	65536
/* Runs of different due times that are open at once. */
#define OPEN_RUNS_MAX	32
/* A run interleaved with others ends at so many ranges. */
#define RANGES_MAX		32
/*
 * Consumers shall find runs of their own: so many runs while the backlog is small, and more
 * before runs get longer than that.
 */
#define RUNS_WANTED		8
#define SHORT_RUN		256
#define LONG_RUNS_WANTED 16
/* Due times in the future are rounded up, so that they share runs. */
#define DUE_ROUNDING	(100 * 1000)

typedef struct Gathered
{
	int64		position;
	TimestampTz due;
	int32		max_attempts;
	bool		apart;			/* something that belongs elsewhere lies before it */
} Gathered;

typedef struct OpenRun
{
	TimestampTz due;
	int32		max_attempts;
	int			last;			/* index of its last message */
	int32		count;
	Cover	   *cover;			/* NULL: slot is free */
} OpenRun;

typedef struct Target
{
	Subscription *subscription;
	Cover	   *left_out;		/* filed by its own transaction; or NULL */
	Gathered   *gathered;
	int			n;
	int			capacity;
	int64		last_position;	/* of the message gathered last, -1 at the start of a range */
	bool		apart;			/* something that belongs elsewhere has passed since */
	int64		filed;
	int64		wanted;			/* the claim that routes will take so many at once */
	OpenRun		open[OPEN_RUNS_MAX];
} Target;

struct Filing
{
	MemoryContext context;
	MemoryContext scratch;		/* reset for each row */
	const Frontier *frontier;
	TimestampTz now;
	RunStore   *store;
	LogReader  *reader;
	int64		seen;
	TimestampTz newest;			/* created_at of the rows seen */
	int			gathered;
	int64		origin;
	int			n_targets;
	Target	   *targets;
};

int			filing_run_least = 1;

static void gather(Filing *filing, TupleTableSlot *slot, int64 position);
static void target_add(Filing *filing, Target *target, TupleTableSlot *slot, int64 position,
					   const char *name, const char *kind);
static int	budget(Target *target, TupleTableSlot *slot, const char *name, const char *kind);
static TimestampTz due_time(Filing *filing, TupleTableSlot *slot);
static int64 filing_gap(Filing *filing, int64 lower, int64 upper, int64 bite, int64 *rows);
static int	first_running_after(const Frontier *frontier, int64 transaction);
static bool running_between(const Frontier *frontier, int64 before, int64 after);
static void file_gathered(Filing *filing, bool range_ends);
static int	length_of_runs(int messages);
static void target_file(Filing *filing, Target *target, int length);
static OpenRun *open_run_for(Filing *filing, Target *target, const Gathered *message);
static void close_run(Filing *filing, Target *target, OpenRun *open);

Filing *
filing_begin(Snapshot snapshot, List *subscriptions, const Frontier *frontier)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox filing",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	Filing	   *filing = palloc0(sizeof(Filing));
	ListCell   *cell;

	filing->context = context;
	filing->scratch = AllocSetContextCreate(context, "outbox filing row", ALLOCSET_SMALL_SIZES);
	filing->frontier = frontier;
	filing->store = runs_open();
	filing->now = clock_now();	/* after the pin: no run will be moved off its due time */
	filing->reader = log_open(snapshot);
	filing->targets = palloc0(Max(list_length(subscriptions), 1) * sizeof(Target));
	foreach(cell, subscriptions)
	{
		Target	   *target = &filing->targets[filing->n_targets++];

		/* a copy: the handlers that are read into it live as long as the filing */
		target->subscription = palloc(sizeof(Subscription));
		*target->subscription = *(Subscription *) lfirst(cell);
		target->subscription->handlers = NIL;
		if (target->subscription->mode == MODE_PUSHED)
			subscription_handlers(target->subscription, snapshot);
	}
	MemoryContextSwitchTo(caller);
	return filing;
}

void
filing_leave_out(Filing *filing, int64 subscription_id, int64 lower, int64 upper)
{
	MemoryContext caller = MemoryContextSwitchTo(filing->context);

	for (int i = 0; i < filing->n_targets; i++)
	{
		Target	   *target = &filing->targets[i];

		if (target->subscription->id != subscription_id)
			continue;
		if (target->left_out == NULL)
			target->left_out = cover_make();
		cover_add(target->left_out, lower, upper);
	}
	MemoryContextSwitchTo(caller);
}

void
filing_wanted(Filing *filing, int64 subscription_id, int64 wanted)
{
	for (int i = 0; i < filing->n_targets; i++)
	{
		if (filing->targets[i].subscription->id == subscription_id)
			filing->targets[i].wanted = wanted;
	}
}

int64
filing_seen(Filing *filing)
{
	return filing->seen;
}

TimestampTz
filing_newest(Filing *filing)
{
	return filing->newest;
}

int64
filing_count(Filing *filing, int64 subscription_id)
{
	int64		count = 0;

	for (int i = 0; i < filing->n_targets; i++)
	{
		if (subscription_id == 0 || filing->targets[i].subscription->id == subscription_id)
			count += filing->targets[i].filed;
	}
	return count;
}

void
filing_end(Filing *filing)
{
	log_close(filing->reader);
	runs_close(filing->store);
	MemoryContextDelete(filing->context);
}

/*
 * Transactions in progress are left out by not reading their ranges at all: a big one
 * that is open for long would otherwise cost every pass a walk over its invisible rows.
 * Our own rows would even be visible.
 */
int64
filing_range(Filing *filing, int64 lower, int64 upper, int64 origin, int64 bite)
{
	MemoryContext caller = MemoryContextSwitchTo(filing->context);
	const Frontier *frontier = filing->frontier;
	int64		rows = 0;
	int64		stop_at = -1;
	int64		from = lower;

	filing->origin = origin;
	for (int i = 0; i < filing->n_targets; i++)
	{
		filing->targets[i].last_position = -1;
		filing->targets[i].apart = false;
	}
	for (int i = first_running_after(frontier, position_transaction(lower) - 1);
		 i < frontier->n_running && from < upper && stop_at < 0; i++)
	{
		int64		begin = position_of_transaction(frontier->running[i]);

		if (begin > from)
			stop_at = filing_gap(filing, from, Min(begin, upper), bite, &rows);
		from = position_of_transaction(frontier->running[i] + 1);
	}
	if (from < upper && stop_at < 0)
		stop_at = filing_gap(filing, from, upper, bite, &rows);
	file_gathered(filing, true);
	filing->seen += rows;
	MemoryContextSwitchTo(caller);
	return stop_at;
}

/* A part of the range with no transaction in progress. */
static int64
filing_gap(Filing *filing, int64 lower, int64 upper, int64 bite, int64 *rows)
{
	TupleTableSlot *slot;
	int64		last_transaction = -1;

	CHECK_FOR_INTERRUPTS();
	log_range(filing->reader, lower, upper);
	while ((slot = log_next(filing->reader)) != NULL)
	{
		int64		position = log_position(slot);
		int64		transaction = position_transaction(position);

		if (bite > 0 && *rows >= bite && transaction != last_transaction)
			return transaction;
		gather(filing, slot, position);
		last_transaction = transaction;
		if ((++*rows & 1023) == 0)
			CHECK_FOR_INTERRUPTS();
		if (filing->gathered >= GATHERED_MAX)
			file_gathered(filing, false);
	}
	return -1;
}

static void
gather(Filing *filing, TupleTableSlot *slot, int64 position)
{
	MemoryContext caller = MemoryContextSwitchTo(filing->scratch);
	bool		isnull;
	char	   *name = TextDatumGetCString(slot_getattr(slot, LOG_NAME, &isnull));
	char	   *kind = TextDatumGetCString(slot_getattr(slot, LOG_KIND, &isnull));
	TimestampTz created_at = log_created_at(slot);

	filing->newest = Max(filing->newest, created_at);
	for (int i = 0; i < filing->n_targets; i++)
	{
		Target	   *target = &filing->targets[i];

		if ((target->left_out != NULL && cover_contains(target->left_out, position)) ||
			!subscription_matches(target->subscription, name, kind))
			target->apart = true;
		else
			target_add(filing, target, slot, position, name, kind);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextReset(filing->scratch);
}

static void
target_add(Filing *filing, Target *target, TupleTableSlot *slot, int64 position,
		   const char *name, const char *kind)
{
	Gathered   *message;

	if (target->n == target->capacity)
	{
		target->capacity = Max(256, target->capacity * 2);
		if (target->gathered == NULL)
			target->gathered = MemoryContextAlloc(filing->context, target->capacity * sizeof(Gathered));
		else
			target->gathered = repalloc(target->gathered, target->capacity * sizeof(Gathered));
	}
	message = &target->gathered[target->n++];
	message->position = position;
	message->due = due_time(filing, slot);
	message->max_attempts = budget(target, slot, name, kind);
	message->apart = target->apart || target->last_position < 0 ||
		running_between(filing->frontier, position_transaction(target->last_position),
						position_transaction(position));
	target->last_position = position;
	target->apart = false;
	filing->gathered++;
}

/* message, else handler, else subscription (which knows the setting) */
static int
budget(Target *target, TupleTableSlot *slot, const char *name, const char *kind)
{
	bool		isnull;
	Datum		own = slot_getattr(slot, LOG_MAX_ATTEMPTS, &isnull);
	Handler    *handler;

	if (!isnull)
		return DatumGetInt32(own);
	if (target->subscription->handlers != NIL)
	{
		int			version = DatumGetInt32(slot_getattr(slot, LOG_VERSION, &isnull));

		handler = handler_match(target->subscription, name, kind, version);
		if (handler != NULL && handler->max_attempts > 0)
			return handler->max_attempts;
	}
	return target->subscription->max_attempts;
}

static TimestampTz
due_time(Filing *filing, TupleTableSlot *slot)
{
	bool		isnull;
	TimestampTz available_at = DatumGetTimestampTz(slot_getattr(slot, LOG_AVAILABLE_AT, &isnull));

	if (isnull || available_at <= filing->now)
		return filing->now;
	if (available_at >= END_TIMESTAMP - DUE_ROUNDING)
		return available_at;
	/* later than now, so above the year 2000: no negative remainder */
	return (available_at + DUE_ROUNDING - 1) / DUE_ROUNDING * DUE_ROUNDING;
}

/* Index of the first transaction in progress above this one. */
static int
first_running_after(const Frontier *frontier, int64 transaction)
{
	int			low = 0;
	int			high = frontier->n_running;

	while (low < high)
	{
		int			middle = (low + high) / 2;

		if (frontier->running[middle] > transaction)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

/* Is a transaction in progress that lies strictly between these two? */
static bool
running_between(const Frontier *frontier, int64 before, int64 after)
{
	int			first = first_running_after(frontier, before);

	return first < frontier->n_running && frontier->running[first] < after;
}

/*
 * Runs are short while the backlog is small, so that consumers side by side find runs of
 * their own.  But the claim that routes takes what it wants at once: that much goes into
 * one run, for each run costs it a row.
 */
static void
file_gathered(Filing *filing, bool range_ends)
{
	for (int i = 0; i < filing->n_targets; i++)
	{
		Target	   *target = &filing->targets[i];
		int			rest = Max(0, target->n - target->wanted);
		int			length = outbox_run_length;
		int			least = filing_run_least;

		/* while a hook works its run is locked */
		if (target->subscription->mode == MODE_PUSHED)
			least = Min(least, outbox_batch_size);
		if (range_ends)
		{
			int			wanted = length_of_runs(rest);

			length = Min(length, Max(least, wanted));
		}
		target_file(filing, target, length);
		target->n = 0;
	}
	filing->gathered = 0;
}

static int
length_of_runs(int messages)
{
	return Max(Min((messages + RUNS_WANTED - 1) / RUNS_WANTED, SHORT_RUN), messages / LONG_RUNS_WANTED);
}

static void
target_file(Filing *filing, Target *target, int length)
{
	for (int i = 0; i < target->n; i++)
	{
		Gathered   *message = &target->gathered[i];
		OpenRun    *open = open_run_for(filing, target, message);
		Cover	   *cover = open->cover;

		if (open->count > 0 && open->last == i - 1 && !message->apart)
			cover->ranges[cover->n - 1].upper = message->position + 1;
		else
			cover_append(cover, message->position, message->position + 1);
		open->last = i;
		open->count++;
		if (open->count >= Max(length, Min(target->wanted, outbox_run_length)))
			close_run(filing, target, open);
	}
	for (int i = 0; i < OPEN_RUNS_MAX; i++)
		close_run(filing, target, &target->open[i]);
	target->filed += target->n;
}

/* The open run with this due time and budget; makes room where there are too many. */
static OpenRun *
open_run_for(Filing *filing, Target *target, const Gathered *message)
{
	OpenRun    *oldest = &target->open[0];

	for (int i = 0; i < OPEN_RUNS_MAX; i++)
	{
		OpenRun    *open = &target->open[i];

		if (open->cover != NULL && open->due == message->due &&
			open->max_attempts == message->max_attempts)
		{
			if (open->cover->n < RANGES_MAX)
				return open;
			oldest = open;
			break;
		}
		if (oldest->cover != NULL && (open->cover == NULL || open->last < oldest->last))
			oldest = open;
	}
	close_run(filing, target, oldest);
	oldest->due = message->due;
	oldest->max_attempts = message->max_attempts;
	oldest->last = -1;
	oldest->count = 0;
	oldest->cover = cover_make();
	return oldest;
}

static void
close_run(Filing *filing, Target *target, OpenRun *open)
{
	Run			run = {0};
	MemoryContext caller;

	if (open->cover == NULL)
		return;
	target->wanted = Max(0, target->wanted - open->count);
	run.subscription_id = target->subscription->id;
	run.origin = filing->origin;
	run.available_at = open->due;
	run.message_count = open->count;
	run.max_attempts = open->max_attempts;
	run.positions = open->cover;
	caller = MemoryContextSwitchTo(filing->scratch);
	run_file(filing->store, &run);
	MemoryContextSwitchTo(caller);
	MemoryContextReset(filing->scratch);
	pfree(open->cover->ranges);
	pfree(open->cover);
	open->cover = NULL;
}
