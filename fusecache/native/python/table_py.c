/* The Python face of table/, but for listings and locations. The contract is in _native.pyi. */
#include "python.h"

#include <fcntl.h>
#include <stdlib.h>

#include "../segment/segment.h"

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

static PyObject *py_census(PyObject *module, PyObject *unused)
{
	struct census found;

	(void)module;
	(void)unused;
	WITHOUT_GIL(found = table_census(segment_known));
	return Py_BuildValue("KKKO", (unsigned long long)found.files, (unsigned long long)found.bytes,
			     (unsigned long long)found.located_bytes, found.is_whole ? Py_True : Py_False);
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
	int err, is_forced = false;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Op", KEYWORDS("ino", "tick", "is_forced"), &ino_arg,
					 &ticking.tick, &is_forced) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (ticking.tick == Py_None)
		ticking.tick = NULL;
	ticking.state = PyEval_SaveThread();
	err = table_scan(ino, ticking.tick ? call_tick : NULL, &ticking, is_forced, &result);
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
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#", KEYWORDS("parent", "name"), &parent_arg, &name, &len) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	locked = lock_read();
	dir = node_at(parent);
	if (dir && len <= (Py_ssize_t)NAME_BYTES_MOST) { /* else add() says what is wrong with it */
		const bool is_listed = node_flags(dir) & NODE_LISTED;

		found = table_find((uint32_t)parent, name, (size_t)len);
		if (!found)
			result = is_listed ? 0 : -1;
		else if (!(node_flags(&table.nodes[found]) & NODE_NOATTR) && (is_listed || !node_has_names(found)))
			result = (long)node_primary(found);
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
	int is_forced = false;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#|p", KEYWORDS("parent", "name", "is_forced"), &parent_arg,
					 &name, &len, &is_forced) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	WITHOUT_GIL(ino = table_add(parent, name, (size_t)len, is_forced)); /* args keeps `name` alive */
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
			     (unsigned long long)copy.size, (unsigned long long)copy.blocks, (long long)copy.atime_ns,
			     (long long)copy.mtime_ns, (long long)copy.ctime_ns);
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
	return names ? Py_BuildValue("INN", stale->ino, PyBool_FromLong(stale->name_is_stale), names) : NULL;
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

static PyObject *py_is_unchecked(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	bool unchecked;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(unchecked = table_is_unchecked(ino));
	return PyBool_FromLong(unchecked);
}

static PyObject *py_has_unchecked(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	bool unchecked;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(unchecked = table_has_unchecked(ino));
	return PyBool_FromLong(unchecked);
}

static PyObject *py_saved_bytes(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromUnsignedLongLong(table_saved_bytes());
}

static bool take_saved(PyObject *args, PyObject *kwargs, int *fd, const unsigned char **source)
{
	Py_ssize_t len;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iy#", KEYWORDS("fd", "source"), fd, source, &len))
		return false;
	if (len != SOURCE_BYTES)
		PyErr_Format(PyExc_ValueError, "source: %u bytes", SOURCE_BYTES);
	return len == SOURCE_BYTES;
}

static PyObject *py_save_table(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const unsigned char *source;
	int64_t bytes;
	int fd;

	(void)module;
	if (!take_saved(args, kwargs, &fd, &source))
		return NULL;
	WITHOUT_GIL(bytes = table_save(fd, source));
	return bytes < 0 ? os_error((int)bytes) : PyLong_FromLongLong(bytes);
}

static PyObject *py_load_table(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static const char *const why_not[] = {
	    [SAVED_LOADED] = "",
	    [SAVED_DAMAGED] = "it is damaged",
	    [SAVED_OTHER_VERSION] = "it was written by another version",
	    [SAVED_OTHER_SOURCE] = "it is of another source",
	};
	const unsigned char *source;
	int fd, result;

	(void)module;
	if (!take_saved(args, kwargs, &fd, &source))
		return NULL;
	WITHOUT_GIL(result = table_load(fd, source));
	return result < 0 ? os_error(result) : PyUnicode_FromString(why_not[result]);
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

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    ONE_ARGUMENT(table_mode),
    NO_ARGUMENT(count),
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
    ONE_ARGUMENT(path),
    ONE_ARGUMENT(parent),
    ONE_ARGUMENT(name),
    WITH_KEYWORDS(open),
    ONE_ARGUMENT(readlink),
    ONE_ARGUMENT(take_stale),
    ONE_ARGUMENT(settled),
    ONE_ARGUMENT(mark_stale),
    ONE_ARGUMENT(mark_young),
    ONE_ARGUMENT(is_unchecked),
    ONE_ARGUMENT(has_unchecked),
    NO_ARGUMENT(census),
    NO_ARGUMENT(saved_bytes),
    WITH_KEYWORDS(save_table),
    WITH_KEYWORDS(load_table),
    ONE_ARGUMENT(version_of_fd),
    ONE_ARGUMENT(adopt_source),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int table_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
