#include "base.h"

#include <stdlib.h>

static inline size_t map64_home(const struct map64 *map, uint64_t key)
{
	key ^= key >> 32;
	key *= 0x9e3779b97f4a7c15u;
	key ^= key >> 29;
	return key & (map->slots - 1);
}

bool map64_get(const struct map64 *map, uint64_t key, uint64_t *value)
{
	if (!map->used)
		return false;
	for (size_t i = map64_home(map, key);; i = (i + 1) & (map->slots - 1)) {
		if (map->pairs[2 * i] == key) {
			*value = map->pairs[2 * i + 1];
			return true;
		}
		if (!map->pairs[2 * i])
			return false;
	}
}

static void map64_place(struct map64 *map, uint64_t key, uint64_t value)
{
	size_t i = map64_home(map, key);

	while (map->pairs[2 * i] && map->pairs[2 * i] != key)
		i = (i + 1) & (map->slots - 1);
	map->used += !map->pairs[2 * i];
	map->pairs[2 * i] = key;
	map->pairs[2 * i + 1] = value;
}

int map64_set(struct map64 *map, uint64_t key, uint64_t value)
{
	if (map->used * 4 >= map->slots * 3) {
		struct map64 grown = {.slots = map->slots ? map->slots * 2 : 64};

		grown.pairs = calloc(grown.slots, 16);
		if (!grown.pairs)
			return -ENOMEM;
		for (size_t i = 0; i < map->slots; i++)
			if (map->pairs[2 * i])
				map64_place(&grown, map->pairs[2 * i], map->pairs[2 * i + 1]);
		free(map->pairs);
		*map = grown;
	}
	map64_place(map, key, value);
	return 0;
}

void map64_delete(struct map64 *map, uint64_t key)
{
	size_t mask = map->slots - 1, hole, i;

	if (!map->used)
		return;
	for (hole = map64_home(map, key); map->pairs[2 * hole] != key; hole = (hole + 1) & mask)
		if (!map->pairs[2 * hole])
			return;
	/* Close the gap, so that look-ups need no tombstones. */
	for (i = (hole + 1) & mask; map->pairs[2 * i]; i = (i + 1) & mask)
		if (((i - map64_home(map, map->pairs[2 * i])) & mask) >= ((i - hole) & mask)) {
			map->pairs[2 * hole] = map->pairs[2 * i];
			map->pairs[2 * hole + 1] = map->pairs[2 * i + 1];
			hole = i;
		}
	map->pairs[2 * hole] = 0;
	map->used--;
}

void map64_clear(struct map64 *map)
{
	free(map->pairs);
	*map = (struct map64){0};
}
