/* The table's memfd is attached: made, or taken over from a server that may have been killed. */
#include "table.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../ram/ram.h"

#define TABLE_MAGIC 0x454c424154434655u
#define TABLE_LAYOUT 1u

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
	names_forget();
	stale_forget();
	map64_clear(&table.blocks);
	table.head = NULL;
	table.nodes = NULL;
	table.names = NULL;
	table.born_ns = NULL;
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
		table.nodes[armed] = table.head->redo; /* NOLINT(clang-analyzer-core.NullDereference): it is mapped */
	atomic_store(&table.head->redo_armed, 0);
	err = slots_reserve(count);
	if (err)
		return err;
	for (uint32_t ino = ROOT_INO; ino <= count; ino++) {
		struct node *n = &table.nodes[ino], *dir;

		n->next = 0;
		if (node_is_directory(n))
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
		if ((node_flags(n) & NODE_PAGES) && node_is_file(n))
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
	} else if (pread(table_fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) || head.magic != TABLE_MAGIC ||
		   head.layout != TABLE_LAYOUT || head.zero_open != (uint32_t)zero_open) {
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
	/* In the place of the old one: a thread that has just fetched the number finds either. */
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
	bytes = !table.head
		    ? 0
		    : TABLE_HEADER_BYTES + (uint64_t)table_count() * (sizeof(struct node) + sizeof(*table.born_ns)) +
			  table.head->names_used * 4 + table.slot_count * sizeof(uint32_t) + map64_bytes(&table.links) +
			  map64_bytes(&table.aliases) + map64_bytes(&table.blocks);
	pthread_rwlock_unlock(&table.lock);
	return bytes;
}
