/* What a block is called: its key, and the slot of that. docs/POOL.md has the bytes. */
#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct key_head {
	char magic[4];
	uint32_t block;
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
};

static char *key_path(uint32_t ino, size_t *length)
{
	uint32_t name_node = 0;
	char *path = NULL;

	pthread_rwlock_rdlock(&table.lock);
	/* Of what this mount has not looked at, or knows to have changed, the table has no version. */
	if (node_at(ino) && !(node_flags(node_at(ino)) & (NODE_UNCHECKED | NODE_STALE | NODE_NOATTR)))
		name_node = node_live_name(ino);
	if (name_node)
		path = table_path(name_node, length);
	pthread_rwlock_unlock(&table.lock);
	return path;
}

bool key_make(const struct wanted *of, unsigned char key[POOL_KEY_BYTES])
{
	struct key_head head = {{'F', 'C', 'P', '1'}, of->block, of->of.size, of->of.mtime_ns, of->of.ctime_ns};
	unsigned char digest[SHA256_BYTES], *text = malloc(sizeof(head) + of->length);

	if (!text)
		return false;
	memcpy(text, &head, sizeof(head));
	memcpy(text + sizeof(head), of->path, of->length);
	link_sha256(text, sizeof(head) + of->length, digest);
	memcpy(key, digest, POOL_KEY_BYTES);
	free(text);
	return true;
}

void key_text(const char *prefix, const unsigned char *key, char text[POOL_KEY_TEXT])
{
	static const char digits[] = "0123456789abcdef";
	char *at = text + snprintf(text, POOL_KEY_TEXT, "%s", prefix);

	for (unsigned i = 0; i < POOL_KEY_BYTES; i++) {
		*at++ = digits[key[i] >> 4];
		*at++ = digits[key[i] & 15];
	}
	*at = '\0';
}

uint16_t key_slot(const char *prefix, const unsigned char *key)
{
	char text[POOL_KEY_TEXT];
	uint16_t crc = 0; /* CRC-16 (XMODEM): the Cluster's specification */

	key_text(prefix, key, text);
	for (const char *at = text; *at; at++) {
		crc ^= (uint16_t)((unsigned char)*at << 8);
		for (int bit = 0; bit < 8; bit++)
			crc = (uint16_t)(crc & 0x8000 ? crc << 1 ^ 0x1021 : crc << 1);
	}
	return crc % POOL_SLOTS;
}

char *key_of(uint32_t ino, struct wanted *wanted, unsigned char key[POOL_KEY_BYTES])
{
	char *path = key_path(ino, &wanted->length);

	wanted->path = path;
	if (path && !key_make(wanted, key)) {
		free(path);
		path = NULL;
	}
	return path;
}

bool pool_owns_file(uint32_t ino)
{
	struct wanted wanted = {.block = 0};
	unsigned char key[POOL_KEY_BYTES];
	bool owns;
	char *path;

	if (!serve_is_on() || !table_version(ino, &wanted.of) || !wanted.of.size || wanted.of.size > BLOCK_BYTES ||
	    !(path = key_of(ino, &wanted, key)))
		return false;
	owns = wanted.length <= POOL_PATH_MOST && pool_owns(key);
	free(path);
	return owns;
}
