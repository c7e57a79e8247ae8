/* LD_PRELOAD: what a process does to the files below $RECORD_DIR, in order, into $RECORD_FILE.
 * Each entry: kind, length of the path, inode, offset, length of the data; path; data. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, RENAME, UNLINK, SYNC, ALLOCATE };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *below;
static int out = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void)
{
	below = getenv("RECORD_DIR");
	if (below && getenv("RECORD_FILE"))
		out = REAL(open)(getenv("RECORD_FILE"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	unsetenv("LD_PRELOAD");
}

static void put(uint32_t kind, const char *path, uint64_t ino, uint64_t offset, const void *data,
		uint64_t length)
{
	struct { uint32_t kind, path_len; uint64_t ino, offset, length; } head = {
	    kind, (uint32_t)strlen(path), ino, offset, length};
	struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path_len},
				{(void *)data, data ? length : 0}};
	pthread_mutex_lock(&lock);
	if (REAL(writev)(out, parts, 3) < 0)
		abort();
	pthread_mutex_unlock(&lock);
}

static int is_ours(const char *path)
{
	return out >= 0 && path && !strncmp(path, below, strlen(below));
}

static uint64_t inode(int fd)
{
	char link[64], path[4096];
	struct stat status;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof path - 1);
	if (length < 0)
		return 0;
	path[length] = 0;
	return is_ours(path) && !fstat(fd, &status) ? status.st_ino : 0;
}

static int opened(int fd, const char *path, int flags)
{
	if (fd >= 0 && flags & O_CREAT && is_ours(path)) {
		put(CREATE, path, inode(fd), 0, NULL, 0);
		if (flags & O_TRUNC)
			put(TRUNCATE, "", inode(fd), 0, NULL, 0);
	}
	return fd;
}

#define OPEN(name)                                                                              \
	int name(const char *path, int flags, ...)                                              \
	{                                                                                       \
		va_list rest;                                                                   \
		va_start(rest, flags);                                                          \
		mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                       \
		va_end(rest);                                                                   \
		return opened(REAL(name)(path, flags, mode), path, flags);                      \
	}
#define OPENAT(name)                                                                            \
	int name(int at, const char *path, int flags, ...)                                      \
	{                                                                                       \
		va_list rest;                                                                   \
		va_start(rest, flags);                                                          \
		mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                       \
		va_end(rest);                                                                   \
		return opened(REAL(name)(at, path, flags, mode), path, flags);                  \
	}
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define PWRITE(name, off)                                                                       \
	ssize_t name(int fd, const void *data, size_t length, off offset)                       \
	{                                                                                       \
		ssize_t done = REAL(name)(fd, data, length, offset);                            \
		uint64_t ino = out >= 0 && done > 0 ? inode(fd) : 0;                            \
		if (ino)                                                                        \
			put(WRITE, "", ino, (uint64_t)offset, data, (uint64_t)done);            \
		return done;                                                                    \
	}
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t length)
{
	ssize_t done = REAL(write)(fd, data, length);
	uint64_t ino = out >= 0 && done > 0 ? inode(fd) : 0;
	if (ino)
		put(WRITE, "", ino, (uint64_t)(lseek(fd, 0, SEEK_CUR) - done), data, (uint64_t)done);
	return done;
}

#define FTRUNCATE(name, off)                                                                    \
	int name(int fd, off length)                                                            \
	{                                                                                       \
		int failed = REAL(name)(fd, length);                                            \
		uint64_t ino = out >= 0 && !failed ? inode(fd) : 0;                             \
		if (ino)                                                                        \
			put(TRUNCATE, "", ino, (uint64_t)length, NULL, 0);                      \
		return failed;                                                                  \
	}
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define ALLOCATES(name, off)                                                                    \
	int name(int fd, off offset, off length)                                                \
	{                                                                                       \
		int failed = REAL(name)(fd, offset, length);                                    \
		uint64_t ino = out >= 0 && !failed ? inode(fd) : 0;                             \
		if (ino)                                                                        \
			put(ALLOCATE, "", ino, (uint64_t)(offset + length), NULL, 0);           \
		return failed;                                                                  \
	}
ALLOCATES(posix_fallocate, off_t)
ALLOCATES(posix_fallocate64, off64_t)

int rename(const char *from, const char *to)
{
	int failed = REAL(rename)(from, to);
	if (!failed && is_ours(from))
		put(RENAME, from, 0, 0, to, strlen(to));
	return failed;
}

int unlink(const char *path)
{
	int failed = REAL(unlink)(path);
	if (!failed && is_ours(path))
		put(UNLINK, path, 0, 0, NULL, 0);
	return failed;
}

#define SYNCS(name)                                                                             \
	int name(int fd)                                                                        \
	{                                                                                       \
		int failed = REAL(name)(fd);                                                    \
		if (out >= 0 && !failed && inode(fd))                                           \
			put(SYNC, #name, inode(fd), 0, NULL, 0);                                \
		return failed;                                                                  \
	}
SYNCS(fsync)
SYNCS(fdatasync)
SYNCS(syncfs)
