/* Who has a block, and when a server is asked.
 *
 * INVARIANT: no server is waited for with a lock held.
 * INVARIANT: a connection is in exactly one place: idle, or with one thread.
 */
#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define CONNECTIONS_MOST 8u
#define FAILURES_MOST 3u
#define REST_NS_FIRST 1000000000ll
#define REST_NS_MOST 16000000000ll
#define REQUEST_NS_LEAST 250000000ll
#define REQUEST_NS_MOST 1000000000ll
#define CONNECT_NS_MOST 1000000000ll /* however fast the origin is: round trips and RSA, once for many requests */
#define ORIGIN_READS 4		   /* as long as so many may take */
#define SMALL_BYTES (1u << 20)	   /* files up to it, and larger ones, are measured apart */
#define KINDS 2
#define WRITERS_MOST 2u		   /* of the connections: readers do not wait behind blocks for others */
#define LEASE_MS_LEAST 1000u
#define LEASES_WAITED 2.5 /* the first one's, and a second one's if that is lost */
#define POLL_NS_FIRST 2000000ll
#define POLL_NS_MOST 50000000ll
#define SLOWER 2		 /* than the origin, and it is hardly asked */
#define HARDLY 16
#define SLOWEST 4 /* an answer counts for no more than so many slow ones: no single one makes a server slow */
#define NO_WRITES_NS 10000000000ll

struct server {
	char host[256], port[8], why[POOL_WHY_BYTES];
	struct place place;
	pthread_cond_t freed;
	struct link idle[CONNECTIONS_MOST];
	unsigned idle_count, open_count;
	unsigned failures_in_a_row;
	bool is_tried; /* by one request, after a rest */
	bool is_self;  /* it is this process: never asked */
	int64_t rest_ns, rests_until_ns;
	int64_t no_writes_until_ns; /* it is full, or we may not */
	int64_t answer_ns[KINDS];   /* moving average of what an answer takes, with its turn; it begins at 0 */
	unsigned writers;	    /* connections that write now */
	unsigned considered;	    /* while it was slow */
	uint64_t hits, failures;
};
static struct {
	pthread_mutex_t lock;
	char dataset[POOL_NAME_BYTES + 1], prefix[96];
	bool has_peers; /* servers are hosts: they read what they have not, and nobody writes to them */
	char *user, *password;
	int64_t min_age_ns, patience_ns;
	struct lease lease;		  /* its holder is this process's id among peers, too */
	_Atomic int64_t origin_ns[KINDS]; /* moving average of a read of the origin; 0: none yet */
	struct server servers[POOL_SERVERS_MOST];
	_Atomic unsigned count;
	uint8_t slots[POOL_SLOTS], heirs[POOL_SLOTS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};
struct pool_counters pool_counters;

#define COUNT_POOL(field, n) atomic_fetch_add_explicit(&pool_counters.field, (n), memory_order_relaxed)

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

/* ---- settings -------------------------------------------------------------------------------- */
bool pool_begin(const struct pool_settings *settings, char why[POOL_WHY_BYTES])
{
	if (!link_load(why) || (settings->ca && !link_use_tls(settings, why)))
		return false;
	snprintf(pool.dataset, sizeof(pool.dataset), "%s", settings->dataset);
	pool.has_peers = settings->has_peers;
	snprintf(pool.prefix, sizeof(pool.prefix), "fusecache:%s:", settings->dataset);
	pool.user = settings->user ? strdup(settings->user) : NULL;
	pool.password = settings->password ? strdup(settings->password) : NULL;
	if (getrandom(pool.lease.holder, sizeof(pool.lease.holder), 0) < 0) {
		snprintf(why, POOL_WHY_BYTES, "getrandom: %s", strerror(errno));
		return false;
	}
	pool.min_age_ns = settings->min_age_ns;
	pool.patience_ns = settings->patience_ns;
	memset(pool.slots, POOL_NO_SERVER, sizeof(pool.slots));
	memset(pool.heirs, POOL_NO_SERVER, sizeof(pool.heirs));
	return true;
}

int pool_server(const char *host, const char *port)
{
	struct server *server;
	pthread_condattr_t attributes;
	unsigned count = atomic_load(&pool.count);

	for (unsigned i = 0; i < count; i++)
		if (!strcmp(pool.servers[i].host, host) && !strcmp(pool.servers[i].port, port))
			return (int)i;
	if (count == POOL_SERVERS_MOST)
		return -ENOSPC;
	server = &pool.servers[count];
	snprintf(server->host, sizeof(server->host), "%s", host);
	snprintf(server->port, sizeof(server->port), "%s", port);
	server->place.host = server->host;
	server->rest_ns = REST_NS_FIRST;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&server->freed, &attributes);
	pthread_condattr_destroy(&attributes);
	atomic_store(&pool.count, count + 1);
	return (int)count;
}

void pool_address(unsigned index, const struct sockaddr *address, socklen_t length)
{
	pthread_mutex_lock(&pool.lock);
	if (index < atomic_load(&pool.count) && length <= sizeof(struct sockaddr_storage)) {
		memcpy(&pool.servers[index].place.address, address, length);
		pool.servers[index].place.length = length;
	}
	pthread_mutex_unlock(&pool.lock);
}

void pool_slots(const uint8_t servers[POOL_SLOTS], const uint8_t heirs[POOL_SLOTS])
{
	pthread_mutex_lock(&pool.lock);
	memcpy(pool.slots, servers, sizeof(pool.slots));
	memcpy(pool.heirs, heirs, sizeof(pool.heirs));
	pthread_mutex_unlock(&pool.lock);
}

bool pool_look(unsigned index, struct pool_state *out)
{
	const struct server *server = &pool.servers[index];

	if (index >= atomic_load(&pool.count))
		return false;
	pthread_mutex_lock(&pool.lock);
	*out = (struct pool_state){
	    .has_address = server->place.length,
	    .is_left_alone = server->failures_in_a_row >= FAILURES_MOST,
	    .is_self = server->is_self,
	    .connections = server->open_count,
	    .hits = server->hits,
	    .failures = server->failures,
	};
	memcpy(out->host, server->host, sizeof(out->host));
	memcpy(out->port, server->port, sizeof(out->port));
	memcpy(out->why, server->why, sizeof(out->why));
	pthread_mutex_unlock(&pool.lock);
	return true;
}

/* ---- how long ---------------------------------------------------------------------------------- */
static int64_t earlier(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t average(int64_t before, int64_t ns) { return before + (ns - before) / 16; }

static unsigned kind_of(uint32_t size) { return size > SMALL_BYTES; }

/* Of a read of the origin, by kind: before one was measured; its average counts no longer than that. */
static const int64_t first_ns[KINDS] = {50000000, 1000000000}, most_ns[KINDS] = {1000000000, 4000000000};
static const int64_t fast_ns[KINDS] = {10000000, 100000000}; /* an answer within it is never slow */

void pool_note_origin(int64_t ns, uint32_t size)
{
	_Atomic int64_t *of = &pool.origin_ns[kind_of(size)];
	int64_t before = atomic_load(of), after = before ? average(before, ns) : ns;

	atomic_store(of, earlier(after, most_ns[kind_of(size)])); /* a lost update is no harm */
}

static int64_t origin_ns(uint32_t size)
{
	int64_t ns = atomic_load(&pool.origin_ns[kind_of(size)]);

	return ns ? ns : first_ns[kind_of(size)];
}

/* An answer that takes longer is slow. */
static int64_t slow_ns(uint32_t size)
{
	int64_t ns = SLOWER * origin_ns(size);

	return ns > fast_ns[kind_of(size)] ? ns : fast_ns[kind_of(size)];
}

/* For the first byte of an answer. */
static int64_t request_ns(uint32_t size)
{
	int64_t ns = ORIGIN_READS * origin_ns(size);

	return ns < REQUEST_NS_LEAST ? REQUEST_NS_LEAST : ns < REQUEST_NS_MOST ? ns : REQUEST_NS_MOST;
}

static unsigned lease_ms(uint32_t size)
{
	int64_t ms = ORIGIN_READS * origin_ns(size) / 1000000;

	return ms < LEASE_MS_LEAST ? LEASE_MS_LEAST : (unsigned)ms;
}

int64_t pool_wait_ns(uint32_t size)
{
	return earlier((int64_t)(LEASES_WAITED * lease_ms(size) * 1e6), pool.patience_ns);
}

struct asked {
	uint8_t server;
	const struct wanted *wanted;
	const unsigned char *key;
	unsigned char *into;	   /* GET */
	const unsigned char *from; /* SET; neither: UNLINK */
	uint32_t size;
	int64_t until_ns; /* no longer, whatever happens */
};

/* ---- connections --------------------------------------------------------------------------------- */
/* Is nobody to ask it now? The pool is locked. */
static bool rests(const struct server *server, int64_t now)
{
	return server->failures_in_a_row >= FAILURES_MOST && (server->is_tried || now < server->rests_until_ns);
}

/* Slower than the origin, and not asked this time: now and then it is, to see whether it still is slow. The pool is
 * locked. */
static bool is_passed_over(struct server *server, uint32_t size)
{
	return server->answer_ns[kind_of(size)] > slow_ns(size) && ++server->considered % HARDLY;
}

/* Without the lock. */
static int connect_to(const struct place *to, struct link *link, int64_t deadline_ns, char why[POOL_WHY_BYTES])
{
	int err = link_open(link, to, deadline_ns, why);

	if (err || !(pool.password || pool.has_peers))
		return err;
	err = pool.has_peers ? wire_hello(link, pool.dataset, &pool.lease, deadline_ns, why)
			     : wire_log_in(link, pool.user, pool.password, deadline_ns, why);
	if (err == REPLY_DONE)
		return 0;
	link_close(link);
	if (pool.has_peers && err == REPLY_ERROR && !strncmp(why, "SELF", 4))
		return -ELOOP;
	return err < 0 ? err : -EACCES;
}

static void give_back(struct server *server, struct link *link, const struct asked *asked, bool is_good,
		      const char *why)
{
	struct link closed[CONNECTIONS_MOST + 1];
	unsigned count = 0;

	pthread_mutex_lock(&pool.lock);
	server->is_tried = false;
	server->writers -= asked->from != NULL;
	if (is_good) {
		server->failures_in_a_row = 0;
		server->rest_ns = REST_NS_FIRST;
		server->idle[server->idle_count++] = *link;
	} else {
		server->failures++;
		COUNT_POOL(failures, 1);
		snprintf(server->why, sizeof(server->why), "%s", why);
		closed[count++] = *link;
		/* Those that were under way with the one that was too much are no further ones. */
		if (++server->failures_in_a_row >= FAILURES_MOST && now_ns() >= server->rests_until_ns) {
			server->rests_until_ns = now_ns() + server->rest_ns;
			server->rest_ns = server->rest_ns * 2 < REST_NS_MOST ? server->rest_ns * 2 : REST_NS_MOST;
			while (server->idle_count)
				closed[count++] = server->idle[--server->idle_count];
		}
		server->open_count -= count;
	}
	pthread_cond_broadcast(&server->freed); /* writers may not all take it */
	pthread_mutex_unlock(&pool.lock);
	for (unsigned i = 0; i < count; i++)
		link_close(&closed[i]);
}

/* One that a thread had, which the server has to answer for no more. */
static void discard(struct server *server, struct link *link, const struct asked *asked)
{
	link_close(link);
	pthread_mutex_lock(&pool.lock);
	server->open_count--;
	server->is_tried = false;
	server->writers -= asked->from != NULL;
	pthread_cond_broadcast(&server->freed);
	pthread_mutex_unlock(&pool.lock);
}

/* The connection that told it was closed. */
static void found_self(struct server *server)
{
	pthread_mutex_lock(&pool.lock);
	server->open_count--;
	server->is_tried = false;
	server->is_self = true;
	pthread_cond_broadcast(&server->freed);
	pthread_mutex_unlock(&pool.lock);
}

/* False: the server is left alone, is ourselves, or is busy for longer than that. */
static bool take_link(struct server *server, struct link *link, const struct asked *asked, int64_t *begun_ns)
{
	const int64_t deadline_ns = asked->until_ns;
	const struct timespec until = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
	char why[POOL_WHY_BYTES] = "";
	struct place to;
	bool is_open = false, may = false;
	int err = 0;

	pthread_mutex_lock(&pool.lock);
	while (server->place.length && !server->is_self && !rests(server, now_ns())) {
		if ((server->idle_count || server->open_count < CONNECTIONS_MOST) &&
		    (!asked->from || server->writers < WRITERS_MOST)) {
			may = true;
			break;
		}
		if (pthread_cond_timedwait(&server->freed, &pool.lock, &until))
			break;
	}
	if (may) {
		server->is_tried = server->failures_in_a_row >= FAILURES_MOST;
		server->writers += asked->from != NULL;
		is_open = server->idle_count;
		if (is_open)
			*link = server->idle[--server->idle_count];
		else
			server->open_count++;
		to = server->place;
	}
	pthread_mutex_unlock(&pool.lock);
	if (!may) {
		COUNT_POOL(skipped, 1);
		return false;
	}
	if (is_open && !link_is_quiet(link)) { /* closed by the server meanwhile */
		link_close(link);
		is_open = false;
	}
	if (!is_open && (err = connect_to(&to, link, earlier(now_ns() + CONNECT_NS_MOST, deadline_ns), why))) {
		if (err == -ELOOP && serve_is_on()) /* who answers nobody is told a lie */
			found_self(server);
		else
			give_back(server, link, asked, false, *why ? why : strerror(-err));
	}
	/* What a connection takes is no answer's time; nor is a turn behind what a host reads for us. */
	if (!is_open || pool.has_peers)
		*begun_ns = now_ns();
	return !err;
}

/* ---- one request ----------------------------------------------------------------------------------- */
enum { ASK_FAILED = -1, ASK_LOST = -2 }; /* beside the replies; lost: it may have done what it was asked */

static void forbid_writes(struct server *server, const char *why)
{
	pthread_mutex_lock(&pool.lock);
	server->no_writes_until_ns = now_ns() + NO_WRITES_NS;
	memcpy(server->why, why, POOL_WHY_BYTES);
	pthread_mutex_unlock(&pool.lock);
}

static int send_to(struct server *server, struct link *link, const struct asked *asked, bool *has_waited,
		   char why[POOL_WHY_BYTES])
{
	struct request of = {
	    .prefix = pool.prefix,
	    .key = asked->key,
	    .deadline_ns = earlier(now_ns() + request_ns(asked->size), asked->until_ns),
	    .until_ns = asked->until_ns,
	    .wait_ns = pool_wait_ns(asked->size),
	    .has_waited = has_waited,
	};
	bool may_write;
	int result;

	if (pool.has_peers)
		return wire_ask(link, &of, asked->wanted, asked->into, asked->size, why);
	pthread_mutex_lock(&pool.lock);
	may_write = now_ns() >= server->no_writes_until_ns;
	pthread_mutex_unlock(&pool.lock);
	if (!asked->into && !may_write)
		return REPLY_ERROR;
	if (asked->from)
		result = wire_put(link, &of, asked->from, asked->size, why);
	else if (!asked->into)
		result = wire_delete(link, &of, why);
	else
		result = wire_get(link, &of, may_write ? &pool.lease : NULL, lease_ms(asked->size), asked->into,
				  asked->size, why);
	if (result == REPLY_ERROR && may_write && wire_is_read_only(why)) {
		forbid_writes(server, why);
		*why = '\0';
		may_write = false;
		if (asked->into)
			result = wire_get(link, &of, NULL, 0, asked->into, asked->size, why);
	}
	if (result == REPLY_ERROR && !strncmp(why, "WRONGTYPE ", 10)) /* somebody else's, and no string */
		return REPLY_STRANGE;
	return result == REPLY_NOTHING && !may_write ? REPLY_ERROR : result; /* no lease: it is not to be written */
}

/* A request, from a place in line to what became of it: a reply, ASK_FAILED or ASK_LOST. */
static int ask(const struct asked *asked)
{
	struct server *server = &pool.servers[asked->server];
	char why[POOL_WHY_BYTES] = "";
	struct link link;
	int64_t begun_ns = now_ns();
	bool has_waited = false;
	int result;

	if (!take_link(server, &link, asked, &begun_ns))
		return ASK_FAILED;
	result = send_to(server, &link, asked, &has_waited, why);
	if (asked->into && (result == REPLY_BLOCK || result == REPLY_NOTHING)) {
		int64_t *of = &server->answer_ns[kind_of(asked->size)];
		int64_t ns = earlier(now_ns() - begun_ns, SLOWEST * slow_ns(asked->size));

		pthread_mutex_lock(&pool.lock);
		server->hits += result == REPLY_BLOCK;
		if (!has_waited) /* else it was the origin that took so long */
			*of = average(*of, ns);
		pthread_mutex_unlock(&pool.lock);
	}
	if (result < 0)
		give_back(server, &link, asked, false, *why ? why : strerror(-result));
	else if (result == REPLY_STRANGE) /* what is left of it was not received */
		discard(server, &link, asked);
	else if (result == REPLY_ERROR && *why && !wire_is_moved(why) && !wire_is_refused(why))
		give_back(server, &link, asked, false, why);
	else
		give_back(server, &link, asked, true, "");
	COUNT_POOL(moved, result == REPLY_ERROR && wire_is_moved(why));
	return result < 0 ? ASK_LOST : result;
}

/* ---- blocks ------------------------------------------------------------------------------------------ */
/* Until another host has read it. */
static int wait_for_lease(const struct asked *asked, int64_t *asked_ns)
{
	int64_t until_ns = now_ns() + (int64_t)(LEASES_WAITED * lease_ms(asked->size) * 1e6), pause_ns = POLL_NS_FIRST;
	int result = REPLY_LEASE;

	COUNT_POOL(waits, 1);
	/* The last time to ask has time for the answer. */
	until_ns = earlier(until_ns, asked->until_ns - request_ns(asked->size));
	while (result == REPLY_LEASE && now_ns() + 2 * pause_ns < until_ns) {
		/* Others wait for the same: not all at one time. */
		const struct timespec pause = {.tv_nsec = (long)(pause_ns / 2 + now_ns() % pause_ns)};

		nanosleep(&pause, NULL);
		pause_ns = pause_ns * 2 < POLL_NS_MOST ? pause_ns * 2 : POLL_NS_MOST;
		*asked_ns = now_ns();
		result = ask(asked);
	}
	return result;
}

static uint8_t server_of(const unsigned char *key, uint32_t size, const uint8_t of_slots[POOL_SLOTS])
{
	uint16_t slot = key_slot(pool.prefix, key);
	uint8_t index;

	pthread_mutex_lock(&pool.lock);
	index = of_slots[slot];
	if (index != POOL_NO_SERVER && pool.servers[index].is_self)
		index = POOL_NO_SERVER;
	else if (index != POOL_NO_SERVER && !rests(&pool.servers[index], now_ns()) &&
		 is_passed_over(&pool.servers[index], size)) {
		index = POOL_NO_SERVER;
		COUNT_POOL(skipped, 1);
	}
	pthread_mutex_unlock(&pool.lock);
	return index;
}

bool pool_owns(const unsigned char *key)
{
	uint16_t slot = key_slot(pool.prefix, key);
	bool owns;

	pthread_mutex_lock(&pool.lock);
	owns = pool.slots[slot] != POOL_NO_SERVER && pool.servers[pool.slots[slot]].is_self;
	pthread_mutex_unlock(&pool.lock);
	return owns;
}

bool pool_meet(unsigned index)
{
	struct asked asked = {.server = (uint8_t)index, .until_ns = now_ns() + CONNECT_NS_MOST};
	int64_t begun_ns;
	struct link link;

	if (index >= atomic_load(&pool.count) || !take_link(&pool.servers[index], &link, &asked, &begun_ns))
		return false;
	give_back(&pool.servers[index], &link, &asked, true, "");
	return true;
}

bool pool_is_us(const char *dataset, const char *id, bool *is_dataset)
{
	char ours[LEASE_TEXT];

	*is_dataset = !strcmp(dataset, pool.dataset);
	lease_text(&pool.lease, ours);
	return !strcmp(id, ours);
}

const char *pool_prefix(void) { return pool.prefix; }

static bool get(const struct wanted *wanted, unsigned char *into, uint32_t size, struct pool_ticket *ticket)
{
	struct asked asked = {
	    .wanted = wanted, .into = into, .size = size, .key = ticket->key, .until_ns = now_ns() + pool.patience_ns};
	int result = ASK_FAILED;

	/* The heir only where the first has surely no lease for us, and while there is time for an answer. */
	for (unsigned i = 0; result == ASK_FAILED && i < 2 && now_ns() + i * request_ns(size) < asked.until_ns; i++) {
		const uint8_t server = server_of(ticket->key, size, i ? pool.heirs : pool.slots);

		if (server == POOL_NO_SERVER)
			break;
		ticket->server = asked.server = server;
		ticket->leased_ns = now_ns();
		result = ask(&asked);
	}
	if (ticket->server == POOL_NO_SERVER)
		return false;
	if (result == REPLY_LEASE)
		result = wait_for_lease(&asked, &ticket->leased_ns);
	if (result == REPLY_BLOCK)
		return true;
	COUNT_POOL(misses, result >= 0); /* else it is a failure, or was skipped */
	COUNT_POOL(damaged, result == REPLY_STRANGE);
	COUNT_POOL(leases, result == REPLY_NOTHING && !pool.has_peers);
	if (result != REPLY_NOTHING)
		ticket->leased_ns = 0;
	/* Lost: the lease may be ours. A host reads for itself. */
	ticket->is_wanted = !pool.has_peers &&
			    (result == REPLY_NOTHING || result == REPLY_STRANGE || result == ASK_LOST);
	return false;
}

bool pool_get(uint32_t ino, const struct version *of, uint32_t block, unsigned char *into, uint32_t size,
	      struct pool_ticket *ticket)
{
	struct wanted wanted = {.of = *of, .block = block};
	bool found = false;
	char *path;

	*ticket = (struct pool_ticket){.server = POOL_NO_SERVER};
	if (!atomic_load(&pool.count) || !size || clock_ns(CLOCK_REALTIME) - of->ctime_ns < pool.min_age_ns ||
	    !(path = key_of(ino, &wanted, ticket->key)))
		return false;
	if (!pool.has_peers || wanted.length <= POOL_PATH_MOST)
		found = get(&wanted, into, size, ticket);
	free(path);
	return found;
}

void pool_finish(const struct pool_ticket *ticket, const unsigned char *data, uint32_t size)
{
	const int64_t now = now_ns();
	struct asked asked = {.server = ticket->server, .key = ticket->key, .from = data, .size = size};

	if (!ticket->is_wanted)
		return;
	asked.until_ns = now + pool.patience_ns;
	if (data) {
		if (ask(&asked) == REPLY_DONE) {
			COUNT_POOL(written, 1);
			COUNT_POOL(bytes_written, size);
		}
	} else if (ticket->leased_ns) { /* only as long as it is surely ours */
		asked.until_ns = ticket->leased_ns + (int64_t)LEASE_MS_LEAST * 1000000 / 2;
		if (now < asked.until_ns)
			ask(&asked);
	}
}
