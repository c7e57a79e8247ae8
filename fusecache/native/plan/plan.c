/* What a plan says of each inode, and what was seen of it.
 *
 * A flag byte an inode, in private memory that is touched only where there are flags. Front threads read
 * flags without a lock and add to the ring of observations; both cost one relaxed load while there is
 * no plan.
 */
#include "plan.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "../table/table.h"
#include "../trace/trace.h"

#define SEEN_MOST 65536u
#define ASKING_MOST 64
#define ASKERS_MOST 64u

_Atomic bool plan_active;

/* ---- flags -------------------------------------------------------------------------------- */
static _Atomic uint8_t *_Atomic flags; /* never unmapped: front threads may be reading */

static _Atomic uint8_t *flags_at(uint32_t ino)
{
	/* `plan_active` alone says nothing of other memory: a thread that sees it may not see them yet. */
	_Atomic uint8_t *all = plan_is_active() ? atomic_load_explicit(&flags, memory_order_acquire) : NULL;

	return all && ino < INODES_MOST ? &all[ino] : NULL;
}

uint8_t plan_flags(uint32_t ino)
{
	const _Atomic uint8_t *at = flags_at(ino);

	return at ? atomic_load_explicit(at, memory_order_relaxed) : 0;
}

void plan_mark(uint32_t ino, uint8_t add, uint8_t remove)
{
	_Atomic uint8_t *at = flags_at(ino);

	if (!at)
		return;
	if (remove)
		atomic_fetch_and(at, (uint8_t)~remove);
	if (add)
		atomic_fetch_or(at, add);
}

/* ---- observations ------------------------------------------------------------------------- */
static struct {
	pthread_mutex_t lock;
	int fd; /* readable exactly while there is something to take */
	uint32_t first, count, lost;
	struct seen ring[SEEN_MOST];
} seen = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

int plan_init(void)
{
	seen.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return seen.fd < 0 ? -errno : 0;
}

int plan_seen_fd(void) { return seen.fd; }

/* The asker is looked up while it waits: a process that reads one file has ended before a hintsd hears of
 * it. /proc/TID/status takes no lock that it could hold. */
static void asker_look_up(int tid, struct seen *of)
{
	char text[1024], path[32], *process, *parent;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/status", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	got = read(fd, text, sizeof(text) - 1);
	close(fd);
	text[got > 0 ? got : 0] = '\0';
	process = strstr(text, "\nTgid:\t");
	parent = strstr(text, "\nPPid:\t");
	if (process && parent) {
		of->process = (uint32_t)strtoul(process + 7, NULL, 10);
		of->parent = (uint32_t)strtoul(parent + 7, NULL, 10);
	}
}

/* The number of a thread that has ended is given to another one: it is believed for a second. */
static void asker_find(int tid, struct seen *of)
{
	static __thread struct asker {
		int tid;
		int64_t until_s;
		uint32_t process, parent;
	} known[ASKERS_MOST];
	struct asker *at = &known[(unsigned)tid % ASKERS_MOST];
	struct timespec now;

	if (tid <= 0)
		return;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	if (at->tid == tid && now.tv_sec < at->until_s) {
		of->process = at->process;
		of->parent = at->parent;
		return;
	}
	asker_look_up(tid, of);
	*at = (struct asker){of->process ? tid : 0, now.tv_sec + 1, of->process, of->parent};
}

static void seen_note(uint32_t ino, uint8_t kind, int tid)
{
	struct seen one = {.ino = ino, .kind = kind};

	asker_find(tid, &one);
	pthread_mutex_lock(&seen.lock);
	if (!plan_is_active()) {
		/* ended meanwhile */
	} else if (seen.count == SEEN_MOST) {
		seen.lost++;
	} else {
		seen.ring[(seen.first + seen.count++) % SEEN_MOST] = one;
		if (seen.count == 1)
			signal_set(seen.fd, true);
	}
	pthread_mutex_unlock(&seen.lock);
}

size_t plan_take_seen(size_t most, struct seen *out, uint32_t *lost)
{
	size_t taken = 0;

	pthread_mutex_lock(&seen.lock);
	for (; taken < most && seen.count; taken++, seen.count--) {
		out[taken] = seen.ring[seen.first];
		seen.first = (seen.first + 1) % SEEN_MOST;
	}
	*lost = seen.lost;
	seen.lost = 0;
	signal_set(seen.fd, seen.count);
	pthread_mutex_unlock(&seen.lock);
	return taken;
}

void plan_saw_read(uint32_t ino, uint8_t what, int tid)
{
	uint8_t standing;

	if (!plan_is_active())
		return;
	standing = plan_flags(ino);
	seen_note(ino, what | (standing & PLAN_STATE), tid);
	if (standing & (PLAN_QUEUED | PLAN_FLYING))
		plan_mark(ino, PLAN_READ, 0);
}

/* ---- begin and end ------------------------------------------------------------------------ */
void plan_end(void)
{
	pthread_mutex_lock(&seen.lock);
	atomic_store(&plan_active, false);
	seen.count = seen.lost = 0;
	signal_set(seen.fd, false);
	pthread_mutex_unlock(&seen.lock);
	if (atomic_load(&flags))
		madvise((void *)(uintptr_t)atomic_load(&flags), INODES_MOST, MADV_DONTNEED);
}

int plan_begin(void)
{
	plan_end();
	if (!atomic_load(&flags)) {
		void *mem = mmap(NULL, INODES_MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
				 -1, 0);

		if (mem == MAP_FAILED)
			return -errno;
		atomic_store(&flags, mem);
	}
	atomic_store(&plan_active, true);
	return 0;
}

/* ---- own look-ups ------------------------------------------------------------------------- */
static struct asking {
	_Atomic int tid; /* what the kernel says a request is from; 0: free */
} asking[ASKING_MOST];

struct asking *plan_asking_begin(void)
{
	const int me = gettid();

	for (int i = 0; i < ASKING_MOST; i++) {
		int none = 0;

		if (atomic_compare_exchange_strong(&asking[i].tid, &none, me))
			return &asking[i];
	}
	return NULL;
}

void plan_asking_end(struct asking *me)
{
	if (me)
		atomic_store(&me->tid, 0);
}

bool plan_is_asking(int tid)
{
	for (int i = 0; i < ASKING_MOST; i++)
		if (tid && atomic_load(&asking[i].tid) == tid)
			return true;
	return false;
}

uint8_t plan_cut_wire(uint32_t ino, int tid)
{
	_Atomic uint8_t *at = flags_at(ino);
	uint8_t before;

	if (!at || !(atomic_load_explicit(at, memory_order_relaxed) & PLAN_ARMED) || plan_is_asking(tid))
		return 0;
	before = atomic_fetch_and(at, (uint8_t)~PLAN_ARMED);
	return before & PLAN_ARMED ? SEEN_LOOKUP | (before & PLAN_STATE) : 0;
}

void plan_saw_lookup(uint32_t ino, uint8_t kind, int tid)
{
	trace_saw_open(ino, (uint32_t)tid, TRACE_WIRES);
	seen_note(ino, kind, tid);
}
