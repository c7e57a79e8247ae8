/* The queue to pyfuse3: requests as they were received, for it to parse again. */
#include "answer.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

/* Its length is bounded by the kernel: each entry is a request that awaits its answer. */
struct queued {
	struct queued *next;
	size_t size;
	int64_t begun_ns;
	unsigned char raw[];
};
static struct {
	pthread_mutex_t lock;
	int fd; /* readable exactly while there is something to receive */
	struct queued *first, **end;
	bool ended;
	int64_t begun_ns; /* of the one that was taken last */
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1, .end = &queue.first};

int slow_begin(void)
{
	queue.fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
	return queue.fd;
}

int slow_fd(void) { return queue.fd; }

void slow_put(const void *raw, size_t size, int64_t begun_ns)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct queued *item;

	while (!(item = malloc(sizeof(*item) + size))) /* it must not be lost */
		nanosleep(&pause, NULL);
	item->next = NULL;
	item->size = size;
	item->begun_ns = begun_ns;
	memcpy(item->raw, raw, size);
	pthread_mutex_lock(&queue.lock);
	if (!queue.first)
		signal_set(queue.fd, true);
	*queue.end = item;
	queue.end = &item->next;
	pthread_mutex_unlock(&queue.lock);
	COUNT(slow, 1);
}

int slow_take(void *to, size_t most)
{
	struct queued *item;
	bool ended;
	int got;

	pthread_mutex_lock(&queue.lock);
	item = queue.first;
	if (item) {
		queue.first = item->next;
		if (!queue.first)
			queue.end = &queue.first;
	}
	ended = queue.ended;
	if (!queue.first && !ended)
		signal_set(queue.fd, false);
	pthread_mutex_unlock(&queue.lock);
	if (!item)
		return ended ? 0 : -EINTR;
	got = item->size <= most ? (int)item->size : -EMSGSIZE;
	if (got > 0)
		memcpy(to, item->raw, item->size);
	queue.begun_ns = item->begun_ns;
	free(item);
	return got;
}

int64_t slow_begun_ns(void) { return queue.begun_ns; }

void slow_end(void)
{
	pthread_mutex_lock(&queue.lock);
	queue.ended = true;
	signal_set(queue.fd, true);
	pthread_mutex_unlock(&queue.lock);
}
