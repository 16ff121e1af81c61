/*
 * counter_file.c
 *		The counters over a restart: the postmaster writes them when it ends, and reads and
 *		removes the file when it starts.
 *
 * There is none after a crash, and it is written only when the control file says that the
 * server was shut down: after an immediate stop what was counted last may never have been
 * committed.  It is read under the same condition, and not by a standby or where a backup
 * is being restored: the counters of another server are none of ours.
 *
 * Locks: none, for nobody else is there, yet or any more.
 */
#include "counters.h"

#include <sys/stat.h>
#include <unistd.h>

#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "miscadmin.h"
#include "storage/fd.h"
#include "storage/ipc.h"

#define FILE_NAME		"pg_stat/outbox.stat"
#define FILE_MAGIC		0x0B0C0001	/* changes with CounterCopy */

typedef struct FileHeader
{
	uint32		magic;
	int32		n;
	TimestampTz since;
} FileHeader;

static bool was_shut_down(void);
static bool is_copied_server(void);
static void read_file(void);
static bool read_entries(FILE *file);
static void write_file(int code, Datum arg);
static bool write_entries(FILE *file);

void
counter_file_open(void)
{
	read_file();
	on_shmem_exit(write_file, (Datum) 0);
}

static bool
was_shut_down(void)
{
	bool		crc_ok;
	ControlFileData *control = get_controlfile(DataDir, &crc_ok);

	return crc_ok && control->state == DB_SHUTDOWNED;
}

static bool
is_copied_server(void)
{
	struct stat	file;

	return stat(STANDBY_SIGNAL_FILE, &file) == 0 || stat(RECOVERY_SIGNAL_FILE, &file) == 0;
}

static void
read_file(void)
{
	FILE	   *file = AllocateFile(FILE_NAME, PG_BINARY_R);

	if (file == NULL)
	{
		if (errno != ENOENT)
			ereport(LOG,
					(errcode_for_file_access(),
					 errmsg("could not read file \"%s\": %m", FILE_NAME)));
		return;
	}
	if (was_shut_down() && !is_copied_server() && !read_entries(file))
		ereport(LOG,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("ignoring invalid data in file \"%s\"", FILE_NAME),
				 errdetail("The counters of outbox begin at zero.")));
	FreeFile(file);
	(void) unlink(FILE_NAME);
}

/* All or nothing. */
static bool
read_entries(FILE *file)
{
	FileHeader	header;
	CounterCopy *copies;
	struct stat	size;

	if (fread(&header, sizeof(header), 1, file) != 1 || header.magic != FILE_MAGIC || header.n < 0 ||
		fstat(fileno(file), &size) != 0 ||
		size.st_size != (off_t) (sizeof(header) + (size_t) header.n * sizeof(CounterCopy)))
		return false;
	copies = palloc(Max(header.n, 1) * sizeof(CounterCopy));
	if (fread(copies, sizeof(CounterCopy), header.n, file) != (size_t) header.n)
		return false;
	counters_restore(copies, header.n, header.since);
	pfree(copies);
	return true;
}

/* Exit callback of the postmaster. */
static void
write_file(int code, Datum arg)
{
	FILE	   *file;
	bool		written;

	if (code != 0 || !was_shut_down())
		return;
	file = AllocateFile(FILE_NAME ".tmp", PG_BINARY_W);
	written = file != NULL && write_entries(file);
	if (file != NULL && FreeFile(file) != 0)
		written = false;
	if (written)
		(void) durable_rename(FILE_NAME ".tmp", FILE_NAME, LOG);
	else
	{
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", FILE_NAME ".tmp")));
		(void) unlink(FILE_NAME ".tmp");
	}
}

static bool
write_entries(FILE *file)
{
	FileHeader	header = {FILE_MAGIC};
	CounterCopy *copies;

	header.n = counters_copy_all(&copies, &header.since);
	return fwrite(&header, sizeof(header), 1, file) == 1 &&
		fwrite(copies, sizeof(CounterCopy), header.n, file) == (size_t) header.n;
}
