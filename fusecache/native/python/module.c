/* fusecache._native: the Python face of the C part. The contract is in _native.pyi.
 *
 * Arguments are checked here; every call that may block runs without the GIL; negative errno values
 * become OSError. The same shared object also interposes libfuse (front/session.c) when it was loaded
 * with RTLD_GLOBAL before pyfuse3.
 */
#include "python.h"

#include "../ahead/ahead.h"
#include "../front/front.h"
#include "../log/log.h"
#include "../plan/plan.h"
#include "../ram/ram.h"

static PyObject *py_attach(PyObject *module, PyObject *args, PyObject *kwargs)
{
	int table_fd, source_fd, zero_open, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iip", KEYWORDS("table_fd", "source_fd", "zero_open"), &table_fd,
					 &source_fd, &zero_open))
		return NULL;
	if (front_running()) {
		PyErr_SetString(PyExc_RuntimeError, "the front is running on the attached table");
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	ring_reset();
	streams_reset();
	events_reset();
	plan_end();
	log_forget();
	err = table_attach(table_fd, source_fd, zero_open);
	Py_END_ALLOW_THREADS
	if (err == -EINVAL) {
		PyErr_SetString(PyExc_ValueError, "the inode table has another layout version or open mode");
		return NULL;
	}
	return err ? os_error(err) : PyLong_FromUnsignedLong(table_count());
}

static PyObject *py_memory_bytes(PyObject *module, PyObject *unused)
{
	uint64_t bytes;

	(void)module;
	(void)unused;
	WITHOUT_GIL(bytes = table_bytes() + ring_bytes() + streams_bytes() + events_bytes() +
			    atomic_load(&log_counters.buffer_bytes));
	return PyLong_FromUnsignedLongLong(bytes);
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(attach),
    NO_ARGUMENT(memory_bytes),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

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
			err = events_init();
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
	if (helpers_init())
		return NULL;
	module = PyModule_Create(&definition);
	if (module &&
	    (table_add_to(module) || journal_add_to(module) || listing_add_to(module) || segment_add_to(module) ||
	     front_add_to(module) || events_add_to(module) || plan_add_to(module) || fetch_add_to(module) ||
	     pool_add_to(module) || trace_add_to(module) || log_add_to(module) || probe_add_to(module)))
		Py_CLEAR(module);
	return module;
}
