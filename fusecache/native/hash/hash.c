/* Chooses among the files hash*.c (see hash.h); the code for any processor of the architecture. */
#include "hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef uint64_t (*HashFunction)(const void *, size_t, uint64_t);

static uint64_t hash64_any(const void *data, size_t len, uint64_t seed)
{
	return XXH3_64bits_withSeed(data, len, seed);
}

static HashFunction chosen = hash64_any;

#if defined(__x86_64__)
__attribute__((constructor)) static void choose(void)
{
	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx512f"))
		chosen = hash64_avx512;
	else if (__builtin_cpu_supports("avx2"))
		chosen = hash64_avx2;
}
#endif

uint64_t hash64(const void *data, size_t len, uint64_t seed) { return chosen(data, len, seed); }
