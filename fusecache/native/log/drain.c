/* While there is little credit, only what lies in some segments is appended: each of them becomes empty, and gives back
 * more than it took.
 */
#include "log.h"

#include <stdlib.h>

static struct {
	pthread_rwlock_t lock;
	_Atomic bool on;
	uint32_t *segnos; /* ascending */
	size_t count;
} drain = {.lock = PTHREAD_RWLOCK_INITIALIZER};

static int compare_segnos(const void *a, const void *b)
{
	const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

void log_drain(uint32_t *segnos, size_t count)
{
	uint32_t *old;

	if (segnos)
		qsort(segnos, count, sizeof(*segnos), compare_segnos);
	pthread_rwlock_wrlock(&drain.lock);
	old = drain.segnos;
	drain.segnos = segnos;
	drain.count = count;
	atomic_store(&drain.on, segnos != NULL);
	pthread_rwlock_unlock(&drain.lock);
	free(old);
}

bool drain_lets(uint64_t packed)
{
	const uint32_t segno = (uint32_t)(packed >> 32);
	bool found;

	if (!packed || !atomic_load_explicit(&drain.on, memory_order_relaxed))
		return true;
	pthread_rwlock_rdlock(&drain.lock);
	found = !drain.segnos || bsearch(&segno, drain.segnos, drain.count, sizeof(segno), compare_segnos) != NULL;
	pthread_rwlock_unlock(&drain.lock);
	return found;
}
