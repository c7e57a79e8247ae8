/* See hash.h: the code for processors with AVX-512F. Nothing else may be compiled here: it would need them, too. */
#include "hash.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif
#define XXH_VECTOR 3 /* XXH_AVX512 */
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t hash64_avx512(const void *data, size_t len, uint64_t seed) { return XXH3_64bits_withSeed(data, len, seed); }

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
