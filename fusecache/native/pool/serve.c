/* What other members of a pool of peers ask this host for: a thread for each connection.
 *
 * INVARIANT: of a request no more is received than fits, and nothing is allocated by a length that it says.
 * INVARIANT: no thread here takes the GIL. What it waits for has an end: a turn, a block that is read, the other end.
 * INVARIANT: what was answered has the key that was asked for: the one that its path and version make.
 */
#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONNECTIONS_MOST 512u
#define SENDING_MOST 16u /* blocks at a time, each in a buffer of its own */
#define REQUEST_MOST (16u << 10)
#define WORDS_MOST 8u
#define HANDSHAKE_NS 2000000000ll
#define TURN_NS 100000000ll /* less than any answer is waited for */
#define ANSWER_NS 2000000000ll /* besides a block's bytes */
#define IDLE_NS 600000000000ll
#define RETRY_NS 100000000l /* no descriptor, no thread */

struct serve_counters serve_counters;
static struct {
	pthread_mutex_t lock;
	pthread_cond_t freed;
	unsigned sending;
	int fd; /* that is listened to */
	struct serve_from from;
	_Atomic uint64_t held_bytes, limit_bytes;
	char version[32];
} serving = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

#define COUNT_SERVE(field, n) atomic_fetch_add_explicit(&serve_counters.field, (n), memory_order_relaxed)
#define COUNTED(field) ((unsigned long long)atomic_load(&serve_counters.field))

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

void serve_holds(uint64_t bytes, uint64_t limit_bytes, const char *version)
{
	atomic_store(&serving.held_bytes, bytes);
	atomic_store(&serving.limit_bytes, limit_bytes);
	pthread_mutex_lock(&serving.lock);
	snprintf(serving.version, sizeof(serving.version), "%s", version);
	pthread_mutex_unlock(&serving.lock);
}

/* ---- requests --------------------------------------------------------------------------------- */
struct word {
	const char *at;
	size_t length;
};
struct asker {
	struct link link;
	bool is_known; /* has said HELLO, of this dataset */
	struct word words[WORDS_MOST];
	size_t word_count;
	size_t count, at; /* bytes that are here; the next of them */
	char bytes[REQUEST_MOST];
};

static int receive_some(struct asker *asker)
{
	ssize_t got;

	if (asker->count == sizeof(asker->bytes))
		return -EMSGSIZE;
	got = link_receive(&asker->link, asker->bytes + asker->count, sizeof(asker->bytes) - asker->count,
			   now_ns() + (asker->count ? ANSWER_NS : IDLE_NS));
	if (got < 0)
		return (int)got;
	asker->count += (size_t)got;
	return 0;
}

/* A line of `kind` and digits alone, none of them superfluous. */
static int take_number(struct asker *asker, char kind, size_t most, size_t *number)
{
	const char *from, *end;
	int err;

	while (!(end = memmem(asker->bytes + asker->at, asker->count - asker->at, "\r\n", 2))) {
		if (asker->count - asker->at > 16)
			return -EBADMSG;
		if ((err = receive_some(asker)))
			return err;
	}
	from = asker->bytes + asker->at;
	if (*from != kind || end - from < 2 || end - from > 7 || (from[1] == '0' && end - from > 2))
		return -EBADMSG;
	*number = 0;
	for (const char *digit = from + 1; digit < end; digit++) {
		if (*digit < '0' || *digit > '9')
			return -EBADMSG;
		*number = *number * 10 + (size_t)(*digit - '0');
	}
	asker->at = (size_t)(end - asker->bytes) + 2;
	return *number > most ? -EMSGSIZE : 0;
}

/* The next request: its words, until the one after it. */
static int take_request(struct asker *asker)
{
	size_t length;
	int err;

	memmove(asker->bytes, asker->bytes + asker->at, asker->count - asker->at);
	asker->count -= asker->at;
	asker->at = 0;
	err = take_number(asker, '*', WORDS_MOST, &asker->word_count);
	if (!err && !asker->word_count)
		return -EBADMSG;
	for (size_t i = 0; !err && i < asker->word_count; i++) {
		if ((err = take_number(asker, '$', sizeof(asker->bytes), &length)))
			break;
		while (!err && asker->count - asker->at < length + 2)
			err = receive_some(asker);
		if (!err && memcmp(asker->bytes + asker->at + length, "\r\n", 2) != 0)
			err = -EBADMSG;
		asker->words[i] = (struct word){asker->bytes + asker->at, length};
		asker->at += length + 2;
	}
	return err;
}

static bool is_word(struct word word, const char *text)
{
	return word.length == strlen(text) && !strncasecmp(word.at, text, word.length);
}

static bool as_text(struct word word, char *to, size_t cap)
{
	if (word.length >= cap || memchr(word.at, 0, word.length))
		return false;
	memcpy(to, word.at, word.length);
	to[word.length] = '\0';
	return true;
}

static bool as_number(struct word word, int64_t least, int64_t most, int64_t *out)
{
	char text[24], *end;

	if (!as_text(word, text, sizeof(text)) || !*text || !strchr("-0123456789", *text))
		return false;
	errno = 0;
	*out = strtoll(text, &end, 10);
	return !errno && !*end && *out >= least && *out <= most;
}

/* Below the mounted directory, as a table has it. */
static bool is_path(struct word word)
{
	const char *end = word.at + word.length;

	if (!word.length || word.length > POOL_PATH_MOST || memchr(word.at, 0, word.length))
		return false;
	for (const char *at = word.at; at <= end;) {
		const char *slash = memchr(at, '/', (size_t)(end - at));
		size_t length = (size_t)((slash ? slash : end) - at);

		if (!length || length > NAME_BYTES_MOST || (length <= 2 && !memcmp(at, "..", length)))
			return false;
		at += length + 1;
	}
	return true;
}

/* ---- answers ---------------------------------------------------------------------------------- */
static int say(struct asker *asker, const char *line)
{
	return link_send(&asker->link, line, strlen(line), false, now_ns() + ANSWER_NS);
}

static bool begin_sending(void)
{
	const int64_t until_ns = now_ns() + TURN_NS;
	const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
	bool may;

	pthread_mutex_lock(&serving.lock);
	while (serving.sending == SENDING_MOST && !pthread_cond_timedwait(&serving.freed, &serving.lock, &until))
		;
	may = serving.sending < SENDING_MOST;
	serving.sending += may;
	pthread_mutex_unlock(&serving.lock);
	return may;
}

static void end_sending(void)
{
	pthread_mutex_lock(&serving.lock);
	serving.sending--;
	pthread_cond_signal(&serving.freed);
	pthread_mutex_unlock(&serving.lock);
}

static int send_block(struct asker *asker, const unsigned char *key, struct served *block)
{
	int err = wire_answer(&asker->link, key, block->data, block->size, now_ns() + ANSWER_NS);

	if (!err)
		COUNT_SERVE(bytes, block->size);
	block->release(block);
	return err;
}

static int say_result(struct asker *asker, enum serve_result result)
{
	switch (result) {
	case SERVE_STALE:
		COUNT_SERVE(stale, 1);
		return say(asker, "-STALE another version\r\n");
	case SERVE_BUSY:
		COUNT_SERVE(busy, 1);
		return say(asker, "-BUSY\r\n");
	default:
		return say(asker, "$-1\r\n");
	}
}

static int answer_block(struct asker *asker)
{
	const struct word *words = asker->words;
	unsigned char key[POOL_KEY_BYTES];
	struct wanted wanted = {.path = words[1].at, .length = words[1].length};
	enum serve_result result;
	struct served block;
	int64_t number, size;
	int err = 0;

	if (asker->word_count != 6 || !as_number(words[2], 0, UINT32_MAX, &number) ||
	    !as_number(words[3], 1, INT64_MAX, &size) ||
	    !as_number(words[4], INT64_MIN, INT64_MAX, &wanted.of.mtime_ns) ||
	    !as_number(words[5], INT64_MIN, INT64_MAX, &wanted.of.ctime_ns))
		return -EBADMSG;
	wanted.block = (uint32_t)number;
	wanted.of.size = (uint64_t)size;
	COUNT_SERVE(requests, 1);
	if (!asker->is_known || !is_path(words[1]) || number > (size - 1) / BLOCK_BYTES || !key_make(&wanted, key))
		return say_result(asker, SERVE_NOTHING);
	if (!begin_sending())
		return say_result(asker, SERVE_BUSY);
	result = serving.from.find(&wanted, &block);
	if (result == SERVE_BLOCK) {
		COUNT_SERVE(hits, 1);
		err = send_block(asker, key, &block);
	}
	end_sending();
	if (result != SERVE_BLOCK && pool_owns(key)) {
		err = say(asker, "+WAIT\r\n");
		result = err ? SERVE_NOTHING : serving.from.fetch(&wanted, &block);
		if (result == SERVE_BLOCK) {
			COUNT_SERVE(fetched, 1);
			err = send_block(asker, key, &block);
		}
	}
	return err || result == SERVE_BLOCK ? err : say_result(asker, result);
}

static int answer_hello(struct asker *asker)
{
	char dataset[POOL_NAME_BYTES + 1], id[LEASE_TEXT];
	bool is_dataset, is_us;

	if (asker->word_count != 4 || !is_word(asker->words[1], "FCH1") ||
	    !as_text(asker->words[2], dataset, sizeof(dataset)) || !as_text(asker->words[3], id, sizeof(id)))
		return say(asker, "-ERR another version of fusecache\r\n");
	is_us = pool_is_us(dataset, id, &is_dataset);
	if (is_us || !is_dataset)
		return say(asker, is_us ? "-SELF\r\n" : "-NAME another dataset\r\n");
	asker->is_known = true;
	return say(asker, "+OK\r\n");
}

static int answer_info(struct asker *asker)
{
	char text[1024], line[32], version[sizeof(serving.version)];
	int length;

	pthread_mutex_lock(&serving.lock);
	memcpy(version, serving.version, sizeof(version));
	pthread_mutex_unlock(&serving.lock);
	length = snprintf(text, sizeof(text),
			  "fusecache_version:%s\r\nused_memory:%llu\r\nmaxmemory:%llu\r\nconnected_clients:%llu\r\n"
			  "requests:%llu\r\nhits:%llu\r\nfetched:%llu\r\nbytes:%llu\r\nstale:%llu\r\nbusy:%llu\r\n",
			  version, (unsigned long long)atomic_load(&serving.held_bytes),
			  (unsigned long long)atomic_load(&serving.limit_bytes), COUNTED(connections),
			  COUNTED(requests), COUNTED(hits), COUNTED(fetched), COUNTED(bytes), COUNTED(stale),
			  COUNTED(busy));
	snprintf(line, sizeof(line), "$%d\r\n", length);
	memcpy(text + length, "\r\n", 3);
	return say(asker, line) || say(asker, text) ? -ECONNRESET : 0;
}

static int answer_time(struct asker *asker)
{
	const int64_t at_ns = clock_ns(CLOCK_REALTIME);
	char text[64], seconds[24], micros[16];

	snprintf(seconds, sizeof(seconds), "%lld", (long long)(at_ns / 1000000000));
	snprintf(micros, sizeof(micros), "%lld", (long long)(at_ns % 1000000000 / 1000));
	snprintf(text, sizeof(text), "*2\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", strlen(seconds), seconds, strlen(micros),
		 micros);
	return say(asker, text);
}

static int answer_members(struct asker *asker)
{
	const struct word *words = asker->words;
	char name[POOL_KEY_TEXT], *text;
	size_t length;
	int err;

	snprintf(name, sizeof(name), "%smembers", pool_prefix());
	if (asker->word_count < 2 || words[1].length != strlen(name) || memcmp(words[1].at, name, strlen(name)) != 0)
		return say(asker, "-NOPERM another dataset\r\n");
	if (is_word(words[0], "EXPIRE"))
		return say(asker, ":1\r\n");
	if (is_word(words[0], "HSET"))
		return say(asker, asker->word_count == 4 &&
					  member_write(words[2].at, words[2].length, words[3].at, words[3].length)
				      ? ":1\r\n"
				      : "-ERR too many members, or too long\r\n");
	text = members_read(&length);
	err = text ? link_send(&asker->link, text, length, false, now_ns() + ANSWER_NS) : -ENOMEM;
	free(text);
	return err;
}

static const struct {
	const char *name;
	int (*answer)(struct asker *);
} commands[] = {
    {"BLOCK", answer_block},  {"HELLO", answer_hello},	  {"INFO", answer_info},       {"TIME", answer_time},
    {"HSET", answer_members}, {"EXPIRE", answer_members}, {"HGETALL", answer_members},
};

static int answer(struct asker *asker)
{
	for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++)
		if (is_word(asker->words[0], commands[i].name))
			return commands[i].answer(asker);
	return say(asker, "-ERR unknown command\r\n");
}

/* ---- connections ------------------------------------------------------------------------------ */
static void *asker_main(void *of)
{
	struct asker *asker = of;
	int err;

	err = link_accept(&asker->link, asker->link.fd, now_ns() + HANDSHAKE_NS);
	if (err) {
		COUNT_SERVE(refused, 1);
	} else {
		while (!(err = take_request(asker)) && !(err = answer(asker)))
			;
		COUNT_SERVE(malformed, err == -EBADMSG || err == -EMSGSIZE);
		link_close(&asker->link);
	}
	COUNT_SERVE(connections, -1);
	free(asker);
	return NULL;
}

static void admit(int fd)
{
	struct asker *asker = NULL;

	if (COUNT_SERVE(connections, 1) < CONNECTIONS_MOST)
		asker = malloc(sizeof(*asker));
	if (asker) {
		*asker = (struct asker){.link.fd = fd};
		if (!thread_start(asker_main, asker))
			return;
		free(asker);
	}
	COUNT_SERVE(connections, -1);
	COUNT_SERVE(refused, 1);
	close(fd);
}

static void *listen_main(void *unused)
{
	const struct timespec pause = {.tv_nsec = RETRY_NS};

	(void)unused;
	for (;;) {
		int fd = accept4(serving.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0)
			admit(fd);
		else if (errno != EINTR && errno != ECONNABORTED)
			nanosleep(&pause, NULL);
	}
	return NULL;
}

bool serve_is_on(void) { return serving.fd >= 0; }

int serve_begin(const struct sockaddr *at, socklen_t length, const struct serve_from *from)
{
	pthread_condattr_t attributes;
	int err = 0, on = 1;
	int fd;

	if (serving.fd >= 0)
		return -EALREADY;
	fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, at, length) || listen(fd, 128)) {
		err = -errno;
	} else {
		pthread_condattr_init(&attributes);
		pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
		pthread_cond_init(&serving.freed, &attributes);
		pthread_condattr_destroy(&attributes);
		serving.from = *from;
		serving.fd = fd;
		err = thread_start(listen_main, NULL);
	}
	if (err) {
		serving.fd = -1;
		close(fd);
	}
	return err;
}
