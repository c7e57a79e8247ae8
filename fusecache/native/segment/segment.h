/* Reads from segment files: records, verified (docs/FORMAT.md). */
#ifndef FUSECACHE_SEGMENT_H
#define FUSECACHE_SEGMENT_H

#include "../table/table.h"

#define RECORD_MAGIC 0x31424346u /* "FCB1" */
#define RECORD_FIXED 72u	 /* bytes before the chunk checksums */
#define RECORD_BLOCK 1
uint64_t location_seed(uint32_t segno, uint64_t offset); /* of the header's checksum */

struct record_head { /* verified headers are kept: records are immutable, numbers not reused */
	bool used;
	uint32_t segno, header_len, payload_len;
	uint64_t offset;
	uint64_t sums[CHUNKS_MOST];
};
#define SCRATCH_HEADS 4
struct scratch { /* buffer for direct reads, one a thread at a time */
	unsigned char *mem;
	size_t cap;
	struct record_head heads[SCRATCH_HEADS];
	unsigned next_head;
	int err; /* errno of the last read that failed */
	struct scratch *next;
};
struct scratch *scratch_get(void); /* NULL: no memory */
void scratch_put(struct scratch *s);

enum { READ_OK, READ_MISS, READ_FAULT };
int segment_add(uint32_t segno, int fd);
void segment_drop(uint32_t segno);
bool segment_known(uint32_t segno);
struct segment;
struct segment *segment_take(uint32_t segno); /* until it is released; NULL: not known */
int segment_fd(const struct segment *segment);
void segment_release(struct segment *segment);
void segment_count_read(struct segment *segment);
/* For each segment that is open: (number, blocks read from it so far). How many there are; at most `most` are
 * written. */
size_t segment_reads(uint64_t (*out)[2], size_t most);
/* `raw`: all of a record, header and payload. NULL: it is not the one that `at` says, or damaged. */
const unsigned char *record_payload(unsigned char *raw, struct location at, uint32_t payload_len);
int record_read_fd(int fd, struct location at, uint32_t payload_len, struct scratch *s, const unsigned char **data);
bool leave_direct(int fd); /* give O_DIRECT up; false: it was not direct */
/* Bytes [from, from+len) of one block, verified; `data` points into the scratch buffer. Faults are
 * counted and reported, and the location is cleared. */
int block_read(uint32_t ino, uint64_t block, uint64_t packed, uint32_t payload_len, uint32_t from, uint32_t len,
	       struct scratch *s, const unsigned char **data);
/* A range of a file, of the version that was found with the block of `offset`; `size` is clipped. *data is in s or in
 * `joined` (when it spans blocks). */
int file_read(const struct look *found, uint64_t offset, size_t *size, struct scratch *s, struct scratch **joined,
	      const unsigned char **data);

/* ---- many records at a time --------------------------------------------------------------- */
struct deep;	     /* of one thread at a time */
struct deep_record { /* of a whole block; the caller's, until it is taken */
	struct deep_record *next;
	struct location at;
	uint32_t payload_len;
};
struct deep *deep_get(void);   /* NULL: no asynchronous I/O here, or no memory */
void deep_put(struct deep *d); /* after deep_take has said NULL */
bool deep_has_room(const struct deep *d);
/* ADDED: it is to be read. FULL: not yet: something has to be taken before. NOT: it is for block_read. */
enum deep_added { DEEP_ADDED, DEEP_FULL, DEEP_NOT };
enum deep_added deep_add(struct deep *d, struct deep_record *record, uint64_t packed, uint32_t payload_len);
/* The next one that was read, NULL: there is none. Header and payload stay until the next call; NULL: the record is
 * for block_read. */
struct deep_record *deep_take(struct deep *d, const unsigned char **raw);

#endif
