/* The inode table, paths beneath the source, and the scan of origin directories.
 *
 * The table lives in a memfd that the keeper made: a header page, nodes, names, times of birth. Servers map
 * it shared and may be killed between any two instructions:
 *
 * INVARIANT: a node and its name are complete before `count` is raised over them (release store).
 * INVARIANT: names, parents and numbers of published nodes never change.
 * INVARIANT: attributes of a published node change only through the redo slot in the header: the new
 *   node is written there, the slot is armed, the node is overwritten, the slot is disarmed. Attaching
 *   finishes an armed slot, so that nobody ever sees half an update.
 * INVARIANT: child lists are in ascending order of inode number. They (and the hashes) are rebuilt when
 *   the table is attached, so a list that was being linked is no loss.
 * INVARIANT: what the kernel may hold in an older state is flagged STALE in the memfd before, or in the same
 *   store as, the change; the flag goes when the kernel was told. An invalidation is never lost.
 * INVARIANT: one writer at a time (table.lock); the lock is private to the process and dies with it.
 *
 * The table is not a cache: nodes are never freed while the mount lives.
 */
#include "native.h"

#define XXH_INLINE_ALL
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define TABLE_MAGIC 0x454c424154434655u
#define TABLE_LAYOUT 1u
#define TABLE_HEADER_BYTES 4096u
#define PUSH_SLOTS 64
#define ROOT_DEVICE 0u	     /* index of the source's own */
#define DEVICE_OTHER 0xffffu /* the list of devices is full: no hard-link detection there */

struct header {
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
	_Atomic uint64_t former_device; /* the root's, before its file system was mounted anew; 0: none */
};
_Static_assert(sizeof(struct header) <= TABLE_HEADER_BYTES, "header page");

struct table table = {.source_fd = -1};

/* ---- locations ---------------------------------------------------------------------------- */
/* segno 32 | offset / 4096 18 | header_len / 8 14 bits; a record never starts at offset 0. */
uint64_t location_pack(struct location at)
{
	return (uint64_t)at.segno << 32 | (at.offset / 4096) << 14 | at.header_len / 8;
}

struct location location_unpack(uint64_t packed)
{
	return (struct location){
	    .segno = (uint32_t)(packed >> 32),
	    .header_len = (uint32_t)(packed & 0x3fff) * 8,
	    .offset = (packed >> 14 & 0x3ffff) * 4096,
	};
}

/* ---- nodes -------------------------------------------------------------------------------- */
int table_init(void)
{
	pthread_rwlockattr_t attr;
	int err;

	pthread_rwlockattr_init(&attr);
	/* Many front threads read; a scan must still get its turn. */
	pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	err = -pthread_rwlock_init(&table.lock, &attr);
	pthread_rwlockattr_destroy(&attr);
	return err;
}

uint32_t table_count(void)
{
	return table.head ? atomic_load_explicit(&table.head->count, memory_order_acquire) : 0;
}

struct node *node_at(uint64_t ino)
{
	return ino && ino <= table_count() ? &table.nodes[ino] : NULL;
}

uint32_t node_primary(uint32_t ino)
{
	return node_flags(&table.nodes[ino]) & NODE_ALIAS ? table.nodes[ino].primary : ino;
}

uint32_t node_live_name(uint32_t ino)
{
	uint64_t alias;

	ino = node_primary(ino);
	if (!(node_flags(&table.nodes[ino]) & NODE_DEAD))
		return ino;
	if (!map64_get(&table.aliases, ino, &alias))
		return 0;
	for (; alias; alias = table.nodes[alias].next_alias)
		if (!(node_flags(&table.nodes[alias]) & NODE_DEAD))
			return (uint32_t)alias;
	return 0;
}

static void flags_change(struct node *n, uint32_t set, uint32_t clear)
{
	atomic_store_explicit(&n->flags, (node_flags(n) & ~clear) | set, memory_order_release);
}

/* ---- what the kernel has to be told ------------------------------------------------------- */
enum { STALE_QUEUED = 1, STALE_IN_FLIGHT, STALE_AGAIN };
#define REFUSALS_MOST 64
#define STALE_FLAGS (uint32_t)(NODE_STALE | NODE_STALE_NAME)

static void stale_push(uint32_t ino)
{
	size_t cap = table.stale.cap ? table.stale.cap * 2 : 256;
	uint32_t *grown;

	if (table.stale.count == table.stale.cap) {
		grown = malloc(cap * sizeof(*grown));
		if (!grown) {
			table.stale.lost = true;
			return;
		}
		for (size_t i = 0; i < table.stale.count; i++)
			grown[i] = table.stale.queue[(table.stale.first + i) % table.stale.cap];
		free(table.stale.queue);
		table.stale.queue = grown;
		table.stale.cap = cap;
		table.stale.first = 0;
	}
	table.stale.queue[(table.stale.first + table.stale.count++) % table.stale.cap] = ino;
	if (table.stale.count == 1)
		watch_signal();
}

/* Queue an inode one of whose nodes has just been flagged. */
static void stale_queue(uint32_t ino)
{
	uint64_t state;

	ino = node_primary(ino);
	if (map64_get(&table.stale.state, ino, &state)) {
		if (state == STALE_IN_FLIGHT)
			map64_set(&table.stale.state, ino, STALE_AGAIN); /* no growth: cannot fail */
		return;
	}
	if (map64_set(&table.stale.state, ino, STALE_QUEUED)) {
		table.stale.lost = true;
		watch_signal();
		return;
	}
	stale_push(ino);
}

static void stale_raise(uint32_t node, uint32_t flags)
{
	flags_change(&table.nodes[node], flags, 0);
	stale_queue(node);
}

static void stale_find_lost(void)
{
	uint64_t state;

	table.stale.lost = false;
	for (uint32_t ino = ROOT_INO; ino <= table_count(); ino++)
		if (node_flags(&table.nodes[ino]) & STALE_FLAGS) {
			if (map64_get(&table.stale.state, node_primary(ino), &state) && state == STALE_QUEUED)
				map64_delete(&table.stale.state, node_primary(ino)); /* may not be in it */
			stale_queue(ino);
		}
}

size_t table_take_stale(struct stale *out, size_t most)
{
	size_t taken = 0;

	pthread_rwlock_wrlock(&table.lock);
	if (table.head && table.stale.lost)
		stale_find_lost();
	while (table.head && taken < most && table.stale.count) {
		uint32_t ino = table.stale.queue[table.stale.first];
		struct stale *stale = &out[taken];
		uint64_t node = ino, state, alias;

		table.stale.first = (table.stale.first + 1) % table.stale.cap;
		table.stale.count--;
		if (!map64_get(&table.stale.state, ino, &state) || state != STALE_QUEUED)
			continue; /* twice in the queue */
		map64_set(&table.stale.state, ino, STALE_IN_FLIGHT);
		*stale = (struct stale){.ino = ino};
		if (!map64_get(&table.aliases, ino, &alias))
			alias = 0;
		for (; node; node = node == ino ? alias : table.nodes[node].next_alias) {
			struct stale_name *name = ino == ROOT_INO ? NULL : malloc(sizeof(*name));

			if (node_flags(&table.nodes[node]) & NODE_STALE_NAME)
				stale->name_is_stale = true;
			if (name) {
				*name = (struct stale_name){(uint32_t)node, stale->names};
				stale->names = name;
			} else if (ino != ROOT_INO) {
				map64_set(&table.stale.state, ino, STALE_AGAIN); /* once more later */
			}
		}
		taken++;
	}
	pthread_rwlock_unlock(&table.lock);
	return taken;
}

void table_settled(uint64_t ino)
{
	uint64_t state, node, alias = 0;

	pthread_rwlock_wrlock(&table.lock);
	if (node_at(ino) && map64_get(&table.stale.state, ino, &state)) {
		if (state == STALE_IN_FLIGHT) {
			map64_delete(&table.stale.state, ino);
			map64_get(&table.aliases, ino, &alias);
			for (node = ino; node; node = node == ino ? alias : table.nodes[node].next_alias)
				flags_change(&table.nodes[node], 0, STALE_FLAGS);
		} else if (state == STALE_AGAIN) {
			map64_set(&table.stale.state, ino, STALE_QUEUED);
			stale_push((uint32_t)ino);
		}
	}
	pthread_rwlock_unlock(&table.lock);
}

void table_mark_stale(uint64_t ino)
{
	pthread_rwlock_wrlock(&table.lock);
	if (node_at(ino)) {
		flags_change(&table.nodes[node_primary((uint32_t)ino)], 0, NODE_YOUNG);
		stale_raise(node_primary((uint32_t)ino), NODE_STALE);
	}
	pthread_rwlock_unlock(&table.lock);
}

void table_served(uint64_t ino)
{
	const uint32_t flags = NODE_SERVED | NODE_PAGES;
	struct node *n;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	if (n) {
		n = &table.nodes[node_primary((uint32_t)ino)];
		if ((node_flags(n) & flags) != flags)
			atomic_fetch_or(&n->flags, flags);
	}
	pthread_rwlock_unlock(&table.lock);
}

/* Of a file of several blocks other pages may be left: its flag stays. */
void table_dropped(uint64_t ino)
{
	struct node *n;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	if (n && n->size <= BLOCK_BYTES)
		atomic_fetch_and(&n->flags, ~(uint32_t)NODE_PAGES);
	pthread_rwlock_unlock(&table.lock);
}

void table_mark_young(uint64_t ino)
{
	struct node *n;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	if (n)
		atomic_fetch_or(&table.nodes[node_primary((uint32_t)ino)].flags, NODE_YOUNG);
	pthread_rwlock_unlock(&table.lock);
}

bool table_is_current(uint64_t ino, const struct version *of)
{
	const struct node *n;
	bool current;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	current = n && !(node_flags(n) & NODE_STALE) && version_equal(node_version(n), *of);
	pthread_rwlock_unlock(&table.lock);
	return current;
}

int push_slot_take(uint32_t ino)
{
	for (int i = 0; table.head && i < PUSH_SLOTS; i++) {
		uint32_t free_slot = 0;

		if (atomic_compare_exchange_strong(&table.head->pushing[i], &free_slot, ino))
			return i;
	}
	return -1;
}

void push_slot_free(int slot) { atomic_store(&table.head->pushing[slot], 0); }

/* ---- devices ------------------------------------------------------------------------------ */
static void device_classify(uint32_t index)
{
	const uint64_t device = table.head->device[index];
	const enum numbers numbers = device_numbers((uint32_t)(device >> 32), (uint32_t)device);

	table.keeps_numbers[index] = numbers == NUMBERS_KEPT;
	if (numbers != NUMBERS_UNKNOWN)
		atomic_store(&table.head->doubts[index], numbers == NUMBERS_MADE_UP ? DOUBTS_MANY : 0);
}

/* DEVICE_OTHER: not met yet. */
static uint32_t device_find(uint32_t major_no, uint32_t minor_no)
{
	uint64_t device = (uint64_t)major_no << 32 | minor_no;
	uint32_t count = table.head ? atomic_load(&table.head->devices) : 0;

	for (uint32_t i = 0; i < count; i++)
		if (table.head->device[i] == device)
			return i;
	/* a look that began there: at the same files */
	return count && device == atomic_load(&table.head->former_device) ? ROOT_DEVICE : DEVICE_OTHER;
}

bool table_device(uint32_t ino, uint32_t *major_no, uint32_t *minor_no)
{
	const struct node *n = &table.nodes[ino];
	uint32_t index = node_device(n);

	if (index == DEVICE_OTHER || (node_flags(n) & NODE_NOATTR))
		return false;
	*major_no = (uint32_t)(table.head->device[index] >> 32);
	*minor_no = (uint32_t)table.head->device[index];
	return true;
}

static uint32_t device_index(uint32_t major_no, uint32_t minor_no)
{
	uint32_t count = atomic_load(&table.head->devices), found = device_find(major_no, minor_no);

	if (found != DEVICE_OTHER || count == DEVICES_MOST)
		return found;
	table.head->device[count] = (uint64_t)major_no << 32 | minor_no;
	device_classify(count);
	atomic_store_explicit(&table.head->devices, count + 1, memory_order_release);
	return count;
}

static inline bool is_file(const struct node *n) { return S_ISREG(n->mode); }
static inline bool is_directory(const struct node *n) { return S_ISDIR(n->mode); }

/* ---- hash of names ------------------------------------------------------------------------ */
static inline uint64_t name_home(uint32_t parent, const void *name, size_t len)
{
	return XXH3_64bits_withSeed(name, len, parent) & (table.slot_count - 1);
}

static bool name_is(const struct node *n, uint32_t parent, const void *name, size_t len)
{
	const unsigned char *own;
	size_t own_len;

	if (n->parent != parent)
		return false;
	own = node_name(n, &own_len);
	return own_len == len && !memcmp(own, name, len);
}

/* The live node of a name; 0: none. */
uint32_t table_find(uint32_t parent, const void *name, size_t len)
{
	if (!table.slot_used)
		return 0;
	for (uint64_t i = name_home(parent, name, len); table.slots[i];
	     i = (i + 1) & (table.slot_count - 1)) {
		const struct node *n = &table.nodes[table.slots[i]];

		if (!(node_flags(n) & NODE_DEAD) && name_is(n, parent, name, len))
			return table.slots[i];
	}
	return 0;
}

static void slot_place(uint32_t ino)
{
	const struct node *n = &table.nodes[ino];
	size_t len;
	const unsigned char *name = node_name(n, &len);
	uint64_t i = name_home(n->parent, name, len);

	/* A dead node's slot serves its successor: at most one slot a name. */
	while (table.slots[i] && !name_is(&table.nodes[table.slots[i]], n->parent, name, len))
		i = (i + 1) & (table.slot_count - 1);
	table.slot_used += !table.slots[i];
	table.slots[i] = ino;
}

static int slots_reserve(uint64_t more)
{
	uint64_t wanted = table.slot_count ? table.slot_count : 1024, old_count = table.slot_count;
	uint32_t *old = table.slots;

	while ((table.slot_used + more) * 4 > wanted * 3)
		wanted *= 2;
	if (wanted == old_count)
		return 0;
	table.slots = calloc(wanted, sizeof(*table.slots));
	if (!table.slots) {
		table.slots = old;
		return -ENOMEM;
	}
	table.slot_count = wanted;
	table.slot_used = 0;
	for (uint64_t i = 0; i < old_count; i++)
		if (old[i] && !(node_flags(&table.nodes[old[i]]) & NODE_DEAD))
			slot_place(old[i]);
	free(old);
	return 0;
}

/* ---- hard links --------------------------------------------------------------------------- */
static uint64_t link_key(uint32_t device, uint64_t origin_ino)
{
	uint64_t key = origin_ino ^ (uint64_t)device << 48;

	return key ? key : 1;
}

/* The primary that has this origin inode, if a name of it is still live. A collision of keys only
 * means that two names do not share an inode number. The caller compares versions: the number may have
 * been used again at the origin. */
static uint32_t link_find(uint32_t device, uint64_t origin_ino)
{
	uint64_t primary;
	const struct node *n;

	if (device == DEVICE_OTHER ||
	    !map64_get(&table.links, link_key(device, origin_ino), &primary))
		return 0;
	n = &table.nodes[primary];
	if (!is_file(n) || node_device(n) != device || n->origin_ino != origin_ino ||
	    !node_live_name((uint32_t)primary))
		return 0;
	return (uint32_t)primary;
}

static int link_note(uint32_t ino)
{
	const struct node *n = &table.nodes[ino];

	if (!is_file(n) || n->nlink < 2 || node_device(n) == DEVICE_OTHER ||
	    link_find(node_device(n), n->origin_ino))
		return 0;
	return map64_set(&table.links, link_key(node_device(n), n->origin_ino), ino);
}

static int alias_note(uint32_t ino)
{
	uint64_t next = 0;

	map64_get(&table.aliases, table.nodes[ino].primary, &next);
	table.nodes[ino].next_alias = next;
	return map64_set(&table.aliases, table.nodes[ino].primary, ino);
}

/* ---- changes ------------------------------------------------------------------------------ */
struct attributes {
	uint64_t origin_ino, size, blocks;
	int64_t mtime_ns, ctime_ns, atime_ns;
	uint32_t mode, uid, gid, nlink, rdev;
	uint32_t major_no, minor_no;
	int64_t born_ns; /* 0: the origin does not tell */
	uint32_t birth;	 /* its hash, 0 as well */
	bool refused; /* only origin_ino and the type in mode are known */
};

/* Beyond the years 1678 to 2262 (a damaged inode, a hostile origin): the nearest that 64 bits hold. */
static int64_t in_ns(const struct statx_timestamp *t)
{
	int64_t ns;

	if (__builtin_mul_overflow((int64_t)t->tv_sec, (int64_t)1000000000, &ns) ||
	    __builtin_add_overflow(ns, (int64_t)t->tv_nsec, &ns))
		return t->tv_sec < 0 ? INT64_MIN : INT64_MAX;
	return ns;
}

static int origin_stat(int dir_fd, const char *name, int flags, struct attributes *out)
{
	struct statx st;

	if (statx(dir_fd, name, flags | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT,
		  STATX_BASIC_STATS | STATX_BTIME, &st))
		return -errno;
	*out = (struct attributes){
	    .origin_ino = st.stx_ino,
	    .size = st.stx_size,
	    .blocks = st.stx_blocks,
	    .mtime_ns = in_ns(&st.stx_mtime),
	    .ctime_ns = in_ns(&st.stx_ctime),
	    .atime_ns = in_ns(&st.stx_atime),
	    .mode = st.stx_mode,
	    .uid = st.stx_uid,
	    .gid = st.stx_gid,
	    .nlink = st.stx_nlink,
	    .rdev = (uint32_t)makedev(st.stx_rdev_major, st.stx_rdev_minor),
	    .major_no = st.stx_dev_major,
	    .minor_no = st.stx_dev_minor,
	};
	if (st.stx_mask & STATX_BTIME) {
		out->born_ns = in_ns(&st.stx_btime);
		out->birth = (uint32_t)XXH3_64bits(&out->born_ns, sizeof(out->born_ns)) | 1;
	}
	return 0;
}

static void node_fill(struct node *n, const struct attributes *a)
{
	n->origin_ino = a->origin_ino;
	n->size = a->size;
	n->blocks = a->blocks;
	n->mtime_ns = a->mtime_ns;
	n->ctime_ns = a->ctime_ns;
	n->atime_ns = a->atime_ns;
	n->mode = a->mode;
	n->uid = a->uid;
	n->gid = a->gid;
	n->nlink = a->nlink;
	n->rdev = S_ISCHR(a->mode) || S_ISBLK(a->mode) ? a->rdev : a->birth;
}

static void locations_forget(uint32_t ino, uint64_t size)
{
	uint64_t blocks = size / BLOCK_BYTES + 1;

	if (size <= BLOCK_BYTES)
		return;
	/* Sparse giants have more blocks than the map has entries. */
	if (blocks <= table.blocks.used) {
		for (uint64_t i = 0; i < blocks; i++)
			map64_delete(&table.blocks, (uint64_t)ino << 32 | i);
		return;
	}
	for (size_t i = 0; i < table.blocks.slots;) {
		uint64_t key = table.blocks.pairs[2 * i];

		if (key && key >> 32 == ino)
			map64_delete(&table.blocks, key); /* may move another one here */
		else
			i++;
	}
}

enum { SAME, ATTRIBUTES_CHANGED, VERSION_CHANGED, REPLACED };

/* Overwrite a published node through the redo slot. */
static void node_rewrite(uint32_t ino, const struct node *image)
{
	struct header *head = table.head;

	head->redo = *image;
	atomic_store_explicit(&head->redo_armed, ino, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
	/* Not the parent, the name and the links between nodes: they are read without the lock. */
	memcpy(&table.nodes[ino], image, offsetof(struct node, parent));
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&head->redo_armed, 0, memory_order_release);
}

/* Merge attributes of the same origin inode; only called after `same_object`. */
static int node_update(uint32_t ino, const struct attributes *a)
{
	uint32_t primary = node_primary(ino);
	struct node *old = &table.nodes[primary];
	struct node image = *old;
	bool was_refused = node_flags(&table.nodes[ino]) & NODE_NOATTR;
	int result = SAME;

	if (a->refused) {
		if (was_refused)
			return SAME;
		stale_raise(ino, NODE_NOATTR | NODE_STALE | NODE_STALE_NAME);
		stale_raise(primary, NODE_STALE);
		return ATTRIBUTES_CHANGED;
	}
	if (was_refused && primary != ino) { /* an alias that was refused for a while: only the name was */
		flags_change(&table.nodes[ino], 0, NODE_NOATTR);
		was_refused = false;
	}
	node_fill(&image, a);
	table.born_ns[primary] = a->born_ns; /* read under the lock that we hold */
	if (!version_equal(node_version(old), node_version(&image)) || was_refused) {
		result = VERSION_CHANGED;
		if (is_file(old)) {
			locations_forget(primary, old->size);
			image.location = 0;
		}
	} else if (image.mode != old->mode || image.uid != old->uid || image.gid != old->gid ||
		   image.nlink != old->nlink || image.blocks != old->blocks ||
		   node_rdev(&image) != node_rdev(old)) {
		result = ATTRIBUTES_CHANGED;
	} else if (image.atime_ns == old->atime_ns && image.origin_ino == old->origin_ino) {
		return SAME;
	}
	if (was_refused) /* its device was not known */
		image.flags = (node_flags(old) & 0xffffu & ~(uint32_t)NODE_NOATTR) |
			      device_index(a->major_no, a->minor_no) << 16;
	if (result != SAME)
		image.flags = node_flags(&image) | NODE_STALE |
			      (image.size < old->size ? NODE_SHRUNK : 0); /* same publication */
	node_rewrite(primary, &image);
	if (result != SAME)
		stale_queue(primary);
	if (primary == ino)
		link_note(ino); /* no memory: later names get numbers of their own */
	return result;
}

/* Is the inode number all that another look found changed? Then the numbers of this origin may mean nothing. */
static bool is_renumbered(const struct node *n, const struct attributes *a)
{
	uint32_t device = node_device(n);
	const struct node *primary = node_flags(n) & NODE_ALIAS ? &table.nodes[n->primary] : n;

	if (device == DEVICE_OTHER || table.keeps_numbers[device])
		return false;
	if (device_renumbers(device) && (is_directory(n) || a->refused || (node_flags(n) & NODE_NOATTR)))
		return true; /* its entries are compared one by one, or nothing is known */
	if (a->refused || (node_flags(n) & NODE_NOATTR) || primary->size != a->size ||
	    primary->mtime_ns != a->mtime_ns || primary->ctime_ns != a->ctime_ns)
		return false;
	if (device_renumbers(device))
		return true;
	/* One directory will do: all below it would get new nodes, and would never be compared. */
	if (primary->mode == a->mode && primary->uid == a->uid && primary->gid == a->gid)
		atomic_fetch_add(&table.head->doubts[device], is_directory(n) ? DOUBTS_MANY : 1);
	return device_renumbers(device);
}

static bool same_object(uint32_t ino, const struct attributes *a)
{
	const struct node *n = &table.nodes[ino];

	if ((n->mode & S_IFMT) != (a->mode & S_IFMT))
		return false;
	/* Inode numbers are used again, on ext4 at once; the time of birth tells. */
	if (!S_ISCHR(n->mode) && !S_ISBLK(n->mode) && n->rdev && a->birth && n->rdev != a->birth)
		return false;
	if (!a->refused && !(node_flags(n) & NODE_NOATTR) &&
	    node_device(n) != device_index(a->major_no, a->minor_no))
		return false;
	return n->origin_ino == a->origin_ino || is_renumbered(n, a);
}

/* Another file has the name. If nobody can hold a byte of the one that had it, the inode may become the new
 * file: a reader that has just opened the name must not be told that its file is stale. */
static bool may_become(uint32_t ino, const struct attributes *a)
{
	const struct node *n = &table.nodes[ino];

	return !a->refused && S_ISREG(a->mode) && is_file(n) && n->nlink == 1 &&
	       !(node_flags(n) & (NODE_SERVED | NODE_ALIAS | NODE_NOATTR | NODE_DEAD)) &&
	       node_device(n) == device_index(a->major_no, a->minor_no);
}

static uint64_t link_hit(const struct attributes *a, bool *same_version)
{
	uint32_t primary = 0;
	struct version now = {a->origin_ino, a->size, a->mtime_ns, a->ctime_ns};
	uint32_t device;

	if (!a->refused && S_ISREG(a->mode) && a->nlink > 1) {
		device = device_index(a->major_no, a->minor_no);
		if (!device_renumbers(device)) /* there a number says nothing of links */
			primary = link_find(device, a->origin_ino);
	}
	*same_version = primary && version_equal(node_version(&table.nodes[primary]), now);
	return primary;
}

/* A new name. Returns its node number or -errno. With `raise_name` the kernel may hold a negative dentry. */
static int64_t node_create(uint32_t parent, const char *name, size_t len, const struct attributes *a,
			   bool raise_name)
{
	bool same_version;
	uint32_t ino = table_count() + 1, units = (uint32_t)(len + 1 + 3) / 4, primary = 0;
	uint64_t at = atomic_load(&table.head->names_used);
	struct node *n = &table.nodes[ino], *dir = &table.nodes[parent];
	uint32_t device = a->refused ? node_device(dir) : device_index(a->major_no, a->minor_no);
	int err;

	if (ino >= table.head->node_cap || at + units > table.head->name_cap)
		return -ENOSPC;
	err = slots_reserve(1);
	if (err)
		return err;
	primary = (uint32_t)link_hit(a, &same_version);
	if (!same_version)
		primary = 0;
	if (node_flags(dir) & NODE_LISTED)
		stale_raise(parent, NODE_STALE); /* its cached listing lacks the name */
	memset(n, 0, sizeof(*n));
	node_fill(n, a);
	table.born_ns[ino] = a->born_ns;
	n->parent = parent;
	n->name = (uint32_t)at;
	n->primary = primary ? primary : ino;
	table.names[at * 4] = (unsigned char)len;
	memcpy(table.names + at * 4 + 1, name, len);
	atomic_store_explicit(&n->flags,
			      device << 16 | (a->refused ? NODE_NOATTR : 0) |
				  (primary ? NODE_ALIAS : 0) | (raise_name ? NODE_STALE_NAME : 0),
			      memory_order_relaxed);
	atomic_store_explicit(&table.head->names_used, at + units, memory_order_release);
	if (dir->last_child)
		table.nodes[dir->last_child].next = ino;
	else
		dir->first_child = ino;
	dir->last_child = ino;
	atomic_store_explicit(&table.head->count, ino, memory_order_release);
	slot_place(ino);
	err = primary ? alias_note(ino) : link_note(ino);
	(void)err; /* without memory for the maps, other names of the file get their own numbers */
	if (primary)
		node_update(ino, a);
	if (raise_name)
		stale_queue(ino);
	return ino;
}

static void node_bury(uint32_t ino)
{
	struct node *n = &table.nodes[ino];

	if (node_flags(n) & NODE_DEAD)
		return;
	if (node_flags(&table.nodes[n->parent]) & NODE_LISTED)
		stale_raise(n->parent, NODE_STALE);
	flags_change(n, NODE_DEAD | NODE_STALE_NAME, NODE_LISTED);
	stale_queue(ino);
}

/* ---- attach ------------------------------------------------------------------------------- */
int table_mode(int table_fd)
{
	struct header head;

	if (pread(table_fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) || !head.magic)
		return -1;
	return head.zero_open ? 1 : 0;
}

static void table_detach(void)
{
	if (!table.head)
		return;
	munmap(table.head, table.mapped);
	close(table.source_fd);
	free(table.slots);
	map64_clear(&table.links);
	map64_clear(&table.aliases);
	map64_clear(&table.blocks);
	map64_clear(&table.stale.state);
	free(table.stale.queue);
	memset(&table.stale, 0, sizeof(table.stale));
	table.head = NULL;
	table.nodes = NULL;
	table.names = NULL;
	table.born_ns = NULL;
	table.slots = NULL;
	table.slot_count = table.slot_used = 0;
	table.source_fd = -1;
}

/* Address space for the most nodes that can be had; the memfd is sparse, so size costs nothing. */
static int table_map(int fd, uint64_t node_cap, uint64_t name_cap)
{
	uint64_t nodes = (node_cap * sizeof(struct node) + 4095) & ~(uint64_t)4095;
	uint64_t names = (name_cap * 4 + 4095) & ~(uint64_t)4095;
	uint64_t total = TABLE_HEADER_BYTES + nodes + names + node_cap * sizeof(*table.born_ns);
	unsigned char *base;
	struct stat st;

	if (fstat(fd, &st))
		return -errno;
	if ((uint64_t)st.st_size < total && ftruncate(fd, (off_t)total))
		return -errno;
	base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (base == MAP_FAILED)
		return -errno;
	table.head = (struct header *)base;
	table.nodes = (struct node *)(base + TABLE_HEADER_BYTES);
	table.names = base + TABLE_HEADER_BYTES + nodes;
	table.born_ns = (int64_t *)(table.names + names);
	table.mapped = total;
	return 0;
}

static int table_create(int fd, int source_fd, bool zero_open)
{
	static const uint8_t shifts[] = {29, 26, 23, 20};
	struct attributes a;
	struct node *root;
	int err = origin_stat(source_fd, "", AT_EMPTY_PATH, &a);

	if (err)
		return err;
	err = -ENOMEM;
	for (size_t i = 0; i < sizeof(shifts) && err; i++) {
		uint64_t cap = 1ull << shifts[i];

		err = table_map(fd, cap, cap * 8); /* 32 bytes a name on average */
		if (!err) {
			table.head->node_cap = cap;
			table.head->name_cap = cap * 8 < UINT32_MAX ? cap * 8 : UINT32_MAX;
		}
	}
	if (err)
		return err;
	table.doubts = table.head->doubts;
	table.head->layout = TABLE_LAYOUT;
	table.head->zero_open = zero_open;
	table.head->devices = 0;
	table.head->redo_armed = 0;
	root = &table.nodes[ROOT_INO];
	memset(root, 0, sizeof(*root));
	node_fill(root, &a);
	table.born_ns[ROOT_INO] = a.born_ns;
	root->primary = ROOT_INO;
	root->flags = device_index(a.major_no, a.minor_no) << 16;
	table.head->names_used = 1; /* the root's empty name */
	atomic_store(&table.head->count, ROOT_INO);
	atomic_store(&table.head->magic, TABLE_MAGIC);
	return 0;
}

/* Finish what a killed writer began, and rebuild all that is only in private memory. */
static int table_resume(void)
{
	uint32_t count = atomic_load(&table.head->count), armed = atomic_load(&table.head->redo_armed);
	int err;

	table.doubts = table.head->doubts;
	for (uint32_t i = 0; i < atomic_load(&table.head->devices); i++)
		device_classify(i); /* a server of an earlier version did not */
	if (armed && armed <= count)
		table.nodes[armed] = table.head->redo;
	atomic_store(&table.head->redo_armed, 0);
	err = slots_reserve(count);
	if (err)
		return err;
	for (uint32_t ino = ROOT_INO; ino <= count; ino++) {
		struct node *n = &table.nodes[ino], *dir;

		n->next = 0;
		if (is_directory(n))
			n->first_child = n->last_child = 0;
		if (ino == ROOT_INO)
			continue;
		dir = &table.nodes[n->parent]; /* parents come first: their lists are clean */
		if (dir->last_child)
			table.nodes[dir->last_child].next = ino;
		else
			dir->first_child = ino;
		dir->last_child = ino;
		if (!(node_flags(n) & NODE_DEAD))
			slot_place(ino);
		if (node_flags(n) & NODE_YOUNG)
			flags_change(n, NODE_STALE, NODE_YOUNG);
		if ((node_flags(n) & NODE_PAGES) && is_file(n))
			for (uint64_t at = 0; at < n->size; at += BLOCK_BYTES)
				ring_note(ino, n->size, at, n->size - at < BLOCK_BYTES ? n->size - at : BLOCK_BYTES);
		err = node_flags(n) & NODE_ALIAS ? alias_note(ino) : link_note(ino);
		if (err)
			return err;
	}
	for (int i = 0; i < PUSH_SLOTS; i++) {
		uint32_t pushed = atomic_load(&table.head->pushing[i]);

		if (node_at(pushed))
			flags_change(&table.nodes[node_primary(pushed)], NODE_STALE, 0);
		atomic_store(&table.head->pushing[i], 0);
	}
	stale_find_lost();
	return 0;
}

int table_attach(int table_fd, int source_fd, bool zero_open)
{
	struct header head;
	int err, source;

	source = fcntl(source_fd, F_DUPFD_CLOEXEC, 0);
	if (source < 0)
		return -errno;
	pthread_rwlock_wrlock(&table.lock);
	table_detach();
	if (table_mode(table_fd) < 0) {
		err = table_create(table_fd, source_fd, zero_open);
	} else if (pread(table_fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) ||
		   head.magic != TABLE_MAGIC || head.layout != TABLE_LAYOUT ||
		   head.zero_open != (uint32_t)zero_open) {
		err = -EINVAL;
	} else {
		/* Only node_cap gives the size; name_cap may have been limited to what `name` can hold. */
		err = table_map(table_fd, head.node_cap, head.node_cap * 8);
		if (!err)
			err = table_resume();
	}
	table.source_fd = source;
	if (err) {
		if (table.head)
			table_detach();
		else
			close(source);
		table.source_fd = -1;
	}
	pthread_rwlock_unlock(&table.lock);
	return err;
}

int table_adopt_source(int fd)
{
	struct header *head = table.head;
	struct attributes a;
	int err = head ? origin_stat(fd, "", AT_EMPTY_PATH, &a) : -EINVAL;

	if (err)
		return err;
	pthread_rwlock_wrlock(&table.lock);
	/* In the place of the old one: who has just fetched the number finds either. */
	if (dup3(fd, table.source_fd, O_CLOEXEC) < 0) {
		err = -errno;
	} else {
		atomic_store(&head->former_device, head->device[ROOT_DEVICE]);
		head->device[ROOT_DEVICE] = (uint64_t)a.major_no << 32 | a.minor_no;
		device_classify(ROOT_DEVICE);
	}
	pthread_rwlock_unlock(&table.lock);
	return err;
}

uint64_t table_bytes(void)
{
	uint64_t bytes;

	pthread_rwlock_rdlock(&table.lock);
	bytes = !table.head ? 0
			    : TABLE_HEADER_BYTES + (uint64_t)table_count() * (sizeof(struct node) + sizeof(*table.born_ns)) +
				  table.head->names_used * 4 + table.slot_count * sizeof(uint32_t) +
				  map64_bytes(&table.links) + map64_bytes(&table.aliases) +
				  map64_bytes(&table.blocks);
	pthread_rwlock_unlock(&table.lock);
	return bytes;
}

/* ---- small questions ---------------------------------------------------------------------- */
bool node_is_watched(uint32_t ino)
{
	uint64_t alias = 0, node;

	ino = node_primary(ino);
	if (ino == ROOT_INO)
		return node_flags(&table.nodes[ROOT_INO]) & NODE_LISTED;
	map64_get(&table.aliases, ino, &alias);
	for (node = ino; node; node = node == ino ? alias : table.nodes[node].next_alias)
		if (!(node_flags(&table.nodes[node]) & NODE_DEAD) &&
		    node_flags(&table.nodes[table.nodes[node].parent]) & NODE_LISTED)
			return true;
	return false;
}

/* The first live child whose number is above the cookie. */
uint32_t table_next_child(uint32_t dir, uint64_t cookie)
{
	const struct node *known = node_at(cookie);
	uint32_t ino;

	if (known && known->parent == dir && cookie != ROOT_INO)
		ino = known->next;
	else
		ino = table.nodes[dir].first_child;
	while (ino && (ino <= cookie || (node_flags(&table.nodes[ino]) & NODE_DEAD)))
		ino = table.nodes[ino].next;
	return ino;
}

bool table_version(uint64_t ino, struct version *out)
{
	const struct node *n;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(ino);
	if (n)
		*out = node_version(&table.nodes[node_primary((uint32_t)ino)]);
	pthread_rwlock_unlock(&table.lock);
	return n != NULL;
}

void node_told(uint32_t primary)
{
	uint32_t flags = node_flags(&table.nodes[primary]);

	if ((flags & NODE_SHRUNK) && !(flags & NODE_STALE))
		atomic_fetch_and(&table.nodes[primary].flags, ~(uint32_t)NODE_SHRUNK);
}

bool table_refuse_short(uint64_t ino)
{
	static _Atomic uint64_t refused; /* inode << 8 | times */
	uint64_t before = atomic_load(&refused);
	uint32_t primary = 0;
	bool refuse = false;

	pthread_rwlock_rdlock(&table.lock);
	if (node_at(ino)) {
		primary = node_primary((uint32_t)ino);
		refuse = node_flags(&table.nodes[primary]) & NODE_SHRUNK;
	}
	/* Direct reads never ask for the size, and need no protection: do not refuse them for ever. */
	if (refuse && before >> 8 == primary && (before & 255) >= REFUSALS_MOST) {
		atomic_fetch_and(&table.nodes[primary].flags, ~(uint32_t)NODE_SHRUNK);
		refuse = false;
	}
	pthread_rwlock_unlock(&table.lock);
	if (refuse)
		atomic_store(&refused, before >> 8 == primary ? before + 1 : (uint64_t)primary << 8);
	return refuse;
}

uint64_t table_location(uint32_t ino, uint64_t block)
{
	const struct node *n = &table.nodes[ino];
	uint64_t packed = 0;

	if (!is_file(n) || block >> 32 || (node_flags(n) & NODE_ALIAS))
		return 0;
	if (n->size <= BLOCK_BYTES)
		return block ? 0 : n->location;
	map64_get(&table.blocks, (uint64_t)ino << 32 | block, &packed);
	return packed;
}

int table_set_location(uint64_t ino, uint64_t block, struct location at, const struct version *of)
{
	int result = 0;
	struct node *n;

	if (!at.offset || at.offset % 4096 || at.offset > LOCATION_OFFSET_MOST || at.header_len % 8 ||
	    at.header_len > LOCATION_HEADER_MOST)
		return -EINVAL;
	pthread_rwlock_wrlock(&table.lock);
	n = node_at(ino);
	if (!n) {
		result = -ENOENT;
	} else {
		ino = node_primary((uint32_t)ino);
		n = &table.nodes[ino];
		if (is_file(n) && version_equal(node_version(n), *of) &&
		    block * BLOCK_BYTES < n->size && !(block >> 32)) {
			result = 1;
			if (n->size <= BLOCK_BYTES)
				n->location = location_pack(at); /* one store: never half */
			else if (map64_set(&table.blocks, ino << 32 | block, location_pack(at)))
				result = -ENOMEM;
		}
	}
	pthread_rwlock_unlock(&table.lock);
	return result;
}

void table_clear_location(uint64_t ino, uint64_t block, uint64_t only_if)
{
	struct node *n;

	pthread_rwlock_wrlock(&table.lock);
	n = node_at(ino);
	if (n) {
		ino = node_primary((uint32_t)ino);
		n = &table.nodes[ino];
		if (table_location((uint32_t)ino, block) == only_if) {
			if (is_file(n) && n->size <= BLOCK_BYTES && !block)
				n->location = 0;
			else if (!(block >> 32))
				map64_delete(&table.blocks, ino << 32 | block);
		}
	}
	pthread_rwlock_unlock(&table.lock);
}

/* ---- locations of many -------------------------------------------------------------------- */
#define SLICE_NODES 65536u /* under one hold of the lock: a waiting writer keeps the front's readers out */

void table_switch(struct moved *moved, size_t count)
{
	pthread_rwlock_wrlock(&table.lock);
	for (size_t i = 0; i < count; i++) {
		struct node *n = node_at(moved[i].ino);

		moved[i].switched = n && is_file(n) && n->size <= BLOCK_BYTES && n->location == moved[i].from &&
				    version_equal(node_version(n), moved[i].of);
		if (moved[i].switched)
			n->location = moved[i].to; /* one store: never half */
	}
	pthread_rwlock_unlock(&table.lock);
}

static int compare_uses(const void *a, const void *b)
{
	const struct segment_use *x = a, *y = b;

	return (x->segno > y->segno) - (x->segno < y->segno);
}

/* table.lock is held. */
static int count_use(struct map64 *numbers, struct segment_use **uses, size_t *count, uint32_t ino, bool is_to_come)
{
	const uint64_t packed = table_location(ino, 0);
	const struct location at = location_unpack(packed);
	struct segment_use *use;
	uint64_t number;

	/* Of a deleted file nobody is promised anything: it must not hold a segment for ever. */
	if (!packed || !node_live_name(ino))
		return 0;
	if (!map64_get(numbers, (uint64_t)at.segno + 1, &number)) {
		number = *count;
		if (!(number & (number - 1))) { /* doubled */
			use = realloc(*uses, (number ? 2 * number : 1) * sizeof(*use));
			if (!use)
				return -ENOMEM;
			*uses = use;
		}
		if (map64_set(numbers, (uint64_t)at.segno + 1, number))
			return -ENOMEM;
		(*uses)[(*count)++] = (struct segment_use){.segno = at.segno};
	}
	use = &(*uses)[number];
	use->files++;
	use->to_come += is_to_come;
	number = table.nodes[ino].size < BLOCK_BYTES ? table.nodes[ino].size : BLOCK_BYTES;
	use->bytes += (at.header_len + number + PAGE - 1) & ~(uint64_t)(PAGE - 1);
	return 0;
}

int table_survey(bool (*is_to_come)(uint32_t ino), struct segment_use **uses, size_t *count)
{
	struct map64 numbers = {0};
	int err = 0;

	*uses = NULL;
	*count = 0;
	for (uint64_t ino = ROOT_INO, stop; !err && ino <= table_count(); ino = stop) {
		stop = ino + SLICE_NODES;
		pthread_rwlock_rdlock(&table.lock);
		for (; !err && ino < stop && ino <= table_count(); ino++)
			err = count_use(&numbers, uses, count, (uint32_t)ino, is_to_come((uint32_t)ino));
		pthread_rwlock_unlock(&table.lock);
	}
	map64_clear(&numbers);
	if (err) {
		free(*uses);
		*uses = NULL;
	} else if (*count) {
		qsort(*uses, *count, sizeof(**uses), compare_uses);
	}
	return err;
}

static int number_put(struct number_list *to, uint32_t number)
{
	uint32_t *items = to->items;

	if (!(to->count & (to->count - 1))) /* doubled */
		items = realloc(items, (to->count ? 2 * to->count : 1) * sizeof(*items));
	if (!items)
		return -ENOMEM;
	to->items = items;
	items[to->count++] = number;
	return 0;
}

/* table.lock is held. */
static int note_segments(struct map64 *known, struct number_list *segnos, struct number_list *unknown, uint32_t ino)
{
	const uint64_t size = table.nodes[ino].size;
	bool is_known = true;
	int err = 0;

	if (!is_file(&table.nodes[ino]))
		return 0;
	for (uint64_t block = 0; !err && block * BLOCK_BYTES < size; block++) {
		const uint64_t packed = table_location(ino, block), segno = location_unpack(packed).segno;
		uint64_t unused;

		is_known &= packed != 0;
		if (packed && !map64_get(known, segno + 1, &unused)) {
			err = map64_set(known, segno + 1, 1) ? -ENOMEM : 0;
			err = err ? err : number_put(segnos, (uint32_t)segno);
		}
	}
	return err || is_known || size <= BLOCK_BYTES ? err : number_put(unknown, ino);
}

int table_segments(const uint8_t *marks, size_t count, struct number_list *segnos, struct number_list *unknown)
{
	struct map64 known = {0};
	int err = 0;

	for (uint64_t ino = ROOT_INO, stop; !err && ino <= table_count() && ino < count; ino = stop) {
		stop = ino + SLICE_NODES;
		pthread_rwlock_rdlock(&table.lock);
		for (; !err && ino < stop && ino <= table_count() && ino < count; ino++)
			if (marks[ino])
				err = note_segments(&known, segnos, unknown, (uint32_t)ino);
		pthread_rwlock_unlock(&table.lock);
	}
	map64_clear(&known);
	return err;
}

void table_locations(const uint32_t *inos, size_t count, uint64_t *packed)
{
	for (size_t i = 0, stop; i < count; i = stop) {
		stop = count - i < SLICE_NODES ? count : i + SLICE_NODES;
		pthread_rwlock_rdlock(&table.lock);
		for (; i < stop; i++)
			packed[i] = node_at(inos[i]) ? table_location(node_primary(inos[i]), 0) : 0;
		pthread_rwlock_unlock(&table.lock);
	}
}

/* ---- paths -------------------------------------------------------------------------------- */
char *table_path(uint32_t ino, size_t *len)
{
	size_t total = 0, name_len, at;
	const unsigned char *name;
	char *path;

	for (uint32_t i = ino; i != ROOT_INO; i = table.nodes[i].parent) {
		node_name(&table.nodes[i], &name_len);
		total += name_len + 1;
	}
	path = malloc(total + 1);
	if (!path)
		return NULL;
	at = total;
	for (uint32_t i = ino; i != ROOT_INO; i = table.nodes[i].parent) {
		name = node_name(&table.nodes[i], &name_len);
		path[--at] = i == ino ? '\0' : '/';
		at -= name_len;
		memcpy(path + at, name, name_len);
	}
	*len = total ? total - 1 : 0;
	path[*len] = '\0';
	return path;
}

#define HOP_BYTES 3800 /* < PATH_MAX, room for one more name */

static int open_one(int dir_fd, const char *path, int flags)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct open_how how = {
	    .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC | O_NOFOLLOW),
	    .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
	};
	int fd;

	/* EAGAIN: a rename went on beside us, or (with O_NONBLOCK) a lease is being broken. */
	while ((fd = (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof(how))) < 0 &&
	       (errno == EINTR || errno == EAGAIN))
		if (errno == EAGAIN)
			nanosleep(&pause, NULL);
	if (fd < 0 && errno == ENOSYS && !strchr(path, '/')) /* one name: openat can do it as safely */
		do
			fd = openat(dir_fd, path, flags | O_CLOEXEC | O_NOFOLLOW);
		while (fd < 0 && errno == EINTR);
	/* A symlink where the table has something else: changed meanwhile. */
	return fd >= 0 ? fd : errno == ELOOP ? -ESTALE : -errno;
}

/* Open beneath the source, never through a symlink, in hops where the path is longer than the kernel
 * takes at once (or, without openat2, name by name). `path` is modified. */
static int open_beneath(char *path, int flags)
{
	int dir = table.source_fd, fd;
	size_t hop = HOP_BYTES;

	if (!*path)
		return open_one(dir, ".", flags);
	for (;;) {
		size_t len = strlen(path), cut = len;

		if (len > hop) {
			for (cut = hop; cut && path[cut] != '/'; cut--)
				;
			if (!cut) {
				for (cut = hop; path[cut] && path[cut] != '/'; cut++)
					;
				if (!path[cut])
					cut = len;
			}
		}
		if (cut < len)
			path[cut] = '\0';
		fd = open_one(dir, path, cut < len ? O_PATH | O_DIRECTORY : flags);
		if (fd == -ENOSYS && hop == HOP_BYTES) {
			if (cut < len)
				path[cut] = '/';
			hop = 0;
			continue;
		}
		if (dir != table.source_fd)
			close(dir);
		if (fd < 0 || cut == len)
			return fd;
		dir = fd;
		path += cut + 1;
	}
}

/* Open the directory that holds a node's name; *name_out is malloc'ed. */
static int open_parent(uint32_t name_node, char **name_out)
{
	size_t len;
	char *path, *name;
	const unsigned char *own;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	path = table_path(table.nodes[name_node].parent, &len);
	own = node_name(&table.nodes[name_node], &len);
	name = path ? strndup((const char *)own, len) : NULL;
	pthread_rwlock_unlock(&table.lock);
	if (!path || !name) {
		free(path);
		return -ENOMEM;
	}
	fd = open_beneath(path, O_PATH | O_DIRECTORY);
	free(path);
	if (fd < 0)
		free(name);
	else
		*name_out = name;
	return fd;
}

int table_open(uint64_t ino, int flags)
{
	uint32_t name_node = 0;
	char *path = NULL;
	size_t len;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	if (node_at(ino)) {
		name_node = node_live_name((uint32_t)ino);
		path = name_node ? table_path(name_node, &len) : NULL;
	}
	fd = !node_at(ino) ? -ENOENT : !name_node ? -ESTALE : !path ? -ENOMEM : 0;
	pthread_rwlock_unlock(&table.lock);
	if (!fd)
		fd = open_beneath(path, flags);
	free(path);
	return fd;
}

ssize_t table_readlink(uint64_t ino, char *buf, size_t cap)
{
	uint32_t name_node = 0;
	bool known;
	char *name;
	ssize_t got;
	int fd;

	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) != NULL;
	if (known)
		name_node = node_live_name((uint32_t)ino);
	pthread_rwlock_unlock(&table.lock);
	if (!known)
		return -ENOENT;
	if (!name_node)
		return -ESTALE;
	if (name_node == ROOT_INO)
		return -EINVAL;
	fd = open_parent(name_node, &name);
	if (fd < 0)
		return fd;
	got = readlinkat(fd, name, buf, cap);
	if (got < 0)
		got = -errno;
	free(name);
	close(fd);
	return got;
}

int table_version_of_fd(int fd, int sync, struct version *out, uint32_t *mode)
{
	struct statx st;

	if (statx(fd, "", AT_EMPTY_PATH | sync, STATX_BASIC_STATS, &st))
		return -errno;
	*out = (struct version){
	    device_renumbers(device_find(st.stx_dev_major, st.stx_dev_minor)) ? 0 : st.stx_ino,
	    st.stx_size,
	    in_ns(&st.stx_mtime),
	    in_ns(&st.stx_ctime),
	};
	*mode = st.stx_mode;
	return 0;
}

/* A new name with the device and inode of a file we know in another version: that one's turn to be looked
 * at has not come, or the number was used again. Looking now tells (it is rare: after link(2)). */
static void link_refresh(const struct attributes *a)
{
	uint32_t primary;
	bool same_version;

	pthread_rwlock_wrlock(&table.lock);
	primary = (uint32_t)link_hit(a, &same_version);
	pthread_rwlock_unlock(&table.lock);
	if (primary && !same_version)
		table_refresh(primary); /* a failure only means: no alias */
}

static bool is_gone(int err) { return err == -ENOENT || err == -ENOTDIR || err == -ESTALE; }

int table_refresh(uint64_t ino)
{
	uint32_t name_node;
	struct attributes a;
	char *name;
	int fd, err;

	for (;;) {
		pthread_rwlock_rdlock(&table.lock);
		name_node = node_at(ino) ? node_live_name((uint32_t)ino) : 0;
		err = node_at(ino) ? 0 : -ENOENT;
		pthread_rwlock_unlock(&table.lock);
		if (err)
			return err;
		if (!name_node)
			return REPLACED;
		if (name_node == ROOT_INO) {
			err = origin_stat(table.source_fd, "", AT_EMPTY_PATH, &a);
		} else {
			fd = open_parent(name_node, &name);
			err = fd;
			if (fd >= 0) {
				err = origin_stat(fd, name, 0, &a);
				close(fd);
				free(name);
			}
		}
		if (err < 0 && (!is_gone(err) || name_node == ROOT_INO))
			return err;
		if (err == -ESTALE) { /* or is it the source itself? Then nothing is known of the name */
			int source_err = origin_stat(table.source_fd, "", AT_EMPTY_PATH, &a);

			if (source_err)
				return source_err;
		}
		pthread_rwlock_wrlock(&table.lock);
		if (!err && (name_node == ROOT_INO || same_object(name_node, &a) ||
			     may_become(name_node, &a))) {
			err = node_update(name_node, &a);
			pthread_rwlock_unlock(&table.lock);
			return err;
		}
		node_bury(name_node);
		pthread_rwlock_unlock(&table.lock);
		/* another name of a hard-linked file may still lead to it */
	}
}

int64_t table_add(uint64_t parent, const char *name, size_t len)
{
	char *path = NULL, text[NAME_BYTES_MOST + 1];
	struct attributes dir_now, a;
	uint32_t known;
	int64_t result = 0;
	size_t path_len;
	int fd, err;

	if (len > NAME_BYTES_MOST)
		return -ENAMETOOLONG;
	if (!len || memchr(name, '/', len) || memchr(name, 0, len) || (len == 1 && name[0] == '.') ||
	    (len == 2 && name[0] == '.' && name[1] == '.'))
		return -EINVAL;
	memcpy(text, name, len);
	text[len] = '\0';
	pthread_rwlock_rdlock(&table.lock);
	if (!node_at(parent))
		result = -ENOENT;
	else if (!is_directory(node_at(parent)))
		result = -ENOTDIR;
	else if (!(path = table_path((uint32_t)parent, &path_len)))
		result = -ENOMEM;
	pthread_rwlock_unlock(&table.lock);
	if (result)
		return result;
	fd = open_beneath(path, O_PATH | O_DIRECTORY);
	free(path);
	if (fd < 0)
		return fd;
	err = origin_stat(fd, "", AT_EMPTY_PATH, &dir_now);
	if (!err)
		err = origin_stat(fd, text, 0, &a);
	close(fd);
	if (err && err != -ENOENT)
		return err;
	if (!err && S_ISREG(a.mode) && a.nlink > 1)
		link_refresh(&a);
	pthread_rwlock_wrlock(&table.lock);
	if (parent != ROOT_INO && !same_object((uint32_t)parent, &dir_now)) {
		result = -ESTALE; /* another directory has this path now */
	} else {
		known = table_find((uint32_t)parent, name, len);
		if (known && !err && same_object(known, &a)) {
			node_update(known, &a);
			result = node_primary(known);
		} else {
			if (known)
				node_bury(known);
			/* The answer to the look-up that asks will replace a negative dentry. */
			result = err ? err : node_create((uint32_t)parent, name, len, &a, known != 0);
			if (result > 0)
				result = node_primary((uint32_t)result);
		}
	}
	pthread_rwlock_unlock(&table.lock);
	return result;
}

/* ---- scan --------------------------------------------------------------------------------- */
#define SCAN_BUFFER_BYTES (64u << 10)
#define SCAN_BATCH 512u /* entries merged under one hold of the lock */
#define TICK_ENTRIES 2048u

struct dirent_raw {
	uint64_t d_ino;
	int64_t d_off;
	uint16_t d_reclen;
	uint8_t d_type;
	char d_name[];
};

struct scan {
	uint32_t dir, highest; /* nodes above `highest` came after the scan began */
	bool was_listed;
	_Atomic bool overtaken;
	unsigned char *seen; /* bit a node number */
	struct scan_result *result;
	struct scan *next;
};

static struct scan *scans; /* those in progress; under table.lock */

struct scan_item {
	const char *name;
	uint32_t len;
	struct attributes a;
};

static int scan_merge(struct scan *scan, const struct scan_item *item)
{
	uint32_t known = table_find(scan->dir, item->name, item->len);
	int64_t created;

	if (known && same_object(known, &item->a)) {
		if (known <= scan->highest)
			scan->seen[known / 8] |= (unsigned char)(1u << known % 8);
		scan->result->changed += node_update(known, &item->a) != SAME;
		return 0;
	}
	if (known) {
		node_bury(known);
		scan->result->removed += scan->was_listed;
	}
	created = node_create(scan->dir, item->name, item->len, &item->a, scan->was_listed || known);
	if (created < 0)
		return (int)created;
	scan->result->added += scan->was_listed;
	return 0;
}

static int scan_merge_batch(struct scan *scan, const struct scan_item *items, size_t count)
{
	int err = 0;

	for (size_t done = 0; done < count && !err;) {
		size_t stop = done + SCAN_BATCH < count ? done + SCAN_BATCH : count;

		pthread_rwlock_wrlock(&table.lock);
		for (; done < stop && !err; done++)
			err = scan_merge(scan, &items[done]);
		pthread_rwlock_unlock(&table.lock);
	}
	return err;
}

static uint32_t type_of_dirent(uint8_t d_type) { return (uint32_t)DTTOIF(d_type) & S_IFMT; }

static int scan_entries(struct scan *scan, int fd, int (*tick)(void *), void *context)
{
	const size_t most = SCAN_BUFFER_BYTES / 24;
	char *buffer = malloc(SCAN_BUFFER_BYTES);
	struct scan_item *items = malloc(most * sizeof(*items));
	size_t since_tick = 0;
	int err = buffer && items ? 0 : -ENOMEM;

	while (!err) {
		long got = syscall(SYS_getdents64, fd, buffer, SCAN_BUFFER_BYTES);
		size_t count = 0;

		if (got <= 0) {
			err = got < 0 ? -errno : 0;
			break;
		}
		for (long at = 0; at < got && !err;) {
			const struct dirent_raw *entry = (const struct dirent_raw *)(buffer + at);
			struct scan_item *item = &items[count];
			int stat_err;

			at += entry->d_reclen;
			item->name = entry->d_name;
			item->len = (uint32_t)strlen(entry->d_name);
			if (!strcmp(item->name, ".") || !strcmp(item->name, "..") || !item->len ||
			    item->len > NAME_BYTES_MOST)
				continue;
			stat_err = origin_stat(fd, item->name, 0, &item->a);
			if (stat_err == -EACCES || stat_err == -EPERM)
				item->a = (struct attributes){
				    .origin_ino = entry->d_ino,
				    .mode = type_of_dirent(entry->d_type),
				    .refused = true,
				};
			else if (stat_err == -ENOENT)
				continue; /* vanished between the two calls */
			else if (stat_err)
				err = stat_err;
			else if (S_ISREG(item->a.mode) && item->a.nlink > 1) {
				/* Names of one file that lie in one directory: let the first be merged. */
				err = scan_merge_batch(scan, items, count);
				since_tick += count;
				items[0] = *item;
				item = &items[0];
				count = 0;
				link_refresh(&item->a);
			}
			count++;
		}
		if (!err)
			err = scan_merge_batch(scan, items, count);
		since_tick += count;
		if (!err && tick && since_tick >= TICK_ENTRIES) {
			since_tick = 0;
			err = tick(context);
		}
	}
	free(buffer);
	free(items);
	return err;
}

/* Names that the listing did not show. Each is asked for once more: a scan that began earlier or a
 * rename during the listing must not bury what is there. */
static int scan_sweep(struct scan *scan, int fd)
{
	uint32_t cookie = 0, missing[256];
	char name[NAME_BYTES_MOST + 1];
	size_t len;
	int err = 0;

	for (;;) {
		size_t count = 0, walked = 0;
		uint32_t ino;

		pthread_rwlock_rdlock(&table.lock);
		ino = table_next_child(scan->dir, cookie);
		while (ino && ino <= scan->highest && count < 256 && walked++ < 8192) {
			if (!(scan->seen[ino / 8] & 1u << ino % 8))
				missing[count++] = ino;
			cookie = ino;
			ino = table_next_child(scan->dir, ino);
		}
		pthread_rwlock_unlock(&table.lock);
		for (size_t i = 0; i < count && !err; i++) {
			const unsigned char *own = node_name(&table.nodes[missing[i]], &len);
			struct scan_item item = {.name = name, .len = (uint32_t)len};

			memcpy(name, own, len);
			name[len] = '\0';
			err = origin_stat(fd, name, 0, &item.a);
			pthread_rwlock_wrlock(&table.lock);
			if (!err) {
				err = scan_merge(scan, &item);
			} else if (err == -ENOENT) {
				err = 0;
				if (!(node_flags(&table.nodes[missing[i]]) & NODE_DEAD)) {
					node_bury(missing[i]);
					scan->result->removed += scan->was_listed;
				}
			} else if (err == -EACCES || err == -EPERM) {
				err = 0; /* listed or not cannot be told: keep it */
			}
			pthread_rwlock_unlock(&table.lock);
		}
		if (err || !ino || ino > scan->highest)
			return err;
	}
}

int table_scan(uint64_t ino, int (*tick)(void *), void *context, struct scan_result *out)
{
	struct scan scan = {.dir = (uint32_t)ino, .result = out};
	struct attributes a;
	int fd = -1, err;
	size_t len;
	char *path = NULL;

	memset(out, 0, sizeof(*out));
	pthread_rwlock_wrlock(&table.lock);
	err = !node_at(ino) ? -ENOENT : !is_directory(node_at(ino)) ? -ENOTDIR : 0;
	if (!err) {
		path = table_path((uint32_t)ino, &len);
		scan.highest = table_count();
		scan.was_listed = node_flags(node_at(ino)) & NODE_LISTED;
		scan.seen = calloc(scan.highest / 8 + 1, 1);
		err = path && scan.seen ? 0 : -ENOMEM;
		scan.next = scans;
		scans = &scan;
	}
	pthread_rwlock_unlock(&table.lock);
	if (!path && !scan.seen && err != -ENOMEM)
		return err;
	if (!err) {
		fd = open_beneath(path, O_RDONLY | O_DIRECTORY);
		err = fd < 0 ? fd : origin_stat(fd, "", AT_EMPTY_PATH, &a);
	}
	if (!err) {
		pthread_rwlock_wrlock(&table.lock);
		if (ino != ROOT_INO && !same_object((uint32_t)ino, &a)) {
			err = -ESTALE; /* another directory has this path now */
		} else {
			out->changed += node_update((uint32_t)ino, &a) != SAME;
		}
		pthread_rwlock_unlock(&table.lock);
	}
	if (!err)
		err = scan_entries(&scan, fd, tick, context);
	if (!err && !scan.overtaken)
		err = scan_sweep(&scan, fd);

	pthread_rwlock_wrlock(&table.lock);
	for (struct scan **at = &scans; *at; at = &(*at)->next)
		if (*at == &scan) {
			*at = scan.next;
			break;
		}
	if (!err && !scan.overtaken && !(node_flags(&table.nodes[ino]) & NODE_DEAD)) {
		flags_change(&table.nodes[ino], NODE_LISTED, 0);
		/* `scans` is in order of beginning, newest first: those behind us know less than we do. */
		for (struct scan *older = scan.next; older; older = older->next)
			if (older->dir == scan.dir)
				older->overtaken = true;
	}
	pthread_rwlock_unlock(&table.lock);
	if (fd >= 0)
		close(fd);
	free(path);
	free(scan.seen);
	return err;
}
