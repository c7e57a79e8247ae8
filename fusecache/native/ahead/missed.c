/* READs of small files that are not on SSD.
 *
 * Python would need half a millisecond for each, thread to thread. So a READ waits here; Python takes the inodes of
 * many at a time and has their files fetched; and the fetch thread that has brought a file answers it.
 * What is unusual about one, Python gives back: then pyfuse3 gets it, as if it had never waited.
 *
 * The kernel asks for a file piece by piece (of 128 KiB, mostly). The first READ has all of it fetched; what its readers
 * have not asked for yet stays in memory for a moment, until it is read, and answers the READs to come.
 *
 * INVARIANT: a READ that was taken is answered once: by the bytes that came, or by pyfuse3.
 * INVARIANT: the inode of each READ that waits has been told to Python, or is in `fresh`.
 * INVARIANT: what stays in memory had its version at the origin before and after it was read, and was not young; it is
 *   answered while the table has that version, and the kernel was told of it.
 */
#include "ahead.h"

#include <stdlib.h>
#include <string.h>

#define RESTS_MOST 32
#define RESTS_BYTES_MOST (32u << 20)
#define REST_NS 1000000000

struct rest {
	uint32_t ino; /* 0: none */
	unsigned users;
	bool is_over; /* freed by its last user */
	struct version of;
	uint64_t from; /* bytes [from, of.size) */
	uint64_t left; /* of them, that no READ was answered with */
	int64_t until_ns;
	unsigned char *data;
};
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
	struct rest rests[RESTS_MOST];
	uint64_t rests_bytes;
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

/* ---- what readers come to next; `missed` is locked, but for what is shown ----------------- */
static void rest_end(struct rest *rest)
{
	rest->is_over = true;
	if (rest->users)
		return;
	missed.rests_bytes -= rest->of.size - rest->from;
	free(rest->data);
	*rest = (struct rest){0};
}

static void rests_forget(int64_t now_ns)
{
	for (struct rest *rest = missed.rests; rest < missed.rests + RESTS_MOST; rest++)
		if (rest->ino && rest->until_ns <= now_ns)
			rest_end(rest);
}

/* Of inode 0: a free place. */
static struct rest *rest_of(uint32_t ino)
{
	for (struct rest *rest = missed.rests; rest < missed.rests + RESTS_MOST; rest++)
		if (rest->ino == ino && !rest->is_over)
			return rest;
	return NULL;
}

/* Bytes [from, of->size), `copy`, are kept, if there is room; else it is false. */
static bool rest_keep(uint32_t ino, const struct version *of, unsigned char *copy, uint64_t from, uint64_t left)
{
	const int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
	const uint64_t size = of->size - from;
	struct rest *former, *place;

	rests_forget(now_ns);
	if ((former = rest_of(ino)))
		rest_end(former);
	place = missed.rests_bytes + size <= RESTS_BYTES_MOST ? rest_of(0) : NULL;
	if (!place)
		return false;
	*place = (struct rest){
	    .ino = ino, .of = *of, .from = from, .left = left, .until_ns = now_ns + REST_NS, .data = copy};
	missed.rests_bytes += size;
	return true;
}

/* How much of the READ a file of `bytes` has. */
static size_t within(const struct read_request *read, uint64_t bytes)
{
	if (read->offset >= bytes)
		return 0;
	return bytes - read->offset < read->size ? bytes - read->offset : read->size;
}

/* The same; 0: it cannot be answered with that version. */
static size_t answerable(const struct read_request *read, const struct version *of)
{
	const size_t size = within(read, of->size);

	if (!size || !table_is_current(read->ino, of))
		return 0;
	return size < read->size && table_refuse_short(read->ino) ? 0 : size;
}

/* Who has it ends its use; NULL: the READ's bytes are not in memory. */
static struct rest *rest_use(const struct read_request *read)
{
	struct rest *rest = rest_of(read->ino);

	if (!rest || read->offset < rest->from || rest->until_ns <= clock_ns(CLOCK_MONOTONIC))
		return NULL;
	rest->users++;
	return rest;
}

/* It locks, and ends the use. False: the READ is not answered. */
static bool rest_answers(struct rest *rest, const struct read_request *read)
{
	const size_t size = answerable(read, &rest->of);

	if (size)
		answer_missed(read, &rest->of, rest->data + (read->offset - rest->from), size);
	pthread_mutex_lock(&missed.lock);
	rest->users--;
	rest->left -= size < rest->left ? size : rest->left;
	if (rest->is_over || !size || !rest->left)
		rest_end(rest);
	pthread_mutex_unlock(&missed.lock);
	return size;
}

/* ---- what waits ---------------------------------------------------------------------------- */
/* A file whose content the fetch threads can bring, and that is not on SSD. */
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
			node_live_name(ino) && n->size > read->offset && n->size <= BLOCK_BYTES &&
			!(packed && segment_known(location_unpack(packed).segno)); /* evicted */
	}
	pthread_rwlock_unlock(&table.lock);
	return plain;
}

bool missed_take(const struct read_request *read)
{
	struct waiting *one;
	struct rest *rest;
	bool known = false, waits;

	if (!atomic_load_explicit(&missed.enabled, memory_order_relaxed))
		return false;
	pthread_mutex_lock(&missed.lock);
	rest = rest_use(read); /* whether it is plain or not: it may just be being stored */
	pthread_mutex_unlock(&missed.lock);
	if (rest)
		return rest_answers(rest, read);
	if (!is_plain(read) || !(one = malloc(sizeof(*one) + read->raw_size)))
		return false;
	one->read = *read;
	one->read.raw = memcpy(one->raw, read->raw, read->raw_size);
	pthread_mutex_lock(&missed.lock);
	rest = rest_use(read);
	waits = !rest && atomic_load(&missed.enabled) && missed.count < MISSED_MOST && missed.fresh_count < MISSED_MOST;
	for (const struct waiting *other = missed.first; waits && other && !known; other = other->next)
		known = other->read.ino == read->ino;
	/* Who begins amid a file may come back for more of it much later, and pyfuse3's way has the kernel keep all of it.
	 * That way goes, too, what another front thread took before the file's first READ was here. */
	waits &= known || !read->offset;
	if (waits) {
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
	return rest ? rest_answers(rest, read) : waits;
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

/* Those of the inode; 0: all. `missed` is locked. */
static struct waiting *take_out(uint32_t ino)
{
	struct waiting *taken = NULL, *one;

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
	return taken;
}

/* Of bytes [*from, size), those that no waiting READ asks for; *from: where the first one ends, 0: none waits.
 * `missed` is locked. */
static uint64_t unasked(uint32_t ino, uint64_t size, uint64_t *from)
{
	uint64_t left;

	*from = 0;
	for (const struct waiting *one = missed.first; one; one = one->next)
		if (one->read.ino == ino && !one->read.offset)
			*from = one->read.size;
	left = *from && *from < size ? size - *from : 0;
	for (const struct waiting *one = missed.first; left && one; one = one->next)
		if (one->read.ino == ino && one->read.offset >= *from) {
			const size_t part = within(&one->read, size);

			left -= part < left ? part : left;
		}
	return left;
}

void missed_came(uint32_t ino, const struct version *of, const unsigned char *data, int64_t begun_ns)
{
	struct waiting *taken, *one, *next;
	unsigned char *copy = NULL;
	uint64_t from, still_from, left;

	/* A file that is too young must be flagged before the kernel has its pages: Python does that. */
	if (begun_ns - of->ctime_ns <= atomic_load(&missed.tick_ns))
		return;
	pthread_mutex_lock(&missed.lock);
	left = unasked(ino, of->size, &from);
	pthread_mutex_unlock(&missed.lock);
	if (!from)
		return;
	if (left && (copy = malloc(of->size - from)))
		memcpy(copy, data + from, of->size - from);
	pthread_mutex_lock(&missed.lock); /* once: a READ waits here, or finds the copy */
	left = unasked(ino, of->size, &still_from);
	taken = take_out(ino);
	/* before the answers: their readers come back at once */
	if (copy && left && still_from == from && rest_keep(ino, of, copy, from, left))
		copy = NULL;
	pthread_mutex_unlock(&missed.lock);
	free(copy);
	for (one = taken; one; one = next) {
		const size_t size = answerable(&one->read, of);

		next = one->next;
		if (size)
			answer_missed(&one->read, of, data + one->read.offset, size);
		else
			answer_pass(&one->read);
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

	pthread_mutex_lock(&missed.lock);
	one = take_out(ino);
	pthread_mutex_unlock(&missed.lock);
	for (; one; one = next) {
		next = one->next;
		answer_pass(&one->read);
		free(one);
	}
}
