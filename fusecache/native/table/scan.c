/* The origin is looked at: one inode, one name, or all entries of a directory. */
#include "table.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

/* A new name with the device and inode of a file we know in another version: that one's turn to be looked
 * at has not come, or the number was used again. Looking now tells (it is rare: after link(2)). */
static void link_refresh(const struct attributes *a)
{
	uint32_t primary;
	bool same_version;

	pthread_rwlock_wrlock(&table.lock);
	primary = (uint32_t)link_hit(a, &same_version);
	pthread_rwlock_unlock(&table.lock);
	if (primary && !same_version)
		table_refresh(primary); /* a failure only means: no alias */
}

/* A directory whose time stamps are younger than this when it is listed may change again, and look the same. */
#define SETTLED_NS 2000000000

static int64_t wall_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool is_gone(int err) { return err == -ENOENT || err == -ENOTDIR || err == -ESTALE; }

int table_refresh(uint64_t ino)
{
	uint32_t name_node;
	struct attributes a;
	bool is_unchecked;
	char *name;
	int fd, err;

	for (;;) {
		pthread_rwlock_rdlock(&table.lock);
		name_node = node_at(ino) ? node_live_name((uint32_t)ino) : 0;
		is_unchecked = name_node && node_is_unchecked(name_node);
		err = node_at(ino) ? 0 : -ENOENT;
		pthread_rwlock_unlock(&table.lock);
		if (err)
			return err;
		if (!name_node)
			return REPLACED;
		if (name_node == ROOT_INO) {
			err = origin_stat(table.source_fd, "", AT_EMPTY_PATH, &a);
		} else {
			fd = open_parent(name_node, &name);
			err = fd;
			if (fd >= 0) {
				/* What this mount has never seen is not believed to an NFS client's cache either. */
				err = origin_stat(fd, name, is_unchecked ? AT_STATX_FORCE_SYNC : 0, &a);
				close(fd);
				free(name);
			}
		}
		if (err < 0 && (!is_gone(err) || name_node == ROOT_INO))
			return err;
		if (err == -ESTALE) { /* or is it the source itself? Then nothing is known of the name */
			int source_err = origin_stat(table.source_fd, "", AT_EMPTY_PATH, &a);

			if (source_err)
				return source_err;
		}
		pthread_rwlock_wrlock(&table.lock);
		if (!err && (name_node == ROOT_INO || same_object(name_node, &a) || may_become(name_node, &a))) {
			err = node_update(name_node, &a);
			pthread_rwlock_unlock(&table.lock);
			return err;
		}
		node_bury(name_node);
		pthread_rwlock_unlock(&table.lock);
		/* another name of a hard-linked file may still lead to it */
	}
}

int64_t table_add(uint64_t parent, const char *name, size_t len, bool is_forced)
{
	const int sync = is_forced ? AT_STATX_FORCE_SYNC : 0;
	char *path = NULL, text[NAME_BYTES_MOST + 1];
	struct attributes dir_now, a;
	uint32_t known;
	int64_t result = 0;
	size_t path_len;
	int fd, err;

	if (len > NAME_BYTES_MOST)
		return -ENAMETOOLONG;
	if (!len || memchr(name, '/', len) || memchr(name, 0, len) || (len == 1 && name[0] == '.') ||
	    (len == 2 && name[0] == '.' && name[1] == '.'))
		return -EINVAL;
	memcpy(text, name, len);
	text[len] = '\0';
	pthread_rwlock_rdlock(&table.lock);
	if (!node_at(parent))
		result = -ENOENT;
	else if (!node_is_directory(node_at(parent)))
		result = -ENOTDIR;
	else if (!(path = table_path((uint32_t)parent, &path_len)))
		result = -ENOMEM;
	pthread_rwlock_unlock(&table.lock);
	if (result)
		return result;
	fd = open_beneath(path, O_PATH | O_DIRECTORY);
	free(path);
	if (fd < 0)
		return fd;
	/* In this order: an NFS client finds by the directory's attributes that it has kept a name too long. */
	err = origin_stat(fd, "", AT_EMPTY_PATH | sync, &dir_now);
	if (!err)
		err = origin_stat(fd, text, sync, &a);
	close(fd);
	if (err && err != -ENOENT)
		return err;
	if (!err && S_ISREG(a.mode) && a.nlink > 1)
		link_refresh(&a);
	pthread_rwlock_wrlock(&table.lock);
	if (parent != ROOT_INO && !same_object((uint32_t)parent, &dir_now)) {
		result = -ESTALE; /* another directory has this path now */
	} else {
		if (is_forced && same_object((uint32_t)parent, &dir_now))
			node_update((uint32_t)parent, &dir_now);
		known = table_find((uint32_t)parent, name, len);
		if (known && !err && same_object(known, &a)) {
			node_update(known, &a);
			result = node_primary(known);
		} else {
			if (known)
				node_bury(known);
			/* The answer to the look-up that asks will replace a negative dentry, if one asks. */
			result = err ? err : node_create((uint32_t)parent, name, len, &a, known != 0 || is_forced);
			if (result > 0)
				result = node_primary((uint32_t)result);
		}
	}
	pthread_rwlock_unlock(&table.lock);
	return result;
}

/* ---- scan --------------------------------------------------------------------------------- */
#define SCAN_BUFFER_BYTES (64u << 10)
#define SCAN_BATCH 512u /* entries merged under one hold of the lock */
#define TICK_ENTRIES 2048u
#define SCANS_MOST 4u /* for one that is forced */

struct dirent_raw {
	uint64_t d_ino;
	int64_t d_off;
	uint16_t d_reclen;
	uint8_t d_type;
	char d_name[];
};

struct scan {
	int sync;	       /* AT_STATX_*_SYNC */
	uint32_t dir, highest; /* nodes above `highest` came after the scan began */
	bool was_listed;
	_Atomic bool overtaken;
	int64_t begun_ns;
	uint64_t buried_before, buried; /* table.buried when it began; how many of those since are its own */
	unsigned char *seen;		/* bit a node number */
	struct scan_result *result;
	struct scan *next;
};

static struct scan *scans; /* those in progress; under table.lock */

struct scan_item {
	const char *name;
	uint32_t len;
	struct attributes a;
};

static void scan_bury(struct scan *scan, uint32_t ino)
{
	const uint64_t before = table.buried;

	node_bury(ino);
	scan->buried += table.buried - before;
}

static int scan_merge(struct scan *scan, const struct scan_item *item)
{
	uint32_t known = table_find(scan->dir, item->name, item->len);
	int64_t created;

	if (known && same_object(known, &item->a)) {
		if (known <= scan->highest)
			scan->seen[known / 8] |= (unsigned char)(1u << known % 8);
		scan->result->changed += node_update(known, &item->a) != SAME;
		return 0;
	}
	if (known) {
		scan_bury(scan, known);
		scan->result->removed += scan->was_listed;
	}
	created = node_create(scan->dir, item->name, item->len, &item->a, scan->was_listed || known);
	if (created < 0)
		return (int)created;
	scan->result->added += scan->was_listed;
	return 0;
}

static int scan_merge_batch(struct scan *scan, const struct scan_item *items, size_t count)
{
	int err = 0;

	for (size_t done = 0; done < count && !err;) {
		size_t stop = done + SCAN_BATCH < count ? done + SCAN_BATCH : count;

		pthread_rwlock_wrlock(&table.lock);
		for (; done < stop && !err; done++)
			err = scan_merge(scan, &items[done]);
		pthread_rwlock_unlock(&table.lock);
	}
	return err;
}

static uint32_t type_of_dirent(uint8_t d_type) { return (uint32_t)DTTOIF(d_type) & S_IFMT; }

static int scan_entries(struct scan *scan, int fd, int (*tick)(void *), void *context)
{
	const size_t most = SCAN_BUFFER_BYTES / 24;
	char *buffer = malloc(SCAN_BUFFER_BYTES);
	struct scan_item *items = malloc(most * sizeof(*items));
	size_t since_tick = 0;
	int err = buffer && items ? 0 : -ENOMEM;

	while (!err) {
		long got = syscall(SYS_getdents64, fd, buffer, SCAN_BUFFER_BYTES);
		size_t count = 0;

		if (got <= 0) {
			err = got < 0 ? -errno : 0;
			break;
		}
		for (long at = 0; at < got && !err;) {
			const struct dirent_raw *entry = (const struct dirent_raw *)(buffer + at);
			struct scan_item *item = &items[count];
			int stat_err;

			at += entry->d_reclen;
			item->name = entry->d_name;
			item->len = (uint32_t)strlen(entry->d_name);
			if (!strcmp(item->name, ".") || !strcmp(item->name, "..") || !item->len ||
			    item->len > NAME_BYTES_MOST)
				continue;
			stat_err = origin_stat(fd, item->name, scan->sync, &item->a);
			if (stat_err == -EACCES || stat_err == -EPERM)
				item->a = (struct attributes){
				    .origin_ino = entry->d_ino,
				    .mode = type_of_dirent(entry->d_type),
				    .refused = true,
				};
			else if (stat_err == -ENOENT)
				continue; /* vanished between the two calls */
			else if (stat_err)
				err = stat_err;
			else if (S_ISREG(item->a.mode) && item->a.nlink > 1) {
				/* Names of one file that lie in one directory: let the first be merged. */
				err = scan_merge_batch(scan, items, count);
				since_tick += count;
				items[0] = *item;
				item = &items[0];
				count = 0;
				link_refresh(&item->a);
			}
			count++;
		}
		if (!err)
			err = scan_merge_batch(scan, items, count);
		since_tick += count;
		if (!err && tick && since_tick >= TICK_ENTRIES) {
			since_tick = 0;
			err = tick(context);
		}
	}
	free(buffer);
	free(items);
	return err;
}

/* Names that the listing did not show. Each is asked for once more: a scan that began earlier or a
 * rename during the listing must not bury what is there. */
static int scan_sweep(struct scan *scan, int fd)
{
	uint32_t cookie = 0, missing[256];
	char name[NAME_BYTES_MOST + 1];
	size_t len;
	int err = 0;

	for (;;) {
		size_t count = 0, walked = 0;
		uint32_t ino;

		pthread_rwlock_rdlock(&table.lock);
		ino = table_next_child(scan->dir, cookie);
		while (ino && ino <= scan->highest && count < 256 && walked++ < 8192) {
			if (!(scan->seen[ino / 8] & 1u << ino % 8))
				missing[count++] = ino;
			cookie = ino;
			ino = table_next_child(scan->dir, ino);
		}
		pthread_rwlock_unlock(&table.lock);
		for (size_t i = 0; i < count && !err; i++) {
			const unsigned char *own = node_name(&table.nodes[missing[i]], &len);
			struct scan_item item = {.name = name, .len = (uint32_t)len};

			memcpy(name, own, len);
			name[len] = '\0';
			err = origin_stat(fd, name, scan->sync, &item.a);
			pthread_rwlock_wrlock(&table.lock);
			if (!err) {
				err = scan_merge(scan, &item);
			} else if (err == -ENOENT) {
				err = 0;
				if (!(node_flags(&table.nodes[missing[i]]) & NODE_DEAD)) {
					scan_bury(scan, missing[i]);
					scan->result->removed += scan->was_listed;
				}
			} else if (err == -EACCES || err == -EPERM) {
				err = 0; /* listed or not cannot be told: keep it */
			}
			pthread_rwlock_unlock(&table.lock);
		}
		if (err || !ino || ino > scan->highest)
			return err;
	}
}

/* Do the time stamps show that a listing of an earlier mount is the directory's? Then it counts as listed. */
static bool listing_holds(uint32_t ino)
{
	const struct node *n;
	struct attributes a;
	char *path = NULL;
	bool holds = false;
	size_t len;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	if (n && (node_flags(n) & (NODE_EXACT | NODE_LISTED | NODE_DEAD)) == NODE_EXACT)
		path = table_path(ino, &len);
	pthread_rwlock_unlock(&table.lock);
	if (!path)
		return false;
	fd = open_beneath(path, O_PATH | O_DIRECTORY);
	free(path);
	if (fd < 0)
		return false;
	if (!origin_stat(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, &a)) {
		pthread_rwlock_wrlock(&table.lock);
		if (same_object(ino, &a)) {
			struct node *n = &table.nodes[ino];

			node_update(ino, &a); /* no more EXACT, if its version is another */
			holds = (node_flags(n) & (NODE_EXACT | NODE_DEAD)) == NODE_EXACT;
			if (holds)
				flags_change(n, NODE_LISTED, 0);
		}
		pthread_rwlock_unlock(&table.lock);
	}
	close(fd);
	return holds;
}

/* table.lock is held, the scan has ended well: is what is listed what these time stamps, of before it, stand for? */
static bool is_exact(const struct scan *scan, const struct attributes *a)
{
	const struct node *n = &table.nodes[scan->dir];

	return n->mtime_ns == a->mtime_ns && n->ctime_ns == a->ctime_ns && a->mtime_ns < scan->begun_ns - SETTLED_NS &&
	       a->ctime_ns < scan->begun_ns - SETTLED_NS && table.buried == scan->buried_before + scan->buried;
}

static int scan_once(uint64_t ino, int (*tick)(void *), void *context, bool is_forced, struct scan_result *out,
		     bool *was_overtaken)
{
	struct scan scan = {.dir = (uint32_t)ino, .result = out, .sync = is_forced ? AT_STATX_FORCE_SYNC : 0};
	const struct node *n;
	struct attributes a;
	int fd = -1, err;
	size_t len;
	char *path = NULL;

	*was_overtaken = false;
	if (ino <= UINT32_MAX && listing_holds((uint32_t)ino))
		return 0;
	scan.begun_ns = wall_ns();
	pthread_rwlock_wrlock(&table.lock);
	scan.buried_before = table.buried;
	n = node_at(ino);
	err = !n ? -ENOENT : !node_is_directory(n) ? -ENOTDIR : 0;
	if (!err) {
		path = table_path((uint32_t)ino, &len);
		scan.highest = table_count();
		scan.was_listed = node_flags(n) & NODE_LISTED;
		scan.seen = calloc(scan.highest / 8 + 1, 1);
		err = path && scan.seen ? 0 : -ENOMEM;
		scan.next = scans;
		scans = &scan;
	}
	pthread_rwlock_unlock(&table.lock);
	if (!path && !scan.seen && err != -ENOMEM)
		return err;
	if (!err) {
		fd = open_beneath(path, O_RDONLY | O_DIRECTORY);
		err = fd < 0 ? fd : origin_stat(fd, "", AT_EMPTY_PATH | scan.sync, &a);
	}
	if (!err) {
		pthread_rwlock_wrlock(&table.lock);
		if (ino != ROOT_INO && !same_object((uint32_t)ino, &a)) {
			err = -ESTALE; /* another directory has this path now */
		} else {
			out->changed += node_update((uint32_t)ino, &a) != SAME;
		}
		pthread_rwlock_unlock(&table.lock);
	}
	if (!err)
		err = scan_entries(&scan, fd, tick, context);
	if (!err && !scan.overtaken)
		err = scan_sweep(&scan, fd);

	pthread_rwlock_wrlock(&table.lock);
	for (struct scan **at = &scans; *at; at = &(*at)->next)
		if (*at == &scan) {
			*at = scan.next;
			break;
		}
	if (!err && !scan.overtaken && !(node_flags(&table.nodes[ino]) & NODE_DEAD)) {
		const uint32_t exact = is_exact(&scan, &a) ? NODE_EXACT : 0;

		flags_change(&table.nodes[ino], NODE_LISTED | exact, NODE_EXACT & ~exact);
		/* `scans` is in order of beginning, newest first: those behind us know less than we do. */
		for (struct scan *older = scan.next; older; older = older->next)
			if (older->dir == scan.dir)
				older->overtaken = true;
	}
	*was_overtaken = scan.overtaken;
	pthread_rwlock_unlock(&table.lock);
	if (fd >= 0)
		close(fd);
	free(path);
	free(scan.seen);
	return err;
}

int table_scan(uint64_t ino, int (*tick)(void *), void *context, bool is_forced, struct scan_result *out)
{
	bool was_overtaken = true;
	int err = 0;

	memset(out, 0, sizeof(*out));
	/* The one that has overtaken it may have seen what attribute caches had. */
	for (unsigned tries = 0; !err && was_overtaken && tries < (is_forced ? SCANS_MOST : 1); tries++)
		err = scan_once(ino, tick, context, is_forced, out, &was_overtaken);
	return err;
}
