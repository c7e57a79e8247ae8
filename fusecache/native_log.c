/* The log: records are written anew, into the segment of the chunk that will read them (docs/LOG.md).
 *
 * A record is copied into the buffer of its chunk. A buffer that is full goes to the writer threads; when it
 * is on disk, the locations in the inode table are switched to the copies. Until then the old records count,
 * so that whatever is lost here is lost to nobody.
 *
 * INVARIANT: a location leads to a record that was written whole before, of that file's content in that
 *   version: it is switched by compare-and-set after the write.
 * INVARIANT: between append and switch an inode is not appended again (its APPENDED bit).
 * INVARIANT: bytes appended <= credit given; what a failed write lost is given back when its file is cut.
 * INVARIANT: nobody waits for the writers or the disk while holding table.lock or the lock of a chunk.
 *
 * Locks, outermost first: control (begin, flush, end: one at a time); gate (read: an append, write: the last
 * one has left before the end); then table.lock or the lock of a chunk, not both; queue.lock, or drain.lock. Writers take
 * neither control nor gate, so both may be held while waiting for them.
 */
#include "native.h"
#include "native_hash.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define INODES_MOST (1u << 29) /* as many as a table has at most */
#define WRITERS 10 /* a write waits for the disk behind reads that are many times as large */
#define QUEUE_BYTES (32u << 20)
#define LARGE_BYTES_KEPT QUEUE_BYTES /* of buffers for single records that are larger than a chunk's buffer */

/* docs/FORMAT.md */
#define ENTRY_FIXED 56u
#define PLACE_BYTES 8u
#define PATH_BYTES_MOST 60000u /* the store's */
#define FIRST_RECORD 4096u     /* behind the segment header */
#define RECORD_MOST (BLOCK_BYTES + 20 * PAGE)
_Static_assert(RECORD_FIXED + 8 * CHUNKS_MOST + ENTRY_FIXED + PATH_BYTES_MOST + PLACE_BYTES + BLOCK_BYTES + PAGE <=
		   RECORD_MOST,
	       "the largest record");

struct chunk;
struct piece { /* a buffer of a chunk, and what lies in it */
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
	uint64_t length;     /* end of what has been written whole; under queue.lock, as the next two */
	uint64_t lost;	     /* bytes of writes that failed, not given back as credit yet */
	uint32_t pending;    /* pieces taken out of it and not finished */
	uint32_t segno;
	int fd;
	_Atomic int err; /* of the first write that failed; 0: none */
};

enum { CLOSED, ASSIGNING, OPEN, ENDING };

static struct {
	pthread_mutex_t control;
	pthread_rwlock_t gate;
	_Atomic int state;
	struct log_settings settings;
	struct chunk *chunks;
	pthread_t writers[WRITERS];
	unsigned writer_count;
	_Atomic int64_t credit;
	_Atomic bool forget; /* writers throw away what they get */
} the = {.control = PTHREAD_MUTEX_INITIALIZER, .gate = PTHREAD_RWLOCK_INITIALIZER};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t wake, done;
	struct piece *first, **end;
	size_t bytes; /* in the queue or being written */
	/* Pieces taken out of their chunk and not finished, of two generations: a flush begins a new one and
	 * waits for the end of the old one. */
	uint64_t outstanding[2];
	unsigned generation;
	bool closed; /* writers end */
	struct piece *spare, *spare_large;
	size_t large_bytes; /* touched, of spare_large */
	struct map64 left; /* segno + 1 -> locations switched away */
} queue = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
    .end = &queue.first,
};

struct log_counters log_counters;
#define TALLY(field, n) atomic_fetch_add_explicit(&log_counters.field, (n), memory_order_relaxed)

/* ---- the chunk of an inode ---------------------------------------------------------------- */
#define APPENDED 0x8000u /* and not switched yet */
#define PASSED 0x4000u	 /* refused once: it does not come again before the next epoch */
#define NUMBER 0x3fffu	 /* of the chunk, + 1; 0: none */
_Static_assert(LOG_CHUNKS_MOST <= NUMBER, "a chunk's number fits");
static _Atomic uint16_t *chunk_of; /* never unmapped: anybody may ask log_wants() */
static _Atomic uint32_t segno_of[LOG_CHUNKS_MOST];

static void chunks_forget(void)
{
	if (chunk_of)
		madvise((void *)(uintptr_t)chunk_of, (size_t)INODES_MOST * sizeof(*chunk_of), MADV_DONTNEED);
}

/* While there is little credit, only what lies in these segments is appended: each of them becomes empty, and
 * gives back more than it took. */
static struct {
	pthread_rwlock_t lock;
	_Atomic bool on;
	uint32_t *segnos; /* ascending */
	size_t count;
} drain = {.lock = PTHREAD_RWLOCK_INITIALIZER};

static int compare_segnos(const void *a, const void *b)
{
	const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

void log_drain(uint32_t *segnos, size_t count)
{
	uint32_t *old;

	if (segnos)
		qsort(segnos, count, sizeof(*segnos), compare_segnos);
	pthread_rwlock_wrlock(&drain.lock);
	old = drain.segnos;
	drain.segnos = segnos;
	drain.count = count;
	atomic_store(&drain.on, segnos != NULL);
	pthread_rwlock_unlock(&drain.lock);
	free(old);
}

/* May a file that lies there be appended? packed: 0: it lies nowhere. */
static bool may_leave(uint64_t packed)
{
	const uint32_t segno = (uint32_t)(packed >> 32);
	bool found;

	if (!packed || !atomic_load_explicit(&drain.on, memory_order_relaxed))
		return true;
	pthread_rwlock_rdlock(&drain.lock);
	found = !drain.segnos ||
		bsearch(&segno, drain.segnos, drain.count, sizeof(segno), compare_segnos) != NULL;
	pthread_rwlock_unlock(&drain.lock);
	return found;
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
	uint64_t packed;
	uint16_t chunk;

	if (atomic_load_explicit(&the.state, memory_order_acquire) != OPEN || !(ino = primary_of(ino)))
		return false;
	chunk = atomic_load(&chunk_of[ino]);
	if (!chunk || chunk & APPENDED || !S_ISREG(table.nodes[ino].mode))
		return false;
	packed = __atomic_load_n(&table.nodes[ino].location, __ATOMIC_RELAXED);
	if (packed && packed >> 32 == atomic_load(&segno_of[(chunk & NUMBER) - 1]))
		return false;
	if (may_leave(packed))
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

/* ---- pieces ------------------------------------------------------------------------------- */
static void piece_free(struct piece *piece)
{
	atomic_fetch_sub(&log_counters.buffer_bytes, piece->touched);
	munmap(piece->mem, piece->mem_bytes);
	free(piece->records);
	free(piece);
}

/* Those that were used before come first: fresh pages cost more than the copy into them. */
static struct piece *piece_get(uint32_t record_len)
{
	const uint32_t buffer_bytes = the.settings.buffer_bytes;
	const bool large = record_len > buffer_bytes;
	struct piece **spares = large ? &queue.spare_large : &queue.spare, *piece;

	pthread_mutex_lock(&queue.lock);
	piece = *spares;
	if (piece) {
		*spares = piece->next;
		queue.large_bytes -= large ? piece->touched : 0;
	}
	pthread_mutex_unlock(&queue.lock);
	if (!piece) {
		piece = calloc(1, sizeof(*piece));
		if (!piece)
			return NULL;
		piece->mem_bytes = large ? RECORD_MOST : buffer_bytes;
		piece->records = malloc((large ? 1 : buffer_bytes / PAGE) * sizeof(*piece->records));
		piece->mem = mmap(NULL, piece->mem_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
				  -1, 0);
		if (!piece->records || piece->mem == MAP_FAILED) {
			if (piece->mem != MAP_FAILED)
				munmap(piece->mem, piece->mem_bytes);
			free(piece->records);
			free(piece);
			return NULL;
		}
	}
	piece->cap = large ? record_len : buffer_bytes;
	if (piece->touched < piece->cap) {
		TALLY(buffer_bytes, piece->cap - piece->touched);
		piece->touched = piece->cap;
	}
	piece->used = piece->count = 0;
	return piece;
}

/* queue.lock is held. What is given back is not to be kept. */
static struct piece *piece_put(struct piece *piece)
{
	bool large = piece->mem_bytes == RECORD_MOST;

	if (large && queue.large_bytes + piece->touched > LARGE_BYTES_KEPT)
		return piece;
	piece->next = large ? queue.spare_large : queue.spare;
	*(large ? &queue.spare_large : &queue.spare) = piece;
	queue.large_bytes += large ? piece->touched : 0;
	return NULL;
}

/* Take the piece out of its chunk, whose lock is held. */
static struct piece *piece_close(struct chunk *chunk)
{
	struct piece *piece = chunk->piece;

	chunk->piece = NULL;
	piece->older = chunk->closed;
	chunk->closed = piece;
	chunk->position += piece->used;
	pthread_mutex_lock(&queue.lock);
	piece->generation = queue.generation;
	queue.outstanding[piece->generation]++;
	chunk->pending++;
	pthread_mutex_unlock(&queue.lock);
	return piece;
}

/* Its records lie where locations lead by now, or nowhere. */
static void piece_finish(struct piece *piece)
{
	struct piece **at = &piece->chunk->closed;

	pthread_mutex_lock(&piece->chunk->lock);
	while (*at != piece)
		at = &(*at)->older;
	*at = piece->older;
	pthread_mutex_unlock(&piece->chunk->lock);
}

/* Waits for room. */
static void queue_put(struct piece *piece)
{
	pthread_mutex_lock(&queue.lock);
	while (queue.bytes && queue.bytes + piece->used > QUEUE_BYTES)
		pthread_cond_wait(&queue.done, &queue.lock);
	queue.bytes += piece->used;
	piece->next = NULL;
	*queue.end = piece;
	queue.end = &piece->next;
	pthread_cond_signal(&queue.wake);
	pthread_mutex_unlock(&queue.lock);
}

/* ---- writers ------------------------------------------------------------------------------ */
/* 0, or an errno. */
static int write_whole(int fd, const unsigned char *mem, size_t size, uint64_t at)
{
	size_t done = 0;
	int err;

	while (done < size) {
		ssize_t count = pwrite(fd, mem + done, size - done, (off_t)(at + done));

		if (count < 0 && errno == EINTR)
			continue;
		err = count < 0 ? errno : EIO;
		if (count <= 0 && !leave_direct(fd))
			return err;
		if (count > 0)
			done += (size_t)count;
		if (done % PAGE)
			leave_direct(fd);
	}
	return 0;
}

/* queue.lock is held. Without memory the segment is not counted, and stays longer. */
static void count_left(const struct piece *piece)
{
	uint64_t count;

	for (uint32_t i = 0; i < piece->count; i++) {
		const struct moved *record = &piece->records[i];
		uint64_t key = (record->from >> 32) + 1;

		if (!record->switched || !record->from)
			continue;
		if (!map64_get(&queue.left, key, &count))
			count = 0;
		map64_set(&queue.left, key, count + 1);
	}
}

/* Parts of records would take space that nobody counts. */
static void cut(const struct chunk *chunk, uint64_t length)
{
	int err = ftruncate(chunk->fd, (off_t)length);

	(void)err; /* whoever adopts the segment cuts it, too */
}

static void piece_write(struct piece *piece)
{
	struct chunk *chunk = piece->chunk;
	int none = 0, err = atomic_load(&the.forget) ? ECANCELED
						     : write_whole(chunk->fd, piece->mem, piece->used, piece->position);
	bool written = !err;

	if (written) {
		TALLY(written_bytes, piece->used);
		table_switch(piece->records, piece->count);
	} else {
		atomic_compare_exchange_strong(&chunk->err, &none, err);
		TALLY(failed, atomic_load(&the.forget) ? 0 : piece->count);
	}
	for (uint32_t i = 0; i < piece->count; i++) {
		const struct moved *record = &piece->records[i];

		if (written && record->switched && record->from)
			TALLY(moved, 1);
		else if (written && record->switched)
			TALLY(added, 1);
		atomic_fetch_and(&chunk_of[record->ino], (uint16_t)~APPENDED); /* after the switch */
	}
	atomic_fetch_sub(&log_counters.waiting_bytes, piece->used);
	piece_finish(piece);
	pthread_mutex_lock(&queue.lock);
	if (written) {
		count_left(piece);
		if (chunk->length < piece->position + piece->used)
			chunk->length = piece->position + piece->used;
	} else {
		chunk->lost += piece->used;
	}
	if (!--chunk->pending && chunk->lost) { /* nobody else writes there now */
		if (!atomic_load(&the.forget))
			cut(chunk, chunk->length);
		atomic_fetch_add(&the.credit, chunk->lost);
		chunk->lost = 0;
	}
	queue.bytes -= piece->used;
	queue.outstanding[piece->generation]--;
	piece = piece_put(piece);
	pthread_cond_broadcast(&queue.done);
	pthread_mutex_unlock(&queue.lock);
	if (piece)
		piece_free(piece);
}

static void *writer_main(void *unused)
{
	struct piece *piece;

	(void)unused;
	for (;;) {
		pthread_mutex_lock(&queue.lock);
		while (!queue.first && !queue.closed)
			pthread_cond_wait(&queue.wake, &queue.lock);
		piece = queue.first;
		if (piece) {
			queue.first = piece->next;
			if (!queue.first)
				queue.end = &queue.first;
		}
		pthread_mutex_unlock(&queue.lock);
		if (!piece)
			return NULL;
		piece_write(piece);
	}
}

static int writers_begin(void)
{
	sigset_t all, before;
	int err = 0;

	queue.closed = false;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
	for (the.writer_count = 0; the.writer_count < WRITERS && !err; the.writer_count += !err)
		err = pthread_create(&the.writers[the.writer_count], NULL, writer_main, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return the.writer_count ? 0 : -err;
}

static void writers_end(void)
{
	pthread_mutex_lock(&queue.lock);
	queue.closed = true;
	pthread_cond_broadcast(&queue.wake);
	pthread_mutex_unlock(&queue.lock);
	while (the.writer_count)
		pthread_join(the.writers[--the.writer_count], NULL);
}

/* ---- appending ---------------------------------------------------------------------------- */
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

static void put32(unsigned char *p, uint32_t v) { memcpy(p, &v, sizeof(v)); }
static void put64(unsigned char *p, uint64_t v) { memcpy(p, &v, sizeof(v)); }

static uint32_t sums_bytes(uint32_t payload_len) { return (payload_len + CHUNK_BYTES - 1) / CHUNK_BYTES * 8; }

static uint32_t header_length(const struct content *content, const struct subject *subject)
{
	return (RECORD_FIXED + sums_bytes(content->payload_len) + ENTRY_FIXED + (uint32_t)subject->path_len +
		PLACE_BYTES + 7) &
	       ~7u;
}

/* docs/FORMAT.md; `to`: record_len bytes. */
static void record_pack(unsigned char *to, uint32_t header_len, uint32_t record_len, const struct content *content,
			const struct subject *subject, uint32_t segno, uint64_t offset)
{
	const uint32_t sums_len = sums_bytes(content->payload_len);
	const uint16_t path_len = (uint16_t)subject->path_len, entry_len = ENTRY_FIXED + path_len + PLACE_BYTES;
	unsigned char *entry = to + RECORD_FIXED + sums_len, place[32];

	memset(to, 0, header_len);
	put32(to, RECORD_MAGIC);
	put32(to + 4, header_len);
	put32(to + 8, content->payload_len);
	put32(to + 12, record_len);
	memcpy(to + 16, content->digest, 32);
	put64(to + 48, content->fetched_ns);
	put32(to + 56, sums_len / 8);
	memcpy(to + 60, &entry_len, 2);
	to[62] = the.settings.algorithm;
	to[63] = RECORD_BLOCK;
	memcpy(to + RECORD_FIXED, content->sums, sums_len);
	memcpy(entry, the.settings.dataset, 16);
	put64(entry + 16, subject->version.origin_ino);
	put64(entry + 24, subject->version.size);
	put64(entry + 32, (uint64_t)subject->version.mtime_ns);
	put64(entry + 40, (uint64_t)subject->version.ctime_ns);
	memcpy(entry + 52, &path_len, 2);
	memcpy(entry + ENTRY_FIXED, subject->path, path_len);
	memcpy(place, the.settings.uuid, 16);
	put64(place + 16, segno);
	put64(place + 24, offset);
	put64(entry + ENTRY_FIXED + path_len, hash64(place, sizeof(place), 0));
	put64(to + 64, hash64(to, header_len, (uint64_t)segno << 32 | offset / PAGE));
	memcpy(to + header_len, content->payload, content->payload_len);
	memset(to + header_len + content->payload_len, 0, record_len - header_len - content->payload_len);
}

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
	const uint32_t header_len = header_length(content, subject);
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
			full = piece_close(chunk); /* to be written by somebody who holds no lock */
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
			record_pack(piece->mem + piece->used, header_len, record_len, content, subject,
				    chunk->segno, offset);
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
	/* First: until the bit is cleared, nobody else looks at the location in order to switch it. */
	number = atomic_load(&chunk_of[ino]);
	do {
		if (!(number & NUMBER))
			return -ENOENT;
		if (number & APPENDED)
			return -EALREADY;
	} while (!atomic_compare_exchange_weak(&chunk_of[ino], &number, (uint16_t)(number | APPENDED)));
	chunk = &the.chunks[(number & NUMBER) - 1];
	err = subject_find(ino, from, of, content->payload_len, chunk->segno, &subject);
	if (!err && !may_leave(from))
		err = -ENOSPC;
	if (!err)
		err = subject.path_len > PATH_BYTES_MOST ? -ENOENT
							 : chunk_append(chunk, ino, from, content, &subject);
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
		sums[at / CHUNK_BYTES] = hash64(
		    content.payload + at, payload_len - at < CHUNK_BYTES ? payload_len - at : CHUNK_BYTES, 0);
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

bool log_holds(uint32_t ino)
{
	int state = atomic_load(&the.state);

	return (state == OPEN || state == ENDING) && (ino = primary_of(ino)) && atomic_load(&chunk_of[ino]) & APPENDED;
}

bool log_read(uint32_t ino, const struct version *of, uint64_t offset, void *to, size_t size)
{
	struct chunk *chunk;
	uint16_t number = 0;
	bool found = false;
	int state;

	pthread_rwlock_rdlock(&the.gate);
	state = atomic_load(&the.state);
	if ((state == OPEN || state == ENDING) && (ino = primary_of(ino)))
		number = atomic_load(&chunk_of[ino]);
	if (number & APPENDED) {
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
	atomic_store(&the.forget, false);
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
		err = writers_begin();
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
	unsigned old;

	for (unsigned i = 0; i < the.settings.chunks; i++) {
		struct chunk *chunk = &the.chunks[i];
		struct piece *piece;

		pthread_mutex_lock(&chunk->lock);
		piece = chunk->piece ? piece_close(chunk) : NULL;
		pthread_mutex_unlock(&chunk->lock);
		if (piece)
			queue_put(piece);
	}
	pthread_mutex_lock(&queue.lock);
	old = queue.generation;
	queue.generation = !old;
	while (queue.outstanding[old])
		pthread_cond_wait(&queue.done, &queue.lock);
	pthread_mutex_unlock(&queue.lock);
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
		atomic_store(&the.forget, forget);
		atomic_store(&the.state, ENDING); /* nobody enters any more */
		pthread_rwlock_wrlock(&the.gate); /* those who were inside are out */
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
		for (struct piece *piece; (piece = queue.spare); piece_free(piece))
			queue.spare = piece->next;
		for (struct piece *piece; (piece = queue.spare_large); piece_free(piece))
			queue.spare_large = piece->next;
		queue.large_bytes = 0;
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
	pthread_mutex_lock(&queue.lock);
	map64_clear(&queue.left);
	pthread_mutex_unlock(&queue.lock);
}

int log_left(struct segment_count **left, size_t *count)
{
	int err = 0;

	*count = 0;
	pthread_mutex_lock(&queue.lock);
	*left = malloc((queue.left.used + 1) * sizeof(**left));
	if (!*left) {
		err = -ENOMEM;
	} else {
		for (size_t i = 0; i < queue.left.slots; i++)
			if (queue.left.pairs[2 * i])
				(*left)[(*count)++] = (struct segment_count){
				    (uint32_t)(queue.left.pairs[2 * i] - 1), queue.left.pairs[2 * i + 1]};
		map64_clear(&queue.left);
	}
	pthread_mutex_unlock(&queue.lock);
	return err;
}
