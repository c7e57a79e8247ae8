/* Blocks that were read and are to be written to the pool, while their readers go on. */
#include "pool.h"

#include <stdlib.h>
#include <string.h>

#define COPIES_MOST (64 << 20)

static _Atomic int64_t copied; /* bytes that wait to be written */

unsigned char *pool_copy(const struct pool_ticket *ticket, const unsigned char *data, uint32_t size)
{
	unsigned char *copy = NULL;

	if (ticket->is_wanted && data && atomic_fetch_add(&copied, size) + size <= COPIES_MOST)
		copy = malloc(size);
	if (copy)
		memcpy(copy, data, size);
	else if (ticket->is_wanted && data)
		atomic_fetch_sub(&copied, size);
	return copy;
}

void pool_finish_copy(const struct pool_ticket *ticket, unsigned char *copy, uint32_t size)
{
	pool_finish(ticket, copy, size);
	if (copy)
		atomic_fetch_sub(&copied, size);
	free(copy);
}
