/* A recording of accesses (docs/TRACES.md). */
#ifndef FUSECACHE_TRACE_H
#define FUSECACHE_TRACE_H

#include "../base/base.h"

enum { SEEN_LOOKUP = 1, SEEN_SSD = 2, SEEN_ORIGIN = 3 };   /* ORIGIN: not from this host; from the pool, too */
enum { TRACE_ON = 1, TRACE_WIRES = 2, TRACE_LOOKUPS = 4 }; /* trace_mode; 0: no recording */
enum { SEEN_ELSEWHERE = 4, TRACE_CONTINUES = 16 };	   /* with SEEN_*; the numbers are those of docs/TRACES.md */
struct access {
	uint64_t time_ns; /* CLOCK_MONOTONIC */
	uint32_t ino;
	uint32_t who; /* thread id << 8 | SEEN_* | TRACE_CONTINUES */
};
_Static_assert(sizeof(struct access) == 16, "recording/recording.py knows it");
extern _Atomic uint8_t trace_mode;
static inline bool trace_is(uint8_t bit) { return atomic_load_explicit(&trace_mode, memory_order_relaxed) & bit; }
int trace_begin(bool wires, bool lookups); /* -EBUSY: a recording is under way */
void trace_end(void);
size_t trace_take(size_t most, struct access *out, uint64_t *lost);
/* Sizes and paths of inodes, in turn, until `names` is full; how many, or -ENOMEM. */
#define TRACE_NAME_MOST 65535u /* bytes; of a path, docs/TRACES.md */
struct described {
	uint64_t *sizes;
	uint32_t *lengths; /* of the path in `names`; 0: no file, or its path is too long */
	char *names;
	size_t names_len;
};
ssize_t trace_describe(const uint32_t *inos, size_t count, size_t names_most, struct described *out);
int64_t trace_expire(int fd); /* the names of all files; how many the kernel knew */
void trace_note_open(uint32_t ino, uint32_t tid);
void trace_note_read(uint32_t ino, uint8_t what, uint32_t tid);
/* An open by thread `tid` (0: unknown) was seen, and counts in a recording with `bit`. */
static inline void trace_saw_open(uint32_t ino, uint32_t tid, uint8_t bit)
{
	if (trace_is(bit))
		trace_note_open(ino, tid);
}

#endif
