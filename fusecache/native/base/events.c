/* Counters, and events for Python: hints and statistics. They may be late or incomplete, but they are bounded, and
 * no thread waits for them.
 */
#include "base.h"

#include <sys/eventfd.h>

struct counters counters;
struct latency origin_reads, mount_reads;

static struct {
	pthread_mutex_t lock;
	int fd;
	size_t first, count;
	struct event ring[EVENTS_MOST];
} events = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

void latency_add(struct latency *to, int64_t ns)
{
	const uint64_t took = ns > 0 ? (uint64_t)ns : 0;
	const uint64_t over = took ? (took - 1) >> LATENCY_SHIFT : 0;
	const unsigned bits = over ? 64 - (unsigned)__builtin_clzll(over) : 0;
	const unsigned k = bits < LATENCY_BUCKETS ? bits : LATENCY_BUCKETS - 1;

	atomic_fetch_add_explicit(&to->buckets[k], 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&to->sum_ns, took, memory_order_relaxed);
}

int events_init(void)
{
	events.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return events.fd < 0 ? -errno : 0;
}

int events_fd(void) { return events.fd; }

void events_signal(void)
{
	const uint64_t one = 1;

	if (write(events.fd, &one, sizeof(one)) < 0)
		return; /* the counter is at its maximum: readable anyway */
}

void events_raise(int kind, uint64_t a, uint64_t b, uint64_t c)
{
	const struct event event = {kind, a, b, c};
	bool raised = false;

	pthread_mutex_lock(&events.lock);
	if (kind != EVENT_STREAM)
		for (size_t i = 0; i < events.count; i++) {
			const struct event *known = &events.ring[(events.first + i) % EVENTS_MOST];

			if (known->kind == kind && known->a == a && known->b == b && known->c == c)
				goto out;
		}
	/* Full: a stream event is dropped; a fault takes the oldest one's place (both are hints: a bad
	 * record that was not reported is met again). */
	if (events.count == EVENTS_MOST) {
		if (kind == EVENT_STREAM)
			goto out;
		events.first = (events.first + 1) % EVENTS_MOST;
		events.count--;
	}
	events.ring[(events.first + events.count++) % EVENTS_MOST] = event;
	raised = true;
out:
	pthread_mutex_unlock(&events.lock);
	if (raised)
		events_signal();
}

size_t events_take(struct event *out, size_t most)
{
	size_t taken = 0;

	pthread_mutex_lock(&events.lock);
	while (taken < most && events.count) {
		out[taken++] = events.ring[events.first];
		events.first = (events.first + 1) % EVENTS_MOST;
		events.count--;
	}
	pthread_mutex_unlock(&events.lock);
	return taken;
}

void events_fault(uint32_t segno, uint64_t offset, uint32_t ino, int err)
{
	COUNT(faults, 1);
	events_raise(err ? EVENT_UNREAD : EVENT_FAULT, segno, offset, ino);
}

void events_reset(void)
{
	pthread_mutex_lock(&events.lock);
	events.count = 0;
	pthread_mutex_unlock(&events.lock);
}

size_t events_bytes(void) { return sizeof(events); }
