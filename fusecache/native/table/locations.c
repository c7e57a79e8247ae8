/* Where the blocks of files lie: locations, one by one and of many files. */
#include "table.h"

#include <stdlib.h>

/* segno 32 | page of the offset 18 | header_len / 8 14 bits; a record never starts at offset 0. The highest of the
 * last 14, which no header needs, says that the record begins within the page: at sector 3 | header_len / 8 10 bits. */
#define WITHIN (1u << 13)
#define SHORT_MOST ((1u << 10) - 1)

uint64_t location_pack(struct location at)
{
	uint32_t sector = at.offset % PAGE / SECTOR, head = at.header_len / 8;

	if (sector)
		head = WITHIN | sector << 10 | (head & SHORT_MOST);
	return (uint64_t)at.segno << 32 | (at.offset / PAGE) << 14 | head;
}

struct location location_unpack(uint64_t packed)
{
	uint32_t head = packed & 0x3fff, sector = head & WITHIN ? head >> 10 & 7 : 0;

	return (struct location){
	    .segno = (uint32_t)(packed >> 32),
	    .header_len = (head & WITHIN ? head & SHORT_MOST : head) * 8,
	    .offset = (packed >> 14 & 0x3ffff) * PAGE + (uint64_t)sector * SECTOR,
	};
}

uint64_t table_location(uint32_t ino, uint64_t block)
{
	const struct node *n = &table.nodes[ino];
	uint64_t packed = 0;

	if (!node_is_file(n) || block >> 32 || (node_flags(n) & NODE_ALIAS))
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

	if (!at.offset || at.offset % SECTOR || at.offset > LOCATION_OFFSET_MOST || at.header_len % 8 ||
	    at.header_len > (at.offset % PAGE ? SHORT_MOST * 8 : LOCATION_HEADER_MOST))
		return -EINVAL;
	pthread_rwlock_wrlock(&table.lock);
	n = node_at(ino);
	if (!n) {
		result = -ENOENT;
	} else {
		ino = node_primary((uint32_t)ino);
		n = &table.nodes[ino];
		if (node_is_file(n) && version_equal(node_version(n), *of) && block * BLOCK_BYTES < n->size &&
		    !(block >> 32)) {
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
			if (node_is_file(n) && n->size <= BLOCK_BYTES && !block)
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

		moved[i].switched = n && node_is_file(n) && n->size <= BLOCK_BYTES && n->location == moved[i].from &&
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

	/* Of a deleted file no reader is promised anything: it must not hold a segment for ever. */
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
	use->files++; /* NOLINT(clang-analyzer-core.NullDereference): a known number has its place */
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

static uint64_t located_bytes(uint32_t ino, uint64_t block, bool (*is_there)(uint32_t segno))
{
	const uint64_t size = table.nodes[ino].size, packed = table_location(ino, block);

	if (!packed || !is_there(location_unpack(packed).segno) || size <= block * BLOCK_BYTES)
		return 0;
	return size - block * BLOCK_BYTES < BLOCK_BYTES ? size - block * BLOCK_BYTES : BLOCK_BYTES;
}

/* table.lock is held. */
static void count_node(struct census *in, uint32_t ino, bool (*is_there)(uint32_t segno))
{
	const struct node *n = &table.nodes[ino];

	if (node_flags(n) & NODE_ALIAS)
		return;
	if (node_is_directory(n)) {
		in->is_whole &= (node_flags(n) & (NODE_LISTED | NODE_DEAD)) != 0;
	} else if (node_is_file(n) && node_live_name(ino)) {
		in->files++;
		in->bytes += n->size;
		if (n->size <= BLOCK_BYTES)
			in->located_bytes += located_bytes(ino, 0, is_there);
	}
}

/* Of files of several blocks: by what is known, for a sparse file may have more blocks than could be asked for. */
static uint64_t count_blocks(bool (*is_there)(uint32_t segno))
{
	uint64_t found = 0, key;
	size_t slots = 0;

	for (size_t slot = 0, stop; !slot || slot < slots; slot = stop) {
		stop = slot + SLICE_NODES;
		pthread_rwlock_rdlock(&table.lock);
		if (slots != table.blocks.slots) { /* it has grown: each block has another place now */
			slots = table.blocks.slots;
			found = stop = 0;
		}
		for (; slot < stop && slot < slots; slot++)
			if ((key = table.blocks.pairs[2 * slot]) && node_live_name((uint32_t)(key >> 32)))
				found += located_bytes((uint32_t)(key >> 32), key & UINT32_MAX, is_there);
		pthread_rwlock_unlock(&table.lock);
		if (!slots)
			break;
	}
	return found;
}

struct census table_census(bool (*is_there)(uint32_t segno))
{
	struct census found = {.is_whole = true};

	for (uint64_t ino = ROOT_INO, stop; ino <= table_count(); ino = stop) {
		stop = ino + SLICE_NODES;
		pthread_rwlock_rdlock(&table.lock);
		for (; ino < stop && ino <= table_count(); ino++)
			count_node(&found, (uint32_t)ino, is_there);
		pthread_rwlock_unlock(&table.lock);
	}
	found.located_bytes += count_blocks(is_there);
	return found;
}

static int number_put(struct number_list *to, uint32_t number)
{
	uint32_t *items = to->items;

	if (!(to->count & (to->count - 1))) /* doubled */
		items = realloc(to->items, (to->count ? 2 * to->count : 1) * sizeof(*items));
	if (!items)
		return -ENOMEM;
	to->items = items;
	items[to->count++] = number;
	return 0;
}

static int note_segment(struct map64 *known, struct number_list *segnos, uint64_t packed)
{
	const uint64_t segno = location_unpack(packed).segno;
	uint64_t unused;

	if (!packed || map64_get(known, segno + 1, &unused))
		return 0;
	return map64_set(known, segno + 1, 1) ? -ENOMEM : number_put(segnos, (uint32_t)segno);
}

/* table.lock is held: a sparse file may have more blocks than could be asked for one by one. */
static int note_segments(struct map64 *known, struct number_list *segnos, struct number_list *unknown, uint32_t ino)
{
	const struct map64 *all = &table.blocks;
	const uint64_t blocks = (table.nodes[ino].size + BLOCK_BYTES - 1) / BLOCK_BYTES;
	uint64_t found = 0;
	int err = 0;

	if (!node_is_file(&table.nodes[ino]))
		return 0;
	if (blocks <= 1)
		return note_segment(known, segnos, table_location(ino, 0));
	if (blocks > all->slots) {
		for (size_t slot = 0; !err && slot < all->slots; slot++)
			if (all->pairs[2 * slot] >> 32 == ino)
				err = note_segment(known, segnos, all->pairs[2 * slot + 1]);
		return err ? err : number_put(unknown, ino);
	}
	for (uint64_t block = 0; !err && block < blocks; block++) {
		const uint64_t packed = table_location(ino, block);

		found += packed != 0;
		err = note_segment(known, segnos, packed);
	}
	return err || found == blocks ? err : number_put(unknown, ino);
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
