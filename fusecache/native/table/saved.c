/* A table that outlives its mount: written to a file when the mount ends, loaded into the next one's empty table
 * (docs/FORMAT.md, "Saved tables").
 *
 * INVARIANT: nothing that was loaded but names and types is believed before the origin was looked at: a directory is
 *   listed only after its time stamps were found to be those of its listing (NODE_EXACT, listing_holds in scan.c), and
 *   every node is NODE_UNCHECKED until it was looked at.
 */
#include <stdlib.h>
#include <string.h>

#include "../hash/hash.h"
#include "table.h"

#define SAVED_MAGIC "FCTABLE\1" /* the last byte: version */
#define SAVED_EXACT 1u
#define LEFT_OUT (1u << 31)   /* of `numbers`: something in this directory was */
#define SAVED_MOST (1ull << 38) /* bytes: more than INODES_MOST names need */

struct saved_header {
	unsigned char magic[8];
	unsigned char source[SOURCE_BYTES];
	uint64_t count, name_bytes;
	uint64_t content_sum; /* of all that follows the header */
	uint64_t header_sum;  /* of all before this */
};
_Static_assert(sizeof(struct saved_header) == 56, "as in FORMAT.md");

struct saved_node { /* its number is its place, from 1; names follow the nodes, in their order, without gaps */
	uint64_t origin_ino, size, blocks;
	int64_t mtime_ns, ctime_ns, atime_ns, born_ns;
	uint32_t mode, uid, gid, nlink, rdev;
	uint32_t parent; /* its number; 0: of the root */
	uint16_t name_len, flags;
	uint32_t zero;
};
_Static_assert(sizeof(struct saved_node) == 88, "as in FORMAT.md");

uint64_t table_saved_bytes(void)
{
	uint64_t bytes = sizeof(struct saved_header);

	pthread_rwlock_rdlock(&table.lock);
	if (table.head) /* its names have a byte more each, and are aligned */
		bytes += table_count() * sizeof(struct saved_node) + atomic_load(&table.head->names_used) * 4;
	pthread_rwlock_unlock(&table.lock);
	return bytes;
}

bool table_is_unchecked(uint64_t ino)
{
	bool found;

	pthread_rwlock_rdlock(&table.lock);
	found = node_at(ino) && node_is_unchecked((uint32_t)ino);
	pthread_rwlock_unlock(&table.lock);
	return found;
}

bool table_has_unchecked(uint64_t dir)
{
	const struct node *n;
	bool found = false;
	uint32_t child;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(dir);
	if (n && node_is_directory(n))
		for (child = table_next_child((uint32_t)dir, 0); child && !found;
		     child = table_next_child((uint32_t)dir, child))
			found = node_is_unchecked(child);
	pthread_rwlock_unlock(&table.lock);
	return found;
}

/* ---- saving: table.lock is held ------------------------------------------------------------ */

/* Which nodes are saved, and as what: numbers[ino]; 0: it is not. Those of file systems below the source are left out:
 * what they are called after the next mount of theirs cannot be told. */
static uint32_t number_nodes(uint32_t *numbers, uint32_t count, uint64_t *name_bytes)
{
	uint32_t given = 1;
	size_t len;

	*name_bytes = 0;
	numbers[ROOT_INO] = 1;
	for (uint32_t ino = ROOT_INO + 1; ino <= count; ino++) {
		const struct node *n = &table.nodes[ino];
		const uint32_t flags = node_flags(n);

		if ((flags & NODE_DEAD) || !numbers[n->parent])
			continue;
		if ((flags & NODE_NOATTR) || node_device(n) != ROOT_DEVICE) {
			numbers[n->parent] |= LEFT_OUT;
			continue;
		}
		numbers[ino] = ++given;
		node_name(n, &len);
		*name_bytes += len;
	}
	return given;
}

static void save_node(struct saved_node *to, uint32_t ino, const uint32_t *numbers)
{
	const struct node *n = &table.nodes[node_primary(ino)], *name = &table.nodes[ino];
	size_t len;

	node_name(name, &len);
	*to = (struct saved_node){
	    .origin_ino = n->origin_ino,
	    .size = n->size,
	    .blocks = n->blocks,
	    .mtime_ns = n->mtime_ns,
	    .ctime_ns = n->ctime_ns,
	    .atime_ns = n->atime_ns,
	    .born_ns = table.born_ns[node_primary(ino)],
	    .mode = n->mode,
	    .uid = n->uid,
	    .gid = n->gid,
	    .nlink = n->nlink,
	    .rdev = n->rdev,
	    .parent = ino == ROOT_INO ? 0 : numbers[name->parent] & ~LEFT_OUT,
	    .name_len = (uint16_t)len,
	    .flags = (node_flags(n) & NODE_EXACT) && !(numbers[ino] & LEFT_OUT) ? SAVED_EXACT : 0,
	};
}

/* malloc'ed; NULL: no memory. */
static unsigned char *save(const unsigned char *source, size_t *bytes)
{
	const uint32_t count = table_count();
	uint32_t *numbers = calloc((size_t)count + 1, sizeof(*numbers));
	unsigned char *buffer = NULL, *names;
	struct saved_header *head;
	struct saved_node *node;
	uint64_t name_bytes, given;

	if (!numbers || !count)
		goto out;
	given = number_nodes(numbers, count, &name_bytes);
	*bytes = sizeof(*head) + given * sizeof(*node) + name_bytes;
	buffer = malloc(*bytes);
	if (!buffer)
		goto out;
	head = (struct saved_header *)buffer;
	node = (struct saved_node *)(head + 1);
	names = (unsigned char *)(node + given);
	for (uint32_t ino = ROOT_INO; ino <= count; ino++) {
		const unsigned char *name;
		size_t len;

		if (!numbers[ino])
			continue;
		save_node(node++, ino, numbers);
		name = node_name(&table.nodes[ino], &len);
		memcpy(names, name, len);
		names += len;
	}
	*head = (struct saved_header){.count = given, .name_bytes = name_bytes};
	memcpy(head->magic, SAVED_MAGIC, sizeof(head->magic));
	memcpy(head->source, source, SOURCE_BYTES);
	head->content_sum = hash64(head + 1, *bytes - sizeof(*head), 0);
	head->header_sum = hash64(head, offsetof(struct saved_header, header_sum), 0);
out:
	free(numbers);
	return buffer;
}

int64_t table_save(int fd, const unsigned char source[SOURCE_BYTES])
{
	unsigned char *buffer;
	size_t bytes = 0, done;
	ssize_t got = 0;

	pthread_rwlock_rdlock(&table.lock);
	buffer = save(source, &bytes);
	pthread_rwlock_unlock(&table.lock);
	if (!buffer)
		return -ENOMEM;
	for (done = 0; done < bytes; done += (size_t)got) {
		got = pwrite(fd, buffer + done, bytes - done, (off_t)done);
		if (got < 0 && errno == EINTR)
			got = 0;
		else if (got <= 0)
			break;
	}
	free(buffer);
	return done == bytes ? (int64_t)bytes : got < 0 ? -errno : -EIO;
}

/* ---- loading ------------------------------------------------------------------------------ */

/* All of the file, malloc'ed, by its own checksums; NULL: *result says why. */
static unsigned char *read_saved(int fd, const unsigned char *source, int *result)
{
	struct saved_header head;
	unsigned char *buffer;
	uint64_t bytes, done;
	ssize_t got = 0;
	struct stat st;

	*result = SAVED_DAMAGED;
	if (fstat(fd, &st) || pread(fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) ||
	    memcmp(head.magic, SAVED_MAGIC, sizeof(head.magic) - 1) != 0)
		return NULL;
	if (head.magic[7] != SAVED_MAGIC[7]) {
		*result = SAVED_OTHER_VERSION;
		return NULL;
	}
	if (head.header_sum != hash64(&head, offsetof(struct saved_header, header_sum), 0) || !head.count ||
	    head.count >= INODES_MOST || head.name_bytes >= SAVED_MOST)
		return NULL;
	bytes = sizeof(head) + head.count * sizeof(struct saved_node) + head.name_bytes;
	if ((uint64_t)st.st_size != bytes)
		return NULL;
	if (memcmp(head.source, source, SOURCE_BYTES) != 0) {
		*result = SAVED_OTHER_SOURCE;
		return NULL;
	}
	buffer = malloc(bytes);
	if (!buffer) {
		*result = -ENOMEM;
		return NULL;
	}
	for (done = 0; done < bytes; done += (uint64_t)got) {
		got = pread(fd, buffer + done, bytes - done, (off_t)done);
		if (got < 0 && errno == EINTR)
			got = 0;
		else if (got <= 0)
			break;
	}
	if (done < bytes || memcmp(buffer, &head, sizeof(head)) != 0 ||
	    head.content_sum != hash64(buffer + sizeof(head), bytes - sizeof(head), 0)) {
		free(buffer);
		return NULL;
	}
	return buffer;
}

static bool is_type(uint32_t mode)
{
	const uint32_t type = mode & S_IFMT;

	return type == S_IFREG || type == S_IFDIR || type == S_IFLNK || type == S_IFCHR || type == S_IFBLK ||
	       type == S_IFIFO || type == S_IFSOCK;
}

static bool is_name(const unsigned char *name, size_t len)
{
	return len && len <= NAME_BYTES_MOST && !memchr(name, '/', len) && !memchr(name, 0, len) &&
	       !(len == 1 && name[0] == '.') && !(len == 2 && name[0] == '.' && name[1] == '.');
}

/* What a checksum cannot tell: who wrote it may have been wrong. */
static bool is_sound(const struct saved_header *head)
{
	const struct saved_node *nodes = (const struct saved_node *)(head + 1);
	const unsigned char *names = (const unsigned char *)(nodes + head->count);
	uint64_t left = head->name_bytes;

	if (nodes[0].parent || nodes[0].name_len || !S_ISDIR(nodes[0].mode))
		return false;
	for (uint64_t i = 1; i < head->count; i++) {
		const struct saved_node *n = &nodes[i];

		if (!n->parent || n->parent > i || !S_ISDIR(nodes[n->parent - 1].mode) || !is_type(n->mode) ||
		    n->name_len > left || !is_name(names, n->name_len))
			return false;
		names += n->name_len;
		left -= n->name_len;
	}
	return !left;
}

static struct attributes attributes_of(const struct saved_node *n)
{
	const uint64_t device = table.head->device[ROOT_DEVICE];

	return (struct attributes){
	    .origin_ino = n->origin_ino,
	    .size = n->size,
	    .blocks = n->blocks,
	    .mtime_ns = n->mtime_ns,
	    .ctime_ns = n->ctime_ns,
	    .atime_ns = n->atime_ns,
	    .mode = n->mode,
	    .uid = n->uid,
	    .gid = n->gid,
	    .nlink = n->nlink,
	    .rdev = n->rdev, /* one of the two: see struct node */
	    .birth = n->rdev,
	    .born_ns = n->born_ns,
	    .major_no = (uint32_t)(device >> 32),
	    .minor_no = (uint32_t)device,
	};
}

/* table.lock is held. The root's attributes are already those of now. */
static int load(const struct saved_header *head)
{
	const struct saved_node *nodes = (const struct saved_node *)(head + 1);
	const unsigned char *names = (const unsigned char *)(nodes + head->count);
	struct attributes a = attributes_of(&nodes[0]);
	struct node *root = &table.nodes[ROOT_INO];
	const bool is_same_root = a.size == root->size && a.mtime_ns == root->mtime_ns && a.ctime_ns == root->ctime_ns;
	int err;

	if (!same_object(ROOT_INO, &a))
		return SAVED_OTHER_SOURCE;
	err = slots_reserve(head->count);
	if (err)
		return err;
	for (uint64_t i = 1; i < head->count; i++) {
		int64_t ino;

		a = attributes_of(&nodes[i]);
		ino = node_create(nodes[i].parent, (const char *)names, nodes[i].name_len, &a, false);
		if (ino < 0)
			return (int)ino;
		flags_change(&table.nodes[node_primary((uint32_t)ino)], NODE_UNCHECKED, 0);
		names += nodes[i].name_len;
	}
	/* Not before all names are there. A node's number is that of its place: the table was empty. */
	for (uint64_t i = is_same_root ? 0 : 1; i < head->count; i++)
		if (S_ISDIR(nodes[i].mode) && (nodes[i].flags & SAVED_EXACT))
			flags_change(&table.nodes[i + 1], NODE_EXACT, 0);
	return SAVED_LOADED;
}

int table_load(int fd, const unsigned char source[SOURCE_BYTES])
{
	int result;
	unsigned char *buffer = read_saved(fd, source, &result);
	const struct saved_header *head = (const struct saved_header *)buffer;

	if (!buffer)
		return result;
	pthread_rwlock_wrlock(&table.lock);
	if (!is_sound(head))
		result = SAVED_DAMAGED;
	else if (table_count() != ROOT_INO)
		result = -EEXIST;
	else
		result = load(head);
	pthread_rwlock_unlock(&table.lock);
	free(buffer);
	return result;
}
