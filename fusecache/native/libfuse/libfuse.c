/* Which libfuse is loaded, and what it offers: decided at run time.
 *
 * Its functions are looked for from the object that calls us, in what that object itself depends on. So it
 * does not matter how libfuse is called (libfuse3.so.3 up to 3.16, .so.4 from 3.17 on, another name inside
 * a wheel), and our own functions of the same names are never found: nothing depends on us. (Linked in, or
 * by RTLD_DEFAULT, ours would be found; RTLD_NEXT finds nothing from an object that was dlopened.)
 *
 * What is built against one libfuse runs beside another: only structures are taken from the headers, which
 * libfuse extends at their ends, and no inline function.
 *
 * INVARIANT: a libfuse that lacks something ends neither the build nor the process: `missing` says what it
 * is, and the front then leaves the session to pyfuse3 (ordinary open mode).
 */
#define _GNU_SOURCE
#include "libfuse.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

struct libfuse real;

static const struct wanted {
	const char *name;
	size_t at;
	bool optional;
} wanted[] = {
    {"fuse_session_new", offsetof(struct libfuse, session_new), true},
    {"fuse_session_new_versioned", offsetof(struct libfuse, session_new_versioned), true},
    {"fuse_session_fd", offsetof(struct libfuse, session_fd), false},
    {"fuse_session_receive_buf", offsetof(struct libfuse, receive_buf), false},
    {"fuse_session_process_buf", offsetof(struct libfuse, process_buf), false},
    {"fuse_session_destroy", offsetof(struct libfuse, session_destroy), false},
    {"fuse_reply_none", offsetof(struct libfuse, reply_none), false},
    {"fuse_reply_err", offsetof(struct libfuse, reply_err), false},
    {"fuse_reply_entry", offsetof(struct libfuse, reply_entry), false},
    {"fuse_reply_attr", offsetof(struct libfuse, reply_attr), false},
    {"fuse_reply_buf", offsetof(struct libfuse, reply_buf), false},
    {"fuse_add_direntry_plus", offsetof(struct libfuse, add_direntry_plus), false},
    {"fuse_req_ctx", offsetof(struct libfuse, req_ctx), false},
};

void libfuse_load(const void *caller)
{
	static bool loaded; /* under the GIL */
	void *object = NULL, *symbol;
	Dl_info info;

	if (loaded)
		return;
	loaded = true;
	if (dladdr(caller, &info) && info.dli_fname)
		object = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); /* never closed */
	for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
		symbol = object ? dlsym(object, wanted[i].name) : NULL;
		memcpy((char *)&real + wanted[i].at, (const void *)&symbol, sizeof(symbol));
		if (!symbol && !wanted[i].optional && !real.missing)
			real.missing = wanted[i].name;
	}
}
