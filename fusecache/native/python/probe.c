/* What a device does under so many reads and writes at a time: Linux AIO, from one thread.
 *
 * Threads would measure themselves: 64 of them need two switches a read, and Python's its lock as well.
 * Here a read of 4 KiB costs 2 µs of one processor, nearly all in the kernel. Knows Python.
 */
#include "python.h"

#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define SECTOR_BYTES 4096u
#define BLOCK_MOST (1u << 20)
#define DEPTH_MOST 64u
#define APART_MOST (4 * (int64_t)BLOCK_MOST) /* reads and writes stay together within this */

struct way {			/* the reads, or the writes */
	uint64_t begin, blocks; /* its part of the file */
	uint64_t block, depth, next;
	int64_t asked, done; /* bytes */
	bool is_write;
};

struct probe {
	int fd;
	bool is_random, is_once;
	uint64_t chance;
	struct way reads, writes;
	struct iocb slots[DEPTH_MOST];
	unsigned idle[DEPTH_MOST], idle_count;
};

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static uint64_t draw(struct probe *p)
{
	p->chance ^= p->chance << 13;
	p->chance ^= p->chance >> 7;
	p->chance ^= p->chance << 17;
	return p->chance;
}

/* The next block of a way into its slot's buffer, or out of it. False: it is not its turn. */
static bool aim(struct probe *p, struct way *way, const struct way *other, struct iocb *slot)
{
	unsigned char *data = (unsigned char *)(uintptr_t)slot->aio_buf;
	uint64_t number = way->next;

	if (p->is_once && way->next == way->blocks)
		return false;
	if (other->depth && way->asked - other->asked > APART_MOST)
		return false;
	if (p->is_random && !way->is_write)
		number = draw(p) % way->blocks;
	else
		way->next = p->is_once ? way->next + 1 : (way->next + 1) % way->blocks;
	way->asked += (int64_t)way->block;
	slot->aio_offset = (int64_t)(way->begin + number * way->block);
	/* No two sectors alike: there are devices that store such only once. */
	for (uint64_t at = 0; way->is_write && at < way->block; at += SECTOR_BYTES) {
		uint64_t mark = draw(p);

		memcpy(data + at, &mark, sizeof(mark));
	}
	return true;
}

/* Until `end_ns`, or all is written. Returns 0 or a negative errno; nothing is in flight any more. */
static int drive(struct probe *p, aio_context_t aio, int64_t end_ns)
{
	struct io_event events[DEPTH_MOST];
	struct iocb *added[DEPTH_MOST];
	unsigned flying = 0;
	int err = 0;

	for (;;) {
		unsigned count = 0, kept = 0, sent = 0;
		long got;

		for (unsigned i = 0; !err && i < p->idle_count && now_ns() < end_ns; i++) {
			struct iocb *slot = &p->slots[p->idle[i]];
			bool is_write = slot->aio_lio_opcode == IOCB_CMD_PWRITE;
			struct way *way = is_write ? &p->writes : &p->reads;

			if (aim(p, way, is_write ? &p->reads : &p->writes, slot))
				added[count++] = slot;
			else
				p->idle[kept++] = p->idle[i];
		}
		p->idle_count = kept;
		while (sent < count && !err) {
			long taken = syscall(SYS_io_submit, aio, (long)(count - sent), added + sent);

			if (taken > 0)
				sent += (unsigned)taken;
			else if (taken == 0 || errno != EINTR)
				err = taken == 0 ? -EIO : -errno;
		}
		flying += sent;
		if (!flying)
			return err;
		got = syscall(SYS_io_getevents, aio, 1L, (long)DEPTH_MOST, events, NULL);
		for (long i = 0; i < got; i++) {
			const struct iocb *slot = &p->slots[events[i].data];
			struct way *way = slot->aio_lio_opcode == IOCB_CMD_PWRITE ? &p->writes : &p->reads;

			flying--;
			p->idle[p->idle_count++] = (unsigned)events[i].data;
			if (events[i].res == (int64_t)slot->aio_nbytes)
				way->done += events[i].res;
			else if (!err)
				err = events[i].res < 0 ? (int)events[i].res : -EIO;
		}
	}
}

/* Returns 0 or a negative errno. */
static int probe_run(struct probe *p, double seconds, int64_t *took_ns)
{
	size_t reads = (size_t)(p->reads.depth * p->reads.block);
	size_t bytes = reads + (size_t)(p->writes.depth * p->writes.block);
	unsigned depth = (unsigned)(p->reads.depth + p->writes.depth);
	aio_context_t aio = 0;
	unsigned char *mem;
	int64_t begun_ns;
	int err;

	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (mem == MAP_FAILED)
		return -errno;
	for (size_t at = reads; at < bytes; at += sizeof(uint64_t)) {
		uint64_t noise = draw(p); /* there are devices that compress */

		memcpy(mem + at, &noise, sizeof(noise));
	}
	for (unsigned i = 0; i < depth; i++) {
		bool is_write = i >= p->reads.depth;
		const struct way *way = is_write ? &p->writes : &p->reads;
		size_t at = is_write ? reads + (i - p->reads.depth) * way->block : i * way->block;

		p->slots[i] = (struct iocb){
		    .aio_data = i,
		    .aio_lio_opcode = is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD,
		    .aio_fildes = (uint32_t)p->fd,
		    .aio_buf = (uintptr_t)(mem + at),
		    .aio_nbytes = way->block,
		};
		p->idle[p->idle_count++] = i;
	}
	err = syscall(SYS_io_setup, DEPTH_MOST, &aio) ? -errno : 0;
	if (!err) {
		begun_ns = now_ns();
		err = drive(p, aio, begun_ns + (int64_t)(seconds * 1e9));
		*took_ns = now_ns() - begun_ns;
		syscall(SYS_io_destroy, aio);
	}
	munmap(mem, bytes);
	return err;
}

static bool is_block(unsigned long long block)
{
	return block >= SECTOR_BYTES && block <= BLOCK_MOST && block % SECTOR_BYTES == 0;
}

static PyObject *py_probe_io(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long file, read_block, reads, write_block, writes;
	struct probe probe = {.chance = (uint64_t)now_ns() | 1};
	int64_t took_ns = 0;
	double seconds;
	int err, is_random;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iKKKKKpd",
					 KEYWORDS("fd", "file_bytes", "read_bytes", "reads", "write_bytes", "writes",
						  "is_random", "seconds"),
					 &probe.fd, &file, &read_block, &reads, &write_block, &writes, &is_random,
					 &seconds))
		return NULL;
	if (!is_block(read_block) || !is_block(write_block) || reads > DEPTH_MOST || writes > DEPTH_MOST ||
	    reads + writes == 0 || reads + writes > DEPTH_MOST || file < 2 * read_block || file < 2 * write_block ||
	    file > INT64_MAX || !(seconds >= 0 && seconds < 1e6))
		return PyErr_Format(PyExc_ValueError,
				    "blocks of 4 KiB to 1 MiB, %u at a time at most, in a "
				    "file of two at least",
				    DEPTH_MOST);
	if (reads && writes)
		file /= 2; /* a half for each */
	probe.is_random = is_random;
	probe.is_once = !reads;
	probe.reads = (struct way){.block = read_block, .depth = reads, .blocks = file / read_block};
	probe.writes = (struct way){
	    .begin = reads ? file / SECTOR_BYTES * SECTOR_BYTES : 0,
	    .block = write_block,
	    .depth = writes,
	    .blocks = file / write_block,
	    .is_write = true,
	};
	WITHOUT_GIL(err = probe_run(&probe, seconds, &took_ns));
	if (err)
		return os_error(err);
	return Py_BuildValue("LLd", (long long)probe.reads.done, (long long)probe.writes.done, (double)took_ns * 1e-9);
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(probe_io),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int probe_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
