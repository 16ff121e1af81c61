/*
 * export.h
 *		What the server looks up by name leaves the module, nothing else does.
 *
 * The module is compiled with hidden visibility, so that our names cannot meet those of another module. From
 * PostgreSQL 16 on the server's headers mark entry points themselves; for 15 this does it, with the same macros.
 */
#ifndef OUTBOX_EXPORT_H
#define OUTBOX_EXPORT_H

#include "postgres.h"

#include "fmgr.h"

#if PG_VERSION_NUM < 160000

#undef PGDLLEXPORT
#define PGDLLEXPORT __attribute__((visibility("default")))

#undef PG_FUNCTION_INFO_V1
#define PG_FUNCTION_INFO_V1(funcname) \
extern PGDLLEXPORT Datum funcname(PG_FUNCTION_ARGS); \
extern PGDLLEXPORT const Pg_finfo_record * CppConcat(pg_finfo_,funcname)(void); \
const Pg_finfo_record * \
CppConcat(pg_finfo_,funcname) (void) \
{ \
	static const Pg_finfo_record my_finfo = { 1 }; \
	return &my_finfo; \
} \
extern int no_such_variable

#endif

#endif							/* OUTBOX_EXPORT_H */
