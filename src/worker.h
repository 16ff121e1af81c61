/*
 * worker.h
 *		What the processes of outbox share: launcher, coordinators, delivery workers.
 *
 * launcher.c		 one process; keeps the wanted set of coordinators running
 * coordinator.c	 one for a database that has something to do: routes, expires, wakes
 * pushers.c		 its part that starts delivery workers and watches over them
 * history.c		 what they do about settled messages
 * delivery_worker.c calls hooks, connected as the role that registered them
 * worker_state.c	 the shared memory below
 * standalone.c		 all of it in one process, without preloading
 * session.c		 the frame of each process: settings, transactions, recovery
 * wake.c			 who is told what, and when; databases announced
 * utility.c		 DROP DATABASE and the like, while workers run
 */
#ifndef OUTBOX_WORKER_H
#define OUTBOX_WORKER_H

#include "outbox.h"

#include "port/atomics.h"
#include "postmaster/bgworker.h"
#include "storage/condition_variable.h"
#include "storage/lwlock.h"

#define DATABASES_MAX	256		/* that have the extension, in one cluster */
#define WORKERS_MAX		128
#define SUSPENDERS_MAX	8		/* of a database at once; copies are made side by side */
#define PROBES_MAX		16
#define PUSHERS_MAX		256

typedef enum WorkerKind
{
	WORKER_PROBE,
	WORKER_COORDINATOR,
	WORKER_DELIVERY
} WorkerKind;

/* asked of a process */
typedef enum LeaveRequest
{
	LEAVE_NOT,
	LEAVE_IF_IDLE,				/* another database waits for a coordinator */
	LEAVE_NOW					/* after the turn; another one may follow */
} LeaveRequest;

/*
 * A database that has, or may have, the extension.  All fields are protected by the lock,
 * but for the atomics.  A slot is given to another database only when its own was dropped,
 * and then nobody is connected to it: so a backend may keep the address of its own.
 */
typedef struct DatabaseSlot
{
	Oid			database;		/* InvalidOid: free */
	bool		wanted;			/* the extension is there, as far as we know */
	/* these backends want nobody to be connected; 0: free */
	pid_t		suspenders[SUSPENDERS_MAX];
	bool		told_copy;		/* the log has it that the data is a copy */
	TimestampTz first_served_at;
	int			failures;		/* of coordinators, in a row */
	TimestampTz not_before;		/* back-off */
	TimestampTz deadline;		/* nothing to do before, as the last coordinator left it */
	/* number of the coordinator's process, -1: none.  Read without the lock to wake it */
	pg_atomic_uint32 coordinator;
	/* something was committed since the last pass began: WORK_LOOK, WORK_ENQUEUED */
	pg_atomic_uint32 work;
	/* a pass that began after a request has ended: what was committed before it is filed */
	pg_atomic_uint64 passes_begun;
	pg_atomic_uint64 passes_ended;
	ConditionVariable pass_ended;
} DatabaseSlot;

/* A process of ours.  Protected by the lock, but for the atomics, which it writes itself. */
typedef struct WorkerSlot
{
	bool		used;
	WorkerKind	kind;
	Oid			database;
	Oid			role;			/* delivery workers */
	pid_t		pid;			/* 0: registered, not yet there */
	int			process;		/* its number, to set its latch */
	TimestampTz registered_at;
	TimestampTz started_at;
	LeaveRequest leave;
	pg_atomic_uint32 busy;		/* not waiting for something to do */
	pg_atomic_uint64 idle_since;	/* last time there was something to do */
	pg_atomic_uint64 handled;	/* messages */
	/* a hook that is not back by then has caught its cancels: the process is ended */
	pg_atomic_uint64 hook_until;
} WorkerSlot;

/* The workers of a role in a database, also when there are none.  Protected by the lock. */
typedef struct Pusher
{
	Oid			database;
	Oid			role;
	int64		pause;			/* after the last failure; 0: the last one ended well */
	TimestampTz not_before;
	bool		told_no_role;
} Pusher;

typedef struct WorkerState
{
	LWLock	   *lock;
	int			launcher;		/* its number, -1: none; read without the lock to wake it */
	pid_t		launcher_pid;
	TimestampTz no_slot_at;		/* when a process could last not be started for want of a slot */
	TimestampTz left_at;		/* when one of ours last ended */
	/* new databases that may have the extension; more: all are looked at */
	Oid			probes[PROBES_MAX];
	int			n_probes;
	DatabaseSlot databases[DATABASES_MAX];
	WorkerSlot	workers[WORKERS_MAX];
	Pusher		pushers[PUSHERS_MAX];
	int			next_pusher;	/* that is given to others, where all are used */
} WorkerState;

/* NULL without preloading */
extern WorkerState *worker_state;

/* worker_state.c */
extern void workers_request_shmem(void);
extern void workers_startup_shmem(void);
/* the slot of a database; made if there is none and "make"; NULL: none, or no room */
extern DatabaseSlot *database_slot(Oid database, bool make);
extern void database_slot_free(DatabaseSlot *slot);
/* this backend wants nobody of ours to be connected; false: too many do */
extern bool database_suspend(DatabaseSlot *slot);
extern void database_resume(DatabaseSlot *slot);
extern bool database_is_suspended(const DatabaseSlot *slot);
extern WorkerSlot *worker_reserve(WorkerKind kind, Oid database, Oid role);
extern bool worker_start(WorkerSlot *slot);
extern bool no_slot_is_news(void);
/* in the process itself: takes its slot, and gives it back at its end */
extern WorkerSlot *worker_attach(Datum argument, WorkerKind kind);
extern void worker_hook_until(TimestampTz until);
/* the hook has met its time limit: the coordinator shall look how it takes it.  In a signal handler */
extern void worker_hook_overdue(void);
/* is this process one of ours, of that kind? */
extern bool worker_is(WorkerKind kind);
/* wake a process by its number; whoever has it by now does not mind */
extern void wake_process(int process);
extern void wake_launcher(void);
extern int	workers_of(WorkerKind kind, Oid database, Oid role);
/* those of a role that failed need not wait any longer */
extern void workers_try_again(Oid role);
/* no slot is free: ask a process that is idle to leave; false: none is, and none is about to leave */
extern bool workers_make_room(void);
#define ROOM_PAUSE		(50 * 1000)		/* until it has left */
/* these two: the caller holds the lock, exclusively for the second, which makes what is not there */
extern bool worker_is_of(const WorkerSlot *slot, WorkerKind kind, Oid database, Oid role);
extern Pusher *pusher_of(Oid database, Oid role);
/* those of a database, or of a role, shall leave after their turn; returns how many there are */
extern int	workers_ask_to_leave(Oid database, Oid role);
extern const char *worker_kind_name(WorkerKind kind);

/* session.c */
extern void session_process_start(const char *what, Oid database, Oid role);
extern void session_transaction_begin(const char *activity);
extern void session_transaction_commit(void);
/* the rights of a superuser are left behind for the transaction */
extern void session_become_owner(void);
/* after an error was caught: reports it and cleans up; the caller waits before it goes on */
extern void session_recover(void);
extern bool session_extension_lock(void);
/* the same in the middle of a delivery: waits, and ends the process where it is gone */
extern void session_extension_hold(void);
/* true: something woke us; false: the time has passed */
extern bool session_wait(int64 usecs);
/* after an error: nobody's wake-up shortens it; true: the process is asked to leave */
extern bool session_pause(const WorkerSlot *slot, int64 usecs);
extern void session_reload(void);
extern bool worker_should_leave(const WorkerSlot *slot);
extern bool worker_should_make_room(const WorkerSlot *slot);

/* wake.c */
extern void wake_register_callbacks(void);
/* why: bits of DatabaseSlot.work */
#define WORK_LOOK		1		/* something is ready, due or leased that was not */
#define WORK_ASKED		4		/* a claim waits for a pass */
#define WORK_READY		8		/* something has become ready other than by routing */
#define WORK_ENQUEUED	2		/* messages were enqueued here, not restored */
#define WORK_ROLES		16		/* a role was renamed */
/* this transaction has made something that a coordinator should look at */
extern void wake_at_commit(uint32 why);
extern void wake_database(Oid database, uint32 why);
extern void wake_all_databases(uint32 why);
/* whether a NOTIFY will find room in the server's queue */
extern bool notifications_have_room(void);
/* whether there are delivery workers for hooks that are registered */
extern bool workers_serve(void);
/* whether a coordinator runs in this database */
extern bool coordinator_runs(void);
/* a database that may have the extension: the launcher will look */
extern void request_probe(Oid database);
/* the launcher's part: the next of them; false: none.  InvalidOid: look at all */
extern bool next_probe_request(Oid *database);
/* a coordinator runs: have it route, and wait a moment until it has; false: none, or too slow */
extern bool wake_and_wait_for_pass(int wait_ms);

/* history.c: outside of a transaction, which it begins and ends where it is due; when it is due again */
extern TimestampTz history_turn(TimestampTz due);

/* lease_look.c: when the coordinator looks for the leases that end first, and how far */
typedef struct LeaseLook
{
	bool		now;			/* in this turn */
	TimestampTz until;			/* so far, by the clock of leases */
	bool		owed;			/* commits have come since the last one, or it was not to the end */
	TimestampTz turn;			/* when this turn began, by the machine's clock */
	TimestampTz looked_at;		/* the turn that looked last */
	TimestampTz asked_at;		/* the last turn for which a commit asked */
} LeaseLook;
/* a turn begins; returns when there has to be another one for a look that is owed */
extern TimestampTz lease_look_plan(LeaseLook *look, TimestampTz turn, bool asked, bool told, bool leaving);
/* it came to its end; returns the same */
extern TimestampTz lease_look_done(LeaseLook *look);

/* pushers.c */
extern TimestampTz start_pushers(Oid database, List *roles);
extern TimestampTz end_stuck_hooks(Oid database);
extern bool role_may_push(Oid role);

/* utility.c */
extern void utility_register_hook(void);

/* launcher.c, coordinator.c, delivery_worker.c */
extern void launcher_register(void);
extern PGDLLEXPORT void outbox_launcher_main(Datum argument);
extern PGDLLEXPORT void outbox_probe_main(Datum argument);
extern PGDLLEXPORT void outbox_coordinator_main(Datum argument);
extern PGDLLEXPORT void outbox_delivery_main(Datum argument);
extern PGDLLEXPORT void outbox_standalone_main(Datum argument);
extern bool database_is_served(const char *name);
extern char *served_name(Oid database);
extern bool own_database_is_served(void);
/* exit callback of a process that calls hooks: what it has claimed and not begun is given back */
extern void delivery_give_back(int code, Datum argument);

#endif							/* OUTBOX_WORKER_H */
