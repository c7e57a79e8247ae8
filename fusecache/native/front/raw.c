/* Requests that are answered as they were received: before libfuse parses them, without a request object.
 *
 * Both open modes: front threads ask here first, and so does fuse_session_receive_buf in the ordinary mode.
 *
 *   IOCTL      HINTSD_IOCTL, on anything of the mount that can be opened: where its hintsd listens
 *              (docs/WIRE.md). Whatever else: ENOTTY. Python's open() asks every file whether it is a terminal
 *              (TCGETS), and the kernel remembers no answer: the one request that an open through a warm cache
 *              still costs.
 *   LISTXATTR  ENOSYS, which the kernel remembers for the mount's life: always.
 *   GETXATTR   the same: `ls -l` asks twice a file, and no answer of a file system is kept. Where access control lists
 *              are honoured (--allow-other): they are the handler's, others are refused, each time; never ENOSYS: no
 *              list would count then.
 *   STATX      which the kernel sends instead of GETATTR when a program asks for the time of birth, once a file;
 *              libfuse before 3.18 has no operation for it. Answered from the table. Where the origin has to be looked
 *              at, pyfuse3 is given it as a GETATTR, which its first fields are, and what that is answered
 *              (fuse_reply_attr is interposed) is sent as the answer to a STATX.
 *   NOTIFY_REPLY   no request at all: what ahead/window.c has asked the kernel.
 *
 * INVARIANT: nothing here waits.
 */
#include "front.h"

#include <limits.h>
#include <linux/fuse.h>
#include <linux/ioctl.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>

#include "../ahead/ahead.h"
#include "../libfuse/libfuse.h"

#define HINTSD_IOCTL _IOR(0xfc, 1, char[PATH_MAX]) /* the same in hintsd/client/finding.py */

#define OPCODE_STATX 52 /* Linux 6.6; older headers lack it */
#define FOREVER_S 1000000000

struct sx_time {
	int64_t sec;
	uint32_t nsec, reserved;
};
struct statx_out { /* struct fuse_statx_out */
	uint64_t valid_s;
	uint32_t valid_ns, flags;
	uint64_t spare[2];
	uint32_t mask, blksize;
	uint64_t attributes;
	uint32_t nlink, uid, gid;
	uint16_t mode, spare_mode;
	uint64_t ino, size, blocks, attributes_mask;
	struct sx_time atime, btime, ctime, mtime;
	uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
	uint64_t spare_end[14];
};
_Static_assert(sizeof(struct statx_out) == 288, "what the kernel takes");

/* STATX requests that pyfuse3 was given as GETATTR. Its thread only. */
static struct {
	uint64_t next;	      /* number of the one that it is about to process; 0: that is none */
	struct map64 waiting; /* request object -> number */
} statx_as_getattr;

static struct {
	char hintsd[PATH_MAX]; /* empty: hints are off */
	bool has_acls;	       /* pyfuse3's handler answers for them */
} raw;

/* The kernel made the root's inode before INIT was answered, and keeps no list of it: it asks for each path that
 * another user than its owner goes along. */
static struct {
	pthread_mutex_t lock;
	bool known;
	int64_t ctime_ns; /* of the directory when this was its list */
	size_t size;	  /* 0: it has none */
	char value[2048];
} root_acl = {.lock = PTHREAD_MUTEX_INITIALIZER};

int raw_configure(const char *hintsd, bool has_acls)
{
	if (strlen(hintsd) >= sizeof(raw.hintsd))
		return -ENAMETOOLONG;
	memcpy(raw.hintsd, hintsd, strlen(hintsd) + 1);
	raw.has_acls = has_acls;
	return 0;
}

bool raw_has_acls(void) { return raw.has_acls; }

/* Whether a GETXATTR is for an access control list of a mount that honours them. */
static bool is_of_acl(const struct fuse_in_header *in, size_t size)
{
	static const char prefix[] = "system.posix_acl_";
	const size_t at = sizeof(*in) + sizeof(struct fuse_getxattr_in), len = sizeof(prefix) - 1;

	return raw.has_acls && size > at + len && !memcmp((const char *)in + at, prefix, len);
}

static void answer(int fd, const struct fuse_in_header *to, int error, struct iovec *parts, int count)
{
	struct fuse_out_header head = {.error = error, .unique = to->unique};
	ssize_t done;

	parts[0] = (struct iovec){&head, sizeof(head)};
	for (int i = 0; i < count; i++)
		head.len += (uint32_t)parts[i].iov_len;
	done = writev(fd, parts, count);
	(void)done; /* ENOENT: the asker was killed meanwhile */
	parts[0] = (struct iovec){NULL, 0};
}

static void refuse(int fd, const struct fuse_in_header *in, int error)
{
	struct iovec parts[1];

	answer(fd, in, -error, parts, 1);
}

static struct sx_time sx_time(struct timespec t) { return (struct sx_time){t.tv_sec, (uint32_t)t.tv_nsec, 0}; }

static void answer_statx(int fd, uint64_t number, const struct stat *st, int64_t born_ns, double valid_s)
{
	const struct fuse_in_header to = {.unique = number};
	const int64_t born_s = born_ns / 1000000000 - (born_ns % 1000000000 < 0);
	struct statx_out out = {
	    .valid_s = (uint64_t)valid_s,
	    .valid_ns = (uint32_t)((valid_s - (double)(uint64_t)valid_s) * 1e9),
	    .mask = STATX_BASIC_STATS | (born_ns ? STATX_BTIME : 0),
	    .blksize = (uint32_t)st->st_blksize,
	    .nlink = (uint32_t)st->st_nlink,
	    .uid = st->st_uid,
	    .gid = st->st_gid,
	    .mode = (uint16_t)st->st_mode,
	    .ino = st->st_ino,
	    .size = (uint64_t)st->st_size,
	    .blocks = (uint64_t)st->st_blocks,
	    .atime = sx_time(st->st_atim),
	    .btime = {born_s, (uint32_t)(born_ns - born_s * 1000000000), 0},
	    .ctime = sx_time(st->st_ctim),
	    .mtime = sx_time(st->st_mtim),
	    .rdev_major = major(st->st_rdev),
	    .rdev_minor = minor(st->st_rdev),
	};
	struct iovec parts[2] = {[1] = {&out, sizeof(out)}};

	answer(fd, &to, 0, parts, 2);
}

void raw_before_pyfuse3(void *request, size_t size)
{
	struct fuse_in_header *in = request;
	const bool is_statx = size >= sizeof(*in) && in->opcode == OPCODE_STATX;

	if (is_statx)
		in->opcode = FUSE_GETATTR;
	statx_as_getattr.next = is_statx ? in->unique : 0;
}

void raw_getattr_begins(const struct fuse_req *req)
{
	const uint64_t key = (uintptr_t)req;

	/* Request objects are used again, after an error too. */
	map64_delete(&statx_as_getattr.waiting, key);
	if (statx_as_getattr.next && map64_set(&statx_as_getattr.waiting, key, statx_as_getattr.next))
		statx_as_getattr.next = 0; /* no memory: the kernel takes the answer for a fault, EIO */
}

int fuse_reply_attr(struct fuse_req *req, const struct stat *st, double timeout_s)
    __attribute__((visibility("default")));
int fuse_reply_attr(struct fuse_req *req, const struct stat *st, double timeout_s)
{
	uint64_t number;
	int64_t born_ns = 0;

	if (!map64_get(&statx_as_getattr.waiting, (uintptr_t)req, &number))
		return real.reply_attr(req, st, timeout_s);
	map64_delete(&statx_as_getattr.waiting, (uintptr_t)req);
	pthread_rwlock_rdlock(&table.lock);
	if (node_at(st->st_ino))
		born_ns = table.born_ns[st->st_ino];
	pthread_rwlock_unlock(&table.lock);
	answer_statx(front_fd(), number, st, born_ns, timeout_s);
	real.reply_none(req);
	return 0;
}

static void answer_ioctl(int fd, const struct fuse_in_header *in, const struct fuse_ioctl_in *what)
{
	const size_t len = strlen(raw.hintsd);
	struct fuse_ioctl_out out = {.result = (int32_t)len};
	struct iovec parts[3] = {[1] = {&out, sizeof(out)}, [2] = {raw.hintsd, len}};

	if (what->cmd != HINTSD_IOCTL)
		refuse(fd, in, ENOTTY);
	else if (!len)
		refuse(fd, in, ENODATA);
	else
		answer(fd, in, 0, parts, 3);
}

/* Only what the handler was told of the directory as it is now. */
static bool answer_root_acl(int fd, const struct fuse_in_header *in)
{
	const struct fuse_getxattr_in *wanted = (const void *)(in + 1);
	struct iovec parts[2] = {{0}};
	struct version version;
	bool known;

	if (in->nodeid != ROOT_INO || strcmp((const char *)(wanted + 1), "system.posix_acl_access") != 0 ||
	    !table_version(ROOT_INO, &version))
		return false;
	pthread_mutex_lock(&root_acl.lock);
	known = root_acl.known && root_acl.ctime_ns == version.ctime_ns && wanted->size >= root_acl.size;
	if (known) {
		parts[1] = (struct iovec){root_acl.value, root_acl.size};
		answer(fd, in, root_acl.size ? 0 : -ENODATA, parts, root_acl.size ? 2 : 1);
	}
	pthread_mutex_unlock(&root_acl.lock);
	return known;
}

void raw_keep_root_acl(const void *value, size_t size, int64_t ctime_ns)
{
	pthread_mutex_lock(&root_acl.lock);
	root_acl.known = size <= sizeof(root_acl.value);
	root_acl.size = root_acl.known ? size : 0;
	root_acl.ctime_ns = ctime_ns;
	memcpy(root_acl.value, value, root_acl.size);
	pthread_mutex_unlock(&root_acl.lock);
}

bool raw_answer(int fd, const void *request, size_t size)
{
	const struct fuse_in_header *in = request;
	struct stat st;
	int64_t born_ns;

	if (size < sizeof(*in))
		return false;
	switch (in->opcode) {
	case FUSE_IOCTL:
		if (size < sizeof(*in) + sizeof(struct fuse_ioctl_in))
			return false;
		answer_ioctl(fd, in, (const void *)(in + 1));
		return true;
	case OPCODE_STATX:
		if (!front_stat(in->nodeid, &st, &born_ns))
			return false;
		answer_statx(fd, in->unique, &st, born_ns, FOREVER_S);
		return true;
	case FUSE_GETXATTR:
		if (is_of_acl(in, size))
			return answer_root_acl(fd, in);
		/* With ENOSYS the kernel would believe that no file has an access control list. */
		refuse(fd, in, raw.has_acls ? EOPNOTSUPP : ENOSYS);
		return true;
	case FUSE_LISTXATTR:
		refuse(fd, in, ENOSYS);
		return true;
	case FUSE_NOTIFY_REPLY:
		window_told(in->unique, size > sizeof(*in) + sizeof(struct fuse_notify_retrieve_in));
		return true;
	default:
		return false;
	}
}
