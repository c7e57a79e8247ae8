/* Notifications to the kernel. They may wait for locks that only an answer releases: no thread on which an answer
 * depends calls them (docs/ARCHITECTURE.md, Threads do not block each other).
 */
#include "kernel.h"

#include <linux/fuse.h>
#include <string.h>
#include <sys/uio.h>

#include "../ram/ram.h"

#define NOTIFY_RESEND 7
#define PUSH_BYTES (1u << 20)

static int notify(int fd, int code, struct iovec *parts, int count)
{
	struct fuse_out_header *head = parts[0].iov_base;
	size_t len = 0;

	for (int i = 0; i < count; i++)
		len += parts[i].iov_len;
	head->len = (uint32_t)len;
	head->error = code;
	head->unique = 0;
	while (writev(fd, parts, count) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

int kernel_inval_inode(int fd, uint64_t ino, int64_t offset, int64_t length)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_inval_inode_out out;
	} message = {.out = {.ino = ino, .off = offset, .len = length}};
	struct iovec part = {&message, sizeof(message)};
	int err = notify(fd, FUSE_NOTIFY_INVAL_INODE, &part, 1);

	return err == -ENOENT ? 0 : err ? err : 1;
}

static int forget_entry(int fd, uint64_t parent, const char *name, size_t len, uint32_t flags)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_inval_entry_out out;
		char name[NAME_BYTES_MOST + 1];
	} message = {.out = {.parent = parent, .namelen = (uint32_t)len, .flags = flags}};
	struct iovec part = {&message, offsetof(__typeof__(message), name) + len + 1};
	int err;

	if (len > NAME_BYTES_MOST)
		return -ENAMETOOLONG;
	memcpy(message.name, name, len);
	err = notify(fd, FUSE_NOTIFY_INVAL_ENTRY, &part, 1);
	return err == -ENOENT ? 0 : err;
}

int kernel_inval_entry(int fd, uint64_t parent, const char *name, size_t len)
{
	return forget_entry(fd, parent, name, len, 0);
}

/* Linux 6.2; before that the flag is ignored, and the inode's pages go with the entry. */
int kernel_expire_entry(int fd, uint64_t parent, const char *name, size_t len)
{
	return forget_entry(fd, parent, name, len, FUSE_EXPIRE_ONLY);
}

int kernel_resend(int fd)
{
	struct fuse_out_header head;
	struct iovec part = {&head, sizeof(head)};

	return notify(fd, NOTIFY_RESEND, &part, 1);
}

int kernel_retrieve(int fd, uint64_t ino, uint64_t number)
{
	struct {
		struct fuse_out_header head;
		struct fuse_notify_retrieve_out out;
	} message = {.out = {.notify_unique = number, .nodeid = ino, .size = 1}};
	struct iovec part = {&message, sizeof(message)};

	return notify(fd, FUSE_NOTIFY_RETRIEVE, &part, 1);
}

/* The caller has clipped to the size of version `of`: the kernel would extend the file otherwise.
 *
 * INVARIANT: pages of an older version never stay: the version is looked at before and after each write;
 * a change in between marks the inode stale, and a server that dies in between leaves its slot. */
int64_t kernel_store(int fd, uint32_t ino, uint64_t offset, const void *data, size_t size, const struct version *of)
{
	int slot = push_slot_take(ino), err = 0;
	size_t done = 0;

	if (slot < 0)
		return 0;
	table_served(ino);
	while (done < size && !err && table_is_current(ino, of)) {
		size_t part = size - done < PUSH_BYTES ? size - done : PUSH_BYTES;
		struct {
			struct fuse_out_header head;
			struct fuse_notify_store_out out;
		} message = {.out = {.nodeid = ino, .offset = offset + done, .size = (uint32_t)part}};
		struct iovec parts[2] = {
		    {&message, sizeof(message)},
		    {(void *)((uintptr_t)data + done), part},
		};

		/* Blocks on pages that wait for an answer: never called from a front thread. */
		err = notify(fd, FUSE_NOTIFY_STORE, parts, 2);
		if (!table_is_current(ino, of)) {
			table_mark_stale(ino);
			break;
		}
		if (!err) {
			ring_note(ino, of->size, offset + done, part);
			done += part;
		}
	}
	push_slot_free(slot);
	return err ? err : (int64_t)done;
}
