/* Own look-ups: pages can be pushed only into inodes that the kernel knows, and one that it does not know is looked up
 * through the mount. Only where every directory of the path is LISTED: the answer comes from the table then, and
 * no thread waits for the origin.
 */
#include "ahead.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "../plan/plan.h"

#define WALKS_KEPT 1024u
/* So many look-ups in a directory are followed by a listing of so many of its entries: it saves some 15 us of CPU for
 * each that is wanted, and the look-ups before it bound what is spent should none be. */
#define WALK_AFTER 32u
#define WALK_ENTRIES 512
#define WALK_BYTES (96u << 10)

static bool is_listed(uint32_t dir)
{
	return (node_flags(&table.nodes[dir]) & (NODE_LISTED | NODE_DEAD | NODE_NOATTR)) == NODE_LISTED;
}

/* The inode's path through the mount, malloc'ed; NULL when looking it up might wait for the origin, or
 * there is none. */
static char *quiet_path(const char *mountpoint, uint32_t ino)
{
	char *path = NULL, *whole = NULL;
	uint32_t name, dir;
	size_t len;

	pthread_rwlock_rdlock(&table.lock);
	name = node_at(ino) ? node_live_name(ino) : 0;
	if (name > ROOT_INO && !(node_flags(&table.nodes[name]) & NODE_NOATTR)) {
		for (dir = table.nodes[name].parent; is_listed(dir) && dir != ROOT_INO;)
			dir = table.nodes[dir].parent;
		if (is_listed(dir))
			path = table_path(name, &len);
	}
	pthread_rwlock_unlock(&table.lock);
	if (path && strlen(mountpoint) + 1 + len < PATH_MAX && asprintf(&whole, "%s/%s", mountpoint, path) < 0)
		whole = NULL;
	free(path);
	return whole;
}

static bool is_inode(int dir_fd, const char *path, int at_flags, uint32_t ino)
{
	struct statx st;

	return !statx(dir_fd, path, at_flags | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC, STATX_INO,
		      &st) &&
	       st.stx_ino == ino;
}

/* Directories in which single files were introduced, one in each place. */
static struct {
	pthread_mutex_t lock;
	struct walk {
		uint32_t dir, asked; /* look-ups since the last stretch */
		off_t from;	     /* where the next one begins */
	} of[WALKS_KEPT];
} walks = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool walk_is_due(uint32_t dir, off_t *from)
{
	struct walk *walk = &walks.of[dir % WALKS_KEPT];
	bool due;

	pthread_mutex_lock(&walks.lock);
	if (walk->dir != dir)
		*walk = (struct walk){.dir = dir};
	due = ++walk->asked == WALK_AFTER;
	if (due)
		walk->asked = 0;
	*from = walk->from;
	pthread_mutex_unlock(&walks.lock);
	return due;
}

static void walk_ended(uint32_t dir, off_t at)
{
	struct walk *walk = &walks.of[dir % WALKS_KEPT];

	pthread_mutex_lock(&walks.lock);
	if (walk->dir == dir)
		walk->from = at;
	pthread_mutex_unlock(&walks.lock);
}

/* List a stretch of a directory through the mount: the answer (READDIRPLUS) introduces all that is in it. Where the
 * next stretch begins; 0: at the directory's begin. */
static off_t walk(const char *path, off_t from)
{
	struct dirent64 *entries = malloc(WALK_BYTES);
	int fd = entries ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
	long got = fd >= 0 && lseek(fd, from, SEEK_SET) == from;

	for (int listed = 0; got > 0 && listed < WALK_ENTRIES;) {
		got = syscall(SYS_getdents64, fd, entries, WALK_BYTES);
		for (long at = 0; at < got; listed++) {
			const struct dirent64 *entry = (const void *)((const char *)entries + at);

			from = entry->d_off;
			at += entry->d_reclen;
		}
	}
	if (fd >= 0)
		close(fd);
	free(entries);
	return got > 0 ? from : 0;
}

bool mount_introduce(const struct mount *mount, uint32_t ino)
{
	char *path = quiet_path(mount->point, ino), *slash = path ? strrchr(path, '/') : NULL;
	struct asking *me = path ? plan_asking_begin() : NULL;
	uint32_t dir = 0;
	bool known;
	off_t from;

	if (me && mount->is_fronted) { /* else Python would list it */
		pthread_rwlock_rdlock(&table.lock);
		dir = table.nodes[node_live_name(ino)].parent; /* for a name that is gone by now any will do */
		pthread_rwlock_unlock(&table.lock);
	}
	if (dir && walk_is_due(dir, &from)) {
		*slash = '\0';
		walk_ended(dir, walk(path, from));
		*slash = '/';
	}
	known = me && is_inode(AT_FDCWD, path, 0, ino);

	plan_asking_end(me);
	free(path);
	return known;
}

/* ---- dropping by advice ------------------------------------------------------------------- */
/* FUSE_NOTIFY_INVAL_INODE throws the attributes away with the pages, so the next open pays a GETATTR, and it
 * waits for pages that a READ is about to bring. POSIX_FADV_DONTNEED does neither, but needs an open file.
 * Microseconds to drop + for the next open, fstat and read after a new push (2 cores, Linux 6.18, the least
 * of 30 rounds over 200 files): 10 KB 1.7 + 10.0 against 3.2 + 4.7 with advice; 110 KB 6.6 + 43.8 against
 * 8.6 + 29.2. In the ordinary mode each open is a round trip to Python: there, and where there is no path
 * to open, it is the invalidation. */
bool mount_advise(const struct mount *mount, uint32_t ino)
{
	char *path = quiet_path(mount->point, ino);
	struct asking *me = path ? plan_asking_begin() : NULL;
	bool dropped = false;
	int fd = -1;

	if (me) /* O_NONBLOCK: should the name be something else by now */
		fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd >= 0) {
		dropped = is_inode(fd, "", AT_EMPTY_PATH, ino) && !posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fd);
	}
	plan_asking_end(me);
	free(path);
	return dropped;
}
