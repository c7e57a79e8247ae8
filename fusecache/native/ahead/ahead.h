/* What is staged and fetched before it is read; READs that wait for that, or missed (missed.c); and the
 * threads that fetch for both (fetch.c). */
#ifndef FUSECACHE_AHEAD_H
#define FUSECACHE_AHEAD_H

#include "../answer/answer.h"

struct mount {
	int fd;		   /* its /dev/fuse */
	const char *point; /* where it is mounted */
	bool is_fronted;   /* front threads answer what the table knows: it costs no Python */
};
enum { PUSH_NO_BYTES, PUSHED, PUSH_CHANGED, PUSH_REFUSED, PUSH_LARGE, PUSH_READ };
/* results: PUSH* of each. moves: a byte each, whether its record goes to the log; NULL: none does. -ENOMEM. */
int ahead_stage(const struct mount *mount, const uint32_t *inos, const uint8_t *moves, size_t count, uint8_t *results,
		struct scratch *s);
int ahead_push(const struct mount *mount, uint32_t ino, const struct version *of, const void *data, size_t size);
void ahead_drop(const struct mount *mount, uint32_t ino);
bool ahead_arm(int fd, uint32_t ino);

/* Make the kernel know the inode: by a look-up, and once in a while with many that will be wanted soon. */
bool mount_introduce(const struct mount *mount, uint32_t ino);
/* Drop its pages by advice. False: there is no path to open, or it leads elsewhere. */
bool mount_advise(const struct mount *mount, uint32_t ino);

enum listed_kind { LISTED_OTHER, LISTED_FILE, LISTED_DIRECTORY, LISTED_SYMLINK };
struct listed {
	uint64_t size;
	uint32_t node, ino;
	uint8_t kind, where; /* where: bits of WHERE_STORED, WHERE_OWNED */
};
#define WHERE_STORED 1
#define WHERE_OWNED 2 /* other hosts of the pool ask this one for it */
/* Live entries that follow node `after` (0: the start); -EAGAIN: the directory is not LISTED. owned: whether to find
 * that out, too. */
ssize_t ahead_list(uint64_t dir, uint64_t after, size_t most, bool owned, struct listed *out, uint32_t *next);

/* ---- what the kernel has let go of --------------------------------------------------------- */
int window_init(void);
enum { PAGES_UNKNOWN, PAGES_GONE, PAGES_THERE };
/* found: one of these each. It waits for the kernel's answers, which front threads take; no answer: unknown. */
void window_ask(int fd, const uint32_t *inos, size_t count, uint8_t *found, unsigned within_ms);
void window_told(uint64_t number, bool is_there);

/* ---- fetch threads --------------------------------------------------------------------------- */
struct fetch {
	struct fetch *next;
	void *owner;	     /* the object that `into` lies in: only touched with the GIL */
	unsigned char *into; /* version.size bytes */
	struct version version;
	int64_t tag;
	uint32_t ino;
	int error;		    /* errno */
	bool is_pooled;		    /* from another host: the origin was not read */
	int64_t begun_ns, ended_ns; /* CLOCK_REALTIME; that plus what it took */
};
#define FETCH_THREADS_MOST 352u /* the greatest depth, READs that miss, what hangs */
int fetch_init(void);
/* Or more of them. direct: files are read past the page cache, as long as their file system can. */
void fetch_begin(unsigned threads, bool direct);
/* Errors: there is no thread, and none can be made. */
int fetch_submit(struct fetch *fetch);
int fetch_fd(void);
struct fetch *fetch_take(size_t most); /* a list */

/* ---- READs that wait for what is being staged --------------------------------------------- */
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
/* READs of the file that wait are answered with its content, got from begun_ns (CLOCK_REALTIME) on, if its
 * last change is older than a tick; / are pyfuse3's (0: all that wait). */
void missed_came(uint32_t ino, const struct version *of, const unsigned char *data, int64_t begun_ns);
void missed_pass(uint32_t ino);
bool missed_waits(uint32_t ino); /* does any READ of it? */

/* ---- blocks that other members of a pool ask for ------------------------------------------- */
#define ASKED_MOST 512 /* that wait: one a connection */
struct asked_block {
	uint32_t ino, block;
};
struct sockaddr;
/* Others are answered from now on, at that address. -errno. */
int asked_begin(const struct sockaddr *at, unsigned length);
/* Whether what is not on SSD waits for asked_end(); else nothing waits: busy. */
int asked_enable(bool is_enabled);
int asked_fd(void);					    /* readable: asked_take() has some */
size_t asked_take(struct asked_block *blocks, size_t most); /* that were not told before */
bool asked_waits(struct asked_block which);		    /* does anybody, for it? */
/* Those that wait for it have `size` bytes of that version; data: NULL: they look on SSD once more. */
void asked_end(struct asked_block which, const struct version *of, const unsigned char *data, size_t size);

#endif
