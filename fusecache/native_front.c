/* The front: libfuse interposed, requests received and answered by C threads; notifications.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, the functions exported here are found before libfuse's own:
 *
 *   fuse_session_new,         pyfuse3's operations become `inner`, ours wrap them
 *   fuse_session_new_versioned (what the headers of libfuse 3.17 and later call)
 *   fuse_session_fd           an eventfd, readable when the queue has something
 *   fuse_session_receive_buf  pops the queue
 *   fuse_session_destroy      never frees a session that front threads may be using
 *
 * Front threads do the real receive and the real fuse_session_process_buf. A wrapped operation that
 * finds itself in a front thread answers from the table and the segments, or gives the request up:
 * the request object is freed without an answer and the raw request is queued, for pyfuse3 to parse it
 * again. Only opcodes whose operation is wrapped are processed in a front thread at all; pyfuse3's own
 * handlers need the GIL.
 *
 * In the ordinary mode INIT is touched (more background requests, and made up on resume), what native_raw.c
 * knows is answered, and of a READ it is noted who asks; all else is pyfuse3's.
 *
 * INVARIANT: every request is answered exactly once: by a front thread, by who brings the bytes that a READ
 *   waits for or, when queued, by pyfuse3.
 * INVARIANT: OPEN and OPENDIR are answered ENOSYS (zero-open); a READ's handle is then 0, and pyfuse3 is
 *   given the inode number in its place.
 *
 * A session that began in another way, or with a libfuse that lacks something (native_libfuse.c), is left to
 * pyfuse3, in the ordinary mode: front_why_not() says why.
 */
#include "native.h"
#include "native_libfuse.h"

#include <linux/fuse.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Defined by its name for the linker alone: in the headers it may be a macro, or an inline function. */
#define INTERPOSED(name) __asm__(#name) __attribute__((visibility("default")))
/* bit 31 of what libfuse 3.18 and later want by themselves: requests that would not come to receive_buf */
#define CAP_OVER_IO_URING (1u << 31)
#define FOREVER_S 1e9
#define REQUEST_BYTES_MOST ((1u << 20) + 4096u) /* libfuse's own buffer size */
#define BLOCK_SIZE_HINT (128 << 10) /* what one READ brings; the same in operations.py */
#define NOTIFY_RESEND 7
#define PUSH_BYTES (1u << 20)
#define THREADS_MOST 64u

/* ---- state -------------------------------------------------------------------------------- */
struct kernel_info kernel_info;

static struct {
	struct fuse_lowlevel_ops inner;
	struct fuse_session *session; /* NULL: not interposed */
	struct fuse_session *plain;   /* then the one that is not wrapped, to resume it */
	bool enabled;		      /* false: ordinary mode */
	int queue_fd;
	unsigned threads;
	double negative_timeout_s;
	bool resume;
	int asker;
	enum { BEFORE_INIT, AFTER_INIT, RUNNING } stage;
} front = {.queue_fd = -1, .enabled = true, .threads = 2};

/* Set in front threads only. */
struct front_thread {
	struct scratch *scratch;
	const void *raw; /* the request */
	size_t raw_size;
	bool slow; /* the operation gave the request up */
};
static __thread struct front_thread *self;

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

/* pyfuse3's handler of a READ is not told who asks. It begins right after front_read has returned, in the
 * same thread. */
int front_asker(void) { return front.asker; }

int front_configure(bool enabled, unsigned threads, double negative_timeout_s, bool resume)
{
	if (!threads || threads > THREADS_MOST || front.session)
		return -EINVAL;
	front.enabled = enabled;
	front.threads = threads;
	front.negative_timeout_s = negative_timeout_s;
	front.resume = resume;
	return 0;
}

/* ---- queue to pyfuse3 --------------------------------------------------------------------- */
/* Its length is bounded by the kernel: each entry is a request that awaits its answer. */
struct queued {
	struct queued *next;
	size_t size;
	unsigned char raw[];
};
static struct {
	pthread_mutex_t lock;
	struct queued *first, **end;
	bool ended; /* unmounted: what is left is served, then receive returns 0 */
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .end = &queue.first};

/* Readable exactly while there is something to receive. */
static void queue_signal(bool on) { signal_set(front.queue_fd, on); }

static int queue_push(const void *raw, size_t size)
{
	struct queued *item = malloc(sizeof(*item) + size);

	if (!item)
		return -ENOMEM;
	item->next = NULL;
	item->size = size;
	memcpy(item->raw, raw, size);
	pthread_mutex_lock(&queue.lock);
	if (!queue.first)
		queue_signal(true);
	*queue.end = item;
	queue.end = &item->next;
	pthread_mutex_unlock(&queue.lock);
	COUNT(slow, 1);
	return 0;
}

static void queue_end(void)
{
	pthread_mutex_lock(&queue.lock);
	queue.ended = true;
	queue_signal(true);
	pthread_mutex_unlock(&queue.lock);
}

/* ---- answers from the table --------------------------------------------------------------- */
/* Answers here never expire in the kernel, so only what the sweep watches is answered here. */
static bool is_watched(uint32_t node)
{
	return front.negative_timeout_s >= FOREVER_S || node_is_watched(node);
}

static void give_up(fuse_req_t req)
{
	real.reply_none(req); /* frees the object, sends nothing */
	self->slow = true;
}

static void fill_stat(uint32_t primary, struct stat *st)
{
	const struct node *n = &table.nodes[primary];

	memset(st, 0, sizeof(*st));
	st->st_ino = primary;
	st->st_mode = n->mode;
	st->st_nlink = n->nlink;
	st->st_uid = n->uid;
	st->st_gid = n->gid;
	st->st_rdev = node_rdev(n);
	st->st_size = (off_t)n->size;
	st->st_blocks = (blkcnt_t)n->blocks;
	st->st_blksize = BLOCK_SIZE_HINT;
	st->st_atim = (struct timespec){n->atime_ns / 1000000000, n->atime_ns % 1000000000};
	st->st_mtim = (struct timespec){n->mtime_ns / 1000000000, n->mtime_ns % 1000000000};
	st->st_ctim = (struct timespec){n->ctime_ns / 1000000000, n->ctime_ns % 1000000000};
	/* times before 1970: the remainder has to be positive */
	if (st->st_atim.tv_nsec < 0)
		st->st_atim.tv_nsec += 1000000000, st->st_atim.tv_sec--;
	if (st->st_mtim.tv_nsec < 0)
		st->st_mtim.tv_nsec += 1000000000, st->st_mtim.tv_sec--;
	if (st->st_ctim.tv_nsec < 0)
		st->st_ctim.tv_nsec += 1000000000, st->st_ctim.tv_sec--;
	node_told(primary);
}

static void fill_entry(uint32_t node, struct fuse_entry_param *entry)
{
	uint32_t primary = node_primary(node);

	memset(entry, 0, sizeof(*entry));
	entry->ino = primary;
	entry->attr_timeout = FOREVER_S;
	fill_stat(primary, &entry->attr);
	/* A wire stands until a reader's look-up takes it away. */
	entry->entry_timeout = plan_flags(primary) & PLAN_ARMED ? 0 : FOREVER_S;
	if (trace_is(TRACE_LOOKUPS) && S_ISREG(entry->attr.st_mode))
		entry->entry_timeout = 0;
}

static void front_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param entry;
	const struct node *dir;
	bool listed = false;
	uint32_t found = 0;
	size_t len = strlen(name);

	if (!self) {
		front.inner.lookup(req, parent, name);
		return;
	}
	if (len > NAME_BYTES_MOST) { /* the kernel's own limit for FUSE is higher */
		real.reply_err(req, ENAMETOOLONG);
		return;
	}
	pthread_rwlock_rdlock(&table.lock);
	dir = node_at(parent);
	if (dir && !(node_flags(dir) & NODE_DEAD)) {
		listed = node_flags(dir) & NODE_LISTED;
		if (listed || front.negative_timeout_s >= FOREVER_S)
			found = table_find((uint32_t)parent, name, len);
		if (found && (node_flags(&table.nodes[found]) & NODE_NOATTR)) {
			found = 0;
			listed = false; /* the origin's own errno, from the slow path */
		} else if (found) {
			if (trace_is(TRACE_LOOKUPS) && !plan_is_asking(real.req_ctx(req)->pid))
				trace_note_open(node_primary(found), (uint32_t)real.req_ctx(req)->pid);
			if (plan_is_active())
				plan_saw_lookup(node_primary(found), real.req_ctx(req)->pid);
			fill_entry(found, &entry);
		}
	}
	pthread_rwlock_unlock(&table.lock);
	if (found) {
		COUNT(lookups, 1);
		real.reply_entry(req, &entry);
	} else if (listed) {
		COUNT(lookups, 1);
		memset(&entry, 0, sizeof(entry));
		entry.entry_timeout = front.negative_timeout_s;
		if (front.negative_timeout_s > 0)
			real.reply_entry(req, &entry);
		else
			real.reply_err(req, ENOENT);
	} else {
		give_up(req);
	}
}

bool front_stat(uint64_t ino, struct stat *st, int64_t *born_ns)
{
	bool known;

	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) && !(node_flags(node_at(ino)) & NODE_NOATTR) &&
		(is_watched((uint32_t)ino) || !node_live_name((uint32_t)ino));
	if (known) {
		fill_stat(node_primary((uint32_t)ino), st);
		*born_ns = table.born_ns[st->st_ino];
	}
	pthread_rwlock_unlock(&table.lock);
	if (known)
		COUNT(getattrs, 1);
	return known;
}

void front_drop_request(struct fuse_req *req) { real.reply_none(req); }

int front_reply_attr(struct fuse_req *req, const struct stat *st, double timeout_s)
{
	return real.reply_attr(req, st, timeout_s);
}

int front_fd(void) { return real.session_fd(front.session); }

static void front_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st;
	int64_t born_ns;

	if (!self) {
		raw_getattr_begins(req);
		front.inner.getattr(req, ino, fi);
	} else if (front_stat(ino, &st, &born_ns)) {
		real.reply_attr(req, &st, FOREVER_S);
	} else {
		give_up(req);
	}
}

/* seen: SEEN_SSD, SEEN_ORIGIN: where the bytes are from. */
static void answer_read(fuse_req_t req, uint32_t ino, const struct version *version, uint64_t offset,
			const unsigned char *data, size_t size, uint8_t seen)
{
	/* Before the answer: whoever counts the reader's bytes must find them counted. */
	if (!offset && trace_is(TRACE_ON))
		trace_note_read(ino, seen, (uint32_t)real.req_ctx(req)->pid);
	if (seen == SEEN_SSD) {
		COUNT(from_ssd, 1);
		COUNT(bytes_from_ssd, size);
	} else {
		COUNT(from_origin, 1);
		COUNT(bytes_from_origin, size);
	}
	watch_read(ino, version->size, offset, size);
	if (!offset)
		plan_saw_read(ino, seen, real.req_ctx(req)->pid);
	real.reply_buf(req, (const char *)data, size);
}

/* False: it is not on SSD, or damaged there. */
static bool read_from_ssd(fuse_req_t req, uint32_t ino, uint64_t offset, size_t size, struct scratch *s)
{
	const unsigned char *data;
	struct scratch *joined = NULL;
	struct version version;
	size_t wanted = size;
	int result = READ_MISS;

	if (table_version(ino, &version))
		result = file_read(ino, offset, &size, s, &joined, &data);
	if (result == READ_OK && size < wanted && table_refuse_short(ino))
		real.reply_err(req, EINTR);
	else if (result == READ_OK)
		answer_read(req, ino, &version, offset, data, size, SEEN_SSD);
	scratch_put(joined);
	return result == READ_OK;
}

void front_answer(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size)
{
	answer_read(one->req, one->ino, of, one->offset, data, size, SEEN_SSD);
}

void front_answer_missed(const struct read_request *one, const struct version *of, const unsigned char *data)
{
	answer_read(one->req, one->ino, of, 0, data, of->size, SEEN_ORIGIN);
}

void front_pass(const struct read_request *one)
{
	const struct timespec pause = {.tv_nsec = 1000000};

	real.reply_none(one->req);
	while (queue_push(one->raw, one->raw_size)) /* must not be lost */
		nanosleep(&pause, NULL);
}

void front_serve(const struct read_request *one, struct scratch *s)
{
	if (!read_from_ssd(one->req, one->ino, one->offset, one->size, s))
		front_pass(one);
}

static void front_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
		       struct fuse_file_info *fi)
{
	struct read_request one;

	if (!self) {
		if (fi && !fi->fh)
			fi->fh = ino;
		front.asker = real.req_ctx(req)->pid;
		front.inner.read(req, ino, size, offset, fi);
		return;
	}
	COUNT(requests, 1);
	one = (struct read_request){
	    .req = req,
	    .ino = (uint32_t)ino,
	    .offset = (uint64_t)offset,
	    .size = size,
	    .raw = self->raw,
	    .raw_size = self->raw_size,
	};
	if (offset >= 0 && (parking_take(&one) || read_from_ssd(req, one.ino, one.offset, size, self->scratch) ||
			    missed_take(&one)))
		return;
	give_up(req);
}

static void front_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
			      struct fuse_file_info *fi)
{
	char name[NAME_BYTES_MOST + 1], *buffer;
	struct fuse_entry_param entry;
	const struct node *dir;
	size_t used = 0, need;
	bool full = false;
	uint32_t child;

	if (!self) {
		if (fi && !fi->fh)
			fi->fh = ino;
		front.inner.readdirplus(req, ino, size, offset, fi);
		return;
	}
	buffer = (char *)self->scratch->mem;
	if (size > self->scratch->cap)
		size = self->scratch->cap;
	pthread_rwlock_rdlock(&table.lock);
	dir = node_at(ino);
	if (!dir || (node_flags(dir) & (NODE_LISTED | NODE_DEAD)) != NODE_LISTED || offset < 0) {
		pthread_rwlock_unlock(&table.lock);
		give_up(req);
		return;
	}
	/* "." and "..": names only (node 0), so that the kernel counts no look-up for them. */
	if (offset == 0 || offset == DOT_COOKIE) {
		for (int dots = offset == 0 ? 1 : 2; dots <= 2 && !full; dots++) {
			uint32_t of = dots == 1 || ino == ROOT_INO ? (uint32_t)ino : dir->parent;

			memset(&entry, 0, sizeof(entry));
			fill_stat(of, &entry.attr);
			need = real.add_direntry_plus(req, buffer + used, size - used,
						      dots == 1 ? "." : "..", &entry,
						      dots == 1 ? DOT_COOKIE : DOTDOT_COOKIE);
			full = need > size - used;
			used += full ? 0 : need;
		}
		offset = 0;
	} else if (offset == DOTDOT_COOKIE) {
		offset = 0;
	}
	for (child = table_next_child((uint32_t)ino, (uint64_t)offset); child && !full;
	     child = table_next_child((uint32_t)ino, child)) {
		size_t len;
		const unsigned char *own = node_name(&table.nodes[child], &len);

		memcpy(name, own, len);
		name[len] = '\0';
		fill_entry(child, &entry);
		if (node_flags(&table.nodes[child]) & NODE_NOATTR)
			entry.ino = 0; /* name and type only: a look-up gets the origin's errno */
		need = real.add_direntry_plus(req, buffer + used, size - used, name, &entry, child);
		full = need > size - used;
		used += full ? 0 : need;
	}
	pthread_rwlock_unlock(&table.lock);
	COUNT(readdirs, 1);
	real.reply_buf(req, buffer, used);
}

static void front_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	(void)fi;
	real.reply_err(req, ENOSYS);
}

static void front_forget(fuse_req_t req, fuse_ino_t ino, uint64_t count)
{
	(void)ino; /* nodes live as long as the mount */
	(void)count;
	real.reply_none(req);
}

static void front_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	(void)count;
	(void)forgets;
	real.reply_none(req);
}

static void front_init(void *userdata, struct fuse_conn_info *conn)
{
	/* Requests are small and replies lie in our own buffers: splicing only costs. Same wishes when
	 * resuming, so that libfuse ends up with what the first server negotiated. */
	front.inner.init(userdata, conn);
	conn->want &= ~(unsigned)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
				  CAP_OVER_IO_URING);
	conn->want |= conn->capable & (FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ |
				       FUSE_CAP_ASYNC_DIO | FUSE_CAP_CACHE_SYMLINKS);
	if (raw_has_acls())
		conn->want |= conn->capable & FUSE_CAP_POSIX_ACL;
	/* Page-cache READs count as background: with the default of 12, as many that wait for an origin
	 * that hangs would keep all others in the kernel. */
	conn->max_background = 4096;
	conn->congestion_threshold = 3072;
	kernel_info.resumed = front.resume;
	kernel_info.initialised = true;
	if (front.resume)
		return;
	kernel_info.proto_major = conn->proto_major;
	kernel_info.proto_minor = conn->proto_minor;
	kernel_info.capable = conn->capable;
	kernel_info.want = conn->want;
	kernel_info.max_write = conn->max_write;
	kernel_info.max_readahead = conn->max_readahead;
	kernel_info.max_background = conn->max_background;
}

/* Opcodes whose libfuse handler leads to one of the functions above. */
static bool is_wrapped(uint32_t opcode)
{
	switch (opcode) {
	case FUSE_LOOKUP:
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_GETATTR:
	case FUSE_OPEN:
	case FUSE_OPENDIR:
	case FUSE_FLUSH:
	case FUSE_READ:
	case FUSE_READDIRPLUS:
		return true;
	default:
		return false;
	}
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
	self = &me;
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
		me.slow = !is_wrapped(in->opcode);
		if (!me.slow)
			real.process_buf(front.session, buf);
		while (me.slow && queue_push(buf->mem, (size_t)got)) /* must not be lost */
			nanosleep(&pause, NULL);
	}
	self = NULL;
	free(buf->mem);
	scratch_put(me.scratch);
	queue_end();
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

static struct fuse_session *session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op,
					size_t op_size, const void *version, void *userdata)
{
	return version ? real.session_new_versioned(args, op, op_size, version, userdata)
		       : real.session_new(args, op, op_size, userdata);
}

/* `version`: what the newer entry was given; NULL: the older one was called. */
static struct fuse_session *session_wrapped(struct fuse_args *args, const struct fuse_lowlevel_ops *op,
					    size_t op_size, const void *version, void *userdata)
{
	/* Operations that this build does not know are not offered: they would know nothing of handle 0. */
	struct fuse_lowlevel_ops outer = {0};
	size_t outer_size = op_size < sizeof(outer) ? op_size : sizeof(outer);
	struct fuse_session *session;

	if (op)
		memcpy(&outer, op, outer_size);
	if (!outer.init || !outer.lookup || !outer.getattr || !outer.read || !outer.readdirplus ||
	    !outer.getxattr || /* not pyfuse3 */
	    outer.init == front_init || front.session || /* wrapped already, or a second session */
	    real.missing)
		return session_new(args, op, op_size, version, userdata);
	front.inner = outer;
	outer.init = front_init;
	outer.getattr = front_getattr;
	outer.read = front_read;
	if (!front.enabled) {
		front.session = session_new(args, &outer, outer_size, version, userdata);
		return front.session;
	}
	front.queue_fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* INIT is waiting */
	if (front.queue_fd < 0)
		return NULL;
	outer.lookup = front_lookup;
	outer.readdirplus = front_readdirplus;
	outer.open = front_open;
	outer.opendir = front_open;
	outer.flush = front_open;
	outer.forget = front_forget;
	outer.forget_multi = front_forget_multi;
	session = session_new(args, &outer, outer_size, version, userdata);
	front.session = session;
	return session;
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
	return session == front.session && session && front.enabled ? front.queue_fd
								    : real.session_fd(session);
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
	struct queued *item;
	bool ended;
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
	pthread_mutex_lock(&queue.lock);
	item = queue.first;
	if (item) {
		queue.first = item->next;
		if (!queue.first)
			queue.end = &queue.first;
	}
	ended = queue.ended;
	if (!queue.first && !ended)
		queue_signal(false);
	pthread_mutex_unlock(&queue.lock);
	if (!item)
		return ended ? 0 : -EINTR;
	got = item->size <= REQUEST_BYTES_MOST ? (int)item->size : -EMSGSIZE;
	if (got > 0) {
		memcpy(buf->mem, item->raw, item->size);
		buf->size = item->size;
		raw_before_pyfuse3(buf->mem, item->size);
	}
	free(item);
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

/* ---- notifications ------------------------------------------------------------------------ */
static int notify(int fd, int code, struct iovec *parts, int count)
{
	struct fuse_out_header *head = parts[0].iov_base;
	size_t len = 0;

	for (int i = 0; i < count; i++)
		len += parts[i].iov_len;
	head->len = (uint32_t)len;
	head->error = code;
	head->unique = 0;
	while (writev(fd, parts, count) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

int kernel_inval_inode(int fd, uint64_t ino, int64_t offset, int64_t length)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_inval_inode_out out;
	} message = {.out = {.ino = ino, .off = offset, .len = length}};
	struct iovec part = {&message, sizeof(message)};
	int err = notify(fd, FUSE_NOTIFY_INVAL_INODE, &part, 1);

	return err == -ENOENT ? 0 : err ? err : 1;
}

static int forget_entry(int fd, uint64_t parent, const char *name, size_t len, uint32_t flags)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_inval_entry_out out;
		char name[NAME_BYTES_MOST + 1];
	} message = {.out = {.parent = parent, .namelen = (uint32_t)len, .flags = flags}};
	struct iovec part = {&message, offsetof(__typeof__(message), name) + len + 1};
	int err;

	if (len > NAME_BYTES_MOST)
		return -ENAMETOOLONG;
	memcpy(message.name, name, len);
	err = notify(fd, FUSE_NOTIFY_INVAL_ENTRY, &part, 1);
	return err == -ENOENT ? 0 : err;
}

int kernel_inval_entry(int fd, uint64_t parent, const char *name, size_t len)
{
	return forget_entry(fd, parent, name, len, 0);
}

/* Linux 6.2; before that the flag is ignored, and the inode's pages go with the entry. */
int kernel_expire_entry(int fd, uint64_t parent, const char *name, size_t len)
{
	return forget_entry(fd, parent, name, len, FUSE_EXPIRE_ONLY);
}

int kernel_resend(int fd)
{
	struct fuse_out_header head;
	struct iovec part = {&head, sizeof(head)};

	return notify(fd, NOTIFY_RESEND, &part, 1);
}

int kernel_retrieve(int fd, uint64_t ino, uint64_t number)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_retrieve_out out;
	} message = {.out = {.notify_unique = number, .nodeid = ino, .size = 1}};
	struct iovec part = {&message, sizeof(message)};

	return notify(fd, FUSE_NOTIFY_RETRIEVE, &part, 1);
}

/* The caller has clipped to the size of version `of`: the kernel would extend the file otherwise.
 *
 * INVARIANT: pages of an older version never stay: the version is looked at before and after each write;
 * a change in between marks the inode stale, and a server that dies in between leaves its slot. */
int64_t kernel_store(int fd, uint32_t ino, uint64_t offset, const void *data, size_t size,
		     const struct version *of)
{
	int slot = push_slot_take(ino), err = 0;
	size_t done = 0;

	if (slot < 0)
		return 0;
	table_served(ino);
	while (done < size && !err && table_is_current(ino, of)) {
		size_t part = size - done < PUSH_BYTES ? size - done : PUSH_BYTES;
		struct {
			struct fuse_out_header head;
			struct fuse_notify_store_out out;
		} message = {.out = {.nodeid = ino, .offset = offset + done, .size = (uint32_t)part}};
		struct iovec parts[2] = {
		    {&message, sizeof(message)},
		    {(void *)((uintptr_t)data + done), part},
		};

		/* Blocks on pages that wait for an answer: never called from a front thread. */
		err = notify(fd, FUSE_NOTIFY_STORE, parts, 2);
		if (!table_is_current(ino, of)) {
			table_mark_stale(ino);
			break;
		}
		if (!err) {
			ring_note(ino, of->size, offset + done, part);
			done += part;
		}
	}
	push_slot_free(slot);
	return err ? err : (int64_t)done;
}
