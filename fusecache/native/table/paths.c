/* Paths beneath the source, and what is opened there. */
#include "table.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

char *table_path(uint32_t ino, size_t *len)
{
	size_t total = 0, name_len, at;
	const unsigned char *name;
	char *path;

	for (uint32_t i = ino; i != ROOT_INO; i = table.nodes[i].parent) {
		node_name(&table.nodes[i], &name_len);
		total += name_len + 1;
	}
	path = malloc(total + 1);
	if (!path)
		return NULL;
	at = total;
	for (uint32_t i = ino; i != ROOT_INO; i = table.nodes[i].parent) {
		name = node_name(&table.nodes[i], &name_len);
		path[--at] = i == ino ? '\0' : '/';
		at -= name_len;
		memcpy(path + at, name, name_len);
	}
	*len = total ? total - 1 : 0;
	path[*len] = '\0';
	return path;
}

#define HOP_BYTES 3800 /* < PATH_MAX, room for one more name */

static int open_one(int dir_fd, const char *path, int flags)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct open_how how = {
	    .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC | O_NOFOLLOW),
	    .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
	};
	int fd;

	/* EAGAIN: a rename went on beside us, or (with O_NONBLOCK) a lease is being broken. */
	while ((fd = (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof(how))) < 0 &&
	       (errno == EINTR || errno == EAGAIN))
		if (errno == EAGAIN)
			nanosleep(&pause, NULL);
	if (fd < 0 && errno == ENOSYS && !strchr(path, '/')) /* one name: openat can do it as safely */
		do
			fd = openat(dir_fd, path, flags | O_CLOEXEC | O_NOFOLLOW);
		while (fd < 0 && errno == EINTR);
	/* A symlink where the table has something else: changed meanwhile. */
	return fd >= 0 ? fd : errno == ELOOP ? -ESTALE : -errno;
}

/* Open beneath the source, never through a symlink, in hops where the path is longer than the kernel
 * takes at once (or, without openat2, name by name). `path` is modified. */
int open_beneath(char *path, int flags)
{
	int dir = table.source_fd, fd;
	size_t hop = HOP_BYTES;

	if (!*path)
		return open_one(dir, ".", flags);
	for (;;) {
		size_t len = strlen(path), cut = len;

		if (len > hop) {
			for (cut = hop; cut && path[cut] != '/'; cut--)
				;
			if (!cut) {
				for (cut = hop; path[cut] && path[cut] != '/'; cut++)
					;
				if (!path[cut])
					cut = len;
			}
		}
		if (cut < len)
			path[cut] = '\0';
		fd = open_one(dir, path, cut < len ? O_PATH | O_DIRECTORY : flags);
		if (fd == -ENOSYS && hop == HOP_BYTES) {
			if (cut < len)
				path[cut] = '/';
			hop = 0;
			continue;
		}
		if (dir != table.source_fd)
			close(dir);
		if (fd < 0 || cut == len)
			return fd;
		dir = fd;
		path += cut + 1;
	}
}

/* Open the directory that holds a node's name; *name_out is malloc'ed. */
int open_parent(uint32_t name_node, char **name_out)
{
	size_t len;
	char *path, *name;
	const unsigned char *own;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	path = table_path(table.nodes[name_node].parent, &len);
	own = node_name(&table.nodes[name_node], &len);
	name = path ? strndup((const char *)own, len) : NULL;
	pthread_rwlock_unlock(&table.lock);
	if (!path || !name) {
		free(path);
		return -ENOMEM;
	}
	fd = open_beneath(path, O_PATH | O_DIRECTORY);
	free(path);
	if (fd < 0)
		free(name);
	else
		*name_out = name;
	return fd;
}

int table_open(uint64_t ino, int flags)
{
	uint32_t name_node = 0;
	char *path = NULL;
	size_t len;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	if (node_at(ino)) {
		name_node = node_live_name((uint32_t)ino);
		path = name_node ? table_path(name_node, &len) : NULL;
	}
	fd = !node_at(ino) ? -ENOENT : !name_node ? -ESTALE : !path ? -ENOMEM : 0;
	pthread_rwlock_unlock(&table.lock);
	if (!fd)
		fd = open_beneath(path, flags);
	free(path);
	return fd;
}

ssize_t table_readlink(uint64_t ino, char *buf, size_t cap)
{
	uint32_t name_node = 0;
	bool known;
	char *name;
	ssize_t got;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) != NULL;
	if (known)
		name_node = node_live_name((uint32_t)ino);
	pthread_rwlock_unlock(&table.lock);
	if (!known)
		return -ENOENT;
	if (!name_node)
		return -ESTALE;
	if (name_node == ROOT_INO)
		return -EINVAL;
	fd = open_parent(name_node, &name);
	if (fd < 0)
		return fd;
	got = readlinkat(fd, name, buf, cap);
	if (got < 0)
		got = -errno;
	free(name);
	close(fd);
	return got;
}
