/* The inode table: nodes, names, locations, what the kernel has to be told. */
#ifndef FUSECACHE_TABLE_H
#define FUSECACHE_TABLE_H

#include "../base/base.h"

#define ROOT_INO 1u
#define INODES_MOST (1u << 29) /* numbers below it */
#define NAME_BYTES_MOST 255u
/* Readdir cookies: 0 is the start, these follow "." and "..", others are node numbers. */
#define DOT_COOKIE 1
#define DOTDOT_COOKIE 0x7fffffff

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
	/* Of a saved table (saved.c). */
	NODE_UNCHECKED = 1024, /* as an earlier mount saw it; this one has not looked at it yet */
	NODE_EXACT = 2048,     /* directory: its time stamps are those of its listing; not LISTED: an earlier mount's */
};

struct node { /* in the memfd: the layout version in attach.c covers it */
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
#define SECTOR 512u /* what records are aligned to; those of logs to PAGE */
struct location { /* unpacked */
	uint32_t segno, header_len;
	uint64_t offset;
};
#define LOCATION_OFFSET_MOST ((uint64_t)((1u << 18) - 1) * 4096)
#define LOCATION_HEADER_MOST (((1u << 13) - 1) * 8)
uint64_t location_pack(struct location at);
struct location location_unpack(uint64_t packed);

#define DEVICES_MOST 256u
#define DOUBTS_MANY 4u /* so often a name's inode number alone was another: it means nothing there */

#define TABLE_HEADER_BYTES 4096u
#define PUSH_SLOTS 64
struct header {			/* of the memfd; only this room looks into it */
	_Atomic uint64_t magic; /* written last: an unfinished header is an empty table */
	uint32_t layout, zero_open;
	uint64_t node_cap, name_cap; /* name_cap in units of 4 bytes */
	_Atomic uint32_t count;	     /* highest published inode number */
	_Atomic uint32_t devices;
	_Atomic uint64_t names_used; /* units of 4 bytes */
	_Atomic uint32_t redo_armed; /* inode number, 0: none */
	uint32_t reserved;
	struct node redo;
	uint64_t device[DEVICES_MOST];
	_Atomic uint32_t pushing[PUSH_SLOTS]; /* inode numbers, 0: free */
	_Atomic uint8_t doubts[DEVICES_MOST]; /* whether its inode numbers mean anything, up to DOUBTS_MANY */
	_Atomic uint64_t former_device;	      /* the root's, before its file system was mounted anew; 0: none */
};
_Static_assert(sizeof(struct header) <= TABLE_HEADER_BYTES, "header page");

struct table {
	pthread_rwlock_t lock;
	struct header *head;		  /* NULL: not attached */
	_Atomic uint8_t *doubts;	  /* of each device, in the header */
	bool keeps_numbers[DEVICES_MOST]; /* its type says so: there is no doubt */
	struct node *nodes;		  /* index: inode number */
	unsigned char *names;
	/* Index: inode number; 0: unknown. A server from before has not filled it in: the sweep does. */
	int64_t *born_ns;
	size_t mapped;
	int source_fd;
	uint32_t *slots; /* (parent, name) -> node */
	uint64_t slot_count, slot_used;
	struct map64 links;   /* (device, origin inode) -> primary of hard-linked files */
	struct map64 aliases; /* primary -> first alias node */
	struct map64 blocks;  /* ino << 32 | block -> packed location, files of several blocks */
	uint64_t buried;      /* names, so far */
	struct {
		struct map64 state; /* inode -> STALE_* in stale.c */
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
static inline uint32_t table_count(void)
{
	return table.head ? atomic_load_explicit(&table.head->count, memory_order_acquire) : 0;
}
/* table.lock is held. NULL: unknown. */
static inline struct node *node_at(uint64_t ino) { return ino && ino <= table_count() ? &table.nodes[ino] : NULL; }
static inline uint32_t node_primary(uint32_t ino)
{
	return node_flags(&table.nodes[ino]) & NODE_ALIAS ? table.nodes[ino].primary : ino;
}
/* table.lock is held. Must the origin be asked before bytes of it, or its name, are answered? */
static inline bool node_is_unchecked(uint32_t ino)
{
	return node_flags(&table.nodes[node_primary(ino)]) & NODE_UNCHECKED;
}
/* table.lock is held. Is it a file with several names? Then who looks at the file may look at another name, which may
 * be all that is left of it. */
static inline bool node_has_names(uint32_t ino)
{
	const struct node *n = &table.nodes[node_primary(ino)];

	return S_ISREG(n->mode) && n->nlink > 1;
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

int table_init(void);
int table_attach(int table_fd, int source_fd, bool zero_open); /* -EINVAL: other layout or mode */
int table_mode(int table_fd);				       /* -1 empty, 0, 1 */
/* The source's file system was mounted anew: `fd` is its directory there. Waits for the origin. */
int table_adopt_source(int fd);
uint64_t table_bytes(void);
/* The functions below up to `table_device` want table.lock held. */
uint32_t node_live_name(uint32_t ino); /* the node whose name still leads to ino; 0: none */
uint32_t table_find(uint32_t parent, const void *name, size_t len);
uint32_t table_next_child(uint32_t dir, uint64_t cookie);
uint64_t table_location(uint32_t ino, uint64_t block);
char *table_path(uint32_t ino, size_t *len);				 /* malloc'ed */
bool table_device(uint32_t ino, uint32_t *major_no, uint32_t *minor_no); /* false: not known */

/* These lock by themselves. */
int table_set_location(uint64_t ino, uint64_t block, struct location at, const struct version *of);
void table_clear_location(uint64_t ino, uint64_t block, uint64_t only_if);
bool table_version(uint64_t ino, struct version *out);
struct look { /* of a file that is to be read; aliases are followed */
	const struct node *node;
	struct version version;
	uint64_t packed; /* location of the block; 0: none */
	uint32_t ino;
};
bool table_look(uint64_t ino, uint64_t block, struct look *out);
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
struct census {
	uint64_t files, bytes;	/* regular files that have a name */
	uint64_t located_bytes; /* of these, blocks with a location in a segment that is there */
	bool is_whole;		/* all directories are LISTED */
};
struct census table_census(bool (*is_there)(uint32_t segno));
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
/* With `is_forced` what the file system here keeps of attributes is not believed, and the parent's are taken, too. */
int64_t table_add(uint64_t parent, const char *name, size_t len, bool is_forced);
int table_refresh(uint64_t ino);
int table_version_of_fd(int fd, int sync, struct version *out, uint32_t *mode); /* sync: AT_STATX_*_SYNC */

/* A table that outlives its mount (docs/FORMAT.md, "Saved tables"). */
#define SOURCE_BYTES 16u /* what tells the source from others */
enum { SAVED_LOADED, SAVED_DAMAGED, SAVED_OTHER_VERSION, SAVED_OTHER_SOURCE };
uint64_t table_saved_bytes(void);				      /* at most, were it saved now */
int64_t table_save(int fd, const unsigned char source[SOURCE_BYTES]); /* bytes written at offset 0 */
/* Into a table that knows only its root, before anything is answered. One of SAVED_..., or -errno: it may be loaded
 * in part then (-ENOMEM, -ENOSPC), which is no harm: no directory counts as listed. */
int table_load(int fd, const unsigned char source[SOURCE_BYTES]);
bool table_is_unchecked(uint64_t ino);
bool table_has_unchecked(uint64_t dir); /* a file in it */

struct scan_result {
	uint64_t added, removed, changed;
};
/* `is_forced`: as above. */
int table_scan(uint64_t ino, int (*tick)(void *), void *context, bool is_forced, struct scan_result *out);

/* For the hosts of a pool: nodes whose names have changed since the last take, while the journal is on. They lock. */
int table_journal(bool is_on);
int table_journal_take(struct number_list *out, bool *is_whole); /* not whole: more has changed */
bool table_is_shared(uint64_t dir);				 /* may one host sweep it for others? */
uint64_t table_find_path(const char *path, size_t len);		 /* below the source, if it is known; else 0 */

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

/* ---- of this room alone; table.lock is held for what follows -------------------------------- */
#define ROOT_DEVICE 0u	     /* index of the source's own */
#define DEVICE_OTHER 0xffffu /* the list of devices is full: no hard-link detection there */

static inline bool node_is_file(const struct node *n) { return S_ISREG(n->mode); }
static inline bool node_is_directory(const struct node *n) { return S_ISDIR(n->mode); }
static inline void flags_change(struct node *n, uint32_t set, uint32_t clear)
{
	atomic_store_explicit(&n->flags, (node_flags(n) & ~clear) | set, memory_order_release);
}

void device_classify(uint32_t index);
uint32_t device_find(uint32_t major_no, uint32_t minor_no);  /* DEVICE_OTHER: not met yet */
uint32_t device_index(uint32_t major_no, uint32_t minor_no); /* the same, but then it is met */

void stale_queue(uint32_t ino); /* one of its nodes has just been flagged */
void stale_raise(uint32_t node, uint32_t flags);
void stale_find_lost(void); /* look for flags in the whole table */
void stale_forget(void);

void journal_note(uint32_t node);	 /* the name, or what it leads to, has changed */
void journal_note_all(uint32_t primary); /* of all names that it has */
void journal_break(void);		 /* and more than names can say */

int slots_reserve(uint64_t more); /* for names; -ENOMEM */
void slot_place(uint32_t ino);
uint32_t link_find(uint32_t device, uint64_t origin_ino);
int link_note(uint32_t ino);  /* it may have more names; -ENOMEM */
int alias_note(uint32_t ino); /* it is one of them */
void names_forget(void);      /* links, too */

struct attributes {
	uint64_t origin_ino, size, blocks;
	int64_t mtime_ns, ctime_ns, atime_ns;
	uint32_t mode, uid, gid, nlink, rdev;
	uint32_t major_no, minor_no;
	int64_t born_ns; /* 0: the origin does not tell */
	uint32_t birth;	 /* its hash, 0 as well */
	bool refused;	 /* only origin_ino and the type in mode are known */
};
enum { SAME, ATTRIBUTES_CHANGED, VERSION_CHANGED, REPLACED };
/* Without the lock: the origin may hang. (table_create: no other thread is there yet.) */
int origin_stat(int dir_fd, const char *name, int flags, struct attributes *out);
void node_fill(struct node *n, const struct attributes *a);
int node_update(uint32_t ino, const struct attributes *a);
bool same_object(uint32_t ino, const struct attributes *a);
bool may_become(uint32_t ino, const struct attributes *a);
uint64_t link_hit(const struct attributes *a, bool *same_version); /* the inode whose name it is; 0: none */
int64_t node_create(uint32_t parent, const char *name, size_t len, const struct attributes *a, bool raise_name);
void node_bury(uint32_t ino);

int open_beneath(char *path, int flags); /* without the lock, as the next one */
int open_parent(uint32_t name_node, char **name_out);

#endif
