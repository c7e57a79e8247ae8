/* Names whose nodes have changed, for the hosts of a pool that leave the sweep to this one (docs/POOL.md, "One sweep
 * for all"). Whatever looked at the origin: the sweep, a look-up, a read.
 */
#include <stdlib.h>
#include <string.h>

#include "table.h"

#define JOURNAL_MOST 65536u /* more than that must be looked for by each host itself */

static struct {
	uint32_t *nodes; /* whose names, in order; NULL: it is off */
	size_t count;
	bool is_whole;
} journal;

void journal_note(uint32_t node)
{
	if (!journal.nodes)
		return;
	if (journal.count == JOURNAL_MOST)
		journal.is_whole = false;
	else
		journal.nodes[journal.count++] = node;
}

void journal_note_all(uint32_t primary)
{
	uint64_t alias;

	if (!journal.nodes)
		return;
	journal_note(primary);
	if (!map64_get(&table.aliases, primary, &alias))
		return;
	for (; alias; alias = table.nodes[alias].next_alias)
		journal_note((uint32_t)alias);
}

void journal_break(void) { journal.is_whole = false; }

int table_journal(bool is_on)
{
	uint32_t *nodes = is_on ? malloc(JOURNAL_MOST * sizeof(*nodes)) : NULL, *old;

	if (is_on && !nodes)
		return -ENOMEM;
	pthread_rwlock_wrlock(&table.lock);
	old = journal.nodes;
	journal.nodes = nodes;
	journal.count = 0;
	journal.is_whole = true;
	pthread_rwlock_unlock(&table.lock);
	free(old);
	return 0;
}

int table_journal_take(struct number_list *out, bool *is_whole)
{
	uint32_t *nodes = malloc(JOURNAL_MOST * sizeof(*nodes));

	*out = (struct number_list){0};
	if (!nodes)
		return -ENOMEM;
	pthread_rwlock_wrlock(&table.lock);
	*is_whole = journal.is_whole;
	journal.is_whole = true;
	if (journal.nodes) {
		*out = (struct number_list){.items = journal.nodes, .count = journal.count};
		journal.nodes = nodes;
		journal.count = 0;
		nodes = NULL;
	}
	pthread_rwlock_unlock(&table.lock);
	free(nodes);
	return 0;
}

/* May a host of the pool leave this directory to another one, or sweep it for others? Hosts see other file systems, and
 * what the origin refuses, each in its own way. */
bool table_is_shared(uint64_t dir)
{
	const struct node *n;
	bool found;

	pthread_rwlock_rdlock(&table.lock);
	n = node_at(dir);
	found = n && node_is_directory(n) && (node_flags(n) & (NODE_LISTED | NODE_DEAD | NODE_NOATTR)) == NODE_LISTED &&
		node_device(n) == ROOT_DEVICE;
	for (uint32_t child = found ? table_next_child((uint32_t)dir, 0) : 0; child && found;
	     child = table_next_child((uint32_t)dir, child))
		found = !(node_flags(&table.nodes[child]) & NODE_NOATTR) &&
			node_device(&table.nodes[child]) == ROOT_DEVICE;
	pthread_rwlock_unlock(&table.lock);
	return found;
}

uint64_t table_find_path(const char *path, size_t len)
{
	uint32_t found = ROOT_INO;

	pthread_rwlock_rdlock(&table.lock);
	if (!table_count())
		found = 0;
	while (found && len) {
		const char *slash = memchr(path, '/', len);
		const size_t name_len = slash ? (size_t)(slash - path) : len;

		found = name_len && name_len <= NAME_BYTES_MOST ? table_find(found, path, name_len) : 0;
		path += name_len + (slash != NULL);
		len -= name_len + (slash != NULL);
	}
	pthread_rwlock_unlock(&table.lock);
	return found;
}
