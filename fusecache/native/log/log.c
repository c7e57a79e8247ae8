/* The log: records are written anew, into the segment of the chunk that will read them (docs/LOG.md).
 *
 * A record is copied into the buffer of its chunk. A buffer that is full goes to the writer threads; when it
 * is on disk, the locations in the inode table are switched to the copies. Until then the old records count,
 * so that whatever is lost here costs a reader nothing.
 *
 * INVARIANT: a location leads to a record that was written whole before, of that file's content in that
 *   version: it is switched by compare-and-set after the write.
 * INVARIANT: between append and switch an inode is not appended again (its APPENDED bit).
 * INVARIANT: bytes appended <= credit given; what a failed write lost is given back when its file is cut.
 * INVARIANT: no thread waits for the writers or the disk while holding table.lock or the lock of a chunk.
 *
 * Locks, outermost first: control (begin, flush, end: one at a time); gate (read: an append, write: the last
 * one has left before the end); then table.lock or the lock of a chunk, not both; queue.lock, or drain.lock.
 * Writers take neither control nor gate, so both may be held while waiting for them.
 */
#include "log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../hash/hash.h"
#include "../segment/segment.h"

#define FIRST_RECORD 4096u /* behind the segment header */

enum { CLOSED, ASSIGNING, OPEN, ENDING };

static struct {
	pthread_mutex_t control;
	pthread_rwlock_t gate;
	_Atomic int state;
	struct log_settings settings;
	struct chunk *chunks;
	_Atomic int64_t credit;
} the = {.control = PTHREAD_MUTEX_INITIALIZER, .gate = PTHREAD_RWLOCK_INITIALIZER};

/* ---- the chunk of an inode ---------------------------------------------------------------- */
#define APPENDED 0x8000u /* and not switched yet */
#define PASSED 0x4000u	 /* refused once: it does not come again before the next epoch */
#define NUMBER 0x3fffu	 /* of the chunk, + 1; 0: none */
_Static_assert(LOG_CHUNKS_MOST <= NUMBER, "a chunk's number fits");
static _Atomic uint16_t *chunk_of; /* never unmapped: any thread may ask log_wants() */
static _Atomic uint32_t segno_of[LOG_CHUNKS_MOST];

static void chunks_forget(void)
{
	if (chunk_of)
		madvise((void *)(uintptr_t)chunk_of, (size_t)INODES_MOST * sizeof(*chunk_of), MADV_DONTNEED);
}

/* Will it be appended yet, as far as can be said? Else its segment does not become empty. */
static bool is_to_come(uint32_t ino)
{
	uint16_t chunk = chunk_of && ino < INODES_MOST ? atomic_load(&chunk_of[ino]) : 0;

	return chunk && !(chunk & PASSED);
}

int log_survey(struct segment_use **uses, size_t *count) { return table_survey(is_to_come, uses, count); }

/* The inode that all names of a file share; 0: there is none. */
static uint32_t primary_of(uint32_t ino)
{
	return ino && ino <= table_count() && ino < INODES_MOST ? node_primary(ino) : 0;
}

bool log_wants(uint32_t ino)
{
	bool is_file;
	uint64_t packed;
	uint16_t chunk;

	if (atomic_load_explicit(&the.state, memory_order_acquire) != OPEN || !(ino = primary_of(ino)))
		return false;
	chunk = atomic_load(&chunk_of[ino]);
	if (!chunk || chunk & APPENDED)
		return false;
	pthread_rwlock_rdlock(&table.lock);
	is_file = S_ISREG(table.nodes[ino].mode);
	packed = table_location(ino, 0);
	pthread_rwlock_unlock(&table.lock);
	if (!is_file || (packed && packed >> 32 == atomic_load(&segno_of[(chunk & NUMBER) - 1])))
		return false;
	if (drain_lets(packed))
		return true;
	atomic_fetch_or(&chunk_of[ino], PASSED);
	TALLY(refused, 1);
	return false;
}

int log_assign(const uint32_t *inos, size_t count, unsigned chunk)
{
	int state = atomic_load(&the.state);

	if (state != ASSIGNING && state != OPEN)
		return -ENOENT;
	if (chunk >= the.settings.chunks)
		return -EINVAL;
	for (size_t i = 0; i < count; i++) {
		uint32_t ino = primary_of(inos[i]);
		uint16_t none = 0;

		if (ino)
			atomic_compare_exchange_strong(&chunk_of[ino], &none, (uint16_t)(chunk + 1));
	}
	return 0;
}

/* ---- what writers tell -------------------------------------------------------------------- */
void inode_is_written(uint32_t ino) { atomic_fetch_and(&chunk_of[ino], (uint16_t)~APPENDED); }

void credit_return(uint64_t bytes) { atomic_fetch_add(&the.credit, bytes); }

/* ---- appending ---------------------------------------------------------------------------- */
/* of: NULL: whatever version lies at `from`. */
static int subject_find(uint32_t ino, uint64_t from, const struct version *of, uint32_t payload_len, uint32_t segno,
			struct subject *out)
{
	const struct node *n = &table.nodes[ino];
	uint32_t name;
	uint64_t packed;
	int err = 0;

	pthread_rwlock_rdlock(&table.lock);
	packed = table_location(ino, 0);
	name = node_live_name(ino);
	out->version = node_version(n);
	if (packed && packed >> 32 == segno)
		err = -EALREADY;
	else if (!S_ISREG(n->mode) || !name || packed != from || out->version.size != payload_len ||
		 (of && !version_equal(out->version, *of)))
		err = -ESTALE;
	else if (!(out->path = table_path(name, &out->path_len)))
		err = -ENOSPC;
	pthread_rwlock_unlock(&table.lock);
	return err;
}

/* Copy it into the buffer of its chunk. */
static int chunk_append(struct chunk *chunk, uint32_t ino, uint64_t from, const struct content *content,
			const struct subject *subject)
{
	const uint32_t header_len = record_header_length(content, subject);
	const uint32_t record_len = (header_len + content->payload_len + PAGE - 1) & ~(PAGE - 1);
	struct piece *piece, *full;
	bool appended;
	int err;

	if (atomic_fetch_sub(&the.credit, record_len) < (int64_t)record_len) {
		atomic_fetch_add(&the.credit, record_len);
		return -ENOSPC;
	}
	do {
		appended = false;
		full = NULL;
		pthread_mutex_lock(&chunk->lock);
		piece = chunk->piece;
		if (atomic_load(&chunk->err)) {
			err = -EIO;
		} else if (piece && piece->used + record_len > piece->cap) {
			full = piece_close(chunk); /* to be written when no lock is held */
			err = 0;
		} else if (chunk->position + (piece ? piece->used : 0) > LOCATION_OFFSET_MOST ||
			   !(piece = piece ? piece : piece_get(record_len))) {
			err = -ENOSPC;
		} else {
			uint64_t offset;

			if (!chunk->piece) {
				piece->chunk = chunk;
				piece->position = chunk->position;
				chunk->piece = piece;
			}
			offset = piece->position + piece->used;
			record_pack(piece->mem + piece->used, header_len, record_len, content, subject, chunk->segno,
				    offset, &the.settings);
			piece->records[piece->count++] = (struct moved){
			    .ino = ino,
			    .of = subject->version,
			    .from = from,
			    .to = location_pack((struct location){chunk->segno, header_len, offset}),
			};
			piece->used += record_len;
			TALLY(waiting_bytes, record_len);
			appended = true;
			err = 0;
			if (piece->used == piece->cap)
				full = piece_close(chunk);
		}
		pthread_mutex_unlock(&chunk->lock);
		if (full)
			queue_put(full);
	} while (!err && !appended);
	if (err)
		atomic_fetch_add(&the.credit, record_len);
	return err;
}

/* The gate is held. */
static int append(uint32_t ino, uint64_t from, const struct version *of, const struct content *content)
{
	struct subject subject = {.path = NULL};
	struct chunk *chunk;
	uint16_t number;
	int err;

	if (atomic_load(&the.state) != OPEN || !(ino = primary_of(ino)) || !content->payload_len ||
	    content->payload_len > BLOCK_BYTES)
		return -ENOENT;
	/* First: until the bit is cleared, no other thread looks at the location in order to switch it. */
	number = atomic_load(&chunk_of[ino]);
	do {
		if (!(number & NUMBER))
			return -ENOENT;
		if (number & APPENDED)
			return -EALREADY;
	} while (!atomic_compare_exchange_weak(&chunk_of[ino], &number, (uint16_t)(number | APPENDED)));
	chunk = &the.chunks[(number & NUMBER) - 1];
	err = subject_find(ino, from, of, content->payload_len, chunk->segno, &subject);
	if (!err && !drain_lets(from))
		err = -ENOSPC;
	if (!err)
		err = subject.path_len > PATH_BYTES_MOST ? -ENOENT : chunk_append(chunk, ino, from, content, &subject);
	free(subject.path);
	if (err) /* else the writer clears it, and may have done so by now */
		atomic_store(&chunk_of[ino], err == -ENOSPC || err == -EIO ? number | PASSED : number);
	if (err == -ENOSPC)
		TALLY(refused, 1);
	return err;
}

int log_move(uint32_t ino, uint64_t from_packed, const unsigned char *raw)
{
	struct content content = {
	    .digest = raw + 16,
	    .sums = raw + RECORD_FIXED,
	    .payload = raw + location_unpack(from_packed).header_len,
	};
	int err;

	memcpy(&content.fetched_ns, raw + 48, 8);
	memcpy(&content.payload_len, raw + 8, 4);
	pthread_rwlock_rdlock(&the.gate);
	err = append(ino, from_packed, NULL, &content);
	pthread_rwlock_unlock(&the.gate);
	return err;
}

int log_add(uint32_t ino, const struct version *of, const unsigned char *digest, uint64_t fetched_ns,
	    const void *payload, uint32_t payload_len)
{
	struct content content = {
	    .digest = digest,
	    .payload = payload,
	    .fetched_ns = fetched_ns,
	    .payload_len = payload_len,
	};
	uint64_t sums[CHUNKS_MOST];
	int err;

	if (!log_wants(ino) || payload_len > BLOCK_BYTES)
		return -ENOENT;
	for (uint32_t at = 0; at < payload_len; at += CHUNK_BYTES)
		sums[at / CHUNK_BYTES] = hash64(content.payload + at,
						payload_len - at < CHUNK_BYTES ? payload_len - at : CHUNK_BYTES, 0);
	content.sums = (const unsigned char *)sums;
	pthread_rwlock_rdlock(&the.gate);
	err = append(ino, 0, of, &content);
	pthread_rwlock_unlock(&the.gate);
	return err;
}

/* ---- what waits --------------------------------------------------------------------------- */
static bool piece_read(const struct piece *piece, uint32_t ino, const struct version *of, uint64_t offset, void *to,
		       size_t size)
{
	for (uint32_t i = 0; piece && i < piece->count; i++) {
		const struct moved *record = &piece->records[i];
		const struct location at = location_unpack(record->to);

		if (record->ino != ino || !version_equal(record->of, *of))
			continue;
		if (offset > of->size || size > of->size - offset)
			return false;
		memcpy(to, piece->mem + (at.offset - piece->position) + at.header_len + offset, size);
		return true;
	}
	return false;
}

/* What chunk_of[] has of an inode that was appended, and not written yet; else 0. */
static uint16_t appended(uint32_t ino)
{
	const int state = atomic_load(&the.state);
	uint16_t number = 0;

	if ((state == OPEN || state == ENDING) && (ino = primary_of(ino)))
		number = atomic_load(&chunk_of[ino]);
	return number & APPENDED ? number : 0;
}

bool log_holds(uint32_t ino) { return appended(ino); }

bool log_read(uint32_t ino, const struct version *of, uint64_t offset, void *to, size_t size)
{
	struct chunk *chunk;
	bool found = false;
	uint16_t number;

	pthread_rwlock_rdlock(&the.gate);
	number = appended(ino);
	ino = primary_of(ino); /* as its record has it */
	if (number) {
		chunk = &the.chunks[(number & NUMBER) - 1];
		pthread_mutex_lock(&chunk->lock);
		found = piece_read(chunk->piece, ino, of, offset, to, size);
		for (const struct piece *closed = chunk->closed; closed && !found; closed = closed->older)
			found = piece_read(closed, ino, of, offset, to, size);
		pthread_mutex_unlock(&chunk->lock);
	}
	pthread_rwlock_unlock(&the.gate);
	return found;
}

/* ---- begin and end ------------------------------------------------------------------------ */
static int chunks_begin(const struct log_settings *settings, const uint32_t *segnos, const int *fds)
{
	unsigned known = 0;
	int err = 0;

	if (!chunk_of) {
		void *mem = mmap(NULL, (size_t)INODES_MOST * sizeof(*chunk_of), PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (mem == MAP_FAILED)
			return -errno;
		chunk_of = mem;
	}
	the.chunks = calloc(settings->chunks, sizeof(*the.chunks));
	if (!the.chunks)
		return -ENOMEM;
	chunks_forget(); /* what log_assign() did too late for the last one */
	log_drain(NULL, 0);
	the.settings = *settings;
	atomic_store(&the.credit, settings->credit_bytes);
	writers_forget(false);
	for (unsigned i = 0; i < settings->chunks; i++) {
		struct chunk *chunk = &the.chunks[i];

		pthread_mutex_init(&chunk->lock, NULL);
		chunk->position = chunk->length = FIRST_RECORD;
		chunk->segno = segnos[i];
		chunk->fd = fds[i];
		atomic_store(&segno_of[i], segnos[i]);
	}
	/* The front has to find a record as soon as a location leads there. */
	for (; known < settings->chunks && !err; known += !err)
		err = segment_add(segnos[known], fds[known]);
	if (!err)
		err = writers_begin(settings->buffer_bytes);
	while (err && known)
		segment_drop(segnos[--known]);
	if (err) {
		free(the.chunks);
		the.chunks = NULL;
	}
	return err;
}

int log_begin(const struct log_settings *settings, const uint32_t *segnos, const int *fds)
{
	int err = -EBUSY;

	pthread_mutex_lock(&the.control);
	if (atomic_load(&the.state) == CLOSED) {
		err = chunks_begin(settings, segnos, fds);
		if (!err)
			atomic_store(&the.state, ASSIGNING);
	}
	pthread_mutex_unlock(&the.control);
	return err;
}

int log_open(void)
{
	int assigning = ASSIGNING;

	return atomic_compare_exchange_strong(&the.state, &assigning, OPEN) || assigning == OPEN ? 0 : -ENOENT;
}

int64_t log_credit(int64_t more_bytes)
{
	int64_t left = atomic_fetch_add(&the.credit, more_bytes) + more_bytes;

	return atomic_load(&the.state) == CLOSED || left < 0 ? 0 : left;
}

/* Control is held. */
static void flush(void)
{
	for (unsigned i = 0; i < the.settings.chunks; i++) {
		struct chunk *chunk = &the.chunks[i];
		struct piece *piece;

		pthread_mutex_lock(&chunk->lock);
		piece = chunk->piece ? piece_close(chunk) : NULL;
		pthread_mutex_unlock(&chunk->lock);
		if (piece)
			queue_put(piece);
	}
	queue_flush();
}

void log_flush(void)
{
	pthread_mutex_lock(&the.control);
	if (atomic_load(&the.state) != CLOSED)
		flush();
	pthread_mutex_unlock(&the.control);
}

static size_t end(bool forget, struct segment_end *ends)
{
	size_t count = 0;

	pthread_mutex_lock(&the.control);
	if (atomic_load(&the.state) != CLOSED) {
		writers_forget(forget);
		atomic_store(&the.state, ENDING); /* no thread enters any more */
		pthread_rwlock_wrlock(&the.gate); /* those that were inside are out */
		pthread_rwlock_unlock(&the.gate);
		flush();
		writers_end(); /* locations lead to all that waited */
		atomic_store(&the.state, CLOSED);
		pthread_rwlock_wrlock(&the.gate); /* nor does log_read() look into chunks any more */
		pthread_rwlock_unlock(&the.gate);
		for (count = 0; count < the.settings.chunks; count++) {
			struct chunk *chunk = &the.chunks[count];

			if (ends)
				ends[count] = (struct segment_end){chunk->segno, atomic_load(&chunk->err),
								   chunk->length};
			pthread_mutex_destroy(&chunk->lock);
		}
		pieces_free();
		free(the.chunks);
		the.chunks = NULL;
		chunks_forget();
	}
	pthread_mutex_unlock(&the.control);
	return count;
}

size_t log_end(struct segment_end ends[LOG_CHUNKS_MOST]) { return end(false, ends); }

void log_forget(void)
{
	end(true, NULL);
	left_forget();
}
