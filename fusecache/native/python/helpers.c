/* What all faces need: arguments in, results and errors out. */
#include "python.h"

#include <string.h>

PyObject *os_error(int negative_errno)
{
	if (negative_errno == -ENOMEM)
		return PyErr_NoMemory();
	errno = -negative_errno;
	return PyErr_SetFromErrno(PyExc_OSError);
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

static PyObject *unknown_inode_class; /* fusecache.base.errors.UnknownInode, for the life of the process */

int helpers_init(void)
{
	PyObject *errors;

	if (unknown_inode_class)
		return 0;
	errors = PyImport_ImportModule("fusecache.base.errors");
	if (errors)
		unknown_inode_class = PyObject_GetAttrString(errors, "UnknownInode");
	Py_XDECREF(errors);
	return unknown_inode_class ? 0 : -1;
}

PyObject *unknown_inode(unsigned long long ino) { return PyErr_Format(unknown_inode_class, "unknown inode %llu", ino); }

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

PyObject *name_bytes(uint32_t node)
{
	size_t len;
	const unsigned char *name = node_name(&table.nodes[node], &len);

	return PyBytes_FromStringAndSize((const char *)name, (Py_ssize_t)len);
}

bool are_inos(Py_buffer *inos)
{
	if (inos->len % 4 == 0)
		return true;
	PyErr_SetString(PyExc_ValueError, "inos: four bytes each");
	PyBuffer_Release(inos);
	return false;
}

uint32_t ino_at(const Py_buffer *inos, Py_ssize_t i)
{
	uint32_t ino;

	memcpy(&ino, (const char *)inos->buf + 4 * i, 4);
	return ino;
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

PyObject *none_or_error(int err)
{
	if (err < 0)
		return os_error(err);
	Py_RETURN_NONE;
}
