/* The libfuse that pyfuse3 is bound to: its functions by name, found at run time (libfuse.c). */
#ifndef FUSECACHE_LIBFUSE_H
#define FUSECACHE_LIBFUSE_H

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>
#include <stddef.h>
#include <stdint.h>

struct libfuse {
	/* One of them is there; both from 3.17 on. `version`: a struct libfuse_version, handed through. */
	struct fuse_session *(*session_new)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t,
					    void *userdata);
	struct fuse_session *(*session_new_versioned)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t,
						      const void *version, void *userdata);
	int (*session_fd)(struct fuse_session *);
	int (*receive_buf)(struct fuse_session *, struct fuse_buf *);
	void (*process_buf)(struct fuse_session *, const struct fuse_buf *);
	void (*session_destroy)(struct fuse_session *);
	void (*reply_none)(fuse_req_t);
	int (*reply_err)(fuse_req_t, int);
	int (*reply_entry)(fuse_req_t, const struct fuse_entry_param *);
	int (*reply_attr)(fuse_req_t, const struct stat *, double);
	int (*reply_buf)(fuse_req_t, const char *, size_t);
	size_t (*add_direntry_plus)(fuse_req_t, char *, size_t, const char *, const struct fuse_entry_param *, off_t);
	const struct fuse_ctx *(*req_ctx)(fuse_req_t);
	/* The first function that the front needs and this libfuse has not; NULL: none. */
	const char *missing;
};
extern struct libfuse real;

/* Fills `real` once. `caller`: an address inside what calls libfuse. */
void libfuse_load(const void *caller);

/* A libfuse from 3.17 on writes more fields into a fuse_buf than the headers of 3.16 have. */
union roomy_buf {
	struct fuse_buf buf;
	unsigned char room[128];
};

#endif
