/* A recording of accesses: a ring that front threads fill and `fusecache trace` empties.
 *
 * It costs one relaxed load a request while nothing records. A reader never waits for the recorder: when the
 * ring is full, accesses are counted and lost.
 *
 * What is seen: READs that come here. Opens that the kernel answers by itself are not, except
 *   TRACE_WIRES    those that fire a tripwire of a plan;
 *   TRACE_LOOKUPS  zero-open mode, on demand: entries of files expire at once, so that each open of a name
 *                  revalidates it with a LOOKUP. Those that the kernel has are expired when it begins;
 *   trace_saw_open ordinary mode: each OPEN is a request anyway.
 * A READ at offset 0 that follows such an open is the same access and is flagged TRACE_CONTINUES.
 */
#include "trace.h"

#include <stdlib.h>
#include <string.h>

#include "../kernel/kernel.h"
#include "../table/table.h"

#define ACCESSES_MOST (1u << 18)
#define OPENED_SLOTS (1u << 16)
#define SAME_ACCESS_NS 1000000000u /* between a fired wire and its READ */

_Atomic uint8_t trace_mode;

static struct {
	pthread_mutex_t lock;
	struct access *ring; /* NULL: no recording */
	uint32_t first, count;
	uint64_t lost;
	struct {
		uint64_t time_ns;
		uint32_t ino;
	} *opened; /* by inode number: opens whose READ has not come */
} trace = {.lock = PTHREAD_MUTEX_INITIALIZER};

int trace_begin(bool wires, bool lookups)
{
	struct access *ring = malloc(ACCESSES_MOST * sizeof(*ring));
	void *opened = calloc(OPENED_SLOTS, sizeof(*trace.opened));
	int err = ring && opened ? 0 : -ENOMEM;

	pthread_mutex_lock(&trace.lock);
	if (!err && trace.ring)
		err = -EBUSY;
	if (!err) {
		trace.ring = ring;
		trace.opened = opened;
		trace.first = trace.count = 0;
		trace.lost = 0;
		atomic_store(&trace_mode, TRACE_ON | (wires ? TRACE_WIRES : 0) | (lookups ? TRACE_LOOKUPS : 0));
	}
	pthread_mutex_unlock(&trace.lock);
	if (err) {
		free(ring);
		free(opened);
	}
	return err;
}

void trace_end(void)
{
	pthread_mutex_lock(&trace.lock);
	atomic_store(&trace_mode, 0);
	free(trace.ring);
	free(trace.opened);
	trace.ring = NULL;
	trace.opened = NULL;
	pthread_mutex_unlock(&trace.lock);
}

size_t trace_take(size_t most, struct access *out, uint64_t *lost)
{
	size_t taken = 0;

	pthread_mutex_lock(&trace.lock);
	if (!trace.ring)
		trace.count = 0;
	for (; taken < most && trace.count; taken++, trace.count--) {
		out[taken] = trace.ring[trace.first];
		trace.first = (trace.first + 1) % ACCESSES_MOST;
	}
	*lost = trace.lost;
	trace.lost = 0;
	pthread_mutex_unlock(&trace.lock);
	return taken;
}

/* Under the lock: times in the ring ascend. */
static uint64_t now_ns(void) { return (uint64_t)clock_ns(CLOCK_MONOTONIC); }

static void note(uint32_t ino, uint8_t seen, uint32_t tid, uint64_t time_ns)
{
	if (trace.count == ACCESSES_MOST) {
		trace.lost++;
		return;
	}
	trace.ring[(trace.first + trace.count++) % ACCESSES_MOST] =
	    (struct access){.time_ns = time_ns, .ino = ino, .who = tid << 8 | seen};
}

void trace_note_open(uint32_t ino, uint32_t tid)
{
	pthread_mutex_lock(&trace.lock);
	if (trace.ring) {
		uint64_t now = now_ns();

		trace.opened[ino % OPENED_SLOTS].ino = ino;
		trace.opened[ino % OPENED_SLOTS].time_ns = now;
		note(ino, SEEN_LOOKUP, tid, now);
	}
	pthread_mutex_unlock(&trace.lock);
}

void trace_note_read(uint32_t ino, uint8_t what, uint32_t tid)
{
	pthread_mutex_lock(&trace.lock);
	if (trace.ring) {
		uint64_t now = now_ns();
		const uint32_t slot = ino % OPENED_SLOTS;
		bool continues = what == SEEN_ELSEWHERE;

		if (!continues && trace.opened[slot].ino == ino) {
			/* Without wires every open is seen: a READ is of the last one, however late. */
			continues = !(trace_mode & TRACE_WIRES) || now - trace.opened[slot].time_ns < SAME_ACCESS_NS;
			trace.opened[slot].ino = 0;
		}
		note(ino, what | (continues ? TRACE_CONTINUES : 0), tid, now);
	}
	pthread_mutex_unlock(&trace.lock);
}

/* ---- what files are ------------------------------------------------------------------------- */
ssize_t trace_describe(const uint32_t *inos, size_t count, size_t names_most, struct described *out)
{
	size_t told = 0;

	out->names_len = 0;
	for (; told < count; told++) {
		char *path = NULL;
		size_t len = 0;
		bool is_file = false;

		pthread_rwlock_rdlock(&table.lock); /* for each: whoever changes the table waits for one */
		if (node_at(inos[told])) {
			const struct node *n = &table.nodes[node_primary(inos[told])];
			uint32_t name = node_live_name(inos[told]);

			is_file = S_ISREG(n->mode);
			out->sizes[told] = n->size;
			if (is_file)
				path = table_path(name ? name : inos[told], &len);
		}
		pthread_rwlock_unlock(&table.lock);
		if (is_file && !path)
			return -ENOMEM;
		if (len > TRACE_NAME_MOST)
			len = 0; /* not a path that a trace can hold */
		if (len > names_most - out->names_len) {
			free(path);
			break;
		}
		if (len)
			memcpy(out->names + out->names_len, path, len);
		out->lengths[told] = (uint32_t)len;
		out->names_len += len;
		free(path);
	}
	return (ssize_t)told;
}

/* ---- names that the kernel has ------------------------------------------------------------- */
int64_t trace_expire(int fd)
{
	const uint32_t count = table_count();
	int64_t expired = 0;

	for (uint32_t node = ROOT_INO + 1; node <= count; node++) {
		const struct node *n;
		const char *name;
		uint32_t parent;
		size_t len;
		bool is_file;

		pthread_rwlock_rdlock(&table.lock);
		n = &table.nodes[node];
		is_file = S_ISREG(table.nodes[node_primary(node)].mode) && !(node_flags(n) & NODE_DEAD);
		parent = n->parent; /* it and the name never change */
		name = (const char *)node_name(n, &len);
		pthread_rwlock_unlock(&table.lock);
		/* Waits for the directory's lock, which a look-up may be holding. */
		if (is_file && !kernel_expire_entry(fd, parent, name, len))
			expired++;
	}
	return expired;
}
