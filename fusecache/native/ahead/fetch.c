/* Fetch threads, which read whole small files from the pool over hosts, or from the origin, each into memory
 * that the caller gave with the fetch.
 *
 * The origin may hang for ever, and its threads with it: more are made as fetches wait, and none ends before the
 * process does.
 *
 * INVARIANT: a fetch is at every time in exactly one of: queue, a thread, done, the caller.
 */
#include "ahead.h"

#include "../pool/pool.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/eventfd.h>

#define PIECE_BYTES (1u << 20)
#define SMALL_BYTES (1 << 20)
#define KEPT_BYTES (128 << 20) /* as much as the prefetcher and the publisher hold */

struct list {
	struct fetch *first, **end;
	size_t count;
};
static struct {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	int fd; /* readable exactly while `done` has something */
	struct list queue, done;
	unsigned most;	     /* threads; 0: not begun */
	unsigned current;    /* of them there are */
	unsigned idle;	     /* of them have no fetch */
	_Atomic bool direct; /* past the origin's page cache */
} fetchers = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .fd = -1,
    .queue.end = &fetchers.queue.first,
    .done.end = &fetchers.done.first,
};

static void list_add(struct list *list, struct fetch *fetch)
{
	fetch->next = NULL;
	*list->end = fetch;
	list->end = &fetch->next;
	list->count++;
}

static struct fetch *list_take(struct list *list)
{
	struct fetch *fetch = list->first;

	list->first = fetch->next;
	if (!list->first)
		list->end = &list->first;
	list->count--;
	fetch->next = NULL;
	return fetch;
}

int fetch_init(void)
{
	/* Small files come and go by the thousand a second: what they lay in is used again, for fresh pages
	 * cost more than the copy into them. Each thread's heap keeps so much, so large ones go back at once. */
	mallopt(M_MMAP_THRESHOLD, SMALL_BYTES);
	mallopt(M_TRIM_THRESHOLD, KEPT_BYTES);
	fetchers.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return fetchers.fd < 0 ? -errno : 0;
}

int fetch_fd(void) { return fetchers.fd; }

/* ---- one file ----------------------------------------------------------------------------- */
/* Is the open file of this version? `sync`: AT_STATX_FORCE_SYNC: ask the origin, for a network file system's
 * attribute cache may be old; AT_STATX_DONT_SYNC: as that cache has it, without a round trip. */
static int check_version(int fd, const struct version *of, int sync)
{
	struct version now;
	uint32_t mode;
	int err = table_version_of_fd(fd, sync, &now, &mode);

	return err ? -err : S_ISREG(mode) && version_equal(now, *of) ? 0 : ESTALE;
}

/* Only by now: a file system in user space that is asked for it by open() may hand it on to another one, whose
 * rules for alignment it does not know. */
static bool go_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return atomic_load(&fetchers.direct) && flags >= 0 && !fcntl(fd, F_SETFL, flags | O_DIRECT);
}

static int read_all(int fd, const struct fetch *fetch, bool *direct)
{
	uint64_t done = 0;
	int err;

	while (done < fetch->version.size) {
		uint64_t want = fetch->version.size - done;
		ssize_t got = pread(fd, fetch->into + done, want < PIECE_BYTES ? want : PIECE_BYTES, (off_t)done);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EINVAL && *direct && leave_direct(fd)) {
			atomic_store(&fetchers.direct, false); /* the next ones need not try */
			*direct = false;
			continue;
		}
		if (got < 0)
			return errno;
		if (!got) { /* the origin ends the file before its size */
			err = check_version(fd, &fetch->version, AT_STATX_FORCE_SYNC);
			return err ? err : EIO;
		}
		done += (uint64_t)got;
	}
	return 0;
}

static int fetch_file(const struct fetch *fetch)
{
	int fd = table_open(fetch->ino, O_RDONLY | O_NONBLOCK | O_NOCTTY), err;
	bool direct = false;

	if (fd < 0)
		return -fd;
	/* To open it may have asked the origin, and every change since the table's stat would show afterwards: a
	 * change moves ctime, which does not come back. So only a file that seems changed is asked about twice. */
	err = check_version(fd, &fetch->version, AT_STATX_DONT_SYNC);
	if (err == ESTALE)
		err = check_version(fd, &fetch->version, AT_STATX_FORCE_SYNC);
	if (!err) {
		direct = go_direct(fd);
		err = read_all(fd, fetch, &direct);
	}
	if (!err)
		err = check_version(fd, &fetch->version, AT_STATX_FORCE_SYNC);
	if (!err && !direct) /* the origin's file system would keep a second copy in RAM */
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
	return err;
}

/* What the pool over hosts is still to be told of a file. */
struct told {
	struct pool_ticket ticket;
	unsigned char *copy;
	uint32_t size;
};

static void fetch_one(struct fetch *fetch, struct told *told)
{
	const uint32_t size = (uint32_t)fetch->version.size;
	int64_t start_ns = clock_ns(CLOCK_MONOTONIC);

	fetch->begun_ns = clock_ns(CLOCK_REALTIME);
	fetch->is_pooled = pool_get(fetch->ino, &fetch->version, 0, fetch->into, size, &told->ticket);
	if (fetch->is_pooled) {
		COUNT(files_pooled, 1);
		COUNT(bytes_pooled, size);
	} else {
		const int64_t origin_ns = clock_ns(CLOCK_MONOTONIC);

		fetch->error = fetch_file(fetch);
		if (!fetch->error) {
			COUNT(files_fetched, 1);
			COUNT(bytes_fetched, size);
			latency_add(&origin_reads, clock_ns(CLOCK_MONOTONIC) - origin_ns);
			pool_note_origin(clock_ns(CLOCK_MONOTONIC) - origin_ns, size);
		}
	}
	if (!fetch->error)
		missed_came(fetch->ino, &fetch->version, fetch->into, fetch->begun_ns);
	fetch->ended_ns = fetch->begun_ns + clock_ns(CLOCK_MONOTONIC) - start_ns;
	told->size = size;
	told->copy = pool_copy(&told->ticket, fetch->error ? NULL : fetch->into, size);
}

/* ---- threads ------------------------------------------------------------------------------ */
static void *fetch_main(void *unused)
{
	struct fetch *fetch;
	struct told told;

	(void)unused;
	pthread_mutex_lock(&fetchers.lock);
	for (;;) {
		while (!fetchers.queue.count)
			pthread_cond_wait(&fetchers.wake, &fetchers.lock);
		fetch = list_take(&fetchers.queue);
		fetchers.idle--;
		pthread_mutex_unlock(&fetchers.lock);
		fetch_one(fetch, &told);
		pthread_mutex_lock(&fetchers.lock);
		list_add(&fetchers.done, fetch);
		if (fetchers.done.count == 1)
			signal_set(fetchers.fd, true);
		pthread_mutex_unlock(&fetchers.lock);
		pool_finish_copy(&told.ticket, told.copy, told.size);
		pthread_mutex_lock(&fetchers.lock);
		fetchers.idle++;
	}
	return NULL;
}

/* `fetchers` is locked. */
static int threads_for(size_t fetches)
{
	int err = 0;

	while (fetches > fetchers.idle && fetchers.current < fetchers.most && !(err = thread_start(fetch_main, NULL))) {
		fetchers.current++;
		fetchers.idle++; /* from its making on: no second one is made for the same fetch */
	}
	return err;
}

/* ---- what the caller does ----------------------------------------------------------------- */
void fetch_begin(unsigned threads, bool direct)
{
	pthread_mutex_lock(&fetchers.lock);
	fetchers.most = threads;
	atomic_store(&fetchers.direct, direct);
	threads_for(fetchers.queue.count); /* those that there are may all hang */
	pthread_mutex_unlock(&fetchers.lock);
}

int fetch_submit(struct fetch *fetch)
{
	int err;

	pthread_mutex_lock(&fetchers.lock);
	err = threads_for(fetchers.queue.count + 1);
	if (fetchers.current) /* with fewer threads than wished for it only takes longer */
		err = 0;
	if (!err) {
		list_add(&fetchers.queue, fetch);
		pthread_cond_signal(&fetchers.wake);
	}
	pthread_mutex_unlock(&fetchers.lock);
	return err;
}

struct fetch *fetch_take(size_t most)
{
	struct list taken = {.end = &taken.first};

	pthread_mutex_lock(&fetchers.lock);
	while (fetchers.done.count && taken.count < most)
		list_add(&taken, list_take(&fetchers.done));
	signal_set(fetchers.fd, fetchers.done.count);
	pthread_mutex_unlock(&fetchers.lock);
	return taken.first;
}
