/* Answers to READs.
 *
 * INVARIANT: a READ is answered once: here, or by pyfuse3 when it was passed on.
 */
#include "answer.h"

#include "../libfuse/libfuse.h"
#include "../plan/plan.h"
#include "../ram/ram.h"
#include "../trace/trace.h"

/* seen: SEEN_SSD, or SEEN_ORIGIN: the bytes are from beyond this host. */
static void answer(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size,
		   uint8_t seen)
{
	const int tid = one->offset && of->size <= BLOCK_BYTES ? 0 : real.req_ctx(one->req)->pid;

	/* Before the answer: whoever counts the reader's bytes must find them counted. */
	if (!one->offset && trace_is(TRACE_ON))
		trace_note_read(one->ino, seen, (uint32_t)tid);
	if (seen == SEEN_SSD) {
		COUNT(from_ssd, 1);
		COUNT(bytes_from_ssd, size);
	} else {
		COUNT(from_origin, 1);
		COUNT(bytes_from_origin, size);
	}
	answer_note(one->ino, of->size, one->offset, size, tid);
	if (!one->offset)
		plan_saw_read(one->ino, seen, tid);
	real.reply_buf(one->req, (const char *)data, size);
	latency_add(&mount_reads, clock_ns(CLOCK_MONOTONIC) - one->begun_ns);
}

bool answer_from_ssd(const struct read_request *one, struct scratch *s)
{
	const unsigned char *data;
	struct scratch *joined = NULL;
	struct look found;
	size_t size = one->size;
	int result = READ_MISS;

	if (table_look(one->ino, one->offset / BLOCK_BYTES, &found))
		result = file_read(&found, one->offset, &size, s, &joined, &data);
	if (result == READ_OK && size < one->size && table_refuse_short(one->ino))
		real.reply_err(one->req, EINTR);
	else if (result == READ_OK)
		answer(one, &found.version, data, size, SEEN_SSD);
	scratch_put(joined);
	return result == READ_OK;
}

void answer_with(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size)
{
	answer(one, of, data, size, SEEN_SSD);
}

void answer_missed(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size)
{
	answer(one, of, data, size, SEEN_ORIGIN);
}

void answer_pass(const struct read_request *one)
{
	real.reply_none(one->req);
	slow_put(one->raw, one->raw_size, one->begun_ns);
}

void answer_now(const struct read_request *one, struct scratch *s)
{
	if (!answer_from_ssd(one, s))
		answer_pass(one);
}

void answer_note(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size, int tid)
{
	if (!size)
		return;
	table_served(ino);
	if (file_size > BLOCK_BYTES) {
		streams_note(ino, offset, size, tid);
		if (offset && trace_is(TRACE_ON))
			trace_note_read(ino, SEEN_ELSEWHERE, 0);
	}
	ring_note(ino, file_size, offset, size);
}
