/* What all rooms of the C part stand on: threads, clocks, a hash map, counters, and events for Python.
 * Which file is what, and the order of the rooms: docs/ARCHITECTURE.md, Layout.
 *
 * Only python/ knows Python. Everything else runs without the GIL and reports errors as negative errno values.
 * Locks, outermost first: the window's question (`one`, ahead/window.c); table.lock; parking (ahead/parking.c); looks
 * (front/looks.c); then any one of the leaf locks: scratch, segments (segment/segments.c), deep (segment/deep.c),
 * events, streams, ring (ram/), queue (answer/slow.c), seen (plan/plan.c), trace, fetchers (ahead/fetch.c), missed,
 * walks (ahead/lookups.c), the window's `lock`, root_acl (front/raw.c), pool (pool/pool.c), serving, members (pool/), asked (ahead/). No thread waits for the GIL
 * while holding one. The log's are named in log/log.c.
 */
#ifndef FUSECACHE_BASE_H
#define FUSECACHE_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES (4u << 20)
#define CHUNK_BYTES (64u << 10)
#define CHUNKS_MOST (BLOCK_BYTES / CHUNK_BYTES)

/* ---- a hash map from non-zero u64 to u64 (open addressing) -------------------------------- */
struct map64 {
	uint64_t *pairs; /* key, value, key, value, ...; key 0: empty */
	size_t slots, used;
};
bool map64_get(const struct map64 *map, uint64_t key, uint64_t *value);
int map64_set(struct map64 *map, uint64_t key, uint64_t value);
void map64_delete(struct map64 *map, uint64_t key);
void map64_clear(struct map64 *map);
static inline size_t map64_bytes(const struct map64 *map) { return map->slots * 16; }

/* ---- counters, and events for Python ------------------------------------------------------- */
enum { EVENT_FAULT = 1, EVENT_STREAM = 2, EVENT_UNREAD = 3, EVENT_PUNCHED = 4 };
struct event {
	int kind;
	uint64_t a, b, c;
};
#define EVENTS_MOST 4096
/* from_origin, bytes_from_origin: answers to READs from beyond this host, the pool included; of what the fetch
 * threads have read, *_fetched is the origin's, *_pooled the pool's. */
struct counters {
	_Atomic uint64_t requests, from_ssd, bytes_from_ssd, lookups, getattrs, readdirs, slow, faults;
	_Atomic uint64_t bytes_staged, waited, from_origin, bytes_from_origin, files_fetched, bytes_fetched;
	_Atomic uint64_t files_pooled, bytes_pooled;
};
extern struct counters counters;
#define COUNT(field, n) atomic_fetch_add_explicit(&counters.field, (n), memory_order_relaxed)

/* What was counted by the time it took: bucket k has those of at most 2^(LATENCY_SHIFT + k) ns that no lower one has,
 * the last one all that took longer. */
#define LATENCY_SHIFT 14   /* from 16 us */
#define LATENCY_BUCKETS 23 /* to 34 s */
struct latency {
	_Atomic uint64_t buckets[LATENCY_BUCKETS], sum_ns;
};
extern struct latency origin_reads; /* those that ended well */
extern struct latency mount_reads;  /* READs that were answered with bytes, from their arrival on */
void latency_add(struct latency *to, int64_t ns);

int events_init(void);
int events_fd(void); /* readable when there are some, or stale inodes */
void events_signal(void);
void events_raise(int kind, uint64_t a, uint64_t b, uint64_t c);
size_t events_take(struct event *out, size_t most);
/* `err`: of a read that failed; 0: what was read is wrong. */
void events_fault(uint32_t segno, uint64_t offset, uint32_t ino, int err);
void events_reset(void);
size_t events_bytes(void); /* of memory */

/* ---- threads and clocks ------------------------------------------------------------------- */
/* A detached thread with a small stack, in which no signal is handled: signals are Python's. -errno. */
static inline int thread_start(void *(*run)(void *), void *of)
{
	sigset_t all, before;
	pthread_attr_t attr;
	pthread_t thread;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 << 10);
	err = pthread_create(&thread, &attr, run, of);
	pthread_attr_destroy(&attr);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -err;
}

static inline int64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- event descriptors -------------------------------------------------------------------- */
static inline void signal_set(int fd, bool on)
{
	uint64_t value = 1;
	ssize_t done = on ? write(fd, &value, sizeof(value)) : read(fd, &value, sizeof(value));

	(void)done; /* EAGAIN: it is in that state already */
}

#endif
