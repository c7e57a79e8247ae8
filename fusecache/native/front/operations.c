/* The operations of a session, answered from the table and the segments in front threads; in others they are pyfuse3's.
 *
 * INVARIANT: every request is answered exactly once: by a front thread, by the thread that brings the bytes that a
 *   READ waits for or, when queued, by pyfuse3.
 * INVARIANT: OPEN and OPENDIR are answered ENOSYS (zero-open); a READ's handle is then 0, and pyfuse3 is
 *   given the inode number in its place.
 */
#include "front.h"

#include <linux/fuse.h>
#include <string.h>

#include "../ahead/ahead.h"
#include "../libfuse/libfuse.h"
#include "../plan/plan.h"
#include "../trace/trace.h"

#define FOREVER_S 1e9
#define BLOCK_SIZE_HINT (128 << 10) /* st_blksize; the same in read/operations.py */

static struct {
	struct fuse_lowlevel_ops inner; /* pyfuse3's */
	double negative_timeout_s;
	int asker;
	int64_t begun_ns;
} operations;

static __thread struct front_thread *self; /* set in front threads only */

void operations_answer(struct front_thread *me) { self = me; }

/* pyfuse3's handler of a READ is not told which thread asks, nor when. It begins right after front_read has returned,
 * in the same thread. */
int front_asker(int64_t *begun_ns)
{
	*begun_ns = operations.begun_ns;
	return operations.asker;
}

/* Answers here never expire in the kernel, so only what the sweep watches is answered here. */
static bool is_watched(uint32_t node) { return operations.negative_timeout_s >= FOREVER_S || node_is_watched(node); }

static void pass_on(fuse_req_t req)
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

/* What only an earlier mount has looked at. Without the lock: nodes stay where they are. */
static bool is_unchecked(uint64_t ino) { return node_at(ino) && node_is_unchecked((uint32_t)ino); }

bool operations_lookup(fuse_req_t req, fuse_ino_t parent, const char *name, uint32_t *unchecked)
{
	struct fuse_entry_param entry;
	const struct node *dir;
	bool listed = false;
	uint32_t found = 0;
	uint8_t seen = 0;

	*unchecked = 0;
	pthread_rwlock_rdlock(&table.lock);
	dir = node_at(parent);
	if (dir && !(node_flags(dir) & NODE_DEAD)) {
		listed = node_flags(dir) & NODE_LISTED;
		if (listed || operations.negative_timeout_s >= FOREVER_S)
			found = table_find((uint32_t)parent, name, strlen(name));
		if (found && node_is_unchecked(found))
			*unchecked = found;
		if (found && ((node_flags(&table.nodes[found]) & NODE_NOATTR) || *unchecked)) {
			found = 0;
			listed = false; /* the origin's own word */
		} else if (found) {
			if (trace_is(TRACE_LOOKUPS) && !plan_is_asking(real.req_ctx(req)->pid))
				trace_note_open(node_primary(found), (uint32_t)real.req_ctx(req)->pid);
			if (plan_is_active())
				seen = plan_cut_wire(node_primary(found), real.req_ctx(req)->pid);
			fill_entry(found, &entry);
		}
	}
	pthread_rwlock_unlock(&table.lock);
	if (seen)
		plan_saw_lookup((uint32_t)entry.ino, seen, real.req_ctx(req)->pid);
	if (found) {
		COUNT(lookups, 1);
		real.reply_entry(req, &entry);
	} else if (listed) {
		COUNT(lookups, 1);
		memset(&entry, 0, sizeof(entry));
		entry.entry_timeout = operations.negative_timeout_s;
		if (operations.negative_timeout_s > 0)
			real.reply_entry(req, &entry);
		else
			real.reply_err(req, ENOENT);
	}
	return found || listed;
}

static void front_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	uint32_t unchecked;

	if (!self)
		operations.inner.lookup(req, parent, name);
	else if (strlen(name) > NAME_BYTES_MOST) /* the kernel's own limit for FUSE is higher */
		real.reply_err(req, ENAMETOOLONG);
	else if (!operations_lookup(req, parent, name, &unchecked) &&
		 !(unchecked && looks_take(req, unchecked, self->raw, self->raw_size)))
		pass_on(req);
}

bool front_stat(uint64_t ino, struct stat *st, int64_t *born_ns)
{
	const struct node *n;
	bool known;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	known = n && !(node_flags(n) & NODE_NOATTR) && !is_unchecked(ino) &&
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

static void front_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st;
	int64_t born_ns;

	if (!self) {
		raw_getattr_begins(req);
		operations.inner.getattr(req, ino, fi);
	} else if (front_stat(ino, &st, &born_ns)) {
		real.reply_attr(req, &st, FOREVER_S);
	} else {
		pass_on(req);
	}
}

static void front_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct read_request one;

	if (!self) {
		if (fi && !fi->fh)
			fi->fh = ino;
		operations.asker = real.req_ctx(req)->pid;
		operations.begun_ns = slow_begun_ns() ? slow_begun_ns() : clock_ns(CLOCK_MONOTONIC);
		operations.inner.read(req, ino, size, offset, fi);
		return;
	}
	COUNT(requests, 1);
	one = (struct read_request){
	    .req = req,
	    .ino = (uint32_t)ino,
	    .offset = (uint64_t)offset,
	    .size = size,
	    .begun_ns = clock_ns(CLOCK_MONOTONIC),
	    .raw = self->raw,
	    .raw_size = self->raw_size,
	};
	if (offset >= 0 && !is_unchecked(ino) &&
	    (parking_take(&one) || answer_from_ssd(&one, self->scratch) || missed_take(&one)))
		return;
	pass_on(req);
}

static void front_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
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
		operations.inner.readdirplus(req, ino, size, offset, fi);
		return;
	}
	buffer = (char *)self->scratch->mem;
	if (size > self->scratch->cap)
		size = self->scratch->cap;
	pthread_rwlock_rdlock(&table.lock);
	dir = node_at(ino);
	if (!dir || (node_flags(dir) & (NODE_LISTED | NODE_DEAD)) != NODE_LISTED || offset < 0) {
		pthread_rwlock_unlock(&table.lock);
		pass_on(req);
		return;
	}
	/* "." and "..": names only (node 0), so that the kernel counts no look-up for them. */
	if (offset == 0 || offset == DOT_COOKIE) {
		for (int dots = offset == 0 ? 1 : 2; dots <= 2 && !full; dots++) {
			uint32_t of = dots == 1 || ino == ROOT_INO ? (uint32_t)ino : dir->parent;

			memset(&entry, 0, sizeof(entry));
			fill_stat(of, &entry.attr);
			need = real.add_direntry_plus(req, buffer + used, size - used, dots == 1 ? "." : "..", &entry,
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
		if ((node_flags(&table.nodes[child]) & NODE_NOATTR) || node_is_unchecked(child))
			entry.ino = 0; /* name and type only: a look-up gets the origin's word */
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

bool operations_have(uint32_t opcode)
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

void operations_wrap(struct fuse_lowlevel_ops *outer, bool zero_open, double negative_timeout_s)
{
	operations.inner = *outer;
	operations.negative_timeout_s = negative_timeout_s;
	outer->getattr = front_getattr;
	outer->read = front_read;
	if (!zero_open)
		return;
	outer->lookup = front_lookup;
	outer->readdirplus = front_readdirplus;
	outer->open = front_open;
	outer->opendir = front_open;
	outer->flush = front_open;
	outer->forget = front_forget;
	outer->forget_multi = front_forget_multi;
}
