/* The RAM tier: which ranges of files the kernel may hold, and who reads a file from front to back. */
#ifndef FUSECACHE_RAM_H
#define FUSECACHE_RAM_H

#include "../base/base.h"

#define STREAM_HEAD_BYTES (128u << 10)

struct range {
	uint32_t ino;
	uint64_t offset, length;
};
void ring_note(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size);
uint64_t ring_total(void);
/* Those that are wanted come last. */
size_t ring_take(uint64_t limit, size_t most, bool (*is_wanted)(uint32_t ino), struct range *out);
void ring_forget(uint32_t ino, uint64_t file_size);
bool ring_has(uint32_t ino); /* its first block is noted */
uint64_t ring_bytes(void);   /* of memory */
void ring_reset(void);

/* Of a file of several blocks; size: not 0; tid: the reader's, 0: unknown. */
void streams_note(uint32_t ino, uint64_t offset, uint64_t size, int tid);
void streams_reset(void);
size_t streams_bytes(void); /* of memory */

#endif
