/* How far the inode numbers of a file system can be trusted, by its type.
 *
 * Some file systems make numbers up and forget them: sshfs and most others in user space when the kernel drops
 * an inode, FAT likewise. There a file is known by path, size and times (docs/ARCHITECTURE.md, "Inode numbers
 * that change"). Others keep a number as long as the file lives: there another number is always another file, be
 * its size and times the same (two copies made within one tick of the clock, mounted in turn at one place).
 * What is not known by its type is watched: changes.c counts how often a name's number was all that had changed.
 */
#include "table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a file system. Made up: its inode numbers are given anew now and then. */
enum numbers { NUMBERS_UNKNOWN, NUMBERS_MADE_UP, NUMBERS_KEPT };

static bool is_one_of(const char *type, const char *const *list)
{
	for (; *list; list++)
		if (!strcmp(type, *list))
			return true;
	return false;
}

static enum numbers numbers_of(const char *type, const char *options)
{
	/* In user space, but with numbers that the file system keeps: its word for it, so it is watched. */
	static const char *const said[] = {
	    "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.mergerfs", "fuse.mfs", NULL};
	static const char *const made_up[] = {"exfat", "msdos", "vfat", NULL};
	static const char *const kept[] = {"bcachefs", "btrfs",	   "ceph",   "erofs", "ext2", "ext3",	"ext4",
					   "f2fs",     "jfs",	   "lustre", "nfs",   "nfs4", "nilfs2", "ramfs",
					   "reiserfs", "squashfs", "tmpfs",  "xfs",   "zfs",  NULL};

	if (!strcmp(type, "cifs") || !strcmp(type, "smb3"))
		return strstr(options, "noserverino") ? NUMBERS_MADE_UP : NUMBERS_UNKNOWN;
	if (!strcmp(type, "fuse") || !strncmp(type, "fuse.", 5))
		return is_one_of(type, said) ? NUMBERS_UNKNOWN : NUMBERS_MADE_UP;
	if (is_one_of(type, made_up))
		return NUMBERS_MADE_UP;
	return is_one_of(type, kept) ? NUMBERS_KEPT : NUMBERS_UNKNOWN;
}

/* The mount table is text: this never asks the file system itself. */
static enum numbers device_numbers(uint32_t major_no, uint32_t minor_no)
{
	FILE *table = fopen("/proc/self/mountinfo", "re");
	enum numbers answer = NUMBERS_UNKNOWN;
	char device[32], *line = NULL;
	bool found = false;
	size_t cap = 0;

	if (!table)
		return answer;
	snprintf(device, sizeof(device), "%u:%u", major_no, minor_no);
	while (!found && getline(&line, &cap, table) > 0) {
		char own[32] = "", type[64] = "", *rest = strstr(line, " - ");
		int options = 0;

		found = rest && sscanf(line, "%*s %*s %31s", own) == 1 && !strcmp(own, device) &&
			sscanf(rest, " - %63s %*s %n", type, &options) == 1;
		if (found)
			answer = numbers_of(type, rest + options);
	}
	free(line);
	fclose(table);
	return answer;
}

/* ---- the devices of the table ------------------------------------------------------------- */
void device_classify(uint32_t index)
{
	const uint64_t device = table.head->device[index];
	const enum numbers numbers = device_numbers((uint32_t)(device >> 32), (uint32_t)device);

	table.keeps_numbers[index] = numbers == NUMBERS_KEPT;
	if (numbers != NUMBERS_UNKNOWN)
		atomic_store(&table.head->doubts[index], numbers == NUMBERS_MADE_UP ? DOUBTS_MANY : 0);
}

/* DEVICE_OTHER: not met yet. */
uint32_t device_find(uint32_t major_no, uint32_t minor_no)
{
	uint64_t device = (uint64_t)major_no << 32 | minor_no;
	uint32_t count = table.head ? atomic_load(&table.head->devices) : 0;

	for (uint32_t i = 0; i < count; i++)
		if (table.head->device[i] == device)
			return i;
	/* a look that began there: at the same files */
	return count && device == atomic_load(&table.head->former_device) ? ROOT_DEVICE : DEVICE_OTHER;
}

bool table_device(uint32_t ino, uint32_t *major_no, uint32_t *minor_no)
{
	const struct node *n = &table.nodes[ino];
	uint32_t index = node_device(n);

	if (index == DEVICE_OTHER || (node_flags(n) & NODE_NOATTR))
		return false;
	*major_no = (uint32_t)(table.head->device[index] >> 32);
	*minor_no = (uint32_t)table.head->device[index];
	return true;
}

uint32_t device_index(uint32_t major_no, uint32_t minor_no)
{
	uint32_t count = atomic_load(&table.head->devices), found = device_find(major_no, minor_no);

	if (found != DEVICE_OTHER || count == DEVICES_MOST)
		return found;
	table.head->device[count] = (uint64_t)major_no << 32 | minor_no;
	device_classify(count);
	atomic_store_explicit(&table.head->devices, count + 1, memory_order_release);
	return count;
}
