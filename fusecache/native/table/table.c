/* The inode table.
 *
 * The table lives in a memfd that the keeper made: a header page, nodes, names, times of birth. Servers map
 * it shared and may be killed between any two instructions:
 *
 * INVARIANT: a node and its name are complete before `count` is raised over them (release store).
 * INVARIANT: names, parents and numbers of published nodes never change.
 * INVARIANT: attributes of a published node change only through the redo slot in the header: the new
 *   node is written there, the slot is armed, the node is overwritten, the slot is disarmed. Attaching
 *   finishes an armed slot, so that no reader ever sees half an update.
 * INVARIANT: child lists are in ascending order of inode number. They (and the hashes) are rebuilt when
 *   the table is attached, so a list that was being linked is no loss.
 * INVARIANT: what the kernel may hold in an older state is flagged STALE in the memfd before, or in the same
 *   store as, the change; the flag goes when the kernel was told. An invalidation is never lost.
 * INVARIANT: one writer at a time (table.lock); the lock is private to the process and dies with it.
 *
 * The table is not a cache: nodes are never freed while the mount lives.
 */
#include "table.h"

#define REFUSALS_MOST 64

struct table table = {.source_fd = -1};

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

void table_served(uint64_t ino)
{
	const uint32_t flags = NODE_SERVED | NODE_PAGES;
	struct node *n = node_at(ino);

	/* Nearly always: without the lock, for nodes stay where they are. */
	if (n && (node_flags(n) & flags) == flags)
		return;
	pthread_rwlock_rdlock(&table.lock);
	if (n)
		atomic_fetch_or(&table.nodes[node_primary((uint32_t)ino)].flags, flags);
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
		ino = table.nodes[dir].first_child; /* NOLINT(clang-analyzer-core.NullDereference): there is a table */
	while (ino && (ino <= cookie || (node_flags(&table.nodes[ino]) & NODE_DEAD)))
		ino = table.nodes[ino].next;
	return ino;
}

bool table_look(uint64_t ino, uint64_t block, struct look *out)
{
	bool known;

	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) != NULL;
	if (known) {
		out->ino = node_primary((uint32_t)ino);
		out->node = &table.nodes[out->ino];
		out->version = node_version(out->node);
		out->packed = table_location(out->ino, block);
	}
	pthread_rwlock_unlock(&table.lock);
	return known;
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
