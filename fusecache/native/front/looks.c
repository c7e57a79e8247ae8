/* Look-ups of what only an earlier mount has looked at: threads of their own look at the origin, and answer.
 *
 * Python would need a third of a millisecond for each. What is unusual is passed on to it: a name that is gone or
 * another file's, an error, an origin that does not answer within PASS_NS.
 *
 * INVARIANT: a look-up that was taken is answered once: by the thread that looked, or by pyfuse3.
 */
#include "front.h"

#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>

#include "../libfuse/libfuse.h"

#define LOOKS_MOST 64u	  /* at a time */
#define PASS_NS 500000000 /* then pyfuse3 says what is known, if it must; as LOOK_WAIT_S in read/operations.py */

struct waiting {
	struct waiting *next;
	struct fuse_req *req; /* NULL: it was passed on */
	int64_t since_ns;
	uint32_t ino;
	bool begun;
	size_t raw_size;
	unsigned char raw[];
};
static struct {
	pthread_mutex_t lock;
	pthread_cond_t some, watch;
	struct waiting *first, **end; /* the oldest first, until it is answered or passed on */
	unsigned threads, idle, queued;
	unsigned hung;		    /* were passed on, and their threads are not back: no others are taken */
	bool has_watch, is_watched; /* its thread is there; it will look again by itself */
} looks = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .some = PTHREAD_COND_INITIALIZER,
    .watch = PTHREAD_COND_INITIALIZER,
    .end = &looks.first,
};

/* looks.lock is held. */
static void leave(struct waiting *one)
{
	struct waiting **at = &looks.first;

	while (*at != one)
		at = &(*at)->next;
	*at = one->next;
	if (looks.end == &one->next)
		looks.end = at;
}

static void pass(struct fuse_req *req, const struct waiting *one)
{
	real.reply_none(req); /* frees the object, sends nothing */
	slow_put(one->raw, one->raw_size, clock_ns(CLOCK_MONOTONIC));
}

static void answer(struct fuse_req *req, const struct waiting *one, int looked)
{
	const struct fuse_in_header *in = (const void *)one->raw;
	uint32_t unchecked;

	if (looked < 0 || looked == REPLACED || !operations_lookup(req, in->nodeid, (const char *)(in + 1), &unchecked))
		pass(req, one);
}

static void *look_main(void *unused)
{
	struct waiting *one;
	struct fuse_req *req;
	int looked;

	(void)unused;
	pthread_mutex_lock(&looks.lock);
	for (;;) {
		while (!looks.queued)
			pthread_cond_wait(&looks.some, &looks.lock);
		for (one = looks.first; one->begun;)
			one = one->next;
		one->begun = true;
		looks.queued--;
		looks.idle--;
		pthread_mutex_unlock(&looks.lock);
		looked = table_refresh(one->ino);
		pthread_mutex_lock(&looks.lock);
		looks.idle++;
		req = one->req;
		if (req)
			leave(one);
		else
			looks.hung--;
		pthread_mutex_unlock(&looks.lock);
		if (req)
			answer(req, one, looked);
		free(one);
		pthread_mutex_lock(&looks.lock);
	}
	return NULL;
}

/* The origin may hang for ever: what has waited for PASS_NS is passed on. */
static void *watch_main(void *unused)
{
	struct waiting *one;

	(void)unused;
	pthread_mutex_lock(&looks.lock);
	for (;;) {
		int64_t left_ns;

		looks.is_watched = looks.first;
		if (!looks.first) {
			pthread_cond_wait(&looks.watch, &looks.lock);
			continue;
		}
		one = looks.first;
		left_ns = one->since_ns + PASS_NS - clock_ns(CLOCK_MONOTONIC);
		if (left_ns > 0) { /* not woken by each that comes: it is due later */
			const struct timespec left = {.tv_nsec = left_ns};

			pthread_mutex_unlock(&looks.lock);
			nanosleep(&left, NULL);
			pthread_mutex_lock(&looks.lock);
			continue;
		}
		leave(one);
		pass(one->req, one);
		one->req = NULL;
		if (one->begun) { /* it is its thread's now */
			looks.hung++;
		} else {
			looks.queued--;
			free(one);
		}
	}
	return NULL;
}

/* looks.lock is held. Is there one for one more? */
static bool have_thread(void)
{
	if (!looks.has_watch && thread_start(watch_main, NULL))
		return false;
	looks.has_watch = true;
	if (looks.queued >= looks.idle && looks.threads < LOOKS_MOST && !thread_start(look_main, NULL)) {
		looks.threads++;
		looks.idle++;
	}
	return looks.threads; /* with fewer than wished for it only takes longer */
}

bool looks_take(struct fuse_req *req, uint32_t ino, const void *raw, size_t raw_size)
{
	struct waiting *one = malloc(sizeof(*one) + raw_size);
	bool waits;

	if (!one)
		return false;
	*one = (struct waiting){.req = req, .since_ns = clock_ns(CLOCK_MONOTONIC), .ino = ino, .raw_size = raw_size};
	memcpy(one->raw, raw, raw_size);
	pthread_mutex_lock(&looks.lock);
	waits = !looks.hung && have_thread();
	if (waits) {
		*looks.end = one;
		looks.end = &one->next;
		looks.queued++;
		pthread_cond_signal(&looks.some);
		if (!looks.is_watched)
			pthread_cond_signal(&looks.watch);
	}
	pthread_mutex_unlock(&looks.lock);
	if (!waits)
		free(one);
	return waits;
}
