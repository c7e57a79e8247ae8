/* What the parts of fusecache._native share.
 * Which file is what: docs/ARCHITECTURE.md, Layout.
 *
 * Only those that include native_py.h know Python. Everything else runs without the GIL and reports errors as
 * negative errno values. Locks, outermost first: table.lock, then any one of the leaf locks (segments, deep, events,
 * streams, ring, queue, seen, pool, trace); nobody waits for the GIL while holding one. The log's are named in
 * native_log.c.
 */
#ifndef FUSECACHE_NATIVE_H
#define FUSECACHE_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES (4u << 20)
#define CHUNK_BYTES (64u << 10)
#define CHUNKS_MOST (BLOCK_BYTES / CHUNK_BYTES)
#define STREAM_HEAD_BYTES (128u << 10)
#define ROOT_INO 1u
#define NAME_BYTES_MOST 255u
/* Readdir cookies: 0 is the start, these follow "." and "..", others are node numbers. */
#define DOT_COOKIE 1
#define DOTDOT_COOKIE 0x7fffffff

/* ---- a hash map from non-zero u64 to u64 (open addressing) -------------------------------- */
struct map64 {
	uint64_t *pairs; /* key, value, key, value, ...; key 0: empty */
	size_t slots, used;
};
bool map64_get(const struct map64 *map, uint64_t key, uint64_t *value);
int map64_set(struct map64 *map, uint64_t key, uint64_t value);
void map64_delete(struct map64 *map, uint64_t key);
void map64_clear(struct map64 *map);
static inline size_t map64_bytes(const struct map64 *map) { return map->slots * 16; }

/* ---- table -------------------------------------------------------------------------------- */
enum {
	NODE_LISTED = 1, /* directory: the listing is complete */
	NODE_DEAD = 2,	 /* the name is gone at the origin (or names another inode now) */
	NODE_NOATTR = 4, /* the origin lists the name but refuses its attributes */
	NODE_ALIAS = 8,	 /* one more name of a hard-linked file; `primary` is its inode */
	/* The kernel holds something older than the table; cleared when it has been told. */
	NODE_STALE = 16,      /* attributes, pages or the cached listing */
	NODE_STALE_NAME = 32, /* the (possibly negative) dentry of the name */
	NODE_SHRUNK = 64,     /* the kernel may believe in a larger size: it has not asked since */
	NODE_SERVED = 128,    /* bytes of it have been answered or pushed: a reader may hold some */
	NODE_PAGES = 256,     /* the kernel may hold pages of it */
	NODE_YOUNG = 512,     /* its pages are to be forgotten soon (time stamps too young) */
};

struct node { /* in the memfd: the layout version in native_table.c covers it */
	uint64_t origin_ino;
	uint64_t size;
	int64_t mtime_ns, ctime_ns, atime_ns;
	union {
		uint64_t location; /* file of one block: packed location, 0: none */
		struct {
			uint32_t first_child, last_child; /* directory */
		};
		uint64_t next_alias; /* alias */
	};
	uint64_t blocks;
	uint32_t mode;
	_Atomic uint32_t flags; /* low 16: NODE_*, high 16: index of the device */
	uint32_t uid, gid, nlink;
	uint32_t rdev; /* device nodes; of others a hash of the time of birth, 0: unknown */
	/* From here on fixed when the node is published, but for `next`. */
	uint32_t parent, next;
	uint32_t name; /* names region, in units of 4 bytes: length byte, then the bytes */
	uint32_t primary;
};
_Static_assert(sizeof(struct node) == 96, "96 bytes a node");

struct version {
	uint64_t origin_ino, size;
	int64_t mtime_ns, ctime_ns;
};

/* Segment files: docs/FORMAT.md. */
#define PAGE 4096u
#define RECORD_MAGIC 0x31424346u /* "FCB1" */
#define RECORD_FIXED 72u	 /* bytes before the chunk checksums */
#define RECORD_BLOCK 1
struct location { /* unpacked */
	uint32_t segno, header_len;
	uint64_t offset;
};
#define LOCATION_OFFSET_MOST ((uint64_t)((1u << 18) - 1) * 4096)
#define LOCATION_HEADER_MOST (((1u << 14) - 1) * 8)
uint64_t location_pack(struct location at);
struct location location_unpack(uint64_t packed);

#define DEVICES_MOST 256u
#define DOUBTS_MANY 4u /* so often a name's inode number alone was another: it means nothing there */

struct header;
struct table {
	pthread_rwlock_t lock;
	struct header *head; /* NULL: not attached */
	_Atomic uint8_t *doubts; /* of each device, in the header */
	bool keeps_numbers[DEVICES_MOST]; /* its type says so: there is no doubt */
	struct node *nodes;  /* index: inode number */
	unsigned char *names;
	int64_t *born_ns; /* index: inode number; 0: unknown. A server from before has not filled it in: the sweep does */
	size_t mapped;
	int source_fd;
	uint32_t *slots; /* (parent, name) -> node */
	uint64_t slot_count, slot_used;
	struct map64 links;   /* (device, origin inode) -> primary of hard-linked files */
	struct map64 aliases; /* primary -> first alias node */
	struct map64 blocks;  /* ino << 32 | block -> packed location, files of several blocks */
	struct {
		struct map64 state; /* inode -> STALE_* in native_table.c */
		uint32_t *queue;    /* circular */
		size_t first, count, cap;
		bool lost; /* no memory: look for flags in the whole table */
	} stale;
};
extern struct table table;

static inline const unsigned char *node_name(const struct node *n, size_t *len)
{
	const unsigned char *at = table.names + (uint64_t)n->name * 4;

	*len = at[0];
	return at + 1;
}
static inline uint32_t node_flags(const struct node *n)
{
	return atomic_load_explicit(&n->flags, memory_order_acquire);
}
static inline bool device_renumbers(uint32_t device)
{
	return device < DEVICES_MOST && atomic_load(&table.doubts[device]) >= DOUBTS_MANY;
}
static inline uint32_t node_device(const struct node *n) { return node_flags(n) >> 16; }
/* Number 0: it means nothing at this origin. */
static inline struct version node_version(const struct node *n)
{
	return (struct version){device_renumbers(node_device(n)) ? 0 : n->origin_ino, n->size, n->mtime_ns,
				n->ctime_ns};
}
/* Of versions one may be older than the discovery that numbers mean nothing. */
static inline bool version_equal(struct version a, struct version b)
{
	return (a.origin_ino == b.origin_ino || !a.origin_ino || !b.origin_ino) && a.size == b.size &&
	       a.mtime_ns == b.mtime_ns && a.ctime_ns == b.ctime_ns;
}
/* Of the file system mounted as this device. Made up: its inode numbers are given anew now and then. */
enum numbers { NUMBERS_UNKNOWN, NUMBERS_MADE_UP, NUMBERS_KEPT };
enum numbers device_numbers(uint32_t major_no, uint32_t minor_no);

int table_init(void);
int table_attach(int table_fd, int source_fd, bool zero_open); /* -EINVAL: other layout or mode */
int table_mode(int table_fd);				       /* -1 empty, 0, 1 */
/* The source's file system was mounted anew: `fd` is its directory there. Waits for the origin. */
int table_adopt_source(int fd);
uint32_t table_count(void);
uint64_t table_bytes(void);
/* The functions below up to `node_live_name` want table.lock held. */
struct node *node_at(uint64_t ino); /* NULL: unknown */
uint32_t node_primary(uint32_t ino);
uint32_t node_live_name(uint32_t ino); /* the node whose name still leads to ino; 0: none */
uint32_t table_find(uint32_t parent, const void *name, size_t len);
uint32_t table_next_child(uint32_t dir, uint64_t cookie);
uint64_t table_location(uint32_t ino, uint64_t block);
char *table_path(uint32_t ino, size_t *len); /* malloc'ed */
bool table_device(uint32_t ino, uint32_t *major_no, uint32_t *minor_no); /* false: not known */

/* These lock by themselves. */
int table_set_location(uint64_t ino, uint64_t block, struct location at, const struct version *of);
void table_clear_location(uint64_t ino, uint64_t block, uint64_t only_if);
bool table_version(uint64_t ino, struct version *out);
/* A record of a whole file of one block that was written anew. */
struct moved {
	struct version of;
	uint64_t from, to; /* packed locations; from 0: it had none */
	uint32_t ino;
	bool switched; /* set by table_switch */
};
/* Under one hold of the lock: those that still have their version and lie where they lay now lie at `to`. */
void table_switch(struct moved *moved, size_t count);
struct segment_use {
	uint32_t segno;
	uint64_t files, bytes; /* of inodes that have a name: whose block 0 lies there; of their records */
	uint64_t to_come;      /* how many of the files */
};
/* What is in use of all segments that locations lead to: malloc'ed, *count of them, by number. */
int table_survey(bool (*is_to_come)(uint32_t ino), struct segment_use **uses, size_t *count);
struct number_list {
	uint32_t *items; /* malloc'ed */
	size_t count;
};
/* Segments in which a block of an inode lies whose mark is not 0 (marks has `count`), and which of those inodes, larger
 * than a block, have a block without a location. */
int table_segments(const uint8_t *marks, size_t count, struct number_list *segnos, struct number_list *unknown);
/* Packed locations of the first blocks; 0: none, or no such inode. */
void table_locations(const uint32_t *inos, size_t count, uint64_t *packed);
/* Attributes are being answered (table.lock held): the kernel learns the size. */
void node_told(uint32_t primary);
static inline uint32_t node_rdev(const struct node *n)
{
	return (n->mode & S_IFMT) == S_IFCHR || (n->mode & S_IFMT) == S_IFBLK ? n->rdev : 0;
}
/* Bytes are about to be answered or pushed; / its noted pages were dropped. They lock. */
void table_served(uint64_t ino);
void table_dropped(uint64_t ino);
void table_mark_young(uint64_t ino);
/* Must a read that gets fewer bytes than it wanted be refused for now? With a size that is too large
 * the kernel would show zeros where we have nothing; it asks for the size before it tries again. */
bool table_refuse_short(uint64_t ino);
int table_open(uint64_t ino, int flags);
ssize_t table_readlink(uint64_t ino, char *buf, size_t cap);
int64_t table_add(uint64_t parent, const char *name, size_t len);
int table_refresh(uint64_t ino);
int table_version_of_fd(int fd, int sync, struct version *out, uint32_t *mode); /* sync: AT_STATX_*_SYNC */

struct scan_result {
	uint64_t added, removed, changed;
};
int table_scan(uint64_t ino, int (*tick)(void *), void *context, struct scan_result *out);

/* The inode's attributes are watched by the sweep (table.lock held). */
bool node_is_watched(uint32_t ino);
/* What the kernel has to be told. A stale name: also the names of the inode, dead ones too. */
struct stale_name {
	uint32_t node; /* its parent and name never change */
	struct stale_name *next;
};
struct stale {
	uint32_t ino;
	bool name_is_stale;
	struct stale_name *names;
};
size_t table_take_stale(struct stale *out, size_t most);
void table_settled(uint64_t ino);
void table_mark_stale(uint64_t ino);
/* True while the node has this version and the kernel has been told everything about it. */
bool table_is_current(uint64_t ino, const struct version *of);
/* A push announces its inode in the memfd, so that the next server has it invalidated if this one dies
 * in between. -1: all slots are taken. */
int push_slot_take(uint32_t ino);
void push_slot_free(int slot);

/* ---- store -------------------------------------------------------------------------------- */
struct record_head { /* verified headers are kept: records are immutable, numbers not reused */
	bool used;
	uint32_t segno, header_len, payload_len;
	uint64_t offset;
	uint64_t sums[CHUNKS_MOST];
};
#define SCRATCH_HEADS 4
struct scratch { /* buffer for direct reads, one a thread at a time */
	unsigned char *mem;
	size_t cap;
	struct record_head heads[SCRATCH_HEADS];
	unsigned next_head;
	int err; /* errno of the last read that failed */
	struct scratch *next;
};
struct scratch *scratch_get(void); /* NULL: no memory */
void scratch_put(struct scratch *s);

enum { READ_OK, READ_MISS, READ_FAULT };
int segment_add(uint32_t segno, int fd);
void segment_drop(uint32_t segno);
bool segment_known(uint32_t segno);
struct segment;
struct segment *segment_take(uint32_t segno); /* until it is released; NULL: not known */
int segment_fd(const struct segment *segment);
void segment_release(struct segment *segment);
void segment_count_read(struct segment *segment);
/* For each segment that is open: (number, blocks read from it so far). How many there are; at most `most` are
 * written. */
size_t segment_reads(uint64_t (*out)[2], size_t most);
/* `raw`: all of a record, header and payload. NULL: it is not the one that `at` says, or damaged. */
const unsigned char *record_payload(unsigned char *raw, struct location at, uint32_t payload_len);
int record_read_fd(int fd, struct location at, uint32_t payload_len, struct scratch *s,
		   const unsigned char **data);
bool leave_direct(int fd); /* give O_DIRECT up; false: it was not direct */
/* Bytes [from, from+len) of one block, verified; `data` points into the scratch buffer. Faults are
 * counted and reported, and the location is cleared. */
int block_read(uint32_t ino, uint64_t block, uint64_t packed, uint32_t payload_len, uint32_t from,
	       uint32_t len, struct scratch *s, const unsigned char **data);
/* A range of a file; `size` is clipped. *data is in s or in `joined` (when it spans blocks). */
int file_read(uint32_t ino, uint64_t offset, size_t *size, struct scratch *s, struct scratch **joined,
	      const unsigned char **data);

/* ---- many records at a time --------------------------------------------------------------- */
struct deep; /* of one thread at a time */
struct deep_record { /* of a whole block; the caller's, until it is taken */
	struct deep_record *next;
	struct location at;
	uint32_t payload_len;
};
struct deep *deep_get(void); /* NULL: no asynchronous I/O here, or no memory */
void deep_put(struct deep *d); /* after deep_take has said NULL */
bool deep_has_room(const struct deep *d);
/* ADDED: it is to be read. FULL: not yet: something has to be taken before. NOT: it is for block_read. */
enum deep_added { DEEP_ADDED, DEEP_FULL, DEEP_NOT };
enum deep_added deep_add(struct deep *d, struct deep_record *record, uint64_t packed, uint32_t payload_len);
/* The next one that was read, NULL: there is none. Header and payload stay until the next call; NULL: the record is
 * for block_read. */
struct deep_record *deep_take(struct deep *d, const unsigned char **raw);

/* ---- watch -------------------------------------------------------------------------------- */
enum { EVENT_FAULT = 1, EVENT_STREAM = 2, EVENT_UNREAD = 3 };
struct event {
	int kind;
	uint64_t a, b, c;
};
#define EVENTS_MOST 4096
struct counters {
	_Atomic uint64_t requests, from_ssd, bytes_from_ssd, lookups, getattrs, readdirs, slow, faults;
	_Atomic uint64_t bytes_staged, waited, from_origin, bytes_from_origin, files_missed, bytes_missed;
};
extern struct counters counters;
#define COUNT(field, n) atomic_fetch_add_explicit(&counters.field, (n), memory_order_relaxed)

struct range {
	uint32_t ino;
	uint64_t offset, length;
};
int watch_init(void);
int watch_event_fd(void);
void watch_signal(void); /* there are stale inodes */
size_t watch_take(struct event *out, size_t most);
/* `err`: of a read that failed; 0: what was read is wrong. */
void watch_fault(uint32_t segno, uint64_t offset, uint32_t ino, int err);
void watch_read(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size);
void ring_note(uint32_t ino, uint64_t file_size, uint64_t offset, uint64_t size);
uint64_t ring_total(void);
/* Those that a plan wants come last. */
size_t ring_take(uint64_t limit, size_t most, struct range *out);
void ring_forget(uint32_t ino, uint64_t file_size);
bool ring_has(uint32_t ino); /* its first block is noted */
uint64_t ring_memory(void);
void watch_reset(void);

/* ---- front -------------------------------------------------------------------------------- */
struct kernel_info {
	unsigned proto_major, proto_minor, capable, want, max_write, max_readahead, max_background;
	bool resumed, initialised;
};
extern struct kernel_info kernel_info;
const char *front_why_not(void); /* NULL: libfuse is interposed */
int front_configure(bool front, unsigned threads, double negative_timeout_s, bool resume);
int front_resume(void);
bool front_running(void);
struct fuse_req;
struct read_request {
	struct fuse_req *req;
	uint32_t ino;
	uint64_t offset;
	size_t size;
	const void *raw; /* as it was received */
	size_t raw_size;
};
/* A READ that has waited is answered with bytes of the file at its offset; / as it would have been at once. */
void front_answer(const struct read_request *one, const struct version *of, const unsigned char *data, size_t size);
void front_serve(const struct read_request *one, struct scratch *s);
/* / with the whole content of the file, from the origin; / by pyfuse3. */
void front_answer_missed(const struct read_request *one, const struct version *of, const unsigned char *data);
void front_pass(const struct read_request *one);
/* Attributes as the front may answer them now; false: the slow path has to look. */
bool front_stat(uint64_t ino, struct stat *st, int64_t *born_ns);
void front_drop_request(struct fuse_req *req); /* it was answered by other means */
int front_reply_attr(struct fuse_req *req, const struct stat *st, double timeout_s); /* libfuse's own */
int front_fd(void);
int front_asker(void); /* thread id of the READ that pyfuse3 was given last; 0: unknown */
/* Bytes pushed: less than size when the node stopped being of this version; or -errno. */
int64_t kernel_store(int fd, uint32_t ino, uint64_t offset, const void *data, size_t size,
		     const struct version *of);
int kernel_inval_inode(int fd, uint64_t ino, int64_t offset, int64_t length); /* 1: told, 0: unknown */
int kernel_inval_entry(int fd, uint64_t parent, const char *name, size_t len);
int kernel_expire_entry(int fd, uint64_t parent, const char *name, size_t len);
int kernel_resend(int fd);
/* The kernel tells window_told with this number whether it has the file's first byte; -ENOENT: it does not know the
 * inode. */
int kernel_retrieve(int fd, uint64_t ino, uint64_t number);

/* ---- requests answered as they were received ----------------------------------------------- */
/* hintsd: its socket, empty: hints are off. has_acls: access control lists are honoured by the kernel, and are
 * pyfuse3's to answer. -ENAMETOOLONG. */
int raw_configure(const char *hintsd, bool has_acls);
bool raw_has_acls(void);
/* The access control list of the root directory, as it is while its ctime is that; size 0: none. */
void raw_keep_root_acl(const void *value, size_t size, int64_t ctime_ns);
bool raw_answer(int fd, const void *request, size_t size); /* false: it is libfuse's */
void raw_before_pyfuse3(void *request, size_t size);	    /* it is about to process this one */
void raw_getattr_begins(const struct fuse_req *req);	    /* pyfuse3's handler is called with it */

/* ---- READs that wait for their chunk ------------------------------------------------------ */
/* Does it wait? Then `raw` was copied, and the request is answered later. */
bool parking_take(const struct read_request *read);
/* The bytes of a COMING file are there, or (data: NULL) will not be: READs that wait for them are answered.
 * True: one of them was for the whole file. */
bool parking_came(uint32_t ino, const struct version *of, const unsigned char *data, struct scratch *s);

/* ---- READs of files that are not on SSD --------------------------------------------------- */
#define MISSED_MOST 1024 /* that wait */
void missed_enable(bool enabled, int64_t tick_ns);
/* Does it wait? Then `raw` was copied, and the request is answered later. */
bool missed_take(const struct read_request *read);
/* Inodes that were not told before: at most MISSED_MOST; how many. wait: until there are some, or it is disabled. */
size_t missed_fresh(bool wait, uint32_t *inos);
/* READs of the file that wait are answered with its content, read from the origin at begun_ns (CLOCK_REALTIME), if its
 * last change is older than a tick; / are pyfuse3's (0: all that wait). */
void missed_came(uint32_t ino, const struct version *of, const unsigned char *data, int64_t begun_ns);
void missed_pass(uint32_t ino);

/* ---- plan --------------------------------------------------------------------------------- */
enum { PLAN_ARMED = 1, PLAN_READ = 2, PLAN_COMING = 4, PLAN_WANTED = 8, PLAN_QUEUED = 16, PLAN_FLYING = 32, PLAN_STAGED = 64, PLAN_FAILED = 128 };
#define PLAN_STATE 0xf8u /* those that an observation carries */
enum { SEEN_LOOKUP = 1, SEEN_SSD = 2, SEEN_ORIGIN = 3 };
extern _Atomic bool plan_active;
static inline bool plan_is_active(void)
{
	return atomic_load_explicit(&plan_active, memory_order_relaxed);
}
int plan_init(void);
int plan_begin(void);
void plan_end(void);
uint8_t plan_flags(uint32_t ino); /* 0 without a plan */
void plan_mark(uint32_t ino, uint8_t add, uint8_t remove);
int plan_seen_fd(void);
struct seen {
	uint32_t ino, process, parent; /* who asked, and who has started that one; 0: unknown */
	uint8_t kind;
};
size_t plan_take_seen(size_t most, struct seen *out, uint32_t *lost);
/* At offset 0, by thread `tid`, which waits for the answer; 0: unknown. */
void plan_saw_read(uint32_t ino, uint8_t what, int tid);
/* A look-up by thread `tid`. True: it is one of our own, and the wire still stands. */
bool plan_saw_lookup(uint32_t ino, int tid);
bool plan_is_asking(int tid); /* the thread makes look-ups of our own */
bool plan_arm(int fd, uint32_t ino);
enum { PUSH_NO_BYTES, PUSHED, PUSH_CHANGED, PUSH_REFUSED, PUSH_LARGE, PUSH_READ };
/* results: PUSH* of each. moves: a byte each, whether its record goes to the log; NULL: none does. -ENOMEM. */
int plan_stage(int fd, const char *mountpoint, const uint32_t *inos, const uint8_t *moves, size_t count,
	       uint8_t *results, struct scratch *s);
int plan_push(int fd, const char *mountpoint, uint32_t ino, const struct version *of, const void *data,
	      size_t size);
void plan_drop(int fd, const char *mountpoint, uint32_t ino);

enum listed_kind { LISTED_OTHER, LISTED_FILE, LISTED_DIRECTORY, LISTED_SYMLINK };
struct listed {
	uint64_t size;
	uint32_t node, ino;
	uint8_t kind, stored;
};
/* Live entries that follow node `after` (0: the start); -EAGAIN: the directory is not LISTED. */
ssize_t plan_list(uint64_t dir, uint64_t after, size_t most, struct listed *out, uint32_t *next);

/* ---- what the kernel has let go of --------------------------------------------------------- */
int window_init(void);
enum { PAGES_UNKNOWN, PAGES_GONE, PAGES_THERE };
/* found: one of these each. It waits for the kernel's answers, which front threads take; no answer: unknown. */
void window_ask(int fd, const uint32_t *inos, size_t count, uint8_t *found, unsigned within_ms);
void window_told(uint64_t number, bool is_there);

/* ---- fetch pool --------------------------------------------------------------------------- */
struct fetch_job {
	struct fetch_job *next;
	void *owner; /* the object that `into` lies in: only touched with the GIL */
	unsigned char *into; /* version.size bytes */
	struct version version;
	int64_t tag;
	uint32_t ino;
	bool answers; /* READs of the file that have missed */
	int error;    /* errno */
	int64_t begun_ns, ended_ns; /* CLOCK_REALTIME; that plus what it took */
};
#define FETCH_THREADS_MOST 352u /* the greatest depth, READs that miss, what hangs */
int fetch_init(void);
/* Or change them. direct: files are read past the page cache, as long as their file system can. */
void fetch_begin(unsigned threads, bool direct);
/* -EINVAL: not begun. Other errors: there is no thread, and none can be made. */
int fetch_submit(struct fetch_job *job);
int fetch_fd(void);
struct fetch_job *fetch_take(size_t most); /* a list */
uint64_t fetch_pending(void);
/* Both give jobs that nobody waits for any more: all that are not in a thread; / those that have come
 * back from one since. */
struct fetch_job *fetch_end(void);
struct fetch_job *fetch_abandoned(void);

/* ---- trace -------------------------------------------------------------------------------- */
enum { TRACE_ON = 1, TRACE_WIRES = 2, TRACE_LOOKUPS = 4 }; /* trace_mode; 0: nobody records */
enum { SEEN_ELSEWHERE = 4, TRACE_CONTINUES = 16 }; /* with SEEN_*; the numbers are those of docs/TRACES.md */
struct access {
	uint64_t time_ns; /* CLOCK_MONOTONIC */
	uint32_t ino;
	uint32_t who; /* thread id << 8 | SEEN_* | TRACE_CONTINUES */
};
_Static_assert(sizeof(struct access) == 16, "recording.py knows it");
extern _Atomic uint8_t trace_mode;
static inline bool trace_is(uint8_t bit)
{
	return atomic_load_explicit(&trace_mode, memory_order_relaxed) & bit;
}
int trace_begin(bool wires, bool lookups); /* -EBUSY: a recording is under way */
void trace_end(void);
size_t trace_take(size_t most, struct access *out, uint64_t *lost);
/* Sizes and paths of inodes, in turn, until `names` is full; how many, or -ENOMEM. */
#define TRACE_NAME_MOST 65535u /* bytes; of a path, docs/TRACES.md */
struct described {
	uint64_t *sizes;
	uint32_t *lengths; /* of the path in `names`; 0: no file, or its path is too long */
	char *names;
	size_t names_len;
};
ssize_t trace_describe(const uint32_t *inos, size_t count, size_t names_most, struct described *out);
int64_t trace_expire(int fd); /* the names of all files; how many the kernel knew */
void trace_note_open(uint32_t ino, uint32_t tid);
void trace_note_read(uint32_t ino, uint8_t what, uint32_t tid);
/* An open by thread `tid` (0: unknown) was seen, and counts in a recording with `bit`. */
static inline void trace_saw_open(uint32_t ino, uint32_t tid, uint8_t bit)
{
	if (trace_is(bit))
		trace_note_open(ino, tid);
}

/* ---- log ---------------------------------------------------------------------------------- */
#define LOG_CHUNKS_MOST 4096u
struct log_settings {
	unsigned chunks;
	uint32_t buffer_bytes; /* of a chunk; a multiple of 4096 */
	int64_t credit_bytes;  /* that may be appended */
	unsigned char uuid[16], dataset[16];
	uint8_t algorithm; /* of digests */
};
struct log_counters { /* since the process began */
	_Atomic uint64_t written_bytes, waiting_bytes, moved, added, refused, failed;
	_Atomic uint64_t buffer_bytes; /* of memory, now; waiting_bytes too is of now */
};
extern struct log_counters log_counters;
struct segment_count {
	uint32_t segno;
	uint64_t count;
};
/* -EBUSY: one is open. The descriptors stay the caller's, and open until log_end. */
int log_begin(const struct log_settings *settings, const uint32_t *segnos, const int *fds);
/* The first assignment of an inode counts. -ENOENT: no log; -EINVAL: no such chunk. */
int log_assign(const uint32_t *inos, size_t count, unsigned chunk);
int log_open(void); /* nothing is appended before */
/* Is the log open, the inode of one of its chunks, neither in it nor on its way there, and not in a segment
 * that others are drained before? */
bool log_wants(uint32_t ino);
/* Append the file of a whole, verified record that was read at `from_packed`. It may wait for the disk.
 * 0: done; -EALREADY: it is in this log, or on its way; -ENOENT: no chunk, or no log; -ENOSPC: no credit, or
 * no memory; -EIO: a write of the chunk has failed; -ESTALE: the location leads elsewhere by now. */
int log_move(uint32_t ino, uint64_t from_packed, const unsigned char *raw);
/* The same for the content of a file that has no location. digest: 32 bytes. */
int log_add(uint32_t ino, const struct version *of, const unsigned char *digest, uint64_t fetched_ns,
	    const void *payload, uint32_t payload_len);
/* Whether a file, in any version, waits in the buffer of its chunk. */
bool log_holds(uint32_t ino);
/* Bytes of a file that waits in the buffer of its chunk. False: it does not, in this version. */
bool log_read(uint32_t ino, const struct version *of, uint64_t offset, void *to, size_t size);
/* Until the next call, or the next log, only what lies in these segments is moved; NULL: everything.
 * `segnos` is malloc'ed, and free'd here. */
void log_drain(uint32_t *segnos, size_t count);
int log_survey(struct segment_use **uses, size_t *count); /* as table_survey */
int64_t log_credit(int64_t more_bytes); /* what is left of it; 0 without a log */
void log_flush(void);			/* what was appended before is written; it waits */
struct segment_end {
	uint32_t segno;
	int err; /* errno of the first write that failed; 0: none */
	uint64_t length;
};
/* Written out, and closed: how its segments ended. How many there were, 0: no log was open. */
size_t log_end(struct segment_end ends[LOG_CHUNKS_MOST]);
void log_forget(void); /* closed; what was not written is lost */
/* Locations that were switched away from segments since the last call: malloc'ed, *count of them. */
int log_left(struct segment_count **left, size_t *count);

/* ---- threads and clocks ------------------------------------------------------------------- */
/* A detached thread with a small stack, in which no signal is handled: signals are Python's. -errno. */
static inline int thread_start(void *(*run)(void *), void *of)
{
	sigset_t all, before;
	pthread_attr_t attr;
	pthread_t thread;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 << 10);
	err = pthread_create(&thread, &attr, run, of);
	pthread_attr_destroy(&attr);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -err;
}

static inline int64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- event descriptors -------------------------------------------------------------------- */
static inline void signal_set(int fd, bool on)
{
	uint64_t value = 1;
	ssize_t done = on ? write(fd, &value, sizeof(value)) : read(fd, &value, sizeof(value));

	(void)done; /* EAGAIN: it is in that state already */
}

#endif
