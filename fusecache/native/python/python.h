/* The Python faces of the rooms. Only these files know Python. */
#ifndef FUSECACHE_PYTHON_H
#define FUSECACHE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../table/table.h"

#define KEYWORDS(...) ((char *[]){__VA_ARGS__, NULL})
#define WITHOUT_GIL(statement)            \
	do {                              \
		Py_BEGIN_ALLOW_THREADS    \
		statement;                \
		Py_END_ALLOW_THREADS      \
	} while (0)
#define WITH_KEYWORDS(name) \
	{#name, (PyCFunction)(void (*)(void))py_##name, METH_VARARGS | METH_KEYWORDS, NULL}
#define ONE_ARGUMENT(name) {#name, py_##name, METH_O, NULL}
#define NO_ARGUMENT(name) {#name, py_##name, METH_NOARGS, NULL}

PyObject *os_error(int negative_errno);
PyObject *none_or_error(int err);
/* The list takes the item, or is given up (NULL): there was no memory for it. */
void list_put(PyObject **list, size_t at, PyObject *item);
void list_append(PyObject **list, PyObject *item);
/* Once, before all else here. -1: a Python error. */
int helpers_init(void);
/* Raises fusecache.base.errors.UnknownInode; NULL. */
PyObject *unknown_inode(unsigned long long ino);
PyObject *name_bytes(uint32_t node);
/* Too large a number is 0: no such inode. */
bool take_ino(PyObject *arg, uint64_t *ino);
bool convert_version(PyObject *arg, struct version *out);
/* A buffer of u32; it is released when it is none. */
bool are_inos(Py_buffer *inos);
uint32_t ino_at(const Py_buffer *inos, Py_ssize_t i); /* they may lie anywhere */

/* table.lock, held with the GIL when it can be had at once, else without: no thread waits for one while
 * holding the other (a waiting writer keeps new readers out, so even two readers could wait in a circle).
 * Between the two calls nothing of Python may be touched. */
PyThreadState *lock_read(void);
void unlock(PyThreadState *without_gil);

/* Functions and constants of the faces. */
int table_add_to(PyObject *module);
int journal_add_to(PyObject *module);
int listing_add_to(PyObject *module);
int segment_add_to(PyObject *module);
int front_add_to(PyObject *module);
int events_add_to(PyObject *module);
int plan_add_to(PyObject *module);
int fetch_add_to(PyObject *module);
int pool_add_to(PyObject *module);
int trace_add_to(PyObject *module);
int log_add_to(PyObject *module);
int probe_add_to(PyObject *module);

#endif
