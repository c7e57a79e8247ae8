/* The Python face of table/journal.c. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>

static PyObject *py_journal(PyObject *module, PyObject *arg)
{
	int is_on = PyObject_IsTrue(arg), err;

	(void)module;
	if (is_on < 0)
		return NULL;
	WITHOUT_GIL(err = table_journal(is_on));
	if (err)
		return os_error(err);
	Py_RETURN_NONE;
}

static PyObject *journal_entry(uint32_t node)
{
	PyThreadState *locked = lock_read();
	size_t len;
	char *path = table_path(table.nodes[node].parent, &len);
	PyObject *out;

	unlock(locked);
	if (!path)
		return PyErr_NoMemory();
	out = Py_BuildValue("y#N", path, (Py_ssize_t)len, name_bytes(node));
	free(path);
	return out;
}

static PyObject *py_journal_take(PyObject *module, PyObject *unused)
{
	struct number_list nodes;
	bool is_whole;
	PyObject *out;
	int err;

	(void)module;
	(void)unused;
	WITHOUT_GIL(err = table_journal_take(&nodes, &is_whole));
	if (err)
		return os_error(err);
	out = PyList_New(0);
	for (size_t i = 0; out && i < nodes.count; i++)
		if (nodes.items[i] != ROOT_INO) /* its entries tell of it */
			list_append(&out, journal_entry(nodes.items[i]));
	free(nodes.items);
	return out ? Py_BuildValue("NN", out, PyBool_FromLong(is_whole)) : NULL;
}

static PyObject *py_is_shared(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	bool found;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(found = table_is_shared(ino));
	return PyBool_FromLong(found);
}

static PyObject *py_find_path(PyObject *module, PyObject *arg)
{
	uint64_t ino;
	Py_ssize_t len;
	char *path;

	(void)module;
	if (PyBytes_AsStringAndSize(arg, &path, &len))
		return NULL;
	WITHOUT_GIL(ino = table_find_path(path, (size_t)len));
	return PyLong_FromUnsignedLongLong(ino);
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    ONE_ARGUMENT(journal),
    NO_ARGUMENT(journal_take),
    ONE_ARGUMENT(is_shared),
    ONE_ARGUMENT(find_path),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int journal_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
