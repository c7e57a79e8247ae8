/* Blocks that other hosts of the pool have read: docs/POOL.md has the format and the rules. */
#ifndef FUSECACHE_POOL_H
#define FUSECACHE_POOL_H

#include "../table/table.h"

#include <netinet/in.h>
#include <sys/socket.h>

#define POOL_SLOTS 16384u
#define POOL_SERVERS_MOST 64u
#define POOL_NO_SERVER 255u
#define POOL_KEY_BYTES 16u
#define POOL_WHY_BYTES 160u
#define POOL_KEY_TEXT 128u
#define POOL_NAME_BYTES 64u    /* of a dataset's name, at most */
#define POOL_PATH_MOST 4095u   /* bytes of a path that a host is asked for */

struct pool_settings { /* texts are copied; NULL: not given */
	const char *dataset;
	const char *user, *password;
	const char *ca, *certificate, *private_key; /* files; ca: TLS */
	bool has_peers;				    /* servers are hosts, as this one is */
	int64_t min_age_ns;			    /* younger files are not shared: hosts' clocks differ */
	int64_t patience_ns;			    /* a READ waits for the pool no longer, whatever happens */
};
/* Once in the life of a process. False: `why` says what is wrong with the files. */
bool pool_begin(const struct pool_settings *settings, char why[POOL_WHY_BYTES]);
/* Its index, from now on; it has no address yet. -ENOSPC: there are too many. */
int pool_server(const char *host, const char *port);
void pool_address(unsigned server, const struct sockaddr *address, socklen_t length);
/* Of each slot the index of its server, and of its heir, who is asked when that does not answer; or POOL_NO_SERVER. */
void pool_slots(const uint8_t servers[POOL_SLOTS], const uint8_t heirs[POOL_SLOTS]);

/* A block that was not in the pool: what is to be done when it has been read. */
struct pool_ticket {
	unsigned char key[POOL_KEY_BYTES];
	int64_t leased_ns; /* CLOCK_MONOTONIC; 0: another one has the lease, or nobody */
	uint8_t server;
	bool is_wanted; /* the pool takes the block */
};
/* Is it in the pool? Then `into` has it, `size` bytes. It waits, for an answer, or for another host that reads it. */
bool pool_get(uint32_t ino, const struct version *of, uint32_t block, unsigned char *into, uint32_t size,
	      struct pool_ticket *ticket);
/* It was read at the origin. NULL: it was not. */
void pool_finish(const struct pool_ticket *ticket, const unsigned char *data, uint32_t size);
/* The same of what others will take away meanwhile; the copy is NULL where none is wanted, or may be made. */
unsigned char *pool_copy(const struct pool_ticket *ticket, const unsigned char *data, uint32_t size);
void pool_finish_copy(const struct pool_ticket *ticket, unsigned char *copy, uint32_t size);
void pool_note_origin(int64_t ns, uint32_t size); /* so long a read of the origin has taken */

struct pool_counters { /* of this process */
	_Atomic uint64_t misses, waits, leases, written, bytes_written, failures, damaged, moved, skipped;
};
extern struct pool_counters pool_counters;
struct pool_state { /* of a server */
	char host[256], port[8], why[POOL_WHY_BYTES];
	bool has_address, is_left_alone, is_self;
	unsigned connections;
	uint64_t hits, failures;
};
bool pool_look(unsigned server, struct pool_state *out); /* false: there is none */

/* ---- what other hosts ask this one for (peers) ------------------------------------------------ */
struct wanted {
	const char *path; /* `length` bytes */
	size_t length;
	struct version of; /* origin_ino: unknown, 0 */
	uint32_t block;
};
/* Connects to a server, so that it is known to be there, or to be this process. Waits for a second at most. */
bool pool_meet(unsigned server);
bool key_make(const struct wanted *of, unsigned char key[POOL_KEY_BYTES]);
bool pool_owns(const unsigned char *key); /* is the block's server this process? */
bool pool_owns_file(uint32_t ino);	  /* of one block; false where nobody is answered */
int64_t pool_wait_ns(uint32_t size);	  /* so long a block that is read for others is waited for */

enum serve_result { SERVE_BLOCK, SERVE_ABSENT, SERVE_NOTHING, SERVE_STALE, SERVE_BUSY };
struct served { /* a block; whoever gives it back calls `release` */
	const unsigned char *data;
	uint32_t size;
	void *of;
	void (*release)(struct served *);
};
struct serve_from {
	/* This host's SSD. ABSENT: it is not there, but may be read: `fetch`. */
	enum serve_result (*find)(const struct wanted *wanted, struct served *into);
	enum serve_result (*fetch)(const struct wanted *wanted, struct served *into); /* waits for it */
};
/* From now on others are answered, once in a process. -errno: not at this address, or not now. */
int serve_begin(const struct sockaddr *at, socklen_t length, const struct serve_from *from);
bool serve_is_on(void);
void serve_holds(uint64_t bytes, uint64_t limit_bytes, const char *version); /* for INFO */
struct serve_counters {							     /* of this process */
	_Atomic uint64_t connections, refused, requests, hits, fetched, bytes, stale, busy, malformed;
};
extern struct serve_counters serve_counters; /* connections: that are open now */

/* ---- of this room alone --------------------------------------------------------------------- */
/* wanted: of, block; its path is what is returned, malloc'ed. NULL: nobody is to be asked for it. */
char *key_of(uint32_t ino, struct wanted *wanted, unsigned char key[POOL_KEY_BYTES]);
void key_text(const char *prefix, const unsigned char *key, char text[POOL_KEY_TEXT]);
uint16_t key_slot(const char *prefix, const unsigned char *key);
/* What one that connects says of itself. True: it is this process. */
bool pool_is_us(const char *dataset, const char *id, bool *is_dataset);
const char *pool_prefix(void); /* of keys */
struct place {
	const char *host; /* as its certificate names it */
	struct sockaddr_storage address;
	socklen_t length;
};
struct link {
	int fd;
	void *tls; /* OpenSSL's; NULL: plain */
};
/* Deadlines are of CLOCK_MONOTONIC; errors -errno. */
#define SHA256_BYTES 32
bool link_load(char why[POOL_WHY_BYTES]); /* before all else here */
void link_sha256(const void *data, size_t size, unsigned char digest[SHA256_BYTES]);
bool link_use_tls(const struct pool_settings *settings, char why[POOL_WHY_BYTES]);
int link_open(struct link *link, const struct place *to, int64_t deadline_ns, char why[POOL_WHY_BYTES]);
/* Of the other end: `fd` is the link's, whatever happens. */
int link_accept(struct link *link, int fd, int64_t deadline_ns);
void link_close(struct link *link);
bool link_is_quiet(const struct link *link); /* nothing has come that nobody asked for, nor its end */
int link_send(struct link *link, const void *data, size_t size, bool more, int64_t deadline_ns);
/* At least one byte: how many. -ECONNRESET: its end. */
ssize_t link_receive(struct link *link, void *to, size_t most, int64_t deadline_ns);

enum reply { REPLY_NOTHING, REPLY_DONE, REPLY_BLOCK, REPLY_LEASE, REPLY_STRANGE, REPLY_ERROR };
struct lease {
	unsigned char holder[8]; /* a process, at random */
};
struct request {
	const char *prefix; /* of the key */
	const unsigned char *key;
	int64_t deadline_ns; /* of the first byte of the answer */
	int64_t until_ns;    /* of the last, while they flow */
	int64_t wait_ns;     /* of a host that reads the block first: so long until the first byte */
	bool *has_waited;    /* it did */
};
#define LEASE_TEXT 17
void lease_text(const struct lease *lease, char text[LEASE_TEXT]);
/* All answer a `reply`, or -errno: then the connection is of no more use. `why`: what an error says. */
int wire_log_in(struct link *link, const char *user, const char *password, int64_t deadline_ns,
		char why[POOL_WHY_BYTES]);
/* Of a host: REPLY_ERROR, SELF: it is this process. */
int wire_hello(struct link *link, const char *dataset, const struct lease *id, int64_t deadline_ns,
	       char why[POOL_WHY_BYTES]);
int wire_ask(struct link *link, const struct request *of, const struct wanted *wanted, unsigned char *into,
	     uint32_t size, char why[POOL_WHY_BYTES]);
/* The header and the bytes, as an answer. */
int wire_answer(struct link *link, const unsigned char *key, const unsigned char *data, uint32_t size,
		int64_t deadline_ns);
/* Or the lease, for so long. NULL: the block alone. One that is ours already is REPLY_NOTHING, as a new one. */
int wire_get(struct link *link, const struct request *of, const struct lease *lease, unsigned lease_ms,
	     unsigned char *into, uint32_t size, char why[POOL_WHY_BYTES]);
int wire_put(struct link *link, const struct request *of, const unsigned char *data, uint32_t size,
	     char why[POOL_WHY_BYTES]);
bool wire_is_moved(const char *why);
bool wire_is_refused(const char *why);
bool wire_is_read_only(const char *why);
int wire_delete(struct link *link, const struct request *of, char why[POOL_WHY_BYTES]);

/* ---- of the server ---------------------------------------------------------------------------- */
#define MEMBER_NAME_BYTES 320u
#define MEMBER_TEXT_BYTES 8192u
/* What members say of themselves. False: there is no room, or it is too long. */
bool member_write(const char *name, size_t name_length, const char *text, size_t text_length);
/* malloc'ed: the answer to HGETALL. */
char *members_read(size_t *length);

#endif
