/* What the kernel holds in an older state than the table, and has to be told. */
#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { STALE_QUEUED = 1, STALE_IN_FLIGHT, STALE_AGAIN };
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
	/* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): it has grown */
	table.stale.queue[(table.stale.first + table.stale.count++) % table.stale.cap] = ino;
	if (table.stale.count == 1)
		events_signal();
}

/* Queue an inode one of whose nodes has just been flagged. */
void stale_queue(uint32_t ino)
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
		events_signal();
		return;
	}
	stale_push(ino);
}

void stale_raise(uint32_t node, uint32_t flags)
{
	flags_change(&table.nodes[node], flags, 0);
	stale_queue(node);
}

void stale_find_lost(void)
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

void stale_forget(void)
{
	map64_clear(&table.stale.state);
	free(table.stale.queue);
	memset(&table.stale, 0, sizeof(table.stale));
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
