/* A record as it is written anew (docs/FORMAT.md). */
#include "log.h"

#include <string.h>

#include "../hash/hash.h"
#include "../segment/segment.h"

#define ENTRY_FIXED 56u
#define PLACE_BYTES 8u
_Static_assert(RECORD_FIXED + 8 * CHUNKS_MOST + ENTRY_FIXED + PATH_BYTES_MOST + PLACE_BYTES + BLOCK_BYTES + PAGE <=
		   RECORD_MOST,
	       "the largest record");

static void put32(unsigned char *p, uint32_t v) { memcpy(p, &v, sizeof(v)); }
static void put64(unsigned char *p, uint64_t v) { memcpy(p, &v, sizeof(v)); }

static uint32_t sums_bytes(uint32_t payload_len) { return (payload_len + CHUNK_BYTES - 1) / CHUNK_BYTES * 8; }

uint32_t record_header_length(const struct content *content, const struct subject *subject)
{
	return (RECORD_FIXED + sums_bytes(content->payload_len) + ENTRY_FIXED + (uint32_t)subject->path_len +
		PLACE_BYTES + 7) &
	       ~7u;
}

void record_pack(unsigned char *to, uint32_t header_len, uint32_t record_len, const struct content *content,
		 const struct subject *subject, uint32_t segno, uint64_t offset, const struct log_settings *settings)
{
	const uint32_t sums_len = sums_bytes(content->payload_len);
	const uint16_t path_len = (uint16_t)subject->path_len, entry_len = ENTRY_FIXED + path_len + PLACE_BYTES;
	unsigned char *entry = to + RECORD_FIXED + sums_len, place[32];

	memset(to, 0, header_len);
	put32(to, RECORD_MAGIC);
	put32(to + 4, header_len);
	put32(to + 8, content->payload_len);
	put32(to + 12, record_len);
	memcpy(to + 16, content->digest, 32);
	put64(to + 48, content->fetched_ns);
	put32(to + 56, sums_len / 8);
	memcpy(to + 60, &entry_len, 2);
	to[62] = settings->algorithm;
	to[63] = RECORD_BLOCK;
	memcpy(to + RECORD_FIXED, content->sums, sums_len);
	memcpy(entry, settings->dataset, 16);
	put64(entry + 16, subject->version.origin_ino);
	put64(entry + 24, subject->version.size);
	put64(entry + 32, (uint64_t)subject->version.mtime_ns);
	put64(entry + 40, (uint64_t)subject->version.ctime_ns);
	memcpy(entry + 52, &path_len, 2);
	memcpy(entry + ENTRY_FIXED, subject->path, path_len);
	memcpy(place, settings->uuid, 16);
	put64(place + 16, segno);
	put64(place + 24, offset);
	put64(entry + ENTRY_FIXED + path_len, hash64(place, sizeof(place), 0));
	put64(to + 64, hash64(to, header_len, location_seed(segno, offset)));
	memcpy(to + header_len, content->payload, content->payload_len);
	memset(to + header_len + content->payload_len, 0, record_len - header_len - content->payload_len);
}
