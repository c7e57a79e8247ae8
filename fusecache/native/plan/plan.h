/* What a plan says of each inode, and what was seen of it. */
#ifndef FUSECACHE_PLAN_H
#define FUSECACHE_PLAN_H

#include "../base/base.h"

enum {
	PLAN_ARMED = 1,
	PLAN_READ = 2,
	PLAN_COMING = 4,
	PLAN_WANTED = 8,
	PLAN_QUEUED = 16,
	PLAN_FLYING = 32,
	PLAN_STAGED = 64,
	PLAN_FAILED = 128,
};
#define PLAN_STATE 0xf8u /* those that an observation carries */
extern _Atomic bool plan_active;
static inline bool plan_is_active(void) { return atomic_load_explicit(&plan_active, memory_order_relaxed); }
int plan_init(void);
int plan_begin(void);
void plan_end(void);
uint8_t plan_flags(uint32_t ino); /* 0 without a plan */
void plan_mark(uint32_t ino, uint8_t add, uint8_t remove);
int plan_seen_fd(void);
struct seen {
	uint32_t ino, process, parent; /* who asked, and who has started that one; 0: unknown */
	uint8_t kind;
};
size_t plan_take_seen(size_t most, struct seen *out, uint32_t *lost);
/* At offset 0, by thread `tid`, which waits for the answer; 0: unknown. */
void plan_saw_read(uint32_t ino, uint8_t what, int tid);
/* A look-up by thread `tid` takes the wire away, but not one of our own. Not 0: for plan_saw_lookup, which is called
 * before the answer, and with no lock held: it reads /proc. */
uint8_t plan_cut_wire(uint32_t ino, int tid);
void plan_saw_lookup(uint32_t ino, uint8_t kind, int tid);
/* This thread makes look-ups of our own until the end; NULL: so many do already. */
struct asking;
struct asking *plan_asking_begin(void);
void plan_asking_end(struct asking *asking); /* or NULL */
bool plan_is_asking(int tid);

#endif
