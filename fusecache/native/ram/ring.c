/* The RAM ring: one entry a (inode, block), in the order of the last note; an entry's bytes are what was
 * noted of that block, at most the block's length. An entry that is noted again moves to the end,
 * unless it is in the newest quarter anyway. The total is an upper bound of what the kernel holds.
 * What is wanted moves to the end instead of being taken, as long as there is anything else.
 *
 * It never blocks a front thread for longer than a few hash look-ups.
 */
#include "ram.h"

#include <stdlib.h>

struct entry {
	uint64_t key; /* 0: moved further back */
	uint64_t bytes;
};
static struct {
	pthread_mutex_t lock;
	struct entry *of; /* circular, cap is a power of two */
	size_t cap;
	uint64_t first, end; /* sequence numbers; place = number % cap */
	uint64_t total, stale;
	uint64_t spared;     /* wanted entries moved to the end since anything else was met */
	struct map64 places; /* key -> sequence number + 1 */
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct entry *ring_at(uint64_t number) { return &ring.of[number & (ring.cap - 1)]; }

/* Room for one more entry: drop the moved ones when they are many, else grow. */
static bool ring_room(void)
{
	uint64_t kept;
	struct entry *grown;
	size_t cap;

	if (ring.cap && ring.end - ring.first < ring.cap)
		return true;
	if (ring.stale > ring.cap / 2) {
		kept = ring.first;
		for (uint64_t i = ring.first; i < ring.end; i++)
			if (ring_at(i)->key) {
				*ring_at(kept) = *ring_at(i);
				if (map64_set(&ring.places, ring_at(kept)->key, kept + 1))
					return false; /* not reached: the key is there */
				kept++;
			}
		ring.end = kept;
		ring.stale = 0;
		return true;
	}
	cap = ring.cap ? ring.cap * 2 : 1024;
	grown = calloc(cap, sizeof(*grown));
	if (!grown)
		return false;
	for (uint64_t i = ring.first; i < ring.end; i++)
		grown[i & (cap - 1)] = *ring_at(i);
	free(ring.of);
	ring.of = grown;
	ring.cap = cap;
	return true;
}

static void ring_remove(struct entry *entry)
{
	ring.total -= entry->bytes;
	map64_delete(&ring.places, entry->key);
	entry->key = 0;
	ring.stale++;
}

void ring_note(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size)
{
	pthread_mutex_lock(&ring.lock);
	while (size && offset < file_size) {
		uint64_t block = offset / BLOCK_BYTES, start = block * BLOCK_BYTES, number, bytes, part;
		uint64_t most = file_size - start < BLOCK_BYTES ? file_size - start : BLOCK_BYTES;
		uint64_t key = (uint64_t)ino << 32 | (block & 0xffffffffu);

		part = start + most - offset < size ? start + most - offset : size;
		bytes = part;
		offset += part;
		size -= part;
		if (map64_get(&ring.places, key, &number)) {
			struct entry *known = ring_at(--number);

			bytes = known->bytes + part;
			if (bytes > most)
				bytes = most;
			if (bytes < known->bytes) /* the file shrank; what is noted stays noted */
				bytes = known->bytes;
			if (ring.end - number <= (ring.end - ring.first) / 4 + 1) {
				ring.total += bytes - known->bytes;
				known->bytes = bytes;
				continue;
			}
			ring_remove(known);
		}
		if (!ring_room())
			break;
		if (map64_set(&ring.places, key, ring.end + 1))
			break;
		*ring_at(ring.end++) = (struct entry){key, bytes};
		ring.total += bytes;
	}
	pthread_mutex_unlock(&ring.lock);
}

uint64_t ring_total(void)
{
	uint64_t total;

	pthread_mutex_lock(&ring.lock);
	total = ring.total;
	pthread_mutex_unlock(&ring.lock);
	return total;
}

#define SPARED_AT_ONCE 4096 /* front threads wait for the lock */

size_t ring_take(uint64_t limit, size_t most, bool (*is_wanted)(uint32_t ino), struct range *out)
{
	size_t taken = 0, spared = 0;

	pthread_mutex_lock(&ring.lock);
	while (ring.first < ring.end && taken < most && spared < SPARED_AT_ONCE) {
		struct entry oldest = *ring_at(ring.first);
		bool wanted = is_wanted((uint32_t)(oldest.key >> 32));

		if (oldest.key && ring.total <= limit)
			break;
		if (oldest.key)
			ring_remove(ring_at(ring.first));
		ring.first++;
		ring.stale--;
		/* The place that became free at the front is there at the end. Once round and nothing
		 * else met: all is wanted. */
		if (oldest.key && wanted && ring.spared <= ring.places.used &&
		    !map64_set(&ring.places, oldest.key, ring.end + 1)) {
			*ring_at(ring.end++) = oldest;
			ring.total += oldest.bytes;
			ring.spared++;
			spared++;
		} else if (oldest.key) {
			if (!wanted)
				ring.spared = 0;
			out[taken].ino = (uint32_t)(oldest.key >> 32);
			out[taken].offset = (oldest.key & 0xffffffffu) * (uint64_t)BLOCK_BYTES;
			out[taken++].length = BLOCK_BYTES;
		}
	}
	if (ring.total <= limit)
		ring.spared = 0;
	pthread_mutex_unlock(&ring.lock);
	return taken;
}

bool ring_has(uint32_t ino)
{
	uint64_t number;
	bool found;

	pthread_mutex_lock(&ring.lock);
	found = map64_get(&ring.places, (uint64_t)ino << 32, &number);
	pthread_mutex_unlock(&ring.lock);
	return found;
}

void ring_forget(uint32_t ino, uint64_t file_size)
{
	uint64_t number;

	for (uint64_t block = 0; block * BLOCK_BYTES < file_size; block++) {
		pthread_mutex_lock(&ring.lock);
		if (map64_get(&ring.places, (uint64_t)ino << 32 | (block & 0xffffffffu), &number))
			ring_remove(ring_at(number - 1));
		pthread_mutex_unlock(&ring.lock);
	}
}

uint64_t ring_bytes(void)
{
	uint64_t bytes;

	pthread_mutex_lock(&ring.lock);
	bytes = ring.cap * sizeof(struct entry) + map64_bytes(&ring.places);
	pthread_mutex_unlock(&ring.lock);
	return bytes;
}

void ring_reset(void)
{
	pthread_mutex_lock(&ring.lock);
	free(ring.of);
	ring.of = NULL;
	ring.cap = 0;
	ring.first = ring.end = ring.total = ring.stale = ring.spared = 0;
	map64_clear(&ring.places);
	pthread_mutex_unlock(&ring.lock);
}
