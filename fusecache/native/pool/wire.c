/* Commands and answers of the Redis protocol (RESP2), as far as the pool needs them.
 *
 * INVARIANT: nothing is allocated, and no more is received than fits, whatever length a server says.
 */
#include "pool.h"

#include "../hash/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_MOST 512
#define FIRST_BYTES 64 /* a lease, or the head of a block, comes with the first of them */

struct block_head { /* of a block: docs/POOL.md; little-endian, as all machines that this runs on */
	char magic[4];
	uint32_t size;
	uint64_t checksum;
	unsigned char key[POOL_KEY_BYTES];
};
static const char block_magic[4] = {'F', 'C', 'B', '1'}, lease_magic[4] = {'F', 'C', 'L', '1'};
#define LEASE_BYTES (sizeof(lease_magic) + sizeof(struct lease))
#define NS_A_BYTE 1000 /* of a block, once it flows: 1 MB/s */

static uint64_t checksum(const unsigned char *data, uint32_t size, const unsigned char *key)
{
	uint64_t seed;

	memcpy(&seed, key, sizeof(seed));
	return hash64(data, size, seed);
}

/* ---- commands --------------------------------------------------------------------------------- */
struct command {
	char text[POOL_PATH_MOST + 1024];
	size_t size;
};

static void put_bytes(struct command *to, const void *data, size_t size)
{
	if (size <= sizeof(to->text) - to->size)
		memcpy(to->text + to->size, data, size);
	to->size += size;
}

static void put_size(struct command *to, char kind, size_t size)
{
	char line[32];

	put_bytes(to, line, (size_t)snprintf(line, sizeof(line), "%c%zu\r\n", kind, size));
}

static void put_word(struct command *to, const char *word)
{
	put_size(to, '$', strlen(word));
	put_bytes(to, word, strlen(word));
	put_bytes(to, "\r\n", 2);
}

static void put_key(struct command *to, const struct request *of)
{
	char text[POOL_KEY_TEXT];

	key_text(of->prefix, of->key, text);
	put_word(to, text);
}

static int send_command(struct link *link, const struct command *command, bool more, int64_t deadline_ns)
{
	if (command->size > sizeof(command->text))
		return -EMSGSIZE;
	return link_send(link, command->text, command->size, more, deadline_ns);
}

/* ---- answers ---------------------------------------------------------------------------------- */
struct incoming {
	struct link *link;
	int64_t deadline_ns;
	char bytes[LINE_MOST];
	size_t count; /* of bytes that are here */
	size_t at;    /* the next of them */
};

static int receive_some(struct incoming *in)
{
	ssize_t got;
	size_t room = sizeof(in->bytes) - in->count;

	if (!room)
		return -EBADMSG;
	got = link_receive(in->link, in->bytes + in->count, room < FIRST_BYTES ? room : FIRST_BYTES, in->deadline_ns);
	if (got < 0)
		return (int)got;
	in->count += (size_t)got;
	return 0;
}

/* Up to \r\n, which becomes a 0. */
static int take_line(struct incoming *in, char **line)
{
	char *end;
	int err;

	while (!(end = memmem(in->bytes + in->at, in->count - in->at, "\r\n", 2)))
		if ((err = receive_some(in)))
			return err;
	*line = in->bytes + in->at;
	*end = '\0';
	in->at = (size_t)(end - in->bytes) + 2;
	return 0;
}

static int take_bytes(struct incoming *in, void *to, size_t size)
{
	unsigned char *at = to;
	size_t here = in->count - in->at;

	if (here > size)
		here = size;
	memcpy(at, in->bytes + in->at, here);
	in->at += here;
	while (here < size) {
		ssize_t got = link_receive(in->link, at + here, size - here, in->deadline_ns);

		if (got < 0)
			return (int)got;
		here += (size_t)got;
	}
	return 0;
}

static int take_end(struct incoming *in)
{
	char end[2];
	int err = take_bytes(in, end, sizeof(end));

	return err ? err : memcmp(end, "\r\n", 2) != 0 || in->at != in->count ? -EBADMSG : 0;
}

/* A bulk string: what it is may be a lease, or the block. Of anything else the rest stays unread. */
static int take_value(struct incoming *in, size_t length, const struct request *of, const struct lease *lease,
		      unsigned char *into, uint32_t size)
{
	char small[LEASE_BYTES];
	struct block_head header;
	int err;

	if (length == sizeof(small)) {
		err = take_bytes(in, small, sizeof(small));
		err = err ? err : take_end(in);
		if (err || memcmp(small, lease_magic, sizeof(lease_magic)) != 0)
			return err ? err : REPLY_STRANGE;
		return lease && !memcmp(small + sizeof(lease_magic), lease, sizeof(*lease)) ? REPLY_NOTHING
											    : REPLY_LEASE;
	}
	if (!into || length != sizeof(header) + size)
		return REPLY_STRANGE;
	err = take_bytes(in, &header, sizeof(header));
	err = err ? err : take_bytes(in, into, size);
	err = err ? err : take_end(in);
	if (err)
		return err;
	return !memcmp(header.magic, block_magic, sizeof(block_magic)) && header.size == size &&
		       !memcmp(header.key, of->key, POOL_KEY_BYTES) && header.checksum == checksum(into, size, of->key)
		   ? REPLY_BLOCK
		   : REPLY_STRANGE;
}

/* Up to `end`: digits alone, none of them superfluous. False: it is none. */
static bool is_length(const char *text, const char *end)
{
	size_t digits = strspn(text, "0123456789"); /* a 0 is where the line ends, or before that */

	return digits && text + digits == end && (*text != '0' || digits == 1);
}

static int take_reply(struct link *link, const struct request *of, const struct lease *lease, unsigned char *into,
		      uint32_t size, char why[POOL_WHY_BYTES])
{
	struct incoming in = {.link = link, .deadline_ns = of->deadline_ns};
	char *line, *end;
	int result = take_line(&in, &line);

	if (!result && of->has_waited && !strcmp(line, "+WAIT")) { /* once */
		*of->has_waited = true;
		in.deadline_ns = clock_ns(CLOCK_MONOTONIC) + of->wait_ns;
		if (in.deadline_ns > of->until_ns)
			in.deadline_ns = of->until_ns;
		result = take_line(&in, &line);
	}
	if (result)
		return result;
	switch (*line) {
	case '+':
	case ':':
		return in.at == in.count ? REPLY_DONE : -EBADMSG;
	case '-':
		snprintf(why, POOL_WHY_BYTES, "%s", line + 1);
		return in.at == in.count ? REPLY_ERROR : -EBADMSG;
	case '$':
		end = in.bytes + in.at - 2;
		if (end - line == 3 && !memcmp(line, "$-1", 3))
			return in.at == in.count ? REPLY_NOTHING : -EBADMSG;
		if (!is_length(line + 1, end))
			return -EBADMSG;
		in.deadline_ns += (int64_t)size * NS_A_BYTE; /* it flows: what was paid for is not thrown away */
		if (in.deadline_ns > of->until_ns)
			in.deadline_ns = of->until_ns;
		return take_value(&in, strtoul(line + 1, NULL, 10), of, lease, into, size);
	default:
		return -EBADMSG;
	}
}

/* ---- what errors say ----------------------------------------------------------------------------- */
/* What the server says for "not here": no fault of it. */
bool wire_is_moved(const char *why)
{
	static const char *const words[] = {"MOVED ", "ASK ", "CLUSTERDOWN ", "TRYAGAIN ", "LOADING "};

	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
		if (!strncmp(why, words[i], strlen(words[i])))
			return true;
	return false;
}

/* A host that does not have it, or has no time: no fault of it. */
bool wire_is_refused(const char *why) { return !strncmp(why, "STALE", 5) || !strncmp(why, "BUSY", 4); }

/* It answers reads, and no writes: full, a member that may only read, a replica, a disk in trouble. */
bool wire_is_read_only(const char *why)
{
	static const char *const words[] = {"OOM ", "NOPERM ", "READONLY ", "MISCONF ", "NOREPLICAS "};

	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
		if (!strncmp(why, words[i], strlen(words[i])))
			return true;
	return false;
}

/* ---- what is asked ---------------------------------------------------------------------------- */
int wire_log_in(struct link *link, const char *user, const char *password, int64_t deadline_ns,
		char why[POOL_WHY_BYTES])
{
	const struct request of = {.deadline_ns = deadline_ns};
	struct command command = {.size = 0};
	int err;

	put_size(&command, '*', user ? 3 : 2);
	put_word(&command, "AUTH");
	if (user)
		put_word(&command, user);
	put_word(&command, password);
	err = send_command(link, &command, false, deadline_ns);
	return err ? err : take_reply(link, &of, NULL, NULL, 0, why);
}

void lease_text(const struct lease *lease, char text[LEASE_TEXT])
{
	for (size_t i = 0; i < sizeof(lease->holder); i++)
		snprintf(text + 2 * i, 3, "%02x", lease->holder[i]);
}

int wire_hello(struct link *link, const char *dataset, const struct lease *id, int64_t deadline_ns,
	       char why[POOL_WHY_BYTES])
{
	const struct request of = {.deadline_ns = deadline_ns};
	struct command command = {.size = 0};
	char text[LEASE_TEXT];
	int err;

	lease_text(id, text);
	put_size(&command, '*', 4);
	put_word(&command, "HELLO");
	put_word(&command, "FCH1");
	put_word(&command, dataset);
	put_word(&command, text);
	err = send_command(link, &command, false, deadline_ns);
	return err ? err : take_reply(link, &of, NULL, NULL, 0, why);
}

int wire_ask(struct link *link, const struct request *of, const struct wanted *wanted, unsigned char *into,
	     uint32_t size, char why[POOL_WHY_BYTES])
{
	const int64_t numbers[] = {wanted->block, (int64_t)wanted->of.size, wanted->of.mtime_ns, wanted->of.ctime_ns};
	struct command command = {.size = 0};
	char number[24];
	int err;

	put_size(&command, '*', 6);
	put_word(&command, "BLOCK");
	put_size(&command, '$', wanted->length);
	put_bytes(&command, wanted->path, wanted->length);
	put_bytes(&command, "\r\n", 2);
	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		snprintf(number, sizeof(number), "%lld", (long long)numbers[i]);
		put_word(&command, number);
	}
	err = send_command(link, &command, false, of->deadline_ns);
	return err ? err : take_reply(link, of, NULL, into, size, why);
}

int wire_answer(struct link *link, const unsigned char *key, const unsigned char *data, uint32_t size,
		int64_t deadline_ns)
{
	struct block_head header = {.size = size, .checksum = checksum(data, size, key)};
	struct command command = {.size = 0};
	int err;

	memcpy(header.magic, block_magic, sizeof(block_magic));
	memcpy(header.key, key, POOL_KEY_BYTES);
	put_size(&command, '$', sizeof(header) + size);
	put_bytes(&command, &header, sizeof(header));
	deadline_ns += (int64_t)size * NS_A_BYTE;
	err = send_command(link, &command, true, deadline_ns);
	err = err ? err : link_send(link, data, size, true, deadline_ns);
	return err ? err : link_send(link, "\r\n", 2, false, deadline_ns);
}

int wire_get(struct link *link, const struct request *of, const struct lease *lease, unsigned lease_ms,
	     unsigned char *into, uint32_t size, char why[POOL_WHY_BYTES])
{
	struct command command = {.size = 0};
	char number[16];
	int err;

	if (lease) {
		put_size(&command, '*', 7);
		put_word(&command, "SET");
		put_key(&command, of);
		put_size(&command, '$', LEASE_BYTES);
		put_bytes(&command, lease_magic, sizeof(lease_magic));
		put_bytes(&command, lease, sizeof(*lease));
		put_bytes(&command, "\r\n", 2);
		put_word(&command, "NX");
		put_word(&command, "GET");
		put_word(&command, "PX");
		snprintf(number, sizeof(number), "%u", lease_ms);
		put_word(&command, number);
	} else {
		put_size(&command, '*', 2);
		put_word(&command, "GET");
		put_key(&command, of);
	}
	err = send_command(link, &command, false, of->deadline_ns);
	return err ? err : take_reply(link, of, lease, into, size, why);
}

int wire_put(struct link *link, const struct request *of, const unsigned char *data, uint32_t size,
	     char why[POOL_WHY_BYTES])
{
	struct block_head header = {.size = size, .checksum = checksum(data, size, of->key)};
	struct request slow = *of;
	struct command command = {.size = 0};
	int err;

	memcpy(header.magic, block_magic, sizeof(block_magic));
	memcpy(header.key, of->key, POOL_KEY_BYTES);
	put_size(&command, '*', 3);
	put_word(&command, "SET");
	put_key(&command, of);
	put_size(&command, '$', sizeof(header) + size);
	put_bytes(&command, &header, sizeof(header));
	slow.deadline_ns += (int64_t)size * NS_A_BYTE;
	if (slow.deadline_ns > of->until_ns)
		slow.deadline_ns = of->until_ns;
	err = send_command(link, &command, true, slow.deadline_ns);
	err = err ? err : link_send(link, data, size, true, slow.deadline_ns);
	err = err ? err : link_send(link, "\r\n", 2, false, slow.deadline_ns);
	of = &slow;
	return err ? err : take_reply(link, of, NULL, NULL, 0, why);
}

int wire_delete(struct link *link, const struct request *of, char why[POOL_WHY_BYTES])
{
	struct command command = {.size = 0};
	int err;

	put_size(&command, '*', 2);
	put_word(&command, "UNLINK");
	put_key(&command, of);
	err = send_command(link, &command, false, of->deadline_ns);
	return err ? err : take_reply(link, of, NULL, NULL, 0, why);
}
