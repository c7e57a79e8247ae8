/* Checksums: XXH3_64bits_withSeed of xxhash.h, compiled in, with the widest vectors that this processor has.
 *
 * The extension needs no libxxhash.so at run time. xxhash.h alone would compile for the least processor, at half the
 * speed; so each kind of processor has a file of its own, and hash.c chooses when the extension is loaded.
 * All give the same numbers. Names and other short things are better hashed inline (table/names.c).
 */
#ifndef FUSECACHE_HASH_H
#define FUSECACHE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const void *data, size_t len, uint64_t seed);

#if defined(__x86_64__)
uint64_t hash64_avx2(const void *data, size_t len, uint64_t seed);
uint64_t hash64_avx512(const void *data, size_t len, uint64_t seed);
#endif

#endif
