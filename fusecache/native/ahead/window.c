/* Which staged files has the kernel let go of?
 *
 * FUSE_NOTIFY_RETRIEVE asks for the first byte of an inode, and the kernel sends what it has of that: one byte, or
 * none (NOTIFY_REPLY, an answer that is received as requests are). It needs no path, no descriptor, and no rights to
 * the file, which cachestat(2) and mincore(2) do; it waits for no page and no lock of the file, brings nothing in,
 * and makes nothing younger. Both open modes. The first page stands for the file: the kernel takes the oldest first.
 *
 * INVARIANT: only a file that the RAM ring counts is said to be gone: what was dropped for the budget stays dropped.
 * INVARIANT: what was not answered in time is not gone. Answers to an earlier question, or to a server that was
 *   killed, are known by their number.
 */
#include "ahead.h"

#include <string.h>

#include "../kernel/kernel.h"
#include "../ram/ram.h"

static struct {
	pthread_mutex_t one;  /* question at a time; outside all others */
	pthread_mutex_t lock; /* of what follows; a leaf */
	pthread_cond_t come;
	uint64_t first; /* number of the first file asked for */
	size_t count, left;
	uint8_t *found;
} asked = {.one = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER};

int window_init(void)
{
	pthread_condattr_t attr;
	int err;

	asked.first = (uint64_t)clock_ns(CLOCK_REALTIME);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	err = -pthread_cond_init(&asked.come, &attr);
	pthread_condattr_destroy(&attr);
	return err;
}

static void told(uint64_t number, uint8_t what)
{
	pthread_mutex_lock(&asked.lock);
	if (number - asked.first < asked.count) {
		asked.found[number - asked.first] = what;
		if (!--asked.left)
			pthread_cond_signal(&asked.come);
	}
	pthread_mutex_unlock(&asked.lock);
}

void window_told(uint64_t number, bool is_there) { told(number, is_there ? PAGES_THERE : PAGES_GONE); }

/* False: there is nothing to ask about, or the kernel takes no question. */
static bool ask(int fd, uint64_t number, uint32_t ino)
{
	struct version version;
	int err;

	if (!table_version(ino, &version) || !version.size)
		return false;
	err = kernel_retrieve(fd, ino, number);
	if (err == -ENOENT) /* the kernel has let go of the inode, and its pages with it */
		window_told(number, false);
	return !err || err == -ENOENT;
}

void window_ask(int fd, const uint32_t *inos, size_t count, uint8_t *found, unsigned within_ms)
{
	const int64_t end_ns = clock_ns(CLOCK_MONOTONIC) + (int64_t)within_ms * 1000000;
	const struct timespec end = {end_ns / 1000000000, end_ns % 1000000000};
	uint64_t first;

	memset(found, PAGES_UNKNOWN, count);
	pthread_mutex_lock(&asked.one);
	pthread_mutex_lock(&asked.lock);
	first = asked.first;
	asked.count = asked.left = count;
	asked.found = found;
	pthread_mutex_unlock(&asked.lock);
	for (size_t i = 0; i < count; i++)
		if (!ask(fd, first + i, inos[i]))
			told(first + i, PAGES_UNKNOWN);
	pthread_mutex_lock(&asked.lock);
	while (asked.left && pthread_cond_timedwait(&asked.come, &asked.lock, &end) != ETIMEDOUT)
		;
	asked.first += count;
	asked.count = 0;
	pthread_mutex_unlock(&asked.lock);
	pthread_mutex_unlock(&asked.one);
	for (size_t i = 0; i < count; i++) /* now: the ring lets go before the kernel is told to */
		if (found[i] == PAGES_GONE && !ring_has(inos[i]))
			found[i] = PAGES_UNKNOWN;
}
