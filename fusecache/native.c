/* fusecache._native: the Python face of the C part. The contract is in _native.pyi.
 *
 * Arguments are checked here; every call that may block runs without the GIL; negative errno values
 * become OSError. The same shared object also interposes libfuse (native_front.c) when it was loaded
 * with RTLD_GLOBAL before pyfuse3.
 */
#include "native_py.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SIBLINGS_MOST 32
#define SIBLINGS_WALK 16384u /* names looked at under one hold of the lock */

PyObject *os_error(int negative_errno)
{
	if (negative_errno == -ENOMEM)
		return PyErr_NoMemory();
	errno = -negative_errno;
	return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *none_or_error(int err)
{
	if (err < 0)
		return os_error(err);
	Py_RETURN_NONE;
}

void list_put(PyObject **list, size_t at, PyObject *item)
{
	if (item)
		PyList_SET_ITEM(*list, (Py_ssize_t)at, item);
	else
		Py_CLEAR(*list);
}

void list_append(PyObject **list, PyObject *item)
{
	if (!item || PyList_Append(*list, item))
		Py_CLEAR(*list);
	Py_XDECREF(item);
}

PyObject *unknown_inode(unsigned long long ino)
{
	return PyErr_Format(PyExc_KeyError, "unknown inode %llu", ino);
}

bool take_ino(PyObject *arg, uint64_t *ino)
{
	*ino = PyLong_AsUnsignedLongLong(arg);
	if (PyErr_Occurred()) {
		if (!PyErr_ExceptionMatches(PyExc_OverflowError))
			return false;
		PyErr_Clear();
		*ino = 0; /* no such inode */
	}
	return true;
}

bool convert_version(PyObject *arg, struct version *out)
{
	unsigned long long ino, size;
	long long mtime, ctime;

	if (!PyTuple_Check(arg)) {
		PyErr_SetString(PyExc_TypeError, "version: a tuple of four ints");
		return false;
	}
	if (!PyArg_ParseTuple(arg, "KKLL;version", &ino, &size, &mtime, &ctime))
		return false;
	*out = (struct version){ino, size, mtime, ctime};
	return true;
}

static PyObject *name_bytes(uint32_t node)
{
	size_t len;
	const unsigned char *name = node_name(&table.nodes[node], &len);

	return PyBytes_FromStringAndSize((const char *)name, (Py_ssize_t)len);
}

PyThreadState *lock_read(void)
{
	PyThreadState *without_gil;

	if (!pthread_rwlock_tryrdlock(&table.lock))
		return NULL;
	without_gil = PyEval_SaveThread();
	pthread_rwlock_rdlock(&table.lock);
	return without_gil;
}

void unlock(PyThreadState *without_gil)
{
	pthread_rwlock_unlock(&table.lock);
	if (without_gil)
		PyEval_RestoreThread(without_gil);
}

/* ---- table -------------------------------------------------------------------------------- */
static PyObject *py_attach(PyObject *module, PyObject *args, PyObject *kwargs)
{
	int table_fd, source_fd, zero_open, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iip", KEYWORDS("table_fd", "source_fd", "zero_open"),
					 &table_fd, &source_fd, &zero_open))
		return NULL;
	if (front_running()) {
		PyErr_SetString(PyExc_RuntimeError, "the front is running on the attached table");
		return NULL;
	}
	WITHOUT_GIL(watch_reset(); plan_end(); log_forget(); err = table_attach(table_fd, source_fd, zero_open));
	if (err == -EINVAL) {
		PyErr_SetString(PyExc_ValueError,
				"the inode table has another layout version or open mode");
		return NULL;
	}
	return err ? os_error(err) : PyLong_FromUnsignedLong(table_count());
}

static PyObject *py_adopt_source(PyObject *module, PyObject *arg)
{
	int fd = PyObject_AsFileDescriptor(arg), err;

	(void)module;
	if (fd < 0)
		return NULL;
	WITHOUT_GIL(err = table_adopt_source(fd));
	if (err)
		return os_error(err);
	Py_RETURN_NONE;
}

static PyObject *py_table_mode(PyObject *module, PyObject *arg)
{
	int fd = PyObject_AsFileDescriptor(arg);

	(void)module;
	return fd < 0 ? NULL : PyLong_FromLong(table_mode(fd));
}

static PyObject *py_count(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromUnsignedLong(table_count());
}

static PyObject *py_memory_bytes(PyObject *module, PyObject *unused)
{
	uint64_t bytes;

	(void)module;
	(void)unused;
	WITHOUT_GIL(bytes = table_bytes() + ring_memory() + atomic_load(&log_counters.buffer_bytes));
	return PyLong_FromUnsignedLongLong(bytes);
}

struct ticking {
	PyThreadState *state;
	PyObject *tick;
	bool raised;
};

static int call_tick(void *context)
{
	struct ticking *ticking = context;
	PyObject *result;

	PyEval_RestoreThread(ticking->state);
	result = PyObject_CallNoArgs(ticking->tick);
	ticking->raised = !result;
	Py_XDECREF(result);
	ticking->state = PyEval_SaveThread();
	return result ? 0 : -ECANCELED;
}

static PyObject *py_scan(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct scan_result result;
	struct ticking ticking = {.tick = NULL};
	PyObject *ino_arg;
	uint64_t ino;
	int err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", KEYWORDS("ino", "tick"), &ino_arg,
					 &ticking.tick) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (ticking.tick == Py_None)
		ticking.tick = NULL;
	ticking.state = PyEval_SaveThread();
	err = table_scan(ino, ticking.tick ? call_tick : NULL, &ticking, &result);
	PyEval_RestoreThread(ticking.state);
	if (err)
		return ticking.raised ? NULL : os_error(err);
	return Py_BuildValue("KKK", (unsigned long long)result.added, (unsigned long long)result.removed,
			     (unsigned long long)result.changed);
}

static PyObject *py_lookup(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyThreadState *locked;
	PyObject *parent_arg;
	const struct node *dir;
	const char *name;
	Py_ssize_t len;
	uint64_t parent;
	uint32_t found;
	long result = -1;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#", KEYWORDS("parent", "name"), &parent_arg,
					 &name, &len) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	locked = lock_read();
	dir = node_at(parent);
	if (dir && len <= (Py_ssize_t)NAME_BYTES_MOST) { /* else add() says what is wrong with it */
		found = table_find((uint32_t)parent, name, (size_t)len);
		if (found)
			result = node_flags(&table.nodes[found]) & NODE_NOATTR ? -1
									       : (long)node_primary(found);
		else
			result = node_flags(dir) & NODE_LISTED ? 0 : -1;
	}
	unlock(locked);
	return PyLong_FromLong(result);
}

static PyObject *py_add(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *parent_arg;
	const char *name;
	Py_ssize_t len;
	uint64_t parent;
	int64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#", KEYWORDS("parent", "name"), &parent_arg,
					 &name, &len) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	WITHOUT_GIL(ino = table_add(parent, name, (size_t)len)); /* args keeps `name` alive */
	return ino < 0 ? os_error((int)ino) : PyLong_FromLongLong(ino);
}

static PyObject *py_refresh(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	int result;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(result = table_refresh(ino));
	return result < 0 ? os_error(result) : PyLong_FromLong(result);
}

static PyObject *py_attributes(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	const struct node *n;
	struct node copy;
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	n = node_at(ino);
	if (n)
		copy = table.nodes[node_primary((uint32_t)ino)];
	unlock(locked);
	if (!n)
		return unknown_inode(ino);
	return Py_BuildValue("IIIIIKKLLL", copy.mode, copy.nlink, copy.uid, copy.gid, node_rdev(&copy),
			     (unsigned long long)copy.size, (unsigned long long)copy.blocks,
			     (long long)copy.atime_ns, (long long)copy.mtime_ns,
			     (long long)copy.ctime_ns);
}

static PyObject *py_version(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	const struct node *n;
	struct version v;
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	n = node_at(ino);
	if (n)
		v = node_version(&table.nodes[node_primary((uint32_t)ino)]);
	unlock(locked);
	if (!n)
		return unknown_inode(ino);
	return Py_BuildValue("KKLL", (unsigned long long)v.origin_ino, (unsigned long long)v.size,
			     (long long)v.mtime_ns, (long long)v.ctime_ns);
}

static PyObject *py_is_listed(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	const struct node *n;
	uint64_t ino;
	bool listed;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	n = node_at(ino);
	listed = n && node_flags(n) & NODE_LISTED;
	unlock(locked);
	return n ? PyBool_FromLong(listed) : unknown_inode(ino);
}

static PyObject *py_refuse_short(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	bool refuse;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	refuse = table_refuse_short(ino);
	Py_END_ALLOW_THREADS
	return PyBool_FromLong(refuse);
}

static PyObject *py_told(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	if (node_at(ino))
		node_told(node_primary((uint32_t)ino));
	unlock(locked);
	Py_RETURN_NONE;
}

static PyObject *py_is_dead(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	const struct node *n;
	uint64_t ino;
	bool dead;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	n = node_at(ino);
	dead = n && !node_live_name((uint32_t)ino);
	unlock(locked);
	return n ? PyBool_FromLong(dead) : unknown_inode(ino);
}

static PyObject *py_device(PyObject *module, PyObject *arg)
{
	uint32_t major_no = 0, minor_no = 0;
	PyThreadState *locked;
	bool known;
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	known = node_at(ino) && table_device((uint32_t)ino, &major_no, &minor_no);
	unlock(locked);
	return known ? PyUnicode_FromFormat("%u:%u", major_no, minor_no) : PyUnicode_FromString("");
}

static bool beneath_dead(uint32_t ino)
{
	for (; ino != ROOT_INO; ino = table.nodes[ino].parent)
		if (node_flags(&table.nodes[ino]) & NODE_DEAD)
			return true;
	return false;
}

static PyObject *py_directories(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long after;
	Py_ssize_t limit, count = 0;
	uint32_t *found;
	PyObject *out;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Kn", KEYWORDS("after", "limit"), &after, &limit))
		return NULL;
	if (limit < 0)
		limit = 0;
	if (limit > 65536)
		limit = 65536;
	found = malloc(((size_t)limit + 1) * sizeof(*found));
	if (!found)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	/* In slices: a waiting writer would keep the front's readers out as long as we hold on. */
	for (uint64_t ino = after + 1, stop; ino <= table_count() && count < limit; ino = stop) {
		stop = ino + 65536;
		pthread_rwlock_rdlock(&table.lock);
		for (; ino < stop && ino <= table_count() && count < limit; ino++)
			if (node_flags(&table.nodes[ino]) & NODE_LISTED && !beneath_dead((uint32_t)ino))
				found[count++] = (uint32_t)ino;
		pthread_rwlock_unlock(&table.lock);
	}
	Py_END_ALLOW_THREADS
	out = PyList_New(count);
	for (Py_ssize_t i = 0; out && i < count; i++)
		list_put(&out, (size_t)i, PyLong_FromUnsignedLong(found[i]));
	free(found);
	return out;
}

static PyObject *py_children(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyThreadState *locked;
	unsigned long long after;
	PyObject *ino_arg, *out;
	Py_ssize_t limit, count = 0;
	uint32_t *found, child;
	const struct node *dir;
	uint64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn", KEYWORDS("ino", "after", "limit"), &ino_arg,
					 &after, &limit) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (limit < 0)
		limit = 0;
	if (limit > 65536)
		limit = 65536;
	if (after == DOT_COOKIE || after == DOTDOT_COOKIE) /* the front's "." and ".." */
		after = 0;
	found = malloc(((size_t)limit + 1) * 2 * sizeof(*found));
	if (!found)
		return PyErr_NoMemory();
	locked = lock_read();
	dir = node_at(ino);
	if (dir && dir->mode && (dir->mode & 0170000) == 0040000)
		for (child = table_next_child((uint32_t)ino, after); child && count < limit;
		     child = table_next_child((uint32_t)ino, child)) {
			found[2 * count] = child;
			found[2 * count++ + 1] = node_primary(child);
		}
	unlock(locked);
	out = dir ? PyList_New(count) : unknown_inode(ino);
	for (Py_ssize_t i = 0; out && i < count; i++)
		list_put(&out, (size_t)i,
			 Py_BuildValue("NII", name_bytes(found[2 * i]), found[2 * i + 1], found[2 * i]));
	free(found);
	return out;
}

/* In order of their numbers: of the listing. */
static size_t siblings_listed(uint32_t dir, uint32_t *found, size_t limit)
{
	uint32_t parent = table.nodes[dir].parent, child = dir;
	size_t count = 0;

	for (unsigned walked = 0; count < limit && walked < SIBLINGS_WALK; walked++) {
		child = table_next_child(parent, child);
		if (!child)
			break;
		if (S_ISDIR(table.nodes[child].mode))
			found[count++] = child;
	}
	return count;
}

static int compare_names(uint32_t one, uint32_t other)
{
	size_t len, other_len;
	const unsigned char *name = node_name(&table.nodes[one], &len);
	const unsigned char *other_name = node_name(&table.nodes[other], &other_len);
	int order = memcmp(name, other_name, len < other_len ? len : other_len);

	return order ? order : len < other_len ? -1 : len > other_len;
}

static size_t siblings_by_name(uint32_t dir, uint32_t *found, size_t limit)
{
	uint32_t parent = table.nodes[dir].parent;
	size_t count = 0, at;
	unsigned walked = 0;

	for (uint32_t child = table_next_child(parent, 0); child; child = table_next_child(parent, child)) {
		if (++walked > SIBLINGS_WALK)
			return 0;
		if (!S_ISDIR(table.nodes[child].mode) || compare_names(child, dir) <= 0 ||
		    (count == limit && compare_names(child, found[limit - 1]) > 0))
			continue;
		at = count < limit ? count++ : limit - 1;
		for (; at && compare_names(child, found[at - 1]) < 0; at--)
			found[at] = found[at - 1];
		found[at] = child;
	}
	return count;
}

static PyObject *py_siblings(PyObject *module, PyObject *args, PyObject *kwargs)
{
	uint32_t found[SIBLINGS_MOST];
	PyThreadState *locked;
	PyObject *ino_arg, *out;
	const struct node *n;
	Py_ssize_t limit;
	size_t count = 0;
	uint64_t ino;
	int by_name;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Opn", KEYWORDS("ino", "by_name", "limit"), &ino_arg,
					 &by_name, &limit) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	limit = limit < 1 ? 1 : limit > SIBLINGS_MOST ? SIBLINGS_MOST : limit;
	locked = lock_read();
	n = node_at(ino);
	if (n && ino != ROOT_INO)
		count = (by_name ? siblings_by_name : siblings_listed)((uint32_t)ino, found, (size_t)limit);
	unlock(locked);
	out = n ? PyList_New((Py_ssize_t)count) : unknown_inode(ino);
	for (size_t i = 0; out && i < count; i++)
		list_put(&out, i, PyLong_FromUnsignedLong(found[i]));
	return out;
}

/* The node that gives the inode its path: a living name, or else its own. */
static uint32_t living_name(uint64_t ino)
{
	uint32_t name_node = node_live_name((uint32_t)ino);

	return name_node ? name_node : (uint32_t)ino;
}

static PyObject *py_path(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	char *path = NULL;
	PyObject *out;
	uint64_t ino;
	size_t len = 0;
	bool known;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	known = node_at(ino) != NULL;
	if (known)
		path = table_path(living_name(ino), &len);
	unlock(locked);
	if (!known)
		return unknown_inode(ino);
	if (!path)
		return PyErr_NoMemory();
	out = PyBytes_FromStringAndSize(path, (Py_ssize_t)len);
	free(path);
	return out;
}

static PyObject *py_parent(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	const struct node *n;
	uint64_t ino;
	uint32_t parent = 0;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	n = node_at(ino);
	if (n)
		parent = ino == ROOT_INO ? ROOT_INO : table.nodes[living_name(ino)].parent;
	unlock(locked);
	return n ? PyLong_FromUnsignedLong(parent) : unknown_inode(ino);
}

static PyObject *py_name(PyObject *module, PyObject *arg)
{
	PyThreadState *locked;
	uint64_t ino;
	bool known;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	locked = lock_read();
	known = node_at(ino) != NULL;
	if (known)
		ino = living_name(ino);
	unlock(locked);
	return known ? name_bytes((uint32_t)ino) : unknown_inode(ino);
}

static PyObject *py_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg;
	uint64_t ino;
	int flags, fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi", KEYWORDS("ino", "flags"), &ino_arg, &flags) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	WITHOUT_GIL(fd = table_open(ino, flags));
	return fd < 0 ? os_error(fd) : PyLong_FromLong(fd);
}

static PyObject *py_readlink(PyObject *module, PyObject *arg)
{
	char target[4096];
	uint64_t ino;
	ssize_t got;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(got = table_readlink(ino, target, sizeof(target)));
	return got < 0 ? os_error((int)got) : PyBytes_FromStringAndSize(target, got);
}

#define STALE_BATCH_MOST 4096

static PyObject *stale_to_tuple(const struct stale *stale)
{
	PyObject *names = PyList_New(0);

	for (const struct stale_name *at = stale->names; names && at; at = at->next)
		list_append(&names, Py_BuildValue("IN", table.nodes[at->node].parent, name_bytes(at->node)));
	return names ? Py_BuildValue("INN", stale->ino, PyBool_FromLong(stale->name_is_stale), names)
		     : NULL;
}

static PyObject *py_take_stale(PyObject *module, PyObject *arg)
{
	Py_ssize_t limit = PyNumber_AsSsize_t(arg, PyExc_OverflowError);
	struct stale *taken;
	size_t count;
	PyObject *out;

	(void)module;
	if (limit == -1 && PyErr_Occurred())
		return NULL;
	limit = limit < 0 ? 0 : limit > STALE_BATCH_MOST ? STALE_BATCH_MOST : limit;
	taken = malloc(((size_t)limit + 1) * sizeof(*taken));
	if (!taken)
		return PyErr_NoMemory();
	WITHOUT_GIL(count = table_take_stale(taken, (size_t)limit));
	out = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; i < count; i++) {
		if (out)
			list_put(&out, i, stale_to_tuple(&taken[i]));
		while (taken[i].names) {
			struct stale_name *next = taken[i].names->next;

			free(taken[i].names);
			taken[i].names = next;
		}
	}
	free(taken);
	return out;
}

static PyObject *py_settled(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(table_settled(ino));
	Py_RETURN_NONE;
}

static PyObject *py_mark_stale(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(table_mark_stale(ino));
	Py_RETURN_NONE;
}

static PyObject *py_mark_young(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(table_mark_young(ino));
	Py_RETURN_NONE;
}

static PyObject *py_version_of_fd(PyObject *module, PyObject *arg)
{
	int fd = PyObject_AsFileDescriptor(arg), err;
	struct version v;
	uint32_t mode;

	(void)module;
	if (fd < 0)
		return NULL;
	WITHOUT_GIL(err = table_version_of_fd(fd, AT_STATX_FORCE_SYNC, &v, &mode));
	if (err)
		return os_error(err);
	return Py_BuildValue("KKLLI", (unsigned long long)v.origin_ino, (unsigned long long)v.size,
			     (long long)v.mtime_ns, (long long)v.ctime_ns, mode);
}

/* ---- locations and segments --------------------------------------------------------------- */
static PyObject *py_set_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, offset;
	unsigned int segno, header_len;
	PyObject *ino_arg, *version_arg;
	struct version version;
	uint64_t ino;
	int result;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(
		args, kwargs, "OKIKIO",
		KEYWORDS("ino", "block", "segno", "offset", "header_len", "version"), &ino_arg, &block,
		&segno, &offset, &header_len, &version_arg) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	WITHOUT_GIL(result = table_set_location(
			ino, block, (struct location){segno, header_len, offset}, &version));
	if (result == -EINVAL) {
		PyErr_SetString(PyExc_ValueError, "offset or header length of a record out of range");
		return NULL;
	}
	if (result == -ENOENT)
		return unknown_inode(ino);
	return result < 0 ? os_error(result) : PyBool_FromLong(result);
}

static PyObject *py_get_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyThreadState *locked;
	unsigned long long block;
	struct location at;
	PyObject *ino_arg;
	uint64_t ino, packed = 0;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK", KEYWORDS("ino", "block"), &ino_arg, &block) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	locked = lock_read();
	if (node_at(ino))
		packed = table_location(node_primary((uint32_t)ino), block);
	unlock(locked);
	if (!packed)
		Py_RETURN_NONE;
	at = location_unpack(packed);
	return Py_BuildValue("IKI", at.segno, (unsigned long long)at.offset, at.header_len);
}

static PyObject *py_clear_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, offset;
	unsigned int segno, header_len;
	PyObject *ino_arg;
	uint64_t ino, at;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK(IKI)", KEYWORDS("ino", "block", "only_if"), &ino_arg,
					 &block, &segno, &offset, &header_len) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	at = location_pack((struct location){segno, header_len, offset});
	WITHOUT_GIL(table_clear_location(ino, block, at));
	Py_RETURN_NONE;
}

static PyObject *py_segment_add(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned int segno;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ii", KEYWORDS("segno", "fd"), &segno, &fd))
		return NULL;
	WITHOUT_GIL(err = segment_add(segno, fd));
	return none_or_error(err);
}

static PyObject *py_segment_drop(PyObject *module, PyObject *arg)
{
	unsigned long segno = PyLong_AsUnsignedLong(arg);

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	WITHOUT_GIL(segment_drop((uint32_t)segno));
	Py_RETURN_NONE;
}

static PyObject *py_segment_known(PyObject *module, PyObject *arg)
{
	unsigned long segno = PyLong_AsUnsignedLong(arg);

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	return PyBool_FromLong(segment_known((uint32_t)segno));
}

static PyObject *py_segment_reads(PyObject *module, PyObject *args)
{
	uint64_t(*pairs)[2] = NULL;
	size_t count = 0, most;
	PyObject *found;

	(void)module;
	(void)args;
	do { /* another may have been opened meanwhile */
		most = count;
		free(pairs);
		pairs = malloc((most + 1) * sizeof(*pairs));
		if (!pairs)
			return PyErr_NoMemory();
		count = segment_reads(pairs, most);
	} while (count > most);
	found = PyDict_New();
	for (size_t i = 0; found && i < count; i++) {
		PyObject *segno = PyLong_FromUnsignedLongLong(pairs[i][0]);
		PyObject *reads = PyLong_FromUnsignedLongLong(pairs[i][1]);

		if (!segno || !reads || PyDict_SetItem(found, segno, reads))
			Py_CLEAR(found);
		Py_XDECREF(segno);
		Py_XDECREF(reads);
	}
	free(pairs);
	return found;
}

static PyObject *py_read_record(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned int header_len, payload_len, segno = 0;
	unsigned long long offset;
	const unsigned char *data;
	struct scratch *scratch;
	PyObject *out = NULL;
	int fd, result;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iKII|I",
					 KEYWORDS("fd", "offset", "header_len", "payload_len", "segno"), &fd,
					 &offset, &header_len, &payload_len, &segno))
		return NULL;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	WITHOUT_GIL(result = record_read_fd(fd, (struct location){segno, header_len, offset}, payload_len,
					    scratch, &data));
	if (result == READ_OK)
		out = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)payload_len);
	else
		PyErr_Format(PyExc_ValueError, "record at %llu: checksum, magic or length mismatch",
			     offset);
	scratch_put(scratch);
	return out;
}

static PyObject *py_read_cached(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyThreadState *locked;
	struct scratch *scratch, *joined = NULL;
	unsigned long long offset;
	const unsigned char *data;
	PyObject *ino_arg, *out = NULL;
	uint64_t ino;
	Py_ssize_t wanted;
	size_t size;
	int result;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn", KEYWORDS("ino", "offset", "size"), &ino_arg,
					 &offset, &wanted) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	size = wanted > 0 ? (size_t)wanted : 0;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	locked = lock_read();
	ino = node_at(ino) ? node_primary((uint32_t)ino) : 0;
	unlock(locked);
	WITHOUT_GIL(result = file_read((uint32_t)ino, offset, &size, scratch, &joined, &data));
	if (result == READ_OK)
		out = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
	scratch_put(scratch);
	scratch_put(joined);
	if (out || PyErr_Occurred())
		return out;
	Py_RETURN_NONE;
}

/* ---- kernel ------------------------------------------------------------------------------- */
static PyObject *py_push(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg, *version_arg;
	unsigned long long offset;
	struct version version;
	Py_buffer data;
	uint64_t ino;
	int64_t pushed = 0;
	size_t size;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOKy*",
					 KEYWORDS("fuse_fd", "ino", "version", "offset", "data"), &fd,
					 &ino_arg, &version_arg, &offset, &data))
		return NULL;
	if (!take_ino(ino_arg, &ino) || !convert_version(version_arg, &version)) {
		PyBuffer_Release(&data);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	if (offset < version.size && table_is_current(ino, &version)) {
		size = (size_t)data.len;
		if (size > version.size - offset)
			size = version.size - offset;
		pushed = kernel_store(fd, (uint32_t)ino, offset, data.buf, size, &version);
	}
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&data);
	return pushed < 0 ? os_error((int)pushed) : PyLong_FromLongLong(pushed);
}

static PyObject *py_push_cached(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, skip;
	const unsigned char *data;
	struct scratch *scratch;
	struct version version;
	PyObject *ino_arg;
	uint64_t ino, packed = 0;
	int fd, result = READ_MISS;
	int64_t pushed = 0;
	uint32_t len = 0;
	bool known;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOKK",
					 KEYWORDS("fuse_fd", "ino", "block", "skip"), &fd, &ino_arg, &block,
					 &skip) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) != NULL;
	if (known) {
		version = node_version(&table.nodes[node_primary((uint32_t)ino)]);
		packed = table_location(node_primary((uint32_t)ino), block);
	}
	pthread_rwlock_unlock(&table.lock);
	if (packed) {
		uint64_t start = block * BLOCK_BYTES;

		len = version.size - start < BLOCK_BYTES ? (uint32_t)(version.size - start) : BLOCK_BYTES;
		if (skip >= len) {
			len = 0;
			result = READ_OK;
		} else {
			len -= (uint32_t)skip;
			result = block_read((uint32_t)ino, block, packed, len + (uint32_t)skip,
					    (uint32_t)skip, len, scratch, &data);
			if (result == READ_OK)
				pushed = kernel_store(fd, (uint32_t)ino, start + skip, data, len, &version);
		}
	}
	Py_END_ALLOW_THREADS
	scratch_put(scratch);
	if (!known)
		return unknown_inode(ino);
	if (pushed < 0)
		return os_error((int)pushed);
	return PyLong_FromLong(result == READ_OK ? (long)pushed : -1);
}

static PyObject *py_inval_inode(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long long offset, length;
	PyObject *ino_arg;
	uint64_t ino;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOLL",
					 KEYWORDS("fuse_fd", "ino", "offset", "length"), &fd, &ino_arg,
					 &offset, &length) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	WITHOUT_GIL(err = kernel_inval_inode(fd, ino, offset, length));
	return err < 0 ? os_error(err) : PyBool_FromLong(err);
}

static PyObject *py_inval_entry(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *parent_arg;
	const char *name;
	Py_ssize_t len;
	uint64_t parent;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOy#", KEYWORDS("fuse_fd", "parent", "name"), &fd,
					 &parent_arg, &name, &len) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	WITHOUT_GIL(err = kernel_inval_entry(fd, parent, name, (size_t)len));
	return none_or_error(err);
}

static PyObject *py_resend(PyObject *module, PyObject *arg)
{
	int fd = PyObject_AsFileDescriptor(arg), err;

	(void)module;
	if (fd < 0)
		return NULL;
	WITHOUT_GIL(err = kernel_resend(fd));
	return none_or_error(err);
}

/* ---- front -------------------------------------------------------------------------------- */
static PyObject *py_why_not_interposed(PyObject *module, PyObject *unused)
{
	const char *why = front_why_not();

	(void)module;
	(void)unused;
	return PyUnicode_FromString(why ? why : "");
}

static PyObject *py_configure_session(PyObject *module, PyObject *args, PyObject *kwargs)
{
	double negative_timeout_s;
	int enabled, threads, resume;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pidp",
					 KEYWORDS("front", "threads", "negative_timeout_s", "resume"),
					 &enabled, &threads, &negative_timeout_s, &resume))
		return NULL;
	if (threads < 1 || front_configure(enabled, (unsigned)threads, negative_timeout_s, resume)) {
		PyErr_SetString(PyExc_ValueError,
				"configure_session: 1 to 64 threads, and before pyfuse3.init");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_keep_root_acl(PyObject *module, PyObject *args, PyObject *kwargs)
{
	Py_buffer value;
	long long ctime_ns;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*L", KEYWORDS("value", "ctime_ns"), &value, &ctime_ns))
		return NULL;
	raw_keep_root_acl(value.buf, (size_t)value.len, ctime_ns);
	PyBuffer_Release(&value);
	Py_RETURN_NONE;
}

static PyObject *py_configure_answers(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const char *hintsd;
	int has_acls = false;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y|p", KEYWORDS("hintsd", "has_acls"), &hintsd,
					 &has_acls))
		return NULL;
	if (raw_configure(hintsd, has_acls)) {
		PyErr_SetString(PyExc_ValueError, "configure_answers: a path has at most 4095 bytes");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_resume_session(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	if (front_resume()) {
		PyErr_SetString(PyExc_ValueError, "resume_session: once, after pyfuse3.init");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_read_asker(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(front_asker());
}

static PyObject *py_kernel_info(PyObject *module, PyObject *unused)
{
	const struct kernel_info *i = &kernel_info;

	(void)module;
	(void)unused;
	return Py_BuildValue("{sIsIsIsIsIsIsIsIsi}", "proto_major", i->proto_major, "proto_minor",
			     i->proto_minor, "capable", i->capable, "want", i->want, "max_write",
			     i->max_write, "max_pages", (i->max_write + 4095) / 4096, "max_readahead",
			     i->max_readahead, "max_background", i->max_background, "resumed",
			     (int)i->resumed);
}

/* ---- events and counters ------------------------------------------------------------------ */
static PyObject *py_event_fd(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(watch_event_fd());
}

static PyObject *py_take_events(PyObject *module, PyObject *unused)
{
	struct event taken[64];
	PyObject *out = PyList_New(0);
	size_t count;

	(void)module;
	(void)unused;
	while (out && (count = watch_take(taken, 64)))
		for (size_t i = 0; out && i < count; i++)
			list_append(&out, Py_BuildValue("iKKK", taken[i].kind, (unsigned long long)taken[i].a,
							(unsigned long long)taken[i].b,
							(unsigned long long)taken[i].c));
	return out;
}

static PyObject *py_note_read(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long offset, size;
	struct version version;
	PyObject *ino_arg;
	uint64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKK", KEYWORDS("ino", "offset", "size"), &ino_arg,
					 &offset, &size) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	if (table_version(ino, &version) && offset < version.size) {
		if (size > version.size - offset)
			size = version.size - offset;
		watch_read((uint32_t)ino, version.size, offset, size);
	}
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyObject *py_ram_bytes(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromUnsignedLongLong(ring_total());
}

static PyObject *py_ram_take(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long limit;
	struct range *taken;
	PyObject *out;
	Py_ssize_t most;
	size_t count;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Kn", KEYWORDS("limit_bytes", "most"), &limit, &most))
		return NULL;
	if (most < 0)
		most = 0;
	if (most > 65536)
		most = 65536;
	taken = malloc(((size_t)most + 1) * sizeof(*taken));
	if (!taken)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	count = ring_take(limit, (size_t)most, taken);
	for (size_t i = 0; i < count; i++) { /* blocks are noted; the last one is shorter */
		struct version v;

		table_dropped(taken[i].ino);
		if (table_version(taken[i].ino, &v) && v.size > taken[i].offset &&
		    v.size - taken[i].offset < taken[i].length)
			taken[i].length = v.size - taken[i].offset;
	}
	Py_END_ALLOW_THREADS
	out = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; out && i < count; i++)
		list_put(&out, i, Py_BuildValue("IKK", taken[i].ino, (unsigned long long)taken[i].offset,
						(unsigned long long)taken[i].length));
	free(taken);
	return out;
}

static PyObject *py_counters(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#define ONE(field) #field, (unsigned long long)atomic_load(&counters.field)
	return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsKsK}", ONE(requests), ONE(from_ssd), ONE(bytes_from_ssd),
			     ONE(lookups), ONE(getattrs), ONE(readdirs), ONE(slow), ONE(faults),
			     ONE(bytes_staged), ONE(waited), ONE(from_origin), ONE(bytes_from_origin),
			     ONE(files_missed), ONE(bytes_missed));
#undef ONE
}

/* ---- module ------------------------------------------------------------------------------- */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(attach),
    ONE_ARGUMENT(table_mode),
    NO_ARGUMENT(count),
    NO_ARGUMENT(memory_bytes),
    WITH_KEYWORDS(scan),
    WITH_KEYWORDS(lookup),
    WITH_KEYWORDS(add),
    ONE_ARGUMENT(refresh),
    ONE_ARGUMENT(attributes),
    ONE_ARGUMENT(version),
    ONE_ARGUMENT(is_listed),
    ONE_ARGUMENT(is_dead),
    ONE_ARGUMENT(device),
    ONE_ARGUMENT(refuse_short),
    ONE_ARGUMENT(told),
    WITH_KEYWORDS(directories),
    WITH_KEYWORDS(children),
    WITH_KEYWORDS(siblings),
    ONE_ARGUMENT(path),
    ONE_ARGUMENT(parent),
    ONE_ARGUMENT(name),
    WITH_KEYWORDS(open),
    ONE_ARGUMENT(readlink),
    ONE_ARGUMENT(take_stale),
    ONE_ARGUMENT(settled),
    ONE_ARGUMENT(mark_stale),
    ONE_ARGUMENT(mark_young),
    ONE_ARGUMENT(version_of_fd),
    ONE_ARGUMENT(adopt_source),
    WITH_KEYWORDS(set_location),
    WITH_KEYWORDS(get_location),
    WITH_KEYWORDS(clear_location),
    WITH_KEYWORDS(segment_add),
    ONE_ARGUMENT(segment_drop),
    ONE_ARGUMENT(segment_known),
    NO_ARGUMENT(segment_reads),
    WITH_KEYWORDS(read_record),
    WITH_KEYWORDS(read_cached),
    WITH_KEYWORDS(push),
    WITH_KEYWORDS(push_cached),
    WITH_KEYWORDS(inval_inode),
    WITH_KEYWORDS(inval_entry),
    ONE_ARGUMENT(resend),
    NO_ARGUMENT(why_not_interposed),
    WITH_KEYWORDS(configure_session),
    WITH_KEYWORDS(configure_answers),
    WITH_KEYWORDS(keep_root_acl),
    NO_ARGUMENT(resume_session),
    NO_ARGUMENT(kernel_info),
    NO_ARGUMENT(read_asker),
    NO_ARGUMENT(event_fd),
    NO_ARGUMENT(take_events),
    WITH_KEYWORDS(note_read),
    NO_ARGUMENT(ram_bytes),
    WITH_KEYWORDS(ram_take),
    NO_ARGUMENT(counters),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fusecache._native",
    .m_doc = "Inode table, front, segment reads and kernel notifications (see _native.pyi).",
    .m_size = -1, /* one mount a process: state is global */
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
	static bool initialised;
	PyObject *module;
	int err = 0;

	if (!initialised) {
		err = table_init();
		if (!err)
			err = watch_init();
		if (!err)
			err = plan_init();
		if (!err)
			err = window_init();
		if (!err)
			err = fetch_init();
		initialised = !err;
	}
	if (err)
		return os_error(err);
	module = PyModule_Create(&definition);
	if (module && (PyModule_AddIntConstant(module, "BLOCK_BYTES", BLOCK_BYTES) ||
		       PyModule_AddIntConstant(module, "CHUNK_BYTES", CHUNK_BYTES) ||
		       PyModule_AddIntConstant(module, "STREAM_HEAD_BYTES", STREAM_HEAD_BYTES) ||
		       PyModule_AddIntConstant(module, "DOT_COOKIE", DOT_COOKIE) ||
		       PyModule_AddIntConstant(module, "DOTDOT_COOKIE", DOTDOT_COOKIE) ||
		       PyModule_AddIntConstant(module, "EVENT_FAULT", EVENT_FAULT) ||
		       PyModule_AddIntConstant(module, "EVENT_STREAM", EVENT_STREAM) ||
		       PyModule_AddIntConstant(module, "EVENT_UNREAD", EVENT_UNREAD) ||
		       plan_add_to(module) || trace_add_to(module) || log_add_to(module) || probe_add_to(module)))
		Py_CLEAR(module);
	return module;
}
