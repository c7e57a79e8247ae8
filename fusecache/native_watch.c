/* Counters, events for Python, stream detection and the RAM ring.
 *
 * Everything here is a hint or a statistic: it may be late or incomplete, but it is bounded, and it
 * never blocks a front thread for longer than a few hash look-ups.
 *
 * RAM ring. One entry a (inode, block), in the order of the last note; an entry's bytes are what was
 * noted of that block, at most the block's length. An entry that is noted again moves to the end,
 * unless it is in the newest quarter anyway. The total is an upper bound of what the kernel holds.
 * What a plan wants moves to the end instead of being taken, as long as there is anything else.
 */
#include "native.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct counters counters;

/* ---- events ------------------------------------------------------------------------------- */
static struct {
	pthread_mutex_t lock;
	int fd;
	size_t first, count;
	struct event ring[EVENTS_MOST];
} events = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

int watch_init(void)
{
	events.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return events.fd < 0 ? -errno : 0;
}

int watch_event_fd(void) { return events.fd; }

void watch_signal(void)
{
	const uint64_t one = 1;

	if (write(events.fd, &one, sizeof(one)) < 0)
		return; /* the counter is at its maximum: readable anyway */
}

static void raise_event(struct event event)
{
	bool raised = false;

	pthread_mutex_lock(&events.lock);
	if (event.kind != EVENT_STREAM)
		for (size_t i = 0; i < events.count; i++) {
			const struct event *known = &events.ring[(events.first + i) % EVENTS_MOST];

			if (!memcmp(known, &event, sizeof(event)))
				goto out;
		}
	/* Full: a stream event is dropped; a fault takes the oldest one's place (both are hints: a bad
	 * record that was not reported is met again). */
	if (events.count == EVENTS_MOST) {
		if (event.kind == EVENT_STREAM)
			goto out;
		events.first = (events.first + 1) % EVENTS_MOST;
		events.count--;
	}
	events.ring[(events.first + events.count++) % EVENTS_MOST] = event;
	raised = true;
out:
	pthread_mutex_unlock(&events.lock);
	if (raised)
		watch_signal();
}

size_t watch_take(struct event *out, size_t most)
{
	size_t taken = 0;

	pthread_mutex_lock(&events.lock);
	while (taken < most && events.count) {
		out[taken++] = events.ring[events.first];
		events.first = (events.first + 1) % EVENTS_MOST;
		events.count--;
	}
	pthread_mutex_unlock(&events.lock);
	return taken;
}

void watch_fault(uint32_t segno, uint64_t offset, uint32_t ino, int err)
{
	struct event event;

	memset(&event, 0, sizeof(event)); /* padding too: events are compared as bytes */
	event.kind = err ? EVENT_UNREAD : EVENT_FAULT;
	event.a = segno;
	event.b = offset;
	event.c = ino;
	COUNT(faults, 1);
	raise_event(event);
}

/* ---- streams ------------------------------------------------------------------------------ */
#define STREAMS_MOST 64
#define STREAM_AFTER_BYTES (256u << 10)
#define STREAM_SLACK_BYTES (1u << 20) /* readahead requests of one reader arrive out of order */

static struct {
	pthread_mutex_t lock;
	uint64_t clock;
	struct {
		uint32_t ino;
		uint64_t next, run, used;
		uint64_t raised; /* block of the last event + 1 */
	} of[STREAMS_MOST];
} streams = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void stream_read(uint32_t ino, uint64_t offset, uint64_t size)
{
	uint64_t block = offset / BLOCK_BYTES, end = offset + size;
	struct event event;
	int oldest = 0, at = -1;
	bool raise = false;

	pthread_mutex_lock(&streams.lock);
	streams.clock++;
	for (int i = 0; i < STREAMS_MOST && at < 0; i++) {
		uint64_t next = streams.of[i].next;

		if (streams.of[i].used < streams.of[oldest].used)
			oldest = i;
		if (streams.of[i].ino != ino || !streams.of[i].used)
			continue;
		if (offset <= next + STREAM_SLACK_BYTES && next <= end + STREAM_SLACK_BYTES)
			at = i;
		/* The stager pushed the rest of the block: the reader shows up at the next head. */
		else if (streams.of[i].run >= STREAM_AFTER_BYTES && offset > next &&
			 block <= next / BLOCK_BYTES + 1)
			at = i;
	}
	if (at < 0) {
		at = oldest;
		streams.of[at].ino = ino;
		streams.of[at].next = end;
		streams.of[at].run = size;
		streams.of[at].raised = 0;
	} else if (end > streams.of[at].next) {
		streams.of[at].next = end;
		streams.of[at].run += size;
	}
	streams.of[at].used = streams.clock;
	block = (streams.of[at].next - 1) / BLOCK_BYTES;
	if (streams.of[at].run >= STREAM_AFTER_BYTES && streams.of[at].raised < block + 1) {
		streams.of[at].raised = block + 1;
		raise = true;
	}
	pthread_mutex_unlock(&streams.lock);
	if (raise) {
		memset(&event, 0, sizeof(event));
		event.kind = EVENT_STREAM;
		event.a = ino;
		event.b = block;
		raise_event(event);
	}
}

void watch_read(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size)
{
	if (!size)
		return;
	table_served(ino);
	if (file_size > BLOCK_BYTES) {
		stream_read(ino, offset, size);
		if (offset && trace_is(TRACE_ON))
			trace_note_read(ino, SEEN_ELSEWHERE, 0);
	}
	ring_note(ino, file_size, offset, size);
}

/* ---- RAM ring ----------------------------------------------------------------------------- */
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
	uint64_t spared; /* wanted entries moved to the end since anything else was met */
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

size_t ring_take(uint64_t limit, size_t most, struct range *out)
{
	size_t taken = 0, spared = 0;

	pthread_mutex_lock(&ring.lock);
	while (ring.first < ring.end && taken < most && spared < SPARED_AT_ONCE) {
		struct entry oldest = *ring_at(ring.first);
		bool wanted = plan_flags((uint32_t)(oldest.key >> 32)) & PLAN_WANTED;

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

uint64_t ring_memory(void)
{
	uint64_t bytes;

	pthread_mutex_lock(&ring.lock);
	bytes = ring.cap * sizeof(struct entry) + map64_bytes(&ring.places);
	pthread_mutex_unlock(&ring.lock);
	return bytes + sizeof(events) + sizeof(streams);
}

void watch_reset(void)
{
	pthread_mutex_lock(&ring.lock);
	free(ring.of);
	ring.of = NULL;
	ring.cap = 0;
	ring.first = ring.end = ring.total = ring.stale = ring.spared = 0;
	map64_clear(&ring.places);
	pthread_mutex_unlock(&ring.lock);
	pthread_mutex_lock(&streams.lock);
	memset(streams.of, 0, sizeof(streams.of));
	pthread_mutex_unlock(&streams.lock);
	pthread_mutex_lock(&events.lock);
	events.count = 0;
	pthread_mutex_unlock(&events.lock);
}

/* ---- map64 -------------------------------------------------------------------------------- */
static inline size_t map64_home(const struct map64 *map, uint64_t key)
{
	key ^= key >> 32;
	key *= 0x9e3779b97f4a7c15u;
	key ^= key >> 29;
	return key & (map->slots - 1);
}

bool map64_get(const struct map64 *map, uint64_t key, uint64_t *value)
{
	if (!map->used)
		return false;
	for (size_t i = map64_home(map, key);; i = (i + 1) & (map->slots - 1)) {
		if (map->pairs[2 * i] == key) {
			*value = map->pairs[2 * i + 1];
			return true;
		}
		if (!map->pairs[2 * i])
			return false;
	}
}

static void map64_place(struct map64 *map, uint64_t key, uint64_t value)
{
	size_t i = map64_home(map, key);

	while (map->pairs[2 * i] && map->pairs[2 * i] != key)
		i = (i + 1) & (map->slots - 1);
	map->used += !map->pairs[2 * i];
	map->pairs[2 * i] = key;
	map->pairs[2 * i + 1] = value;
}

int map64_set(struct map64 *map, uint64_t key, uint64_t value)
{
	if (map->used * 4 >= map->slots * 3) {
		struct map64 grown = {.slots = map->slots ? map->slots * 2 : 64};

		grown.pairs = calloc(grown.slots, 16);
		if (!grown.pairs)
			return -ENOMEM;
		for (size_t i = 0; i < map->slots; i++)
			if (map->pairs[2 * i])
				map64_place(&grown, map->pairs[2 * i], map->pairs[2 * i + 1]);
		free(map->pairs);
		*map = grown;
	}
	map64_place(map, key, value);
	return 0;
}

void map64_delete(struct map64 *map, uint64_t key)
{
	size_t mask = map->slots - 1, hole, i;

	if (!map->used)
		return;
	for (hole = map64_home(map, key); map->pairs[2 * hole] != key; hole = (hole + 1) & mask)
		if (!map->pairs[2 * hole])
			return;
	/* Close the gap, so that look-ups need no tombstones. */
	for (i = (hole + 1) & mask; map->pairs[2 * i]; i = (i + 1) & mask)
		if (((i - map64_home(map, map->pairs[2 * i])) & mask) >= ((i - hole) & mask)) {
			map->pairs[2 * hole] = map->pairs[2 * i];
			map->pairs[2 * hole + 1] = map->pairs[2 * i + 1];
			hole = i;
		}
	map->pairs[2 * hole] = 0;
	map->used--;
}

void map64_clear(struct map64 *map)
{
	free(map->pairs);
	*map = (struct map64){0};
}
