/* The Python face of what table/ and ahead/ list. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>
#include <string.h>

#include "../ahead/ahead.h"

#define LIST_MOST 65536
#define SIBLINGS_MOST 32
#define SIBLINGS_WALK 16384u /* names looked at under one hold of the lock */

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
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn", KEYWORDS("ino", "after", "limit"), &ino_arg, &after,
					 &limit) ||
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
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Opn", KEYWORDS("ino", "by_name", "limit"), &ino_arg, &by_name,
					 &limit) ||
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

/* ---- many at a time ----------------------------------------------------------------------- */
static PyObject *listed_to_tuple(const struct listed *listed, Py_ssize_t count, uint32_t next)
{
	PyObject *inos = PyBytes_FromStringAndSize(NULL, count * 4);
	PyObject *sizes = PyBytes_FromStringAndSize(NULL, count * 8);
	PyObject *kinds = PyBytes_FromStringAndSize(NULL, count);
	PyObject *stored = PyBytes_FromStringAndSize(NULL, count);
	PyObject *lengths = PyBytes_FromStringAndSize(NULL, count * 2);
	PyObject *names = NULL;
	size_t len, total = 0;

	/* Names of published nodes never change: no lock. */
	for (Py_ssize_t i = 0; i < count; i++) {
		node_name(&table.nodes[listed[i].node], &len);
		total += len;
	}
	names = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
	if (!inos || !sizes || !kinds || !stored || !lengths || !names) {
		Py_XDECREF(inos);
		Py_XDECREF(sizes);
		Py_XDECREF(kinds);
		Py_XDECREF(stored);
		Py_XDECREF(lengths);
		Py_XDECREF(names);
		return NULL;
	}
	total = 0;
	for (Py_ssize_t i = 0; i < count; i++) {
		const unsigned char *name = node_name(&table.nodes[listed[i].node], &len);
		uint16_t len16 = (uint16_t)len;

		memcpy(PyBytes_AS_STRING(inos) + 4 * i, &listed[i].ino, 4);
		memcpy(PyBytes_AS_STRING(sizes) + 8 * i, &listed[i].size, 8);
		memcpy(PyBytes_AS_STRING(lengths) + 2 * i, &len16, 2);
		PyBytes_AS_STRING(kinds)[i] = (char)listed[i].kind;
		PyBytes_AS_STRING(stored)[i] = (char)listed[i].where;
		memcpy(PyBytes_AS_STRING(names) + total, name, len);
		total += len;
	}
	return Py_BuildValue("NNNNNNI", inos, sizes, kinds, stored, lengths, names, next);
}

static PyObject *py_list_directory(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long after;
	struct listed *listed;
	PyObject *ino_arg, *out = NULL;
	Py_ssize_t most;
	ssize_t count;
	uint32_t next;
	uint64_t ino;
	int owned = 0;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn|p", KEYWORDS("ino", "after", "most", "owned"), &ino_arg,
					 &after, &most, &owned) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (most < 1) { /* no page would ever end */
		PyErr_SetString(PyExc_ValueError, "most: at least 1");
		return NULL;
	}
	most = most > LIST_MOST ? LIST_MOST : most;
	listed = malloc((size_t)most * sizeof(*listed));
	if (!listed)
		return PyErr_NoMemory();
	WITHOUT_GIL(count = ahead_list(ino, after, (size_t)most, owned, listed, &next));
	if (count >= 0)
		out = listed_to_tuple(listed, count, next);
	else if (count == -ENOENT)
		unknown_inode(ino);
	else if (count == -EAGAIN)
		PyErr_SetString(PyExc_ValueError, "the directory is not LISTED");
	else
		os_error((int)count);
	free(listed);
	return out;
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(directories),
    WITH_KEYWORDS(children),
    WITH_KEYWORDS(siblings),
    WITH_KEYWORDS(list_directory),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int listing_add_to(PyObject *module)
{
	return PyModule_AddFunctions(module, methods) || PyModule_AddIntConstant(module, "DOT_COOKIE", DOT_COOKIE) ||
	       PyModule_AddIntConstant(module, "DOTDOT_COOKIE", DOTDOT_COOKIE);
}
