/* Who reads a file from front to back? Found by its READs; a hint: late or incomplete, but bounded. */
#include "ram.h"

#include <string.h>

#define STREAMS_MOST 64
#define STREAM_AFTER_BYTES (1u << 20) /* a large sample of many in a file is no stream */
#define STREAM_SLACK_BYTES (1u << 20) /* readahead requests of one reader arrive out of order */

static struct {
	pthread_mutex_t lock;
	uint64_t clock;
	struct {
		uint32_t ino;
		uint64_t next, run, used;
		uint64_t raised; /* block of the last event + 1 */
		int tid;	 /* who read there last */
	} of[STREAMS_MOST];
} streams = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A reader that goes elsewhere has ended its stream: samples of a file, read in any order, would soon lie near to one
 * of many others. */
static void streams_leave(uint32_t ino, int tid, int but)
{
	for (int i = 0; tid && i < STREAMS_MOST; i++)
		if (i != but && streams.of[i].ino == ino && streams.of[i].tid == tid)
			streams.of[i].used = 0;
}

void streams_note(uint32_t ino, uint64_t offset, uint64_t size, int tid)
{
	uint64_t block = offset / BLOCK_BYTES, end = offset + size;
	int oldest = 0, at = -1;
	bool raise = false;

	pthread_mutex_lock(&streams.lock);
	streams.clock++;
	for (int i = 0; i < STREAMS_MOST && at < 0; i++) {
		uint64_t next = streams.of[i].next;

		if (streams.of[i].used < streams.of[oldest].used)
			oldest = i;
		if (streams.of[i].ino != ino || !streams.of[i].used)
			continue;
		/* The stager may have pushed the rest of the block: the reader shows up at the next head. */
		if ((offset <= next + STREAM_SLACK_BYTES && next <= end + STREAM_SLACK_BYTES) ||
		    (streams.of[i].run >= STREAM_AFTER_BYTES && offset > next && block <= next / BLOCK_BYTES + 1))
			at = i;
	}
	if (at < 0) {
		at = oldest;
		streams.of[at].ino = ino;
		streams.of[at].next = end;
		streams.of[at].run = size;
		streams.of[at].raised = 0;
	} else if (end > streams.of[at].next) {
		streams.of[at].next = end;
		streams.of[at].run += size;
	}
	streams.of[at].used = streams.clock;
	streams.of[at].tid = tid;
	streams_leave(ino, tid, at);
	block = (streams.of[at].next - 1) / BLOCK_BYTES;
	if (streams.of[at].run >= STREAM_AFTER_BYTES && streams.of[at].raised < block + 1) {
		streams.of[at].raised = block + 1;
		raise = true;
	}
	pthread_mutex_unlock(&streams.lock);
	if (raise)
		events_raise(EVENT_STREAM, ino, block, 0);
}

void streams_reset(void)
{
	pthread_mutex_lock(&streams.lock);
	memset(streams.of, 0, sizeof(streams.of));
	pthread_mutex_unlock(&streams.lock);
}

size_t streams_bytes(void) { return sizeof(streams); }
