/* The front: libfuse interposed, requests received by C threads.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, the functions exported here are found before libfuse's own:
 *
 *   fuse_session_new,         pyfuse3's operations become inner ones, ours wrap them
 *   fuse_session_new_versioned (what the headers of libfuse 3.17 and later call)
 *   fuse_session_fd           an eventfd, readable when the queue has something
 *   fuse_session_receive_buf  pops the queue
 *   fuse_session_destroy      never frees a session that front threads may be using
 *
 * Front threads do the real receive and the real fuse_session_process_buf. A wrapped operation that
 * finds itself in a front thread answers from the table and the segments; or keeps the request, for
 * ahead/parking.c, ahead/missed.c or looks.c to answer or queue it later; or gives it up: the request
 * object is freed without an answer and the raw request is queued, for pyfuse3 to parse it again. Only
 * opcodes whose operation is wrapped are processed in a front thread at all; pyfuse3's own handlers need
 * the GIL.
 *
 * In the ordinary mode INIT is touched (more background requests, and made up on resume), what raw.c
 * knows is answered, and of a READ it is noted which thread asks; all else is pyfuse3's.
 *
 * A session that began in another way, or with a libfuse that lacks something (libfuse/libfuse.c), is left to
 * pyfuse3, in the ordinary mode: front_why_not() says why.
 */
#include "front.h"

#include <linux/fuse.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../libfuse/libfuse.h"

/* Defined by its name for the linker alone: in the headers it may be a macro, or an inline function. */
#define INTERPOSED(name) __asm__(#name) __attribute__((visibility("default")))
/* bit 31 of what libfuse 3.18 and later want by themselves: requests that would not come to receive_buf */
#define CAP_OVER_IO_URING (1u << 31)
#define REQUEST_BYTES_MOST ((1u << 20) + 4096u) /* libfuse's own buffer size */
#define THREADS_MOST 64u

/* ---- state -------------------------------------------------------------------------------- */
static struct {
	void (*init)(void *userdata, struct fuse_conn_info *conn); /* pyfuse3's */
	struct fuse_session *session;				   /* NULL: not interposed */
	struct fuse_session *plain;				   /* then the one that is not wrapped, to resume it */
	bool enabled;						   /* false: ordinary mode */
	unsigned threads;
	double negative_timeout_s;
	enum { BEFORE_INIT, AFTER_INIT, RUNNING } stage;
} front = {.enabled = true, .threads = 2};

const char *front_why_not(void)
{
	static char why[96];

	if (front.session)
		return NULL;
	if (!real.missing)
		return "pyfuse3 began its session by a function of libfuse that fusecache does not know";
	snprintf(why, sizeof(why), "this libfuse has no %s", real.missing);
	return why;
}

bool front_running(void) { return front.stage == RUNNING; }

int front_fd(void) { return real.session_fd(front.session); }

int front_configure(bool enabled, unsigned threads, double negative_timeout_s)
{
	if (!threads || threads > THREADS_MOST || front.session)
		return -EINVAL;
	front.enabled = enabled;
	front.threads = threads;
	front.negative_timeout_s = negative_timeout_s;
	return 0;
}

static void front_init(void *userdata, struct fuse_conn_info *conn)
{
	/* Requests are small and replies lie in our own buffers: splicing only costs. Same wishes when
	 * resuming, so that libfuse ends up with what the first server negotiated. */
	front.init(userdata, conn);
	conn->want &= ~(unsigned)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
				  CAP_OVER_IO_URING);
	conn->want |= conn->capable &
		      (FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ | FUSE_CAP_ASYNC_DIO | FUSE_CAP_CACHE_SYMLINKS);
	if (raw_has_acls())
		conn->want |= conn->capable & FUSE_CAP_POSIX_ACL;
	/* Page-cache READs count as background: with the default of 12, as many that wait for an origin
	 * that hangs would keep all others in the kernel. */
	conn->max_background = 4096;
	conn->congestion_threshold = 3072;
}

/* ---- front threads ------------------------------------------------------------------------ */
static void *front_main(void *unused)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct front_thread me = {.scratch = NULL};
	union roomy_buf room = {.buf.mem = NULL};
	struct fuse_buf *buf = &room.buf;
	struct pollfd readable = {.fd = real.session_fd(front.session), .events = POLLIN};

	(void)unused;
	while (!(me.scratch = scratch_get()))
		nanosleep(&pause, NULL);
	operations_answer(&me);
	for (;;) {
		int got = real.receive_buf(front.session, buf);
		const struct fuse_in_header *in = buf->mem;

		if (got == -EAGAIN) { /* the descriptor is not blocking */
			poll(&readable, 1, -1);
			continue;
		}
		if (got == -EINTR)
			continue;
		if (got == -ENOMEM) {
			nanosleep(&pause, NULL);
			continue;
		}
		if (got <= 0) /* unmounted, aborted, or told to exit */
			break;
		if ((size_t)got < sizeof(*in))
			continue;
		/* A read-only mount answers soon; libfuse would keep notes of interrupts it cannot match. */
		if (in->opcode == FUSE_INTERRUPT)
			continue;
		if (raw_answer(readable.fd, buf->mem, (size_t)got))
			continue;
		me.raw = buf->mem;
		me.raw_size = (size_t)got;
		me.slow = !operations_have(in->opcode);
		if (!me.slow)
			real.process_buf(front.session, buf);
		if (me.slow)
			slow_put(buf->mem, (size_t)got, clock_ns(CLOCK_MONOTONIC));
	}
	operations_answer(NULL);
	free(buf->mem);
	scratch_put(me.scratch);
	slow_end();
	return NULL;
}

static int front_start(void)
{
	unsigned started = 0;
	int err = 0;

	front.stage = RUNNING;
	for (; started < front.threads && !err; started += !err)
		err = thread_start(front_main, NULL);
	return started ? 0 : err;
}

/* ---- what pyfuse3 calls instead of libfuse ------------------------------------------------ */
/* The caller: pyfuse3, or libfuse's own older entry on its way to the newer one. */
#define real_load() libfuse_load(__builtin_return_address(0))

static struct fuse_session *session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size,
					const void *version, void *userdata)
{
	return version ? real.session_new_versioned(args, op, op_size, version, userdata)
		       : real.session_new(args, op, op_size, userdata);
}

/* `version`: what the newer entry was given; NULL: the older one was called. */
static struct fuse_session *session_wrapped(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size,
					    const void *version, void *userdata)
{
	/* Operations that this build does not know are not offered: they would know nothing of handle 0. */
	struct fuse_lowlevel_ops outer = {0};
	size_t outer_size = op_size < sizeof(outer) ? op_size : sizeof(outer);

	if (op)
		memcpy(&outer, op, outer_size);
	if (!outer.init || !outer.lookup || !outer.getattr || !outer.read || !outer.readdirplus ||
	    !outer.getxattr ||				 /* not pyfuse3 */
	    outer.init == front_init || front.session || /* wrapped already, or a second session */
	    real.missing)
		return session_new(args, op, op_size, version, userdata);
	front.init = outer.init;
	operations_wrap(&outer, front.enabled, front.negative_timeout_s);
	outer.init = front_init;
	if (front.enabled && slow_begin() < 0)
		return NULL;
	front.session = session_new(args, &outer, outer_size, version, userdata);
	return front.session;
}

struct fuse_session *interposed_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size,
				    void *userdata) INTERPOSED(fuse_session_new);
struct fuse_session *interposed_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size,
				    void *userdata)
{
	real_load();
	return session_wrapped(args, op, op_size, NULL, userdata);
}

struct fuse_session *interposed_new_versioned(struct fuse_args *args, const struct fuse_lowlevel_ops *op,
					      size_t op_size, const void *version, void *userdata)
    INTERPOSED(fuse_session_new_versioned);
struct fuse_session *interposed_new_versioned(struct fuse_args *args, const struct fuse_lowlevel_ops *op,
					      size_t op_size, const void *version, void *userdata)
{
	real_load();
	return session_wrapped(args, op, op_size, version, userdata);
}

int interposed_fd(struct fuse_session *session) INTERPOSED(fuse_session_fd);
int interposed_fd(struct fuse_session *session)
{
	real_load();
	if (!front.session)
		front.plain = session;
	return session == front.session && session && front.enabled ? slow_fd() : real.session_fd(session);
}

/* The kernel sends INIT once in a mount's life; a server that takes over makes libfuse believe in one.
 * The reply goes to a request that the kernel does not know and is refused (ENOENT), silently.
 * Calls pyfuse3's handler: the caller has the GIL. */
int front_resume(void)
{
	struct {
		struct fuse_in_header head;
		struct fuse_init_in init;
	} request = {
	    .head = {.len = sizeof(request), .opcode = FUSE_INIT, .unique = 0x7ffffffffffffff0u},
	    .init = {.major = FUSE_KERNEL_VERSION,
		     .minor = FUSE_KERNEL_MINOR_VERSION,
		     .max_readahead = 1 << 20,
		     .flags = 0xfffffbffu},
	};
	union roomy_buf room = {.buf = {.mem = &request, .size = sizeof(request)}};
	struct fuse_session *session = front.session ? front.session : front.plain;

	if (!session || front.stage != BEFORE_INIT)
		return -EINVAL;
	front.stage = AFTER_INIT;
	real.process_buf(session, &room.buf);
	return 0;
}

int interposed_receive_buf(struct fuse_session *session, struct fuse_buf *buf) INTERPOSED(fuse_session_receive_buf);
int interposed_receive_buf(struct fuse_session *session, struct fuse_buf *buf)
{
	int got;

	real_load();
	if (session != front.session || !session)
		return real.receive_buf(session, buf);
	if (!front.enabled) {
		got = real.receive_buf(session, buf);
		if (got > 0 && raw_answer(real.session_fd(session), buf->mem, (size_t)got))
			return -EINTR;
		if (got > 0)
			raw_before_pyfuse3(buf->mem, (size_t)got);
		return got;
	}
	if (front.stage == BEFORE_INIT) {
		got = real.receive_buf(session, buf);
		if (got > 0)
			front.stage = AFTER_INIT;
		return got == -EAGAIN ? -EINTR : got;
	}
	if (!buf->mem) { /* pyfuse3 frees it; larger requests do not come on a read-only mount */
		buf->mem = malloc(REQUEST_BYTES_MOST);
		if (!buf->mem)
			return -ENOMEM;
	}
	buf->flags = 0;
	if (front.stage == AFTER_INIT) { /* pyfuse3 has processed it */
		got = front_start();
		if (got)
			return got;
	}
	got = slow_take(buf->mem, REQUEST_BYTES_MOST);
	if (got > 0) {
		buf->size = (size_t)got;
		raw_before_pyfuse3(buf->mem, buf->size);
	}
	return got;
}

void interposed_destroy(struct fuse_session *session) INTERPOSED(fuse_session_destroy);
void interposed_destroy(struct fuse_session *session)
{
	real_load();
	/* Front threads wait inside the session for requests; the process is about to end. */
	if (session && session == front.session && front.stage == RUNNING)
		return;
	real.session_destroy(session);
}
