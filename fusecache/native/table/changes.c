/* What the origin says of a file, without the lock; and nodes that are made, changed and buried as it says, with
 * table.lock held (table.h says which is which).
 */
#include "table.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <xxhash.h>

/* Beyond the years 1678 to 2262 (a damaged inode, a hostile origin): the nearest that 64 bits hold. */
static int64_t in_ns(const struct statx_timestamp *t)
{
	int64_t ns;

	if (__builtin_mul_overflow((int64_t)t->tv_sec, (int64_t)1000000000, &ns) ||
	    __builtin_add_overflow(ns, (int64_t)t->tv_nsec, &ns))
		return t->tv_sec < 0 ? INT64_MIN : INT64_MAX;
	return ns;
}

int origin_stat(int dir_fd, const char *name, int flags, struct attributes *out)
{
	struct statx st;

	if (statx(dir_fd, name, flags | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS | STATX_BTIME, &st))
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

void node_fill(struct node *n, const struct attributes *a)
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

/* Overwrite a published node through the redo slot. */
static void node_rewrite(uint32_t ino, const struct node *image)
{
	struct header *head = table.head;
	struct node *to = &table.nodes[ino];

	head->redo = *image;
	atomic_store_explicit(&head->redo_armed, ino, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
	/* Not the parent, the name and the links between nodes: they are read without the lock. So are the flags. */
	memcpy(to, image, offsetof(struct node, flags));
	atomic_store_explicit(&to->flags, image->flags, memory_order_release);
	memcpy(&to->uid, &image->uid, offsetof(struct node, parent) - offsetof(struct node, uid));
	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&head->redo_armed, 0, memory_order_release);
}

/* Merge attributes of the same origin inode; only called after `same_object`. */
int node_update(uint32_t ino, const struct attributes *a)
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
		journal_note_all(primary);
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
		if (node_is_file(old)) {
			locations_forget(primary, old->size);
			image.location = 0;
		}
	} else if (image.mode != old->mode || image.uid != old->uid || image.gid != old->gid ||
		   image.nlink != old->nlink || image.blocks != old->blocks || node_rdev(&image) != node_rdev(old)) {
		result = ATTRIBUTES_CHANGED;
	} else if (image.atime_ns == old->atime_ns && image.origin_ino == old->origin_ino) {
		flags_change(old, 0, NODE_UNCHECKED);
		return SAME;
	}
	/* In the same publication: it was looked at; and what is listed is older than these time stamps. */
	atomic_store(&image.flags,
		     node_flags(&image) &
			 ~(uint32_t)(result == VERSION_CHANGED ? NODE_UNCHECKED | NODE_EXACT : NODE_UNCHECKED));
	if (was_refused) /* its device was not known */
		image.flags = (node_flags(&image) & 0xffffu & ~(uint32_t)NODE_NOATTR) |
			      device_index(a->major_no, a->minor_no) << 16;
	if (result != SAME)
		image.flags = node_flags(&image) | NODE_STALE |
			      (image.size < old->size ? NODE_SHRUNK : 0); /* same publication */
	node_rewrite(primary, &image);
	if (result != SAME) {
		stale_queue(primary);
		journal_note_all(primary);
	}
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
	if (device_renumbers(device) && (node_is_directory(n) || a->refused || (node_flags(n) & NODE_NOATTR)))
		return true; /* its entries are compared one by one, or nothing is known */
	if (a->refused || (node_flags(n) & NODE_NOATTR) || primary->size != a->size ||
	    primary->mtime_ns != a->mtime_ns || primary->ctime_ns != a->ctime_ns)
		return false;
	if (device_renumbers(device))
		return true;
	/* One directory will do: all below it would get new nodes, and would never be compared. */
	if (primary->mode == a->mode && primary->uid == a->uid && primary->gid == a->gid)
		atomic_fetch_add(&table.head->doubts[device], node_is_directory(n) ? DOUBTS_MANY : 1);
	return device_renumbers(device);
}

bool same_object(uint32_t ino, const struct attributes *a)
{
	const struct node *n = &table.nodes[ino];

	if ((n->mode & S_IFMT) != (a->mode & S_IFMT))
		return false;
	/* Inode numbers are used again, on ext4 at once; the time of birth tells. */
	if (!S_ISCHR(n->mode) && !S_ISBLK(n->mode) && n->rdev && a->birth && n->rdev != a->birth)
		return false;
	if (!a->refused && !(node_flags(n) & NODE_NOATTR) && node_device(n) != device_index(a->major_no, a->minor_no))
		return false;
	return n->origin_ino == a->origin_ino || is_renumbered(n, a);
}

/* Another file has the name. If no reader can hold a byte of the one that had it, the inode may become the new
 * file: a reader that has just opened the name must not be told that its file is stale. */
bool may_become(uint32_t ino, const struct attributes *a)
{
	const struct node *n = &table.nodes[ino];

	return !a->refused && S_ISREG(a->mode) && node_is_file(n) && n->nlink == 1 &&
	       !(node_flags(n) & (NODE_SERVED | NODE_ALIAS | NODE_NOATTR | NODE_DEAD)) &&
	       node_device(n) == device_index(a->major_no, a->minor_no);
}

uint64_t link_hit(const struct attributes *a, bool *same_version)
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
int64_t node_create(uint32_t parent, const char *name, size_t len, const struct attributes *a, bool raise_name)
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
			      device << 16 | (a->refused ? NODE_NOATTR : 0) | (primary ? NODE_ALIAS : 0) |
				  (raise_name ? NODE_STALE_NAME : 0),
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
	if (node_flags(dir) & NODE_LISTED)
		journal_note(ino);
	return ino;
}

void node_bury(uint32_t ino)
{
	struct node *n = &table.nodes[ino];

	if (node_flags(n) & NODE_DEAD)
		return;
	if (node_flags(&table.nodes[n->parent]) & NODE_LISTED)
		stale_raise(n->parent, NODE_STALE);
	journal_note(ino);
	if (node_is_directory(n) && ((node_flags(n) & NODE_LISTED) || n->first_child))
		journal_break(); /* others may leave what is below it to us */
	flags_change(n, NODE_DEAD | NODE_STALE_NAME, NODE_LISTED);
	/* It may be there all the same (a directory above had another name for a moment): the next scan says. */
	flags_change(&table.nodes[n->parent], 0, NODE_EXACT);
	table.buried++;
	stale_queue(ino);
}
