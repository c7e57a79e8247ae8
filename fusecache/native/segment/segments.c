/* Reads of segment files: the record of a block, verified, as bytes (docs/FORMAT.md).
 *
 * INVARIANT: no byte leaves here that does not match the record's header checksum and the checksum
 * of its chunk, on every read.
 * INVARIANT: a record that was evicted is a miss, not a fault: in a truncated segment, or punched out of one.
 * This is not the store: what is written, indexed or evicted is decided in Python.
 */
#include "segment.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../hash/hash.h"

/* A whole block, the largest header, and alignment at both ends. */
#define SCRATCH_BYTES (BLOCK_BYTES + LOCATION_HEADER_MOST + 3 * PAGE)
#define SCRATCH_KEPT 16 /* new ones are paid for page by page */

static uint16_t get16(const unsigned char *p)
{
	uint16_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}
static uint32_t get32(const unsigned char *p)
{
	uint32_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}
static uint64_t get64(const unsigned char *p)
{
	uint64_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "segment files are little endian");

/* ---- scratch buffers ---------------------------------------------------------------------- */
static pthread_mutex_t scratch_lock = PTHREAD_MUTEX_INITIALIZER;
static struct scratch *scratch_free;
static unsigned scratch_kept;

struct scratch *scratch_get(void)
{
	struct scratch *s;

	pthread_mutex_lock(&scratch_lock);
	s = scratch_free;
	if (s) {
		scratch_free = s->next;
		scratch_kept--;
	}
	pthread_mutex_unlock(&scratch_lock);
	if (s)
		return s;
	s = calloc(1, sizeof(*s));
	if (!s)
		return NULL;
	s->cap = (SCRATCH_BYTES + PAGE - 1) & ~(size_t)(PAGE - 1);
	s->mem = mmap(NULL, s->cap, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (s->mem == MAP_FAILED) {
		free(s);
		return NULL;
	}
	return s;
}

void scratch_put(struct scratch *s)
{
	if (!s)
		return;
	pthread_mutex_lock(&scratch_lock);
	if (scratch_kept < SCRATCH_KEPT) {
		s->next = scratch_free;
		scratch_free = s;
		scratch_kept++;
		s = NULL;
	}
	pthread_mutex_unlock(&scratch_lock);
	if (s) {
		munmap(s->mem, s->cap);
		free(s);
	}
}

/* ---- segments ----------------------------------------------------------------------------- */
struct segment {
	uint32_t segno;
	int fd; /* one each: a large store has thousands of segments */
	_Atomic int reading;
	_Atomic uint64_t used;	      /* segments_clock when it was last taken */
	_Atomic uint64_t blocks_read; /* from their beginning: many READs of one block are one */
};

static pthread_rwlock_t segments_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct map64 segments; /* segno + 1 -> struct segment */
static _Atomic uint64_t segments_clock;

/* At most half of the process's descriptors: the other half is for everybody else. */
static size_t segments_most(void)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur > 1u << 20 ? 1u << 19 : limit.rlim_cur / 2;
}

/* The one used longest ago, but not `but`; segments_lock is held. -1: there is no other. */
static int64_t segment_idlest(uint32_t but)
{
	uint64_t used, least = UINT64_MAX;
	int64_t idlest = -1;

	for (size_t i = 0; i < segments.slots; i++) {
		const struct segment *segment = (const struct segment *)(uintptr_t)segments.pairs[2 * i + 1];

		if (!segments.pairs[2 * i] || segment->segno == but)
			continue;
		used = atomic_load_explicit(&segment->used, memory_order_relaxed);
		if (used < least) {
			least = used;
			idlest = segment->segno;
		}
	}
	return idlest;
}

int segment_add(uint32_t segno, int fd)
{
	struct segment *segment = calloc(1, sizeof(*segment));
	char path[64];
	uint64_t known;
	int64_t idlest = -1;
	int err;

	if (!segment)
		return -ENOMEM;
	segment->segno = segno;
	segment->used = atomic_fetch_add(&segments_clock, 1);
	/* O_DIRECT belongs to the open file, and the caller's may be the writer's: open it anew. */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	segment->fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (segment->fd < 0) /* no direct I/O in this file system, or no /proc */
		segment->fd = open(path, O_RDONLY | O_CLOEXEC);
	if (segment->fd < 0)
		segment->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (segment->fd < 0) {
		err = -errno;
		free(segment);
		return err;
	}
	pthread_rwlock_wrlock(&segments_lock);
	err = map64_get(&segments, (uint64_t)segno + 1, &known)
		  ? -EEXIST
		  : map64_set(&segments, (uint64_t)segno + 1, (uint64_t)(uintptr_t)segment);
	if (!err && segments.used > segments_most())
		idlest = segment_idlest(segno);
	pthread_rwlock_unlock(&segments_lock);
	if (idlest >= 0) /* its locations are misses until it is added again */
		segment_drop((uint32_t)idlest);
	if (err) {
		close(segment->fd);
		free(segment);
	}
	return err == -EEXIST ? 0 : err;
}

struct segment *segment_take(uint32_t segno)
{
	struct segment *segment = NULL;
	uint64_t found;

	pthread_rwlock_rdlock(&segments_lock);
	if (map64_get(&segments, (uint64_t)segno + 1, &found)) {
		segment = (struct segment *)(uintptr_t)found;
		atomic_fetch_add(&segment->reading, 1);
		atomic_store_explicit(&segment->used,
				      atomic_fetch_add_explicit(&segments_clock, 1, memory_order_relaxed),
				      memory_order_relaxed);
	}
	pthread_rwlock_unlock(&segments_lock);
	return segment;
}

int segment_fd(const struct segment *segment) { return segment->fd; }

void segment_release(struct segment *segment) { atomic_fetch_sub(&segment->reading, 1); }

void segment_count_read(struct segment *segment)
{
	atomic_fetch_add_explicit(&segment->blocks_read, 1, memory_order_relaxed);
}

size_t segment_reads(uint64_t (*out)[2], size_t most)
{
	size_t count = 0;

	pthread_rwlock_rdlock(&segments_lock);
	for (size_t i = 0; i < segments.slots; i++) {
		const struct segment *segment = (const struct segment *)(uintptr_t)segments.pairs[2 * i + 1];

		if (!segments.pairs[2 * i])
			continue;
		if (count < most) {
			out[count][0] = segment->segno;
			out[count][1] = atomic_load_explicit(&segment->blocks_read, memory_order_relaxed);
		}
		count++;
	}
	pthread_rwlock_unlock(&segments_lock);
	return count;
}

void segment_drop(uint32_t segno)
{
	const struct timespec pause = {.tv_nsec = 100000};
	uint64_t found;
	struct segment *segment = NULL;

	pthread_rwlock_wrlock(&segments_lock);
	if (map64_get(&segments, (uint64_t)segno + 1, &found)) {
		segment = (struct segment *)(uintptr_t)found;
		map64_delete(&segments, (uint64_t)segno + 1);
	}
	pthread_rwlock_unlock(&segments_lock);
	if (!segment)
		return;
	while (atomic_load(&segment->reading)) /* no other reader can take it: disk reads end soon */
		nanosleep(&pause, NULL);
	close(segment->fd);
	free(segment);
}

bool segment_known(uint32_t segno)
{
	uint64_t found;
	bool known;

	pthread_rwlock_rdlock(&segments_lock);
	known = map64_get(&segments, (uint64_t)segno + 1, &found);
	pthread_rwlock_unlock(&segments_lock);
	return known;
}

/* ---- records ------------------------------------------------------------------------------ */
uint64_t location_seed(uint32_t segno, uint64_t offset)
{
	return (uint64_t)segno << 32 | offset % PAGE / SECTOR << 24 | offset / PAGE;
}

static bool head_verify(unsigned char *raw, struct location at, uint32_t payload_len, struct record_head *out)
{
	uint32_t header_len = at.header_len;
	uint32_t chunks = payload_len / CHUNK_BYTES + !!(payload_len % CHUNK_BYTES);
	uint64_t stored, computed;

	if (payload_len > BLOCK_BYTES || header_len < RECORD_FIXED + chunks * 8)
		return false;
	if (get32(raw) != RECORD_MAGIC || get32(raw + 4) != header_len || get32(raw + 8) != payload_len ||
	    get32(raw + 56) != chunks || raw[63] != RECORD_BLOCK)
		return false;
	if (RECORD_FIXED + chunks * 8 + get16(raw + 60) > header_len || get32(raw + 12) < header_len + payload_len)
		return false;
	stored = get64(raw + 64);
	memset(raw + 64, 0, 8);
	/* Seeded with its place: a record that the disk delivers from elsewhere fails. */
	computed = hash64(raw, header_len, location_seed(at.segno, at.offset));
	memcpy(raw + 64, &stored, 8);
	if (stored != computed)
		return false;
	out->header_len = header_len;
	out->payload_len = payload_len;
	memcpy(out->sums, raw + RECORD_FIXED, (size_t)chunks * 8);
	return true;
}

/* False: it was not direct. Some file systems accept the flag and refuse what is asked with it. */
bool leave_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && flags & O_DIRECT && !fcntl(fd, F_SETFL, flags & ~O_DIRECT);
}

/* Aligned read of the file's [from, to) into s->mem; bytes got from `from` on, or -errno. */
static ssize_t aligned_read(int fd, uint64_t from, uint64_t to, struct scratch *s, unsigned char **data)
{
	uint64_t start = from & ~(uint64_t)(PAGE - 1), end = (to + PAGE - 1) & ~(uint64_t)(PAGE - 1);
	size_t done = 0, want = end - start;

	if (want > s->cap)
		return -EINVAL;
	*data = s->mem + (from - start);
	while (done < want && start + done < to) {
		/* A short direct read ends unaligned only at the end of the file. */
		ssize_t got = pread(fd, s->mem + done, want - done, (off_t)(start + done));

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EINVAL && done % PAGE == 0) {
			/* A disk that wants another alignment: buffered from now on. */
			if (leave_direct(fd))
				continue;
			return -EINVAL;
		}
		if (got < 0) {
			s->err = errno;
			return -s->err;
		}
		if (!got)
			break;
		done += (size_t)got;
	}
	return done > from - start ? (ssize_t)(done - (from - start)) : 0;
}

/* Bytes [start, end) of a payload: whole chunks. */
static bool chunks_verify(const unsigned char *bytes, uint32_t start, uint32_t end, const struct record_head *head)
{
	for (uint32_t at = start; at < end; at += CHUNK_BYTES) {
		uint32_t size = end - at < CHUNK_BYTES ? end - at : CHUNK_BYTES;

		if (hash64(bytes + (at - start), size, 0) != head->sums[at / CHUNK_BYTES])
			return false;
	}
	return true;
}

/* Chunks are verified whole; the range asked for lies inside. */
static int record_read(int fd, bool remember, struct location at, uint32_t payload_len, uint32_t from, uint32_t len,
		       struct scratch *s, const unsigned char **data)
{
	uint32_t first, last, start, end;
	struct record_head *head = NULL;
	unsigned char *raw = NULL;
	ssize_t got;

	if (!len || from > payload_len || len > payload_len - from || at.header_len % 8 ||
	    at.header_len < RECORD_FIXED || at.header_len > LOCATION_HEADER_MOST)
		return READ_FAULT;
	first = from / CHUNK_BYTES;
	last = (from + len - 1) / CHUNK_BYTES;
	start = first * CHUNK_BYTES;
	end = (last + 1) * CHUNK_BYTES < payload_len ? (last + 1) * CHUNK_BYTES : payload_len;

	for (int i = 0; remember && i < SCRATCH_HEADS && !head; i++)
		if (s->heads[i].used && s->heads[i].segno == at.segno && s->heads[i].offset == at.offset &&
		    s->heads[i].header_len == at.header_len && s->heads[i].payload_len == payload_len)
			head = &s->heads[i];
	if (head && first == 0)
		head = NULL; /* one read gets both anyway */
	if (!head) {
		/* The header, and the payload with it unless the range lies far into the record. */
		bool together = start <= 2 * CHUNK_BYTES;

		const int64_t want = (int64_t)at.header_len + (together ? end : 0);

		got = aligned_read(fd, at.offset, at.offset + (uint64_t)want, s, &raw);
		if (got < want)
			return READ_FAULT;
		head = &s->heads[s->next_head++ % SCRATCH_HEADS];
		head->used = false;
		if (!head_verify(raw, at, payload_len, head))
			return READ_FAULT;
		head->segno = at.segno;
		head->offset = at.offset;
		head->used = remember;
		raw = together ? raw + at.header_len + start : NULL;
	}
	if (!raw) {
		got = aligned_read(fd, at.offset + at.header_len + start, at.offset + at.header_len + end, s, &raw);
		if (got < (ssize_t)(end - start))
			return READ_FAULT;
	}
	if (!chunks_verify(raw, start, end, head))
		return READ_FAULT;
	*data = raw + (from - start);
	return READ_OK;
}

const unsigned char *record_payload(unsigned char *raw, struct location at, uint32_t payload_len)
{
	struct record_head head;

	if (at.header_len % 8 || at.header_len < RECORD_FIXED || !head_verify(raw, at, payload_len, &head))
		return NULL;
	raw += at.header_len;
	return chunks_verify(raw, 0, payload_len, &head) ? raw : NULL;
}

int record_read_fd(int fd, struct location at, uint32_t payload_len, struct scratch *s, const unsigned char **data)
{
	return record_read(fd, false, at, payload_len, 0, payload_len, s, data);
}

/* Of a record that was read in vain: was it punched out of its segment? */
static bool is_punched(int fd, struct location at, uint32_t payload_len)
{
	const off_t hole = lseek(fd, (off_t)at.offset, SEEK_HOLE); /* all reads say where, so it may move */

	return hole >= 0 && (uint64_t)hole < at.offset + at.header_len + payload_len;
}

int block_read(uint32_t ino, uint64_t block, uint64_t packed, uint32_t payload_len, uint32_t from, uint32_t len,
	       struct scratch *s, const unsigned char **data)
{
	struct location at = location_unpack(packed);
	struct segment *segment = segment_take(at.segno);
	struct stat st;
	int result;

	if (!segment)
		return READ_MISS;
	if (!from)
		segment_count_read(segment);
	s->err = 0;
	result = record_read(segment->fd, true, at, payload_len, from, len, s, data);
	if (result == READ_FAULT) {
		/* Evicted by any process: truncated first, then unlinked; or punched. That is no fault. */
		if (!fstat(segment->fd, &st) &&
		    (!st.st_nlink || (uint64_t)st.st_size < at.offset + at.header_len + payload_len))
			result = READ_MISS;
		else if (!s->err && is_punched(segment->fd, at, payload_len)) {
			result = READ_MISS;
			events_raise(EVENT_PUNCHED, at.segno, at.offset, ino);
		}
		table_clear_location(ino, block, packed);
		if (result == READ_FAULT)
			events_fault(at.segno, at.offset, ino, s->err);
	}
	segment_release(segment);
	return result;
}

int file_read(const struct look *found, uint64_t offset, size_t *size, struct scratch *s, struct scratch **joined,
	      const unsigned char **data)
{
	uint64_t packed = found->packed, end, block = offset / BLOCK_BYTES, last;
	const struct version version = found->version;
	struct version now;
	size_t done = 0;
	int result = READ_OK;

	if (offset >= version.size)
		*size = 0;
	else if (*size > version.size - offset)
		*size = version.size - offset;
	*data = s->mem;
	if (!*size)
		return READ_OK;
	if (!packed)
		return READ_MISS;
	end = offset + *size;
	last = (end - 1) / BLOCK_BYTES;
	if (last > block) {
		if (*size > s->cap)
			return READ_MISS;
		*joined = scratch_get();
		if (!*joined)
			return READ_MISS;
	}
	for (; block <= last && result == READ_OK; block++) {
		uint64_t begin = block * BLOCK_BYTES;
		uint64_t most = version.size - begin < BLOCK_BYTES ? version.size - begin : BLOCK_BYTES;
		uint64_t from = done ? 0 : offset - begin;
		uint64_t len = (end - begin < most ? end - begin : most) - from;

		if (done) {
			pthread_rwlock_rdlock(&table.lock);
			packed = table_location(found->ino, block);
			now = node_version(found->node);
			pthread_rwlock_unlock(&table.lock);
			/* The blocks of one answer are of one version. */
			if (!packed || !version_equal(now, version))
				return READ_MISS;
		}
		result = block_read(found->ino, block, packed, (uint32_t)most, (uint32_t)from, (uint32_t)len, s, data);
		if (result == READ_OK && *joined)
			memcpy((*joined)->mem + done, *data, len);
		done += len;
	}
	if (result == READ_OK && *joined)
		*data = (*joined)->mem;
	return result;
}
