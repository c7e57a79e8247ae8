/* For test_libfuse.py. -DLIBRARY: what a libfuse offers, as far as the front looks; -DCALLER: what pyfuse3 does
 * with it; -DDETOUR: preloaded, begins sessions behind the front's back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef void operation(void *, void *);

#ifdef LIBRARY /* OLD, NEW: the entries that it has; LACKING: no fuse_add_direntry_plus */
struct seen {
	int begun, init_opcode;
	const void *version;
	operation *init;
} seen;

#define STUB(name) \
	void name(void) {}
STUB(fuse_session_destroy)
STUB(fuse_reply_none)
STUB(fuse_reply_err)
STUB(fuse_reply_entry)
STUB(fuse_reply_attr)
STUB(fuse_reply_buf)
STUB(fuse_req_ctx)
STUB(fuse_session_receive_buf)
#ifndef LACKING
STUB(fuse_add_direntry_plus)
#endif

void *fuse_session_new_of_tomorrow(void *args, operation *const *op, size_t size, const void *version, void *data)
{
	(void)args, (void)size, (void)data;
	seen.begun++;
	seen.version = version;
	seen.init = op[0];
	return &seen;
}
#ifdef NEW
void *fuse_session_new_versioned(void *args, operation *const *op, size_t size, const void *version, void *data)
{
	return fuse_session_new_of_tomorrow(args, op, size, version, data);
}
#endif
#ifdef OLD
void *fuse_session_new(void *args, operation *const *op, size_t size, void *data)
{
#ifdef NEW /* as libfuse does it, where a preloaded function of that name is called, too */
	return fuse_session_new_versioned(args, op, size, "unknown", data);
#else
	return fuse_session_new_of_tomorrow(args, op, size, NULL, data);
#endif
}
#endif
int fuse_session_fd(void *session)
{
	return session == &seen ? 1234567 : -1;
}
void fuse_session_process_buf(void *session, const void *buf)
{
	const void *mem = *(void *const *)((const char *)buf + 16);

	(void)session;
	memcpy(&seen.init_opcode, (const char *)mem + 4, sizeof(seen.init_opcode));
}
#endif

#ifdef CALLER
extern struct seen {
	int begun, init_opcode;
	const void *version;
	operation *init;
} seen;
void *ENTRY();
int fuse_session_fd(void *);
static int inits;
static void *session;

static void init(void *userdata, void *connection)
{
	(void)userdata, (void)connection;
	inits++;
}
static void nothing(void *one, void *two)
{
	(void)one, (void)two;
}

/* The descriptor of the session that was begun. */
int begin(void)
{
	operation *operations[80];

	for (int i = 0; i < 80; i++)
		operations[i] = nothing;
	operations[0] = init;
#ifdef VERSIONED
	session = ENTRY(NULL, operations, sizeof(operations), "mine", NULL);
#else
	session = ENTRY(NULL, operations, sizeof(operations), NULL);
#endif
	return session ? fuse_session_fd(session) : -2;
}

/* Calls what libfuse was given: how often does pyfuse3's own operation run? */
int inits_of_one(void)
{
	long connection[64] = {0};

	inits = 0;
	seen.init(NULL, connection);
	return inits;
}
int wrapped(void) { return seen.init != init; }
int begun(void) { return seen.begun; }
int init_opcode(void) { return seen.init_opcode; }
const char *version(void) { return seen.version ? seen.version : ""; }
#endif

#ifdef DETOUR
static void *next(const void *caller, const char *name)
{
	Dl_info info;

	dladdr(caller, &info);
	return dlsym(dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD), name);
}
void *fuse_session_new(void *args, const void *op, size_t size, void *data)
{
	void *(*real)(void *, const void *, size_t, void *) =
	    next(__builtin_return_address(0), "fuse_session_new");

	return real(args, op, size, data);
}
void *fuse_session_new_versioned(void *args, const void *op, size_t size, const void *version, void *data)
{
	void *(*real)(void *, const void *, size_t, const void *, void *) =
	    next(__builtin_return_address(0), "fuse_session_new_versioned");

	return real(args, op, size, version, data);
}
#endif
