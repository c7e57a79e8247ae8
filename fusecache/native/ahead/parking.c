/* READs that wait for what is being staged.
 *
 * A reader that has caught up would read the same bytes again, or one by one what is about to come in large
 * reads. So its READ waits, and the thread that stages the file answers it with the bytes it has in hand; or
 * it is read as ever, when they are not coming any more, or not soon. No thread waits with it.
 *
 * INVARIANT: a READ that was taken is answered, or passed on, once: by parking_came, or by the one thread
 *   that looks after those whose bytes do not come.
 */
#include "ahead.h"

#include <stdlib.h>
#include <string.h>

#include "../plan/plan.h"

#define PARKED_MOST 256
#define PARKED_NS_MOST 100000000
#define PARKED_LOOK_NS 5000000

struct parked {
	struct parked *next;
	struct read_request read;
	int64_t until_ns;
	unsigned char raw[]; /* what read.raw points at */
};
static struct {
	pthread_mutex_t lock;
	pthread_cond_t some;
	struct parked *first;
	unsigned count;
	bool is_looked_after;
} parking = {.lock = PTHREAD_MUTEX_INITIALIZER, .some = PTHREAD_COND_INITIALIZER};

static bool is_coming(uint32_t ino)
{
	return (plan_flags(ino) & (PLAN_COMING | PLAN_QUEUED | PLAN_READ | PLAN_STAGED)) == (PLAN_COMING | PLAN_QUEUED);
}

/* From the list of those parked to the list `taken`. */
static void take_out(struct parked **at, struct parked **taken)
{
	struct parked *one = *at;

	*at = one->next;
	one->next = *taken;
	*taken = one;
	parking.count--;
}

/* Those of an inode. */
static struct parked *unpark(uint32_t ino)
{
	struct parked *taken = NULL;

	for (struct parked **at = &parking.first; *at;)
		if ((*at)->read.ino == ino)
			take_out(at, &taken);
		else
			at = &(*at)->next;
	return taken;
}

/* Those that have no more to wait for. */
static struct parked *unpark_waiting_in_vain(void)
{
	const int64_t now = clock_ns(CLOCK_MONOTONIC);
	struct parked *taken = NULL;

	for (struct parked **at = &parking.first; *at;) {
		if ((*at)->until_ns <= now)
			plan_mark((*at)->read.ino, 0, PLAN_COMING); /* late: no READ waits for it again */
		if (!is_coming((*at)->read.ino))
			take_out(at, &taken);
		else
			at = &(*at)->next;
	}
	return taken;
}

static void serve(struct parked *one, struct scratch *s)
{
	answer_now(&one->read, s);
	free(one);
}

static void *look_after_parked(void *of)
{
	const struct timespec pause = {.tv_nsec = PARKED_LOOK_NS};
	struct parked *one, *next;
	struct scratch *s = of;

	for (;;) {
		pthread_mutex_lock(&parking.lock);
		while (!parking.first)
			pthread_cond_wait(&parking.some, &parking.lock);
		one = unpark_waiting_in_vain();
		pthread_mutex_unlock(&parking.lock);
		for (; one; one = next) {
			next = one->next;
			serve(one, s);
		}
		nanosleep(&pause, NULL);
	}
	return NULL;
}

/* With the lock: there is a thread for those whose bytes do not come. */
static bool is_looked_after(void)
{
	struct scratch *s = parking.is_looked_after ? NULL : scratch_get();

	if (s && !(parking.is_looked_after = !thread_start(look_after_parked, s)))
		scratch_put(s);
	return parking.is_looked_after;
}

bool parking_take(const struct read_request *read)
{
	struct parked *one;
	bool waits;

	if (!is_coming(read->ino) || !(one = malloc(sizeof(*one) + read->raw_size)))
		return false;
	one->read = *read;
	one->read.raw = memcpy(one->raw, read->raw, read->raw_size);
	one->until_ns = clock_ns(CLOCK_MONOTONIC) + PARKED_NS_MOST;
	pthread_mutex_lock(&parking.lock);
	/* Under the lock: the thread that brings the bytes clears the flag before it takes the lock. */
	waits = is_coming(read->ino) && parking.count < PARKED_MOST && is_looked_after();
	if (waits) {
		one->next = parking.first;
		parking.first = one;
		parking.count++;
		pthread_cond_signal(&parking.some);
		COUNT(waited, 1);
	}
	pthread_mutex_unlock(&parking.lock);
	if (!waits)
		free(one);
	return waits;
}

bool parking_came(uint32_t ino, const struct version *of, const unsigned char *data, struct scratch *s)
{
	struct parked *one, *next;
	bool is_whole = false;

	if (!(plan_flags(ino) & PLAN_COMING))
		return false;
	plan_mark(ino, 0, PLAN_COMING);
	pthread_mutex_lock(&parking.lock);
	one = unpark(ino);
	pthread_mutex_unlock(&parking.lock);
	for (; one; one = next) {
		const struct read_request *read = &one->read;

		next = one->next;
		if (data && table_is_current(ino, of) && read->offset < of->size) {
			size_t left = of->size - read->offset, size = left < read->size ? left : read->size;

			if (size < read->size && table_refuse_short(ino)) {
				serve(one, s); /* it refuses */
				continue;
			}
			is_whole |= size == of->size;
			answer_with(read, of, data + read->offset, size);
			free(one);
		} else {
			serve(one, s);
		}
	}
	return is_whole;
}
