/* The log: records written anew for the chunk that will read them (docs/LOG.md). */
#ifndef FUSECACHE_LOG_H
#define FUSECACHE_LOG_H

#include "../table/table.h"

#define LOG_CHUNKS_MOST 4096u
struct log_settings {
	unsigned chunks;
	uint32_t buffer_bytes; /* of a chunk; a multiple of 4096 */
	int64_t credit_bytes;  /* that may be appended */
	unsigned char uuid[16], dataset[16];
	uint8_t algorithm; /* of digests */
};
struct log_counters { /* since the process began */
	_Atomic uint64_t written_bytes, waiting_bytes, moved, added, refused, failed;
	_Atomic uint64_t buffer_bytes; /* of memory, now; waiting_bytes too is of now */
};
extern struct log_counters log_counters;
struct segment_count {
	uint32_t segno;
	uint64_t count;
};
/* -EBUSY: one is open. The descriptors stay the caller's, and open until log_end. */
int log_begin(const struct log_settings *settings, const uint32_t *segnos, const int *fds);
/* The first assignment of an inode counts. -ENOENT: no log; -EINVAL: no such chunk. */
int log_assign(const uint32_t *inos, size_t count, unsigned chunk);
int log_open(void); /* nothing is appended before */
/* Is the log open, the inode of one of its chunks, neither in it nor on its way there, and not in a segment
 * that others are drained before? */
bool log_wants(uint32_t ino);
/* Append the file of a whole, verified record that was read at `from_packed`. It may wait for the disk.
 * 0: done; -EALREADY: it is in this log, or on its way; -ENOENT: no chunk, or no log; -ENOSPC: no credit, or
 * no memory; -EIO: a write of the chunk has failed; -ESTALE: the location leads elsewhere by now. */
int log_move(uint32_t ino, uint64_t from_packed, const unsigned char *raw);
/* The same for the content of a file that has no location. digest: 32 bytes. */
int log_add(uint32_t ino, const struct version *of, const unsigned char *digest, uint64_t fetched_ns,
	    const void *payload, uint32_t payload_len);
/* Whether a file, in any version, waits in the buffer of its chunk. */
bool log_holds(uint32_t ino);
/* Bytes of a file that waits in the buffer of its chunk. False: it does not, in this version. */
bool log_read(uint32_t ino, const struct version *of, uint64_t offset, void *to, size_t size);
/* Until the next call, or the next log, only what lies in these segments is moved; NULL: everything.
 * `segnos` is malloc'ed, and free'd here. */
void log_drain(uint32_t *segnos, size_t count);
int log_survey(struct segment_use **uses, size_t *count); /* as table_survey */
int64_t log_credit(int64_t more_bytes);			  /* what is left of it; 0 without a log */
void log_flush(void);					  /* what was appended before is written; it waits */
struct segment_end {
	uint32_t segno;
	int err; /* errno of the first write that failed; 0: none */
	uint64_t length;
};
/* Written out, and closed: how its segments ended. How many there were, 0: no log was open. */
size_t log_end(struct segment_end ends[LOG_CHUNKS_MOST]);
void log_forget(void); /* closed; what was not written is lost */
/* Locations that were switched away from segments since the last call: malloc'ed, *count of them. */
int log_left(struct segment_count **left, size_t *count);

/* ---- of this room alone -------------------------------------------------------------------- */
#define PATH_BYTES_MOST 60000u /* the store's */
#define RECORD_MOST (BLOCK_BYTES + 20 * PAGE)
#define TALLY(field, n) atomic_fetch_add_explicit(&log_counters.field, (n), memory_order_relaxed)

struct chunk;
struct piece {		     /* a buffer of a chunk, and what lies in it */
	struct piece *next;  /* in the queue, or of the spare ones */
	struct piece *older; /* of those closed in its chunk, and not finished */
	struct chunk *chunk;
	unsigned char *mem;
	struct moved *records;
	uint64_t position; /* in the segment */
	uint32_t mem_bytes, cap, used, count;
	uint32_t touched; /* of mem: the rest has no pages yet */
	unsigned generation;
};

struct chunk {
	pthread_mutex_t lock;
	struct piece *piece;  /* NULL: none yet */
	struct piece *closed; /* the last one taken out of it, if it is not finished */
	uint64_t position;    /* where the next piece begins */
	uint64_t length;      /* end of what has been written whole; under queue.lock, as the next two */
	uint64_t lost;	      /* bytes of writes that failed, not given back as credit yet */
	uint32_t pending;     /* pieces taken out of it and not finished */
	uint32_t segno;
	int fd;
	_Atomic int err; /* of the first write that failed; 0: none */
};

/* Taken out of its chunk, whose lock is held. */
struct piece *piece_close(struct chunk *chunk);
struct piece *piece_get(uint32_t record_len); /* NULL: no memory */
void pieces_free(void);			      /* those that are not used */
void queue_put(struct piece *piece);	      /* to be written; it waits for room */
void queue_flush(void);			      /* what was closed before is written; it waits */
int writers_begin(uint32_t buffer_bytes);     /* of a piece */
void writers_end(void);
void writers_forget(bool forget);    /* they throw away what they get */
void inode_is_written(uint32_t ino); /* its location was switched, or was not to be */
void credit_return(uint64_t bytes);  /* of a write that failed */
void left_forget(void);
bool drain_lets(uint64_t packed); /* may a file that lies there be appended? 0: it lies nowhere */

struct content { /* what a record keeps when it is written anew; nothing is aligned */
	const unsigned char *digest, *sums, *payload;
	uint64_t fetched_ns;
	uint32_t payload_len;
};

struct subject { /* what the table says of it */
	struct version version;
	char *path;
	size_t path_len;
};

uint32_t record_header_length(const struct content *content, const struct subject *subject);
/* docs/FORMAT.md; `to`: record_len bytes. */
void record_pack(unsigned char *to, uint32_t header_len, uint32_t record_len, const struct content *content,
		 const struct subject *subject, uint32_t segno, uint64_t offset, const struct log_settings *settings);

#endif
