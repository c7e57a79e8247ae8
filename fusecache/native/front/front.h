/* Requests of the kernel, received and answered by C threads. */
#ifndef FUSECACHE_FRONT_H
#define FUSECACHE_FRONT_H

#include "../answer/answer.h"

const char *front_why_not(void); /* NULL: libfuse is interposed */
int front_configure(bool front, unsigned threads, double negative_timeout_s);
int front_resume(void);
bool front_running(void);
/* Attributes as the front may answer them now; false: the slow path has to look. */
bool front_stat(uint64_t ino, struct stat *st, int64_t *born_ns);
int front_fd(void);
/* Of the READ that pyfuse3 was given last: its thread id, 0: unknown; when it came, by CLOCK_MONOTONIC. */
int front_asker(int64_t *begun_ns);

/* ---- requests answered as they were received ----------------------------------------------- */
/* hintsd: its socket, empty: hints are off. has_acls: access control lists are honoured by the kernel, and are
 * pyfuse3's to answer. -ENAMETOOLONG. */
int raw_configure(const char *hintsd, bool has_acls);
bool raw_has_acls(void);
/* The access control list of the root directory, as it is while its ctime is that; size 0: none. */
void raw_keep_root_acl(const void *value, size_t size, int64_t ctime_ns);
bool raw_answer(int fd, const void *request, size_t size); /* false: it is libfuse's */
void raw_before_pyfuse3(void *request, size_t size);	   /* it is about to process this one */
void raw_getattr_begins(const struct fuse_req *req);	   /* pyfuse3's handler is called with it */

/* ---- of this room alone -------------------------------------------------------------------- */
struct front_thread {
	struct scratch *scratch;
	const void *raw; /* the request */
	size_t raw_size;
	bool slow; /* the operation gave the request up */
};
struct fuse_lowlevel_ops;
/* A look-up answered by what the table knows. False: that is the origin's to say; / *unchecked: of this node. */
bool operations_lookup(struct fuse_req *req, uint64_t parent, const char *name, uint32_t *unchecked);
/* A look-up of what only an earlier mount has looked at. Is it kept, and answered later? */
bool looks_take(struct fuse_req *req, uint32_t ino, const void *raw, size_t raw_size);
void operations_wrap(struct fuse_lowlevel_ops *outer, bool zero_open, double negative_timeout_s);
bool operations_have(uint32_t opcode);		 /* its libfuse handler leads to a wrapped one */
void operations_answer(struct front_thread *me); /* in this thread from now on; NULL: not any more */

#endif
