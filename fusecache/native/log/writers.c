/* Pieces of chunks, and the threads that write them.
 *
 * A buffer that is full is taken out of its chunk and queued; when it is on disk, the locations of what lies in it are
 * switched to the copies.
 */
#include "log.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "../segment/segment.h"

#define WRITERS 10 /* a write waits for the disk behind reads that are many times as large */
#define QUEUE_BYTES (32u << 20)
#define LARGE_BYTES_KEPT QUEUE_BYTES /* of buffers for single records that are larger than a chunk's buffer */

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
	struct map64 left;  /* segno + 1 -> locations switched away */
	pthread_t writers[WRITERS];
	unsigned writer_count;
	uint32_t buffer_bytes;
	_Atomic bool forget; /* writers throw away what they get */
} queue = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
    .end = &queue.first,
};

struct log_counters log_counters;

/* ---- pieces ------------------------------------------------------------------------------- */
static void piece_free(struct piece *piece)
{
	atomic_fetch_sub(&log_counters.buffer_bytes, piece->touched);
	munmap(piece->mem, piece->mem_bytes);
	free(piece->records);
	free(piece);
}

/* Those that were used before come first: fresh pages cost more than the copy into them. */
struct piece *piece_get(uint32_t record_len)
{
	const uint32_t buffer_bytes = queue.buffer_bytes;
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
		piece->mem = mmap(NULL, piece->mem_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

struct piece *piece_close(struct chunk *chunk)
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

void queue_put(struct piece *piece)
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

/* Parts of records would take space that is not counted. */
static void cut(const struct chunk *chunk, uint64_t length)
{
	int err = ftruncate(chunk->fd, (off_t)length);

	(void)err; /* whoever adopts the segment cuts it, too */
}

static void piece_write(struct piece *piece)
{
	struct chunk *chunk = piece->chunk;
	int none = 0, err = atomic_load(&queue.forget)
				? ECANCELED
				: write_whole(chunk->fd, piece->mem, piece->used, piece->position);
	bool written = !err;

	if (written) {
		TALLY(written_bytes, piece->used);
		table_switch(piece->records, piece->count);
	} else {
		atomic_compare_exchange_strong(&chunk->err, &none, err);
		TALLY(failed, atomic_load(&queue.forget) ? 0 : piece->count);
	}
	for (uint32_t i = 0; i < piece->count; i++) {
		const struct moved *record = &piece->records[i];

		if (written && record->switched && record->from)
			TALLY(moved, 1);
		else if (written && record->switched)
			TALLY(added, 1);
		inode_is_written(record->ino); /* after the switch */
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
	if (!--chunk->pending && chunk->lost) { /* no other piece is written there now */
		if (!atomic_load(&queue.forget))
			cut(chunk, chunk->length);
		credit_return(chunk->lost);
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

int writers_begin(uint32_t buffer_bytes)
{
	sigset_t all, before;
	int err = 0;

	queue.closed = false;
	queue.buffer_bytes = buffer_bytes;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
	for (queue.writer_count = 0; queue.writer_count < WRITERS && !err; queue.writer_count += !err)
		err = pthread_create(&queue.writers[queue.writer_count], NULL, writer_main, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return queue.writer_count ? 0 : -err;
}

void writers_end(void)
{
	pthread_mutex_lock(&queue.lock);
	queue.closed = true;
	pthread_cond_broadcast(&queue.wake);
	pthread_mutex_unlock(&queue.lock);
	while (queue.writer_count)
		pthread_join(queue.writers[--queue.writer_count], NULL);
}

void writers_forget(bool forget) { atomic_store(&queue.forget, forget); }

void queue_flush(void)
{
	unsigned old;

	pthread_mutex_lock(&queue.lock);
	old = queue.generation;
	queue.generation = !old;
	while (queue.outstanding[old])
		pthread_cond_wait(&queue.done, &queue.lock);
	pthread_mutex_unlock(&queue.lock);
}

void pieces_free(void)
{
	for (struct piece *piece; (piece = queue.spare); piece_free(piece))
		queue.spare = piece->next;
	for (struct piece *piece; (piece = queue.spare_large); piece_free(piece))
		queue.spare_large = piece->next;
	queue.large_bytes = 0;
}

/* ---- what was left ------------------------------------------------------------------------ */
void left_forget(void)
{
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
				(*left)[(*count)++] = (struct segment_count){(uint32_t)(queue.left.pairs[2 * i] - 1),
									     queue.left.pairs[2 * i + 1]};
		map64_clear(&queue.left);
	}
	pthread_mutex_unlock(&queue.lock);
	return err;
}
