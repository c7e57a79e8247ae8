/* READs of small files that are not on SSD.
 *
 * Python would need half a millisecond for each, thread to thread. So a READ waits here; Python takes the inodes of
 * many at a time and has their files fetched; and the fetch thread that has brought a file answers it.
 * What is unusual about one, Python gives back: then pyfuse3 gets it, as if it had never waited.
 *
 * INVARIANT: a READ that was taken is answered once: by the bytes that came, or by pyfuse3.
 * INVARIANT: the inode of each READ that waits has been told to Python, or is in `fresh`.
 */
#include "ahead.h"

#include <stdlib.h>
#include <string.h>

struct waiting {
	struct waiting *next;
	struct read_request read;
	unsigned char raw[]; /* what read.raw points at */
};
static struct {
	pthread_mutex_t lock;
	pthread_cond_t some; /* fresh ones, or none will come */
	_Atomic bool enabled;
	_Atomic int64_t tick_ns; /* what changed no longer ago may change again, and look the same */
	struct waiting *first;
	unsigned count;
	uint32_t fresh[MISSED_MOST];
	unsigned fresh_count;
} missed = {.lock = PTHREAD_MUTEX_INITIALIZER, .some = PTHREAD_COND_INITIALIZER};

void missed_enable(bool enabled, int64_t tick_ns)
{
	if (enabled) /* what is in the air goes by the last one */
		atomic_store(&missed.tick_ns, tick_ns);
	pthread_mutex_lock(&missed.lock);
	atomic_store(&missed.enabled, enabled);
	pthread_cond_broadcast(&missed.some);
	pthread_mutex_unlock(&missed.lock);
}

/* A file whose content the fetch threads can bring, read as a whole, and not on SSD. */
static bool is_plain(const struct read_request *read)
{
	const struct node *n;
	bool plain = false;
	uint64_t packed;
	uint32_t ino;

	pthread_rwlock_rdlock(&table.lock);
	if (node_at(read->ino)) {
		ino = node_primary(read->ino);
		n = &table.nodes[ino];
		packed = table_location(ino, 0);
		plain = S_ISREG(n->mode) && !(node_flags(n) & (NODE_STALE | NODE_NOATTR | NODE_SHRUNK)) &&
			node_live_name(ino) && n->size && n->size <= read->size && n->size <= BLOCK_BYTES &&
			!(packed && segment_known(location_unpack(packed).segno)); /* evicted */
	}
	pthread_rwlock_unlock(&table.lock);
	return plain;
}

bool missed_take(const struct read_request *read)
{
	struct waiting *one;
	bool known = false, waits;

	if (!atomic_load_explicit(&missed.enabled, memory_order_relaxed) || read->offset || !is_plain(read) ||
	    !(one = malloc(sizeof(*one) + read->raw_size)))
		return false;
	one->read = *read;
	one->read.raw = memcpy(one->raw, read->raw, read->raw_size);
	pthread_mutex_lock(&missed.lock);
	waits = atomic_load(&missed.enabled) && missed.count < MISSED_MOST && missed.fresh_count < MISSED_MOST;
	if (waits) {
		for (const struct waiting *other = missed.first; other && !known; other = other->next)
			known = other->read.ino == read->ino;
		one->next = missed.first;
		missed.first = one;
		missed.count++;
		if (!known) {
			missed.fresh[missed.fresh_count++] = read->ino;
			pthread_cond_signal(&missed.some);
		}
	}
	pthread_mutex_unlock(&missed.lock);
	if (!waits)
		free(one);
	return waits;
}

size_t missed_fresh(bool wait, uint32_t *inos)
{
	size_t count;

	pthread_mutex_lock(&missed.lock);
	while (wait && !missed.fresh_count && atomic_load(&missed.enabled))
		pthread_cond_wait(&missed.some, &missed.lock);
	count = missed.fresh_count;
	memcpy(inos, missed.fresh, count * sizeof(*inos));
	missed.fresh_count = 0;
	pthread_mutex_unlock(&missed.lock);
	return count;
}

/* Those of the inode; 0: all. */
static struct waiting *take_out(uint32_t ino)
{
	struct waiting *taken = NULL, *one;

	pthread_mutex_lock(&missed.lock);
	for (struct waiting **at = &missed.first; (one = *at);) {
		if (ino && one->read.ino != ino) {
			at = &one->next;
			continue;
		}
		*at = one->next;
		one->next = taken;
		taken = one;
		missed.count--;
	}
	if (!ino)
		missed.fresh_count = 0;
	pthread_mutex_unlock(&missed.lock);
	return taken;
}

void missed_came(uint32_t ino, const struct version *of, const unsigned char *data, int64_t begun_ns)
{
	/* A file that is too young must be flagged before the kernel has its pages: Python does that. */
	const bool settled = begun_ns - of->ctime_ns > atomic_load(&missed.tick_ns);
	struct waiting *one, *next;

	for (one = settled ? take_out(ino) : NULL; one; one = next) {
		const struct read_request *read = &one->read;

		next = one->next;
		if (table_is_current(ino, of) && of->size <= read->size &&
		    !(of->size < read->size && table_refuse_short(ino)))
			answer_missed(read, of, data);
		else
			answer_pass(read);
		free(one);
	}
}

bool missed_waits(uint32_t ino)
{
	bool waits = false;

	pthread_mutex_lock(&missed.lock);
	for (const struct waiting *one = missed.first; one && !waits; one = one->next)
		waits = one->read.ino == ino;
	pthread_mutex_unlock(&missed.lock);
	return waits;
}

void missed_pass(uint32_t ino)
{
	struct waiting *one, *next;

	for (one = take_out(ino); one; one = next) {
		next = one->next;
		answer_pass(&one->read);
		free(one);
	}
}
