/* The Python face of trace/. The contract is in _native.pyi. */
#include "python.h"

#include "../trace/trace.h"

#define TAKE_MOST 65536
#define DESCRIBE_MOST 8192u
#define NAMES_MOST (1u << 20) /* bytes; >= TRACE_NAME_MOST, or it would not come to an end */

static PyObject *py_trace_begin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	int wires, lookups, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pp", KEYWORDS("wires", "lookups"), &wires, &lookups))
		return NULL;
	WITHOUT_GIL(err = trace_begin(wires, lookups));
	return err ? os_error(err) : Py_NewRef(Py_None);
}

static PyObject *py_trace_end(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	WITHOUT_GIL(trace_end());
	Py_RETURN_NONE;
}

static PyObject *py_take_accesses(PyObject *module, PyObject *arg)
{
	Py_ssize_t most = PyNumber_AsSsize_t(arg, PyExc_OverflowError), count;
	struct access *taken;
	uint64_t lost;
	PyObject *out;

	(void)module;
	if (most == -1 && PyErr_Occurred())
		return NULL;
	most = most < 0 ? 0 : most > TAKE_MOST ? TAKE_MOST : most;
	taken = PyMem_Malloc((size_t)most * sizeof(*taken) + 1);
	if (!taken)
		return PyErr_NoMemory();
	WITHOUT_GIL(count = (Py_ssize_t)trace_take((size_t)most, taken, &lost));
	out = Py_BuildValue("y#K", (char *)taken, count * (Py_ssize_t)sizeof(*taken), (unsigned long long)lost);
	PyMem_Free(taken);
	return out;
}

static PyObject *py_describe_files(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct described found;
	PyObject *out = NULL;
	Py_buffer inos;
	ssize_t told;
	size_t count;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*", KEYWORDS("inos"), &inos) || !are_inos(&inos))
		return NULL;
	count = (size_t)inos.len / 4 < DESCRIBE_MOST ? (size_t)inos.len / 4 : DESCRIBE_MOST;
	found.sizes = PyMem_Calloc(count + 1, sizeof(*found.sizes));
	found.lengths = PyMem_Calloc(count + 1, sizeof(*found.lengths));
	found.names = PyMem_Malloc(NAMES_MOST);
	if (!found.sizes || !found.lengths || !found.names) {
		PyErr_NoMemory();
	} else {
		WITHOUT_GIL(told = trace_describe(inos.buf, count, NAMES_MOST, &found));
		out = told < 0 ? os_error((int)told)
			       : Py_BuildValue("y#y#y#", (char *)found.sizes, told * 8, (char *)found.lengths, told * 4,
					       found.names, (Py_ssize_t)found.names_len);
	}
	PyMem_Free(found.sizes);
	PyMem_Free(found.lengths);
	PyMem_Free(found.names);
	PyBuffer_Release(&inos);
	return out;
}

static PyObject *py_note_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg;
	uint64_t ino;
	int tid;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi", KEYWORDS("ino", "tid"), &ino_arg, &tid) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (ino && ino <= table_count())
		trace_saw_open((uint32_t)ino, (uint32_t)tid, TRACE_ON);
	Py_RETURN_NONE;
}

static PyObject *py_trace_sees_lookups(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyBool_FromLong(trace_is(TRACE_LOOKUPS));
}

static PyObject *py_expire_names(PyObject *module, PyObject *arg)
{
	long fd = PyLong_AsLong(arg);
	int64_t expired;

	(void)module;
	if (fd == -1 && PyErr_Occurred())
		return NULL;
	WITHOUT_GIL(expired = trace_expire((int)fd));
	return PyLong_FromLongLong(expired);
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(trace_begin),
    NO_ARGUMENT(trace_end),
    ONE_ARGUMENT(take_accesses),
    WITH_KEYWORDS(describe_files),
    WITH_KEYWORDS(note_open),
    NO_ARGUMENT(trace_sees_lookups),
    ONE_ARGUMENT(expire_names),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int trace_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
