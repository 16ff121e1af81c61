/*
 * worker_state.c
 *		Shared memory of the processes of outbox: which databases want one, which
 *		processes there are.
 *
 * A slot of a process is reserved by whoever registers it, taken by the process when it
 * starts and given back in its exit callback.  A reservation that no process took within
 * RESERVED_FOR has failed (no free slot, fork failed) and is free again.
 *
 * Locks: one LWLock, held for a few instructions.  Nothing waits or allocates under it.
 */
#include "worker.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#define RESERVED_FOR	(10 * USECS_PER_SEC)

WorkerState *worker_state = NULL;

static WorkerSlot *my_slot = NULL;
static DatabaseSlot *my_database = NULL;

static void give_back(int code, Datum argument);
static void note_exit(int code);
static bool somebody_leaves(void);
static int	ask_idle(WorkerKind kind, LeaveRequest request);
static bool is_free(const WorkerSlot *slot, TimestampTz now);

void
workers_request_shmem(void)
{
	RequestAddinShmemSpace(MAXALIGN(sizeof(WorkerState)));
	RequestNamedLWLockTranche("outbox workers", 1);
}

void
workers_startup_shmem(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	worker_state = ShmemInitStruct("outbox workers", sizeof(WorkerState), &found);
	if (!found)
	{
		memset(worker_state, 0, sizeof(WorkerState));
		worker_state->lock = &GetNamedLWLockTranche("outbox workers")->lock;
		worker_state->launcher = -1;
		for (int i = 0; i < DATABASES_MAX; i++)
		{
			DatabaseSlot *slot = &worker_state->databases[i];

			pg_atomic_init_u32(&slot->coordinator, PG_UINT32_MAX);
			pg_atomic_init_u32(&slot->work, 0);
			pg_atomic_init_u64(&slot->passes_begun, 0);
			pg_atomic_init_u64(&slot->passes_ended, 0);
			ConditionVariableInit(&slot->pass_ended);
		}
		for (int i = 0; i < WORKERS_MAX; i++)
		{
			WorkerSlot *slot = &worker_state->workers[i];

			pg_atomic_init_u32(&slot->busy, 0);
			pg_atomic_init_u64(&slot->idle_since, 0);
			pg_atomic_init_u64(&slot->handled, 0);
			pg_atomic_init_u64(&slot->hook_until, 0);
		}
	}
	LWLockRelease(AddinShmemInitLock);
}

const char *
worker_kind_name(WorkerKind kind)
{
	return kind == WORKER_PROBE ? "probe" : kind == WORKER_COORDINATOR ? "coordinator" : "delivery";
}

DatabaseSlot *
database_slot(Oid database, bool make)
{
	DatabaseSlot *found = NULL;
	DatabaseSlot *free_slot = NULL;

	if (worker_state == NULL)
		return NULL;
	LWLockAcquire(worker_state->lock, make ? LW_EXCLUSIVE : LW_SHARED);
	for (int i = 0; i < DATABASES_MAX && found == NULL; i++)
	{
		DatabaseSlot *slot = &worker_state->databases[i];

		if (slot->database == database)
			found = slot;
		else if (free_slot == NULL && !OidIsValid(slot->database))
			free_slot = slot;
	}
	if (found == NULL && make && free_slot != NULL)
	{
		found = free_slot;
		found->database = database;
		found->wanted = false;
		memset(found->suspenders, 0, sizeof(found->suspenders));
		found->told_copy = false;
		found->first_served_at = DT_NOEND;
		found->failures = 0;
		found->not_before = found->deadline = DT_NOBEGIN;
	}
	LWLockRelease(worker_state->lock);
	return found;
}

/* Its database was dropped, so nobody is connected to it. */
void
database_slot_free(DatabaseSlot *slot)
{
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	slot->database = InvalidOid;
	slot->wanted = false;
	memset(slot->suspenders, 0, sizeof(slot->suspenders));
	pg_atomic_write_u32(&slot->work, 0);
	LWLockRelease(worker_state->lock);
}

bool
database_suspend(DatabaseSlot *slot)
{
	bool		done = false;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < SUSPENDERS_MAX && !done; i++)
	{
		if (slot->suspenders[i] != 0)
			continue;
		slot->suspenders[i] = MyProcPid;
		done = true;
	}
	LWLockRelease(worker_state->lock);
	return done;
}

void
database_resume(DatabaseSlot *slot)
{
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < SUSPENDERS_MAX; i++)
	{
		if (slot->suspenders[i] == MyProcPid)
			slot->suspenders[i] = 0;
	}
	slot->not_before = DT_NOBEGIN;
	slot->deadline = DT_NOBEGIN;
	/* who was terminated has not failed */
	for (int i = 0; i < PUSHERS_MAX; i++)
	{
		if (worker_state->pushers[i].database == slot->database)
			worker_state->pushers[i].not_before = DT_NOBEGIN;
	}
	LWLockRelease(worker_state->lock);
	wake_launcher();
}

/* The caller holds the lock. */
bool
database_is_suspended(const DatabaseSlot *slot)
{
	for (int i = 0; i < SUSPENDERS_MAX; i++)
	{
		if (slot->suspenders[i] != 0)
			return true;
	}
	return false;
}

static bool
is_free(const WorkerSlot *slot, TimestampTz now)
{
	return !slot->used || (slot->pid == 0 && slot->registered_at + RESERVED_FOR < now);
}

/* How many there are, those included that were registered and have not started yet. */
int
workers_of(WorkerKind kind, Oid database, Oid role)
{
	int			n = 0;

	LWLockAcquire(worker_state->lock, LW_SHARED);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		if (worker_is_of(&worker_state->workers[i], kind, database, role))
			n++;
	}
	LWLockRelease(worker_state->lock);
	return n;
}

bool
worker_is_of(const WorkerSlot *slot, WorkerKind kind, Oid database, Oid role)
{
	return !is_free(slot, clock_machine()) && slot->kind == kind &&
		(!OidIsValid(database) || slot->database == database) &&
		(!OidIsValid(role) || slot->role == role);
}

/*
 * What is known of a role's workers.  Entries are never removed; where all are used, the
 * one that is taken has its back-off forgotten, which does little harm.
 */
Pusher *
pusher_of(Oid database, Oid role)
{
	Pusher	   *pusher;

	for (int i = 0; i < PUSHERS_MAX; i++)
	{
		pusher = &worker_state->pushers[i];
		if (pusher->database == database && pusher->role == role)
			return pusher;
	}
	pusher = &worker_state->pushers[worker_state->next_pusher];
	worker_state->next_pusher = (worker_state->next_pusher + 1) % PUSHERS_MAX;
	*pusher = (Pusher) {database, role, 0, DT_NOBEGIN, false};
	return pusher;
}

WorkerSlot *
worker_reserve(WorkerKind kind, Oid database, Oid role)
{
	TimestampTz now = clock_machine();
	WorkerSlot *reserved = NULL;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < WORKERS_MAX && reserved == NULL; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!is_free(slot, now))
			continue;
		reserved = slot;
		slot->used = true;
		slot->kind = kind;
		slot->database = database;
		slot->role = role;
		slot->pid = 0;
		slot->process = -1;
		slot->registered_at = now;
		slot->started_at = 0;
		slot->leave = LEAVE_NOT;
		pg_atomic_write_u32(&slot->busy, 0);
		pg_atomic_write_u64(&slot->idle_since, (uint64) now);
		pg_atomic_write_u64(&slot->handled, 0);
		pg_atomic_write_u64(&slot->hook_until, 0);
	}
	LWLockRelease(worker_state->lock);
	return reserved;
}

/*
 * Start the process of a reserved slot.  False: no free slot for background workers, now;
 * the reservation is given back.
 */
bool
worker_start(WorkerSlot *slot)
{
	static const char *const functions[] = {
		[WORKER_PROBE] = "outbox_probe_main",
		[WORKER_COORDINATOR] = "outbox_coordinator_main",
		[WORKER_DELIVERY] = "outbox_delivery_main",
	};
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = Int32GetDatum(slot - worker_state->workers);
	worker.bgw_notify_pid = MyProcPid;
	strlcpy(worker.bgw_library_name, "outbox", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, functions[slot->kind], BGW_MAXLEN);
	snprintf(worker.bgw_type, BGW_MAXLEN, "outbox %s", worker_kind_name(slot->kind));
	snprintf(worker.bgw_name, BGW_MAXLEN, "outbox %s for database %u",
			 worker_kind_name(slot->kind), slot->database);
	if (RegisterDynamicBackgroundWorker(&worker, NULL))
		return true;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	slot->used = false;
	LWLockRelease(worker_state->lock);
	return false;
}

/*
 * The exit callback is registered before the slot is taken; it is the last to run, for it
 * says that nobody of ours is connected any more.
 */
WorkerSlot *
worker_attach(Datum argument, WorkerKind kind)
{
	int			index = DatumGetInt32(argument);
	WorkerSlot *slot;

	if (worker_state == NULL || index < 0 || index >= WORKERS_MAX)
		proc_exit(0);
	slot = &worker_state->workers[index];
	on_shmem_exit(give_back, (Datum) 0);
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	if (slot->used && slot->kind == kind && slot->pid == 0)
	{
		slot->pid = MyProcPid;
		slot->process = OUTBOX_MY_PROC_NUMBER;
		slot->started_at = clock_machine();
		pg_atomic_write_u32(&slot->busy, 1);
		my_slot = slot;
	}
	LWLockRelease(worker_state->lock);
	my_database = database_slot(slot->database, false);
	if (my_slot == NULL)
		proc_exit(0);			/* came too late: the reservation was given to another */
	return slot;
}

/*
 * No free slot for a background worker: worth a log line where it has not happened for a
 * while, in whichever process.  Starts succeed and fail in turn where slots are scarce.
 */
bool
no_slot_is_news(void)
{
	TimestampTz now = clock_machine();
	bool		news;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	news = (now - worker_state->no_slot_at > USECS_PER_MINUTE);
	worker_state->no_slot_at = now;
	LWLockRelease(worker_state->lock);
	return news;
}

static void
give_back(int code, Datum argument)
{
	DatabaseSlot *database;
	int			coordinator = -1;

	if (my_slot == NULL)
		return;
	database = database_slot(my_slot->database, false);
	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	if (my_slot->kind == WORKER_COORDINATOR && database != NULL)
	{
		pg_atomic_write_u32(&database->coordinator, PG_UINT32_MAX);
		if (code != 0)
		{
			/* a failure; one after a healthy while counts as the first */
			if (clock_machine() - my_slot->started_at > USECS_PER_MINUTE)
				database->failures = 0;
			database->failures = Min(database->failures + 1, 7);
			database->not_before = clock_machine() +
				Min(USECS_PER_SEC << (database->failures - 1), USECS_PER_MINUTE);
			database->deadline = DT_NOBEGIN;
		}
		else
			database->failures = 0;
		/* another one shall take its place */
		if (my_slot->leave == LEAVE_NOW || !outbox_enabled)
			database->deadline = DT_NOBEGIN;
	}
	if (my_slot->kind == WORKER_DELIVERY && database != NULL)
	{
		note_exit(code);
		coordinator = (int) pg_atomic_read_u32(&database->coordinator);
	}
	worker_state->left_at = clock_machine();
	my_slot->used = false;
	my_slot->pid = 0;
	my_slot = NULL;
	LWLockRelease(worker_state->lock);
	if (database != NULL)
		ConditionVariableBroadcast(&database->pass_ended);
	/* who starts another one if there is still something to do */
	wake_process(coordinator);
	wake_launcher();
}

void
workers_try_again(Oid role)
{
	bool		any = false;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < PUSHERS_MAX; i++)
	{
		Pusher	   *pusher = &worker_state->pushers[i];

		if (pusher->role != role || (pusher->pause == 0 && !pusher->told_no_role))
			continue;
		pusher->not_before = DT_NOBEGIN;
		any = true;
	}
	LWLockRelease(worker_state->lock);
	if (any)
		wake_all_databases(WORK_LOOK);
}

/* A delivery worker, since these stay for a while when they are idle; else a coordinator. */
bool
workers_make_room(void)
{
	int			process = -1;
	bool		room;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	process = ask_idle(WORKER_DELIVERY, LEAVE_NOW);
	if (process < 0)
		process = ask_idle(WORKER_COORDINATOR, LEAVE_IF_IDLE);
	room = (process >= 0 || somebody_leaves());
	LWLockRelease(worker_state->lock);
	wake_process(process);
	return room;
}

/* Or has just left: core has the slot back when the postmaster has noticed. */
static bool
somebody_leaves(void)
{
	if (clock_machine() - worker_state->left_at < USECS_PER_SEC)
		return true;
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (slot->used && slot->pid != 0 && slot != my_slot && slot->leave != LEAVE_NOT)
			return true;
	}
	return false;
}

/* The number of the one that was asked, which has been idle longest; -1: none is idle. */
static int
ask_idle(WorkerKind kind, LeaveRequest request)
{
	WorkerSlot *longest = NULL;

	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!slot->used || slot->pid == 0 || slot == my_slot || slot->kind != kind ||
			pg_atomic_read_u32(&slot->busy) != 0)
			continue;
		if (longest == NULL ||
			pg_atomic_read_u64(&slot->idle_since) < pg_atomic_read_u64(&longest->idle_since))
			longest = slot;
	}
	if (longest == NULL)
		return -1;
	longest->leave = Max(longest->leave, request);
	return longest->process;
}

/* Of a delivery worker: a failure makes the next one wait. */
static void
note_exit(int code)
{
	Pusher	   *pusher = pusher_of(my_slot->database, my_slot->role);
	TimestampTz now = clock_machine();

	/* one that has got something done was well */
	if (code == 0 || pg_atomic_read_u64(&my_slot->handled) > 0 || now - my_slot->started_at > USECS_PER_MINUTE)
		pusher->pause = 0;
	if (code == 0)
		return;
	pusher->pause = Min(Max(pusher->pause * 2, USECS_PER_SEC), USECS_PER_MINUTE);
	pusher->not_before = now + pusher->pause;
}

int
workers_ask_to_leave(Oid database, Oid role)
{
	int			processes[WORKERS_MAX];
	int			n = 0;

	LWLockAcquire(worker_state->lock, LW_EXCLUSIVE);
	for (int i = 0; i < WORKERS_MAX; i++)
	{
		WorkerSlot *slot = &worker_state->workers[i];

		if (!slot->used || (OidIsValid(database) && slot->database != database) ||
			(OidIsValid(role) && slot->role != role))
			continue;
		slot->leave = LEAVE_NOW;
		processes[n++] = slot->pid != 0 ? slot->process : -1;
	}
	LWLockRelease(worker_state->lock);
	for (int i = 0; i < n; i++)
		wake_process(processes[i]);
	return n;
}

/* A hook of ours may run so long, twice its time limit; 0: none runs. */
void
worker_hook_until(TimestampTz until)
{
	if (my_slot != NULL)
		pg_atomic_write_u64(&my_slot->hook_until, (uint64) until);
}

void
worker_hook_overdue(void)
{
	uint32		coordinator;

	if (my_slot == NULL || my_database == NULL)
		return;
	(void) pg_atomic_fetch_or_u32(&my_database->work, WORK_LOOK);
	coordinator = pg_atomic_read_u32(&my_database->coordinator);
	if (coordinator != PG_UINT32_MAX)
		wake_process((int) coordinator);
	else
		wake_launcher();
}

bool
worker_is(WorkerKind kind)
{
	return my_slot != NULL && my_slot->kind == kind;
}

void
wake_process(int process)
{
	if (process >= 0 && process < MaxBackends)
		SetLatch(&ProcGlobal->allProcs[process].procLatch);
}

void
wake_launcher(void)
{
	if (worker_state != NULL)
		wake_process(worker_state->launcher);
}
