/* What the kernel is told through /dev/fuse. */
#ifndef FUSECACHE_KERNEL_H
#define FUSECACHE_KERNEL_H

#include "../table/table.h"

/* Bytes pushed: less than size when the node stopped being of this version; or -errno. */
int64_t kernel_store(int fd, uint32_t ino, uint64_t offset, const void *data, size_t size, const struct version *of);
int kernel_inval_inode(int fd, uint64_t ino, int64_t offset, int64_t length); /* 1: told, 0: unknown */
int kernel_inval_entry(int fd, uint64_t parent, const char *name, size_t len);
int kernel_expire_entry(int fd, uint64_t parent, const char *name, size_t len);
int kernel_resend(int fd);
/* The kernel tells in a NOTIFY_REPLY of this number whether it has the file's first byte; -ENOENT: it does not know the
 * inode. */
int kernel_retrieve(int fd, uint64_t ino, uint64_t number);

#endif
