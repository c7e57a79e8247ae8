/* Reads of many records at a time: Linux AIO, so that one thread keeps a disk busy while it works, and neighbours
 * together.
 *
 * A thread that reads one record after the other leaves the disk idle while it verifies and pushes, and
 * itself while the disk works; more threads cost a wake-up and a command to the disk for each record.
 *
 * Only whole records of up to LARGE_BYTES, and only their good outcome: all else is refused here, and is
 * for block_read, which knows what to make of it. The same where the kernel has no AIO, or no more of it
 * (/proc/sys/fs/aio-max-nr).
 */
#include "segment.h"

#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define READS_MOST 16
/* The last six buffers are large ones: neighbours are read together, as far as they fit. They come first in memory, of
 * huge pages if there are any: a disk takes some 128 pieces of memory a command, and 1 MiB is 256 small pages. */
#define LARGE_FROM 10u
#define SMALL_BYTES (128u << 10)
#define LARGE_BYTES (1u << 20)
#define HUGE_PAGE (2u << 20)
#define MEM_BYTES ((size_t)4 * HUGE_PAGE)
_Static_assert(LARGE_FROM *SMALL_BYTES + (READS_MOST - LARGE_FROM) * LARGE_BYTES <= MEM_BYTES, "buffers fit");
#define GAP_MOST (16u << 10) /* cheaper to read than another command */
#define TAKE_AT_ONCE 4 /* so many commands reach the disk together, most of the time */
#define KEPT_MOST 8	 /* as many as there are threads that stage */

struct reading {
	struct segment *segment;
	uint64_t from, end; /* of the segment */
	struct deep_record *first, *last;
	struct iocb iocb;
};

struct deep {
	struct deep *next;
	unsigned char *mem;
	aio_context_t aio;
	struct reading readings[READS_MOST];
	unsigned busy; /* bit by bit */
	unsigned added[READS_MOST], added_count, flying;
	struct io_event events[READS_MOST];
	unsigned event_next, event_count;
	struct deep_record *left; /* to be taken from the read of the last event */
	struct location last;	  /* where what was added last ends: what goes on there is a run */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct deep *kept;
static unsigned kept_count;

static struct deep *deep_new(void)
{
	struct deep *d = calloc(1, sizeof(*d));

	if (!d)
		return NULL;
	d->mem = aligned_alloc(HUGE_PAGE, MEM_BYTES);
	if (d->mem)
		madvise(d->mem, MEM_BYTES, MADV_HUGEPAGE);
	if (d->mem && !syscall(SYS_io_setup, READS_MOST, &d->aio))
		return d;
	free(d->mem);
	free(d);
	return NULL;
}

struct deep *deep_get(void)
{
	struct deep *d;

	pthread_mutex_lock(&lock);
	d = kept;
	if (d) {
		kept = d->next;
		kept_count--;
	}
	pthread_mutex_unlock(&lock);
	return d ? d : deep_new();
}

void deep_put(struct deep *d)
{
	if (!d)
		return;
	pthread_mutex_lock(&lock);
	if (kept_count < KEPT_MOST) {
		d->next = kept;
		kept = d;
		kept_count++;
		d = NULL;
	}
	pthread_mutex_unlock(&lock);
	if (d) {
		syscall(SYS_io_destroy, d->aio);
		free(d->mem);
		free(d);
	}
}

static unsigned char *buffer(const struct deep *d, unsigned number)
{
	const size_t large = (size_t)(READS_MOST - LARGE_FROM) * LARGE_BYTES;

	return d->mem + (number < LARGE_FROM ? large + (size_t)number * SMALL_BYTES
					     : (size_t)(number - LARGE_FROM) * LARGE_BYTES);
}

/* The first free buffer of that size: what was used last is in the processor's cache. READS_MOST: there is none. */
static unsigned free_buffer(const struct deep *d, uint64_t size)
{
	unsigned number = size > SMALL_BYTES ? LARGE_FROM : 0;

	while (number < READS_MOST && d->busy & 1u << number)
		number++;
	return number;
}

bool deep_has_room(const struct deep *d) { return free_buffer(d, 0) < READS_MOST; }

/* In a run the next read is going to be a large one. To begin it in whatever buffer is free would fill the disk's queue
 * with small reads, since these are done first. */
static bool goes_on(const struct deep *d, struct location at)
{
	return at.segno == d->last.segno && at.offset + PAGE > d->last.offset && at.offset <= d->last.offset + GAP_MOST;
}

/* The read that was added last takes in a neighbour. */
static bool join(struct deep *d, struct deep_record *record, uint64_t end)
{
	struct reading *reading;
	unsigned *number, large;

	if (!d->added_count)
		return false;
	number = &d->added[d->added_count - 1];
	reading = &d->readings[*number];
	if (end < reading->end)
		end = reading->end;
	if (record->at.segno != reading->first->at.segno || record->at.offset < reading->from ||
	    record->at.offset > reading->end + GAP_MOST || end - reading->from > LARGE_BYTES)
		return false;
	if (end - reading->from > SMALL_BYTES && *number < LARGE_FROM) {
		large = free_buffer(d, LARGE_BYTES);
		if (large == READS_MOST)
			return false;
		d->readings[large] = *reading;
		reading = &d->readings[large];
		d->busy ^= 1u << *number | 1u << large;
		*number = large;
	}
	reading->end = end;
	reading->last = reading->last->next = record;
	return true;
}

enum deep_added deep_add(struct deep *d, struct deep_record *record, uint64_t packed, uint32_t payload_len)
{
	struct location at = location_unpack(packed);
	uint64_t from = at.offset & ~(uint64_t)(PAGE - 1);
	uint64_t end = (at.offset + at.header_len + payload_len + PAGE - 1) & ~(uint64_t)(PAGE - 1);
	struct segment *segment;
	unsigned number;

	*record = (struct deep_record){.at = at, .payload_len = payload_len};
	if (end - from > LARGE_BYTES)
		return DEEP_NOT;
	if (!join(d, record, end)) {
		number = free_buffer(d, goes_on(d, at) ? LARGE_BYTES : end - from);
		if (number == READS_MOST && d->busy)
			return DEEP_FULL;
		segment = number < READS_MOST ? segment_take(at.segno) : NULL;
		if (!segment)
			return DEEP_NOT;
		segment_count_read(segment);
		d->readings[number] =
		    (struct reading){.segment = segment, .from = from, .end = end, .first = record, .last = record};
		d->busy |= 1u << number;
		d->added[d->added_count++] = number;
	}
	d->last = (struct location){.segno = at.segno, .offset = end};
	return DEEP_ADDED;
}

/* What the kernel does not take has failed. */
static void submit(struct deep *d)
{
	struct iocb *commands[READS_MOST];
	unsigned done = 0;

	for (unsigned i = 0; i < d->added_count; i++) {
		struct reading *reading = &d->readings[d->added[i]];

		commands[i] = &reading->iocb;
		reading->iocb = (struct iocb){
		    .aio_data = d->added[i],
		    .aio_lio_opcode = IOCB_CMD_PREAD,
		    .aio_fildes = (uint32_t)segment_fd(reading->segment),
		    .aio_buf = (uintptr_t)buffer(d, d->added[i]),
		    .aio_nbytes = reading->end - reading->from,
		    .aio_offset = (int64_t)reading->from,
		};
	}
	while (done < d->added_count) {
		long taken = syscall(SYS_io_submit, d->aio, (long)(d->added_count - done), commands + done);

		if (taken > 0) {
			done += (unsigned)taken;
			d->flying += (unsigned)taken;
		} else if (taken == 0 || errno != EINTR) {
			d->events[d->event_count++] = (struct io_event){.data = d->added[done++]};
		}
	}
	d->added_count = 0;
}

static bool next_event(struct deep *d)
{
	struct reading *reading;

	if (d->event_next < d->event_count) /* it is done with */
		d->busy ^= 1u << d->events[d->event_next++].data;
	if (d->event_next == d->event_count) {
		d->event_next = d->event_count = 0;
		submit(d);
		while (!d->event_count && d->flying) {
			long got = syscall(SYS_io_getevents, d->aio, 1L, (long)TAKE_AT_ONCE, d->events, NULL);

			if (got > 0) {
				d->event_count = (unsigned)got;
				d->flying -= (unsigned)got;
			}
		}
		if (!d->event_count)
			return false;
	}
	reading = &d->readings[d->events[d->event_next].data];
	segment_release(reading->segment);
	d->left = reading->first;
	return true;
}

struct deep_record *deep_take(struct deep *d, const unsigned char **raw)
{
	const struct io_event *event;
	struct deep_record *record;
	unsigned char *at;
	uint64_t offset;

	if (!d->left && !next_event(d))
		return NULL;
	record = d->left;
	d->left = record->next;
	event = &d->events[d->event_next];
	offset = record->at.offset - d->readings[event->data].from;
	at = buffer(d, (unsigned)event->data) + offset;
	*raw = NULL;
	if (event->res >= (int64_t)(offset + record->at.header_len + record->payload_len) &&
	    record_payload(at, record->at, record->payload_len))
		*raw = at;
	return record;
}
