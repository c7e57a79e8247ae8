/* Blocks that other members of a pool of peers ask this host for (docs/POOL.md, Peers).
 *
 * What is on SSD is read here. What is not, waits here: Python takes what is asked for, has it fetched as for a reader,
 * and gives the bytes; what is unusual about it, it gives back.
 *
 * INVARIANT: each block that waits has been told to Python, or will be by the next asked_take().
 * INVARIANT: bytes go to those alone who asked for the version that they have.
 */
#include "ahead.h"

#include "../pool/pool.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define BYTES_MOST (64u << 20) /* of answers that are waited for, or being sent */

struct asking {
	struct asking *next;
	uint32_t ino, block;
	struct version of;
	bool is_told, is_over;
	pthread_cond_t over;
	unsigned char *data; /* `size` bytes; NULL: not yet, or none */
	uint32_t size;
};
static struct {
	pthread_mutex_t lock;
	int fd; /* readable exactly while something was not told */
	bool is_enabled;
	struct asking *first;
	_Atomic uint64_t bytes;
} asked = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

/* ---- which file it is ------------------------------------------------------------------------- */
/* 0: there is none. What this mount has never looked at, it looks at now if that `may_ask` the origin. */
static uint32_t node_of(const struct wanted *wanted, bool may_ask)
{
	const char *at = wanted->path, *end = at + wanted->length;
	int64_t ino = ROOT_INO;

	while (at < end) {
		const char *slash = memchr(at, '/', (size_t)(end - at));
		size_t length = (size_t)((slash ? slash : end) - at);
		uint32_t child;

		pthread_rwlock_rdlock(&table.lock);
		child = table_find((uint32_t)ino, at, length);
		pthread_rwlock_unlock(&table.lock);
		ino = child || !may_ask ? child : table_add((uint64_t)ino, at, length, false);
		if (ino <= 0)
			return 0;
		at += length + 1;
	}
	return (uint32_t)ino;
}

static bool is_same(const struct version *now, const struct version *of)
{
	return now->size == of->size && now->mtime_ns == of->mtime_ns && now->ctime_ns == of->ctime_ns;
}

/* ABSENT: it is a file that has the version. */
static enum serve_result look_at(uint32_t ino, const struct wanted *wanted, struct look *found)
{
	enum serve_result result = SERVE_NOTHING;

	if (!table_look(ino, wanted->block, found))
		return result;
	pthread_rwlock_rdlock(&table.lock);
	if (S_ISREG(found->node->mode) && node_live_name(found->ino)) {
		const uint32_t flags = node_flags(found->node);

		/* STALE is about the kernel: the table has the new version. */
		result = flags & (NODE_UNCHECKED | NODE_NOATTR) || !is_same(&found->version, &wanted->of)
			     ? SERVE_STALE
			     : SERVE_ABSENT;
	}
	pthread_rwlock_unlock(&table.lock);
	return result;
}

/* Without `may_ask`: of what the table knows. */
static enum serve_result look_for(const struct wanted *wanted, bool may_ask, struct look *found)
{
	const uint32_t ino = node_of(wanted, may_ask);
	enum serve_result result = ino ? look_at(ino, wanted, found) : SERVE_NOTHING;

	/* Whoever asks may have looked later than we have. */
	if (result == SERVE_STALE && may_ask && table_refresh(ino) >= 0)
		result = look_at(ino, wanted, found);
	return result;
}

static uint32_t block_bytes(const struct wanted *wanted)
{
	const uint64_t left = wanted->of.size - (uint64_t)wanted->block * BLOCK_BYTES;

	return left < BLOCK_BYTES ? (uint32_t)left : BLOCK_BYTES;
}

/* ---- from SSD --------------------------------------------------------------------------------- */
static void release_scratch(struct served *served) { scratch_put(served->of); }

static bool read_found(const struct look *found, const struct wanted *wanted, struct served *into)
{
	struct scratch *scratch = found->packed ? scratch_get() : NULL;
	const uint32_t size = block_bytes(wanted);

	*into = (struct served){.size = size, .of = scratch, .release = release_scratch};
	if (scratch &&
	    block_read(found->ino, wanted->block, found->packed, size, 0, size, scratch, &into->data) == READ_OK)
		return true;
	if (scratch)
		scratch_put(scratch);
	return false;
}

static enum serve_result find(const struct wanted *wanted, struct served *into)
{
	struct look found;
	enum serve_result result = look_for(wanted, false, &found);

	return result == SERVE_ABSENT && read_found(&found, wanted, into) ? SERVE_BLOCK : result;
}

/* ---- what waits ------------------------------------------------------------------------------- */
static void release_data(struct served *served)
{
	atomic_fetch_sub(&asked.bytes, served->size);
	free(served->of);
}

/* `asked` is locked, as for the next three. */
static void tell(void)
{
	bool any = false;

	for (const struct asking *one = asked.first; one && !any; one = one->next)
		any = !one->is_told;
	signal_set(asked.fd, any);
}

static void leave(struct asking *gone)
{
	for (struct asking **at = &asked.first; *at; at = &(*at)->next)
		if (*at == gone) {
			*at = gone->next;
			break;
		}
}

static void end(struct asking *one)
{
	leave(one);
	one->is_over = true;
	pthread_cond_signal(&one->over);
}

/* False: the time is over, or nobody takes what is asked for. */
static bool wait_for(struct asking *one, int64_t until_ns)
{
	const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
	bool was_ended;

	pthread_mutex_lock(&asked.lock);
	if (!asked.is_enabled) {
		pthread_mutex_unlock(&asked.lock);
		return false;
	}
	for (const struct asking *other = asked.first; other && !one->is_told; other = other->next)
		one->is_told = other->ino == one->ino && other->block == one->block;
	one->next = asked.first;
	asked.first = one;
	tell();
	while (!one->is_over && !pthread_cond_timedwait(&one->over, &asked.lock, &until))
		;
	was_ended = one->is_over;
	if (!was_ended) {
		/* Another one that waits for the same was not told, since this one was to be. */
		for (struct asking *other = asked.first; other && !one->is_told; other = other->next)
			if (other != one && other->ino == one->ino && other->block == one->block) {
				other->is_told = false;
				break;
			}
		leave(one);
		tell();
	}
	pthread_mutex_unlock(&asked.lock);
	return was_ended;
}

static enum serve_result fetch(const struct wanted *wanted, struct served *into)
{
	pthread_condattr_t attributes;
	struct asking one = {.block = wanted->block};
	struct look found;
	const int64_t until_ns = clock_ns(CLOCK_MONOTONIC) + pool_wait_ns(block_bytes(wanted)) * 3 / 4;
	enum serve_result result = look_for(wanted, true, &found);
	bool was_ended;

	if (result != SERVE_ABSENT)
		return result;
	one.ino = found.ino;
	one.of = found.version;
	one.size = block_bytes(wanted);
	if (atomic_fetch_add(&asked.bytes, one.size) + one.size > BYTES_MOST) {
		atomic_fetch_sub(&asked.bytes, one.size);
		return SERVE_BUSY;
	}
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&one.over, &attributes);
	pthread_condattr_destroy(&attributes);
	was_ended = wait_for(&one, until_ns); /* before the other end gives up: it is to hear so */
	pthread_cond_destroy(&one.over);
	if (one.data) {
		*into = (struct served){one.data, one.size, one.data, release_data};
		return SERVE_BLOCK;
	}
	atomic_fetch_sub(&asked.bytes, one.size);
	if (!was_ended)
		return SERVE_BUSY;
	result = find(wanted, into); /* it may be on SSD by now */
	return result == SERVE_ABSENT ? SERVE_NOTHING : result;
}

int asked_begin(const struct sockaddr *at, unsigned length)
{
	static const struct serve_from from = {.find = find, .fetch = fetch};

	return serve_begin(at, length, &from);
}

/* ---- what Python does ------------------------------------------------------------------------- */
int asked_enable(bool is_enabled)
{
	int err = 0;

	pthread_mutex_lock(&asked.lock);
	if (asked.fd < 0)
		asked.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (asked.fd < 0)
		err = -errno;
	else
		asked.is_enabled = is_enabled;
	while (!asked.is_enabled && asked.first)
		end(asked.first);
	pthread_mutex_unlock(&asked.lock);
	return err;
}

int asked_fd(void) { return asked.fd; }

size_t asked_take(struct asked_block *blocks, size_t most)
{
	size_t count = 0;

	pthread_mutex_lock(&asked.lock);
	for (struct asking *one = asked.first; one && count < most; one = one->next)
		if (!one->is_told) {
			one->is_told = true;
			blocks[count++] = (struct asked_block){one->ino, one->block};
		}
	tell();
	pthread_mutex_unlock(&asked.lock);
	return count;
}

bool asked_waits(struct asked_block which)
{
	bool waits = false;

	pthread_mutex_lock(&asked.lock);
	for (const struct asking *one = asked.first; one && !waits; one = one->next)
		waits = one->ino == which.ino && one->block == which.block;
	pthread_mutex_unlock(&asked.lock);
	return waits;
}

void asked_end(struct asked_block which, const struct version *of, const unsigned char *data, size_t size)
{
	struct asking *next;

	pthread_mutex_lock(&asked.lock);
	for (struct asking *one = asked.first; one; one = next) {
		next = one->next;
		if (one->ino != which.ino || one->block != which.block)
			continue;
		if (data && size == one->size && version_equal(one->of, *of) && (one->data = malloc(size)))
			memcpy(one->data, data, size);
		end(one);
	}
	pthread_mutex_unlock(&asked.lock);
}
