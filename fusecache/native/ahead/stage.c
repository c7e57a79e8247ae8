/* Files are staged: their pages are pushed into the kernel, and dropped; names are armed, directories listed.
 *
 * Tripwires. An armed inode's dentry is expired, not invalidated (FUSE_EXPIRE_ONLY): FUSE keeps no inode
 * without a dentry, so the pages would go with it. The next open of the name revalidates it with a
 * LOOKUP. As long as the wire stands, answers that carry the entry (of a READDIRPLUS, of our own
 * look-ups) let it expire at once, so that only a reader's look-up takes the wire away.
 */
#include "ahead.h"

#include <stdlib.h>

#include "../kernel/kernel.h"
#include "../log/log.h"
#include "../plan/plan.h"
#include "../pool/pool.h"
#include "../ram/ram.h"

/* ---- staging ------------------------------------------------------------------------------ */
/* Is there a file of at most one block that bytes can be pushed of? PUSHED: yes. */
static int may_push(uint32_t *ino, struct version *version, uint64_t *packed)
{
	int result = PUSH_CHANGED;
	const struct node *n;

	pthread_rwlock_rdlock(&table.lock);
	if (node_at(*ino)) {
		*ino = node_primary(*ino);
		n = &table.nodes[*ino];
		*version = node_version(n);
		*packed = table_location(*ino, 0);
		if (node_flags(n) & NODE_NOATTR)
			result = PUSH_NO_BYTES; /* the origin's own errno comes with the bytes */
		else if (S_ISREG(n->mode) && !(node_flags(n) & NODE_STALE) && node_live_name(*ino))
			result = n->size > BLOCK_BYTES ? PUSH_LARGE : PUSHED;
	}
	pthread_rwlock_unlock(&table.lock);
	return result;
}

static int push_whole(const struct mount *mount, uint32_t ino, const void *data, const struct version *version)
{
	int64_t pushed = kernel_store(mount->fd, ino, 0, data, version->size, version);

	if (pushed == -ENOENT && mount_introduce(mount, ino))
		pushed = kernel_store(mount->fd, ino, 0, data, version->size, version);
	if (pushed == (int64_t)version->size) {
		plan_mark(ino, PLAN_STAGED, 0);
		return PUSHED;
	}
	return table_is_current(ino, version) ? PUSH_REFUSED : PUSH_CHANGED;
}

/* A reader that has come to a file brings its pages itself; a push would read the same bytes again, and wait
 * for the reader's pages. */
static bool was_read(uint32_t ino)
{
	if (!(plan_flags(ino) & PLAN_READ))
		return false;
	plan_mark(ino, PLAN_STAGED, 0);
	return true;
}

struct staging {
	struct deep_record record; /* first: it is what comes back */
	struct version version;
	uint64_t packed;
	size_t number; /* in its batch */
	uint32_t ino;
	bool move; /* its record goes to the log, wherever its pages come from */
};

/* May its bytes be read? Else *result is why not. */
static bool stage_begin(struct staging *file, uint8_t *result)
{
	*result = (uint8_t)may_push(&file->ino, &file->version, &file->packed);
	if (*result != PUSHED)
		return false;
	if (!file->version.size) {
		plan_mark(file->ino, PLAN_STAGED, 0);
		return false;
	}
	file->move = file->move && file->packed && log_wants(file->ino);
	if (!file->move)
		*result = was_read(file->ino) ? PUSH_READ : file->packed ? PUSHED : PUSH_NO_BYTES;
	return *result == PUSHED;
}

/* Of a file that is read for the log: has it no need of pages? */
static bool is_served(const struct staging *file)
{
	return file->move && (plan_flags(file->ino) & (PLAN_WANTED | PLAN_STAGED)) != PLAN_WANTED;
}

/* raw: NULL: not read yet, or in vain. */
static uint8_t stage_end(const struct mount *mount, const struct staging *file, const unsigned char *raw,
			 struct scratch *s)
{
	const uint32_t size = (uint32_t)file->version.size;
	const struct location at = location_unpack(file->packed);
	const unsigned char *data = raw ? raw + at.header_len : NULL;
	const bool was_faster = was_read(file->ino); /* by now */
	int result = PUSHED;

	if (was_faster && !file->move)
		return PUSH_READ;
	if (!data && block_read(file->ino, 0, file->packed, size, 0, size, s, &data) != READ_OK)
		return was_faster ? PUSH_READ : PUSH_NO_BYTES;
	if (parking_came(file->ino, &file->version, data, s)) {
		plan_mark(file->ino, PLAN_STAGED, 0);
	} else if (!was_faster && !is_served(file)) {
		result = push_whole(mount, file->ino, data, &file->version);
		if (result == PUSHED)
			COUNT(bytes_staged, size);
	}
	if (file->move) /* a whole block is read with its header before it */
		log_move(file->ino, file->packed, data - at.header_len);
	return (uint8_t)(was_faster ? PUSH_READ : result);
}

int ahead_stage(const struct mount *mount, const uint32_t *inos, const uint8_t *moves, size_t count, uint8_t *results,
		struct scratch *s)
{
	struct staging *files = malloc(count * sizeof(*files) + 1), *file, *begun = NULL;
	struct deep *deep = files ? deep_get() : NULL;
	enum deep_added added = DEEP_NOT;
	const unsigned char *raw;
	size_t next = 0;

	if (!files)
		return -ENOMEM;
	do {
		for (; next < count && (!deep || deep_has_room(deep)); next++) {
			file = &files[next];
			if (file != begun) {
				begun = file;
				*file =
				    (struct staging){.ino = inos[next], .number = next, .move = moves && moves[next]};
				if (!stage_begin(file, &results[next])) {
					parking_came(inos[next], NULL, NULL, s);
					continue;
				}
				/* whoever reads it now waits, and reads it not again */
				plan_mark(file->ino, PLAN_COMING, 0);
			}
			if (deep)
				added = deep_add(deep, &file->record, file->packed, (uint32_t)file->version.size);
			if (added == DEEP_FULL)
				break;
			if (added == DEEP_NOT) {
				results[next] = stage_end(mount, file, NULL, s);
				parking_came(inos[next], NULL, NULL, s);
			}
		}
		file = deep ? (struct staging *)deep_take(deep, &raw) : NULL;
		if (file) {
			results[file->number] = stage_end(mount, file, raw, s);
			parking_came(inos[file->number], NULL, NULL, s);
		}
	} while (file);
	deep_put(deep);
	free(files);
	return 0;
}

int ahead_push(const struct mount *mount, uint32_t ino, const struct version *of, const void *data, size_t size)
{
	struct version version;
	uint64_t packed;
	int result = may_push(&ino, &version, &packed);

	if (result != PUSHED)
		return result;
	if (!version_equal(version, *of) || size != version.size)
		return PUSH_CHANGED;
	if (!size)
		return PUSHED;
	return was_read(ino) ? PUSH_READ : push_whole(mount, ino, data, &version);
}

/* ---- dropping ----------------------------------------------------------------------------- */
void ahead_drop(const struct mount *mount, uint32_t ino)
{
	struct version version;

	if (!table_version(ino, &version))
		return;
	plan_mark(ino, 0, PLAN_STAGED | PLAN_READ);
	/* First: what a reader brings back meanwhile is counted again. */
	ring_forget(ino, version.size);
	table_dropped(ino);
	if (!mount->is_fronted || !mount_advise(mount, ino))
		kernel_inval_inode(mount->fd, ino, 0, 0);
}

/* ---- tripwires ---------------------------------------------------------------------------- */
bool ahead_arm(int fd, uint32_t ino)
{
	uint64_t node = 0, alias = 0;
	bool armed = false;

	pthread_rwlock_rdlock(&table.lock);
	if (plan_is_active() && ino != ROOT_INO && node_at(ino)) {
		node = ino = node_primary(ino);
		map64_get(&table.aliases, ino, &alias);
	}
	plan_mark(ino, PLAN_ARMED, 0); /* first: the look-up may come before the kernel has answered us */
	while (node) {
		bool dead = node_flags(&table.nodes[node]) & NODE_DEAD;
		uint32_t parent = table.nodes[node].parent; /* it and the name never change */
		size_t len;
		const unsigned char *name = node_name(&table.nodes[node], &len);

		/* Waits for the directory's lock, which a look-up may be holding. */
		pthread_rwlock_unlock(&table.lock);
		if (!dead && !kernel_expire_entry(fd, parent, (const char *)name, len))
			armed = true;
		pthread_rwlock_rdlock(&table.lock);
		node = node == ino ? alias : table.nodes[node].next_alias;
	}
	pthread_rwlock_unlock(&table.lock);
	if (!armed)
		plan_mark(ino, 0, PLAN_ARMED);
	return armed;
}

/* ---- listing ------------------------------------------------------------------------------ */
#define LIST_AT_ONCE 1024 /* entries under one hold of the lock */

static bool is_stored(uint32_t ino)
{
	const struct node *n = &table.nodes[ino];

	for (uint64_t block = 0; block * BLOCK_BYTES < n->size; block++) {
		const uint64_t packed = table_location(ino, block);

		if (!packed || !segment_known(location_unpack(packed).segno)) /* evicted */
			return false;
	}
	return !(node_flags(n) & NODE_NOATTR);
}

static enum listed_kind kind_of(const struct node *n)
{
	return S_ISREG(n->mode)	  ? LISTED_FILE
	       : S_ISDIR(n->mode) ? LISTED_DIRECTORY
	       : S_ISLNK(n->mode) ? LISTED_SYMLINK
				  : LISTED_OTHER;
}

ssize_t ahead_list(uint64_t dir, uint64_t after, size_t most, bool owned, struct listed *out, uint32_t *next)
{
	size_t count = 0;
	uint32_t child;
	int err = 0;

	do {
		pthread_rwlock_rdlock(&table.lock);
		if (!node_at(dir))
			err = -ENOENT;
		else if (!S_ISDIR(node_at(dir)->mode))
			err = -ENOTDIR;
		else if (!(node_flags(node_at(dir)) & NODE_LISTED))
			err = -EAGAIN;
		child = err ? 0 : table_next_child((uint32_t)dir, after);
		for (size_t i = 0; child && count < most && i < LIST_AT_ONCE; i++) {
			uint32_t primary = node_primary(child);
			const struct node *n = &table.nodes[primary];
			enum listed_kind kind = kind_of(n);

			out[count++] = (struct listed){
			    .node = child,
			    .ino = primary,
			    .size = n->size,
			    .kind = (uint8_t)kind,
			    .where = kind == LISTED_FILE && is_stored(primary) ? WHERE_STORED : 0,
			};
			after = child;
			child = table_next_child((uint32_t)dir, child);
		}
		pthread_rwlock_unlock(&table.lock);
	} while (child && count < most);
	for (size_t i = 0; owned && !err && i < count; i++)
		if (out[i].kind == LISTED_FILE && pool_owns_file(out[i].ino))
			out[i].where |= WHERE_OWNED;
	*next = child ? (uint32_t)after : 0;
	return err ? err : (ssize_t)count;
}
