/* What members of a pool of peers say of themselves, kept for the others.
 *
 * INVARIANT: a record is one that was written within MEMBER_NS, or its place is free for another.
 */
#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMBERS_MOST 128u
#define MEMBER_NS 300000000000ll

struct member {
	char *name, *text; /* NULL: a free place */
	size_t name_length, text_length;
	int64_t until_ns;
};
static struct {
	pthread_mutex_t lock;
	struct member all[MEMBERS_MOST];
} members = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* `members` is locked, as for the next one. */
static void forget_old(int64_t now_ns)
{
	for (struct member *one = members.all; one < members.all + MEMBERS_MOST; one++)
		if (one->name && one->until_ns <= now_ns) {
			free(one->name);
			free(one->text);
			*one = (struct member){.name = NULL};
		}
}

/* Its place, or a free one; NULL: there is none. */
static struct member *place_of(const char *name, size_t length)
{
	struct member *free_one = NULL;

	for (struct member *one = members.all; one < members.all + MEMBERS_MOST; one++) {
		if (!one->name)
			free_one = one;
		else if (one->name_length == length && !memcmp(one->name, name, length))
			return one;
	}
	return free_one;
}

static char *copy_of(const char *text, size_t length)
{
	char *copy = malloc(length + 1);

	if (copy)
		memcpy(copy, text, length);
	return copy;
}

bool member_write(const char *name, size_t name_length, const char *text, size_t text_length)
{
	const int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
	char *name_copy, *text_copy;
	struct member *place = NULL;

	if (name_length > MEMBER_NAME_BYTES || text_length > MEMBER_TEXT_BYTES)
		return false;
	name_copy = copy_of(name, name_length);
	text_copy = copy_of(text, text_length);
	if (name_copy && text_copy) {
		pthread_mutex_lock(&members.lock);
		forget_old(now_ns);
		place = place_of(name, name_length);
		if (place) {
			struct member before = *place;

			*place = (struct member){name_copy, text_copy, name_length, text_length, now_ns + MEMBER_NS};
			name_copy = before.name;
			text_copy = before.text;
		}
		pthread_mutex_unlock(&members.lock);
	}
	free(name_copy);
	free(text_copy);
	return place;
}

static char *put_text(char *at, const char *text, size_t length)
{
	at += sprintf(at, "$%zu\r\n", length);
	memcpy(at, text, length);
	memcpy(at + length, "\r\n", 2); /* NOLINT(bugprone-not-null-terminated-result): more follows */
	return at + length + 2;
}

char *members_read(size_t *length)
{
	size_t count = 0, bytes = 32;
	char *text, *at;

	pthread_mutex_lock(&members.lock);
	forget_old(clock_ns(CLOCK_MONOTONIC));
	for (const struct member *one = members.all; one < members.all + MEMBERS_MOST; one++)
		if (one->name) {
			count++;
			bytes += one->name_length + one->text_length + 32;
		}
	at = text = malloc(bytes);
	if (text) {
		at += sprintf(at, "*%zu\r\n", 2 * count);
		for (const struct member *one = members.all; one < members.all + MEMBERS_MOST; one++)
			if (one->name) {
				at = put_text(at, one->name, one->name_length);
				at = put_text(at, one->text, one->text_length);
			}
	}
	pthread_mutex_unlock(&members.lock);
	*length = text ? (size_t)(at - text) : 0;
	return text;
}
