/* Reads of many records at a time: Linux AIO, so that one thread keeps a disk busy while it works.
 *
 * A thread that reads one record after the other leaves the disk idle while it verifies and pushes, and
 * itself while the disk works; more threads cost a wake-up and a command to the disk for each record.
 *
 * Only whole records of up to SLOT_BYTES, and only their good outcome: all else is refused here, and is
 * for block_read, which knows what to make of it. The same where the kernel has no AIO, or no more of it
 * (/proc/sys/fs/aio-max-nr).
 */
#include "native.h"

#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define PAGE 4096u
#define SLOT_BYTES (256u << 10)
#define TAKE_AT_ONCE 4 /* so many commands reach the disk together, most of the time */
#define KEPT_MOST 8	 /* as many as there are threads that stage */

struct slot {
	struct segment *segment;
	struct location at;
	uint32_t payload_len;
	struct iocb iocb;
};

struct deep {
	struct deep *next;
	unsigned char *mem; /* SLOT_BYTES for each slot */
	aio_context_t aio;
	struct slot slots[DEEP_SLOTS];
	unsigned free_slots[DEEP_SLOTS], free_count;
	struct iocb *added[DEEP_SLOTS];
	unsigned added_count, flying;
	struct io_event events[DEEP_SLOTS];
	unsigned event_next, event_count;
	int taken; /* the slot that the caller looks at; -1: none */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct deep *kept;
static unsigned kept_count;

static struct deep *deep_new(void)
{
	struct deep *d = calloc(1, sizeof(*d));

	if (!d)
		return NULL;
	d->taken = -1;
	for (d->free_count = 0; d->free_count < DEEP_SLOTS; d->free_count++)
		d->free_slots[d->free_count] = d->free_count;
	d->mem = mmap(NULL, DEEP_SLOTS * SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		      -1, 0);
	if (d->mem != MAP_FAILED && !syscall(SYS_io_setup, DEEP_SLOTS, &d->aio))
		return d;
	if (d->mem != MAP_FAILED)
		munmap(d->mem, DEEP_SLOTS * SLOT_BYTES);
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
		munmap(d->mem, DEEP_SLOTS * SLOT_BYTES);
		free(d);
	}
}

bool deep_has_room(const struct deep *d) { return d->free_count; }

int deep_add(struct deep *d, uint64_t packed, uint32_t payload_len)
{
	struct location at = location_unpack(packed);
	size_t want = ((size_t)at.header_len + payload_len + PAGE - 1) & ~(size_t)(PAGE - 1);
	struct slot *slot;
	unsigned number;

	if (!d->free_count || want > SLOT_BYTES)
		return -1;
	number = d->free_slots[d->free_count - 1];
	slot = &d->slots[number];
	slot->segment = segment_take(at.segno);
	if (!slot->segment)
		return -1;
	d->free_count--;
	slot->at = at;
	slot->payload_len = payload_len;
	slot->iocb = (struct iocb){
	    .aio_data = number,
	    .aio_lio_opcode = IOCB_CMD_PREAD,
	    .aio_fildes = (uint32_t)segment_fd(slot->segment),
	    .aio_buf = (uintptr_t)(d->mem + (size_t)number * SLOT_BYTES),
	    .aio_nbytes = want,
	    .aio_offset = (int64_t)at.offset,
	};
	d->added[d->added_count++] = &slot->iocb;
	return (int)number;
}

/* What the kernel does not take has failed. */
static void submit(struct deep *d)
{
	unsigned done = 0;

	while (done < d->added_count) {
		long taken = syscall(SYS_io_submit, d->aio, (long)(d->added_count - done), d->added + done);

		if (taken > 0) {
			done += (unsigned)taken;
			d->flying += (unsigned)taken;
		} else if (taken == 0 || errno != EINTR) {
			d->events[d->event_count++] = (struct io_event){.data = d->added[done++]->aio_data};
		}
	}
	d->added_count = 0;
}

int deep_take(struct deep *d, const unsigned char **data)
{
	const struct io_event *event;
	struct slot *slot;

	if (d->taken >= 0)
		d->free_slots[d->free_count++] = (unsigned)d->taken;
	d->taken = -1;
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
	}
	if (d->event_next == d->event_count)
		return -1;
	event = &d->events[d->event_next++];
	d->taken = (int)event->data;
	slot = &d->slots[d->taken];
	*data = NULL;
	if (event->res >= (int64_t)slot->at.header_len + slot->payload_len)
		*data = record_payload(d->mem + (size_t)d->taken * SLOT_BYTES, slot->at, slot->payload_len);
	segment_release(slot->segment);
	return d->taken;
}
