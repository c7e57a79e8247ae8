/* Fetch threads, which read whole small files from the pool over hosts, or from the origin, each into memory
 * that the caller gave with the job.
 *
 * The origin may hang for ever, and its threads with it: more are made as jobs wait, and none ends before the
 * process does.
 *
 * INVARIANT: a job is at every time in exactly one of: queue, a thread, done, the caller.
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
	struct fetch_job *first, **end;
	size_t count;
};
static struct {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	int fd; /* readable exactly while `done` has something */
	struct list queue, done;
	unsigned most;	     /* threads; 0: not begun */
	unsigned current;    /* of them there are */
	unsigned idle;	     /* of them have no job */
	_Atomic bool direct; /* past the origin's page cache */
} fetchers = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .fd = -1,
    .queue.end = &fetchers.queue.first,
    .done.end = &fetchers.done.first,
};

static void list_add(struct list *list, struct fetch_job *job)
{
	job->next = NULL;
	*list->end = job;
	list->end = &job->next;
	list->count++;
}

static struct fetch_job *list_take(struct list *list)
{
	struct fetch_job *job = list->first;

	list->first = job->next;
	if (!list->first)
		list->end = &list->first;
	list->count--;
	job->next = NULL;
	return job;
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

static int read_all(int fd, const struct fetch_job *job, bool *direct)
{
	uint64_t done = 0;
	int err;

	while (done < job->version.size) {
		uint64_t want = job->version.size - done;
		ssize_t got = pread(fd, job->into + done, want < PIECE_BYTES ? want : PIECE_BYTES, (off_t)done);

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
			err = check_version(fd, &job->version, AT_STATX_FORCE_SYNC);
			return err ? err : EIO;
		}
		done += (uint64_t)got;
	}
	return 0;
}

static int fetch_file(const struct fetch_job *job)
{
	int fd = table_open(job->ino, O_RDONLY | O_NONBLOCK | O_NOCTTY), err;
	bool direct = false;

	if (fd < 0)
		return -fd;
	/* To open it may have asked the origin, and every change since the table's stat would show afterwards: a
	 * change moves ctime, which does not come back. So only a file that seems changed is asked about twice. */
	err = check_version(fd, &job->version, AT_STATX_DONT_SYNC);
	if (err == ESTALE)
		err = check_version(fd, &job->version, AT_STATX_FORCE_SYNC);
	if (!err) {
		direct = go_direct(fd);
		err = read_all(fd, job, &direct);
	}
	if (!err)
		err = check_version(fd, &job->version, AT_STATX_FORCE_SYNC);
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

static void fetch_one(struct fetch_job *job, struct told *told)
{
	const uint32_t size = (uint32_t)job->version.size;
	int64_t start_ns = clock_ns(CLOCK_MONOTONIC);

	job->begun_ns = clock_ns(CLOCK_REALTIME);
	job->is_pooled = pool_get(job->ino, &job->version, 0, job->into, size, &told->ticket);
	if (job->is_pooled) {
		COUNT(files_pooled, 1);
		COUNT(bytes_pooled, size);
	} else {
		const int64_t origin_ns = clock_ns(CLOCK_MONOTONIC);

		job->error = fetch_file(job);
		if (!job->error) {
			COUNT(files_fetched, 1);
			COUNT(bytes_fetched, size);
			latency_add(&origin_reads, clock_ns(CLOCK_MONOTONIC) - origin_ns);
			pool_note_origin(clock_ns(CLOCK_MONOTONIC) - origin_ns, size);
		}
	}
	if (!job->error)
		missed_came(job->ino, &job->version, job->into, job->begun_ns);
	job->ended_ns = job->begun_ns + clock_ns(CLOCK_MONOTONIC) - start_ns;
	told->size = size;
	told->copy = pool_copy(&told->ticket, job->error ? NULL : job->into, size);
}

/* ---- threads ------------------------------------------------------------------------------ */
static void *fetch_main(void *unused)
{
	struct fetch_job *job;
	struct told told;

	(void)unused;
	pthread_mutex_lock(&fetchers.lock);
	for (;;) {
		while (!fetchers.queue.count)
			pthread_cond_wait(&fetchers.wake, &fetchers.lock);
		job = list_take(&fetchers.queue);
		fetchers.idle--;
		pthread_mutex_unlock(&fetchers.lock);
		fetch_one(job, &told);
		pthread_mutex_lock(&fetchers.lock);
		list_add(&fetchers.done, job);
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
static int threads_for(size_t jobs)
{
	int err = 0;

	while (jobs > fetchers.idle && fetchers.current < fetchers.most && !(err = thread_start(fetch_main, NULL))) {
		fetchers.current++;
		fetchers.idle++; /* from its making on: no second one is made for the same job */
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

int fetch_submit(struct fetch_job *job)
{
	int err;

	pthread_mutex_lock(&fetchers.lock);
	err = threads_for(fetchers.queue.count + 1);
	if (fetchers.current) /* with fewer threads than wished for it only takes longer */
		err = 0;
	if (!err) {
		list_add(&fetchers.queue, job);
		pthread_cond_signal(&fetchers.wake);
	}
	pthread_mutex_unlock(&fetchers.lock);
	return err;
}

struct fetch_job *fetch_take(size_t most)
{
	struct list taken = {.end = &taken.first};

	pthread_mutex_lock(&fetchers.lock);
	while (fetchers.done.count && taken.count < most)
		list_add(&taken, list_take(&fetchers.done));
	signal_set(fetchers.fd, fetchers.done.count);
	pthread_mutex_unlock(&fetchers.lock);
	return taken.first;
}
