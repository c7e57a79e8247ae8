/* READs: their answers, and the queue to pyfuse3. */
#ifndef FUSECACHE_ANSWER_H
#define FUSECACHE_ANSWER_H

#include "../segment/segment.h"

struct fuse_req; /* libfuse's */
struct read_request {
	struct fuse_req *req;
	uint32_t ino;
	uint64_t offset;
	size_t size;
	int64_t begun_ns; /* it came, by CLOCK_MONOTONIC */
	const void *raw;  /* as it was received */
	size_t raw_size;
};
/* From SSD. False: it is not there, or damaged. */
bool answer_from_ssd(const struct read_request *one, struct scratch *s);
/* One that has waited: with bytes of the file at its offset; / as it would have been at once. */
void answer_with(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size);
void answer_now(const struct read_request *one, struct scratch *s);
/* / with such bytes from beyond this host (the origin, or the pool); / by pyfuse3. */
void answer_missed(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size);
void answer_pass(const struct read_request *one);
/* Bytes of a file are about to be answered: whoever counts them is told. */
void answer_note(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size, int tid); /* tid: 0: unknown */

/* ---- the queue to pyfuse3 ------------------------------------------------------------------ */
int slow_begin(void); /* its descriptor, readable: INIT is waiting; -1: errno */
int slow_fd(void);
void slow_put(const void *raw, size_t size, int64_t begun_ns);
/* Its size; -EINTR: there is none; -EMSGSIZE: it is larger, and lost; 0: none will come any more. */
int slow_take(void *to, size_t most);
/* When the last one that was taken had come; 0: none was. For the thread that takes them. */
int64_t slow_begun_ns(void);
void slow_end(void); /* unmounted: what is left is served */

#endif
