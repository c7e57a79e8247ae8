/* The Python face of ahead/fetch.c and ahead/missed.c. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>

#include "../ahead/ahead.h"

static void fetches_free(struct fetch *fetches)
{
	while (fetches) {
		struct fetch *fetch = fetches;

		fetches = fetch->next;
		Py_DECREF((PyObject *)fetch->owner);
		free(fetch);
	}
}

static PyObject *py_fetch_start(PyObject *module, PyObject *args, PyObject *kwargs)
{
	int direct = false;
	long threads;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "l|p", KEYWORDS("threads", "direct"), &threads, &direct))
		return NULL;
	if (threads < 1 || threads > (long)FETCH_THREADS_MOST)
		return PyErr_Format(PyExc_ValueError, "1 to %d threads", (int)FETCH_THREADS_MOST);
	fetch_begin((unsigned)threads, direct);
	Py_RETURN_NONE;
}

static PyObject *py_fetch_submit(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg, *version_arg, *bytes;
	struct version version;
	struct fetch *fetch;
	long long tag;
	uint64_t ino;
	int err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL", KEYWORDS("ino", "version", "tag"), &ino_arg, &version_arg,
					 &tag) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	if (!ino || ino > table_count())
		return unknown_inode(ino);
	if (version.size > BLOCK_BYTES) {
		PyErr_SetString(PyExc_ValueError, "larger than one block");
		return NULL;
	}
	bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)version.size);
	if (!bytes)
		return NULL;
	fetch = malloc(sizeof(*fetch));
	if (!fetch) {
		Py_DECREF(bytes);
		return PyErr_NoMemory();
	}
	*fetch = (struct fetch){
	    .owner = bytes,
	    .into = (unsigned char *)PyBytes_AS_STRING(bytes),
	    .version = version,
	    .tag = tag,
	    .ino = (uint32_t)ino,
	};
	err = fetch_submit(fetch);
	if (!err)
		Py_RETURN_NONE;
	fetches_free(fetch);
	return os_error(err);
}

static PyObject *py_fetch_fd(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(fetch_fd());
}

static PyObject *py_fetch_take(PyObject *module, PyObject *arg)
{
	Py_ssize_t most = PyNumber_AsSsize_t(arg, PyExc_OverflowError);
	struct fetch *fetches;
	PyObject *out;

	(void)module;
	if (most == -1 && PyErr_Occurred())
		return NULL;
	out = PyList_New(0);
	if (!out)
		return NULL;
	fetches = fetch_take(most < 0 ? 0 : (size_t)most);
	for (const struct fetch *fetch = fetches; out && fetch; fetch = fetch->next)
		list_append(&out, Py_BuildValue("LIOiLLO", (long long)fetch->tag, fetch->ino,
						fetch->error ? Py_None : (PyObject *)fetch->owner, fetch->error,
						(long long)fetch->begun_ns, (long long)fetch->ended_ns,
						fetch->is_pooled ? Py_True : Py_False));
	fetches_free(fetches);
	return out;
}

static PyObject *py_missed_enable(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long long tick_ns;
	int enabled;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pL", KEYWORDS("enabled", "tick_ns"), &enabled, &tick_ns))
		return NULL;
	missed_enable(enabled, tick_ns);
	Py_RETURN_NONE;
}

static PyObject *py_missed_fresh(PyObject *module, PyObject *arg)
{
	int wait = PyObject_IsTrue(arg);
	uint32_t inos[MISSED_MOST];
	size_t count;

	(void)module;
	if (wait < 0)
		return NULL;
	WITHOUT_GIL(count = missed_fresh(wait, inos));
	return PyBytes_FromStringAndSize((const char *)inos, (Py_ssize_t)(count * sizeof(*inos)));
}

static PyObject *py_missed_pass(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	WITHOUT_GIL(missed_pass((uint32_t)ino));
	Py_RETURN_NONE;
}

static PyObject *py_missed_waits(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	return PyBool_FromLong(missed_waits((uint32_t)ino));
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(missed_enable),
    ONE_ARGUMENT(missed_fresh),
    ONE_ARGUMENT(missed_pass),
    ONE_ARGUMENT(missed_waits),
    WITH_KEYWORDS(fetch_start),
    WITH_KEYWORDS(fetch_submit),
    NO_ARGUMENT(fetch_fd),
    ONE_ARGUMENT(fetch_take),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int fetch_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
