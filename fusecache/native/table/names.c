/* Names and hard links: hash tables in private memory, rebuilt when the table is attached. */
#include "table.h"

#define XXH_INLINE_ALL
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

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
	for (uint64_t i = name_home(parent, name, len); table.slots[i]; i = (i + 1) & (table.slot_count - 1)) {
		const struct node *n = &table.nodes[table.slots[i]];

		if (!(node_flags(n) & NODE_DEAD) && name_is(n, parent, name, len))
			return table.slots[i];
	}
	return 0;
}

void slot_place(uint32_t ino)
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

int slots_reserve(uint64_t more)
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
uint32_t link_find(uint32_t device, uint64_t origin_ino)
{
	uint64_t primary;
	const struct node *n;

	if (device == DEVICE_OTHER || !map64_get(&table.links, link_key(device, origin_ino), &primary))
		return 0;
	n = &table.nodes[primary];
	if (!node_is_file(n) || node_device(n) != device || n->origin_ino != origin_ino ||
	    !node_live_name((uint32_t)primary))
		return 0;
	return (uint32_t)primary;
}

int link_note(uint32_t ino)
{
	const struct node *n = &table.nodes[ino];

	if (!node_is_file(n) || n->nlink < 2 || node_device(n) == DEVICE_OTHER ||
	    link_find(node_device(n), n->origin_ino))
		return 0;
	return map64_set(&table.links, link_key(node_device(n), n->origin_ino), ino);
}

int alias_note(uint32_t ino)
{
	uint64_t next = 0;

	map64_get(&table.aliases, table.nodes[ino].primary, &next);
	table.nodes[ino].next_alias = next;
	return map64_set(&table.aliases, table.nodes[ino].primary, ino);
}

void names_forget(void)
{
	free(table.slots);
	table.slots = NULL;
	table.slot_count = table.slot_used = 0;
	map64_clear(&table.links);
	map64_clear(&table.aliases);
}
