/* The Python face of events, counters and the RAM tier. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>

#include "../answer/answer.h"
#include "../plan/plan.h"
#include "../ram/ram.h"

static PyObject *py_event_fd(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(events_fd());
}

static PyObject *py_take_events(PyObject *module, PyObject *unused)
{
	struct event taken[64];
	PyObject *out = PyList_New(0);
	size_t count;

	(void)module;
	(void)unused;
	while (out && (count = events_take(taken, 64)))
		for (size_t i = 0; out && i < count; i++)
			list_append(&out,
				    Py_BuildValue("iKKK", taken[i].kind, (unsigned long long)taken[i].a,
						  (unsigned long long)taken[i].b, (unsigned long long)taken[i].c));
	return out;
}

static PyObject *py_note_read(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long offset, size;
	struct version version;
	PyObject *ino_arg;
	uint64_t ino;
	int tid = 0;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKK|i", KEYWORDS("ino", "offset", "size", "tid"), &ino_arg,
					 &offset, &size, &tid) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	if (table_version(ino, &version) && offset < version.size) {
		if (size > version.size - offset)
			size = version.size - offset;
		answer_note((uint32_t)ino, version.size, offset, size, tid);
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

static bool is_wanted(uint32_t ino) { return plan_flags(ino) & PLAN_WANTED; }

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
	count = ring_take(limit, (size_t)most, is_wanted, taken);
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
		list_put(&out, i,
			 Py_BuildValue("IKK", taken[i].ino, (unsigned long long)taken[i].offset,
				       (unsigned long long)taken[i].length));
	free(taken);
	return out;
}

static PyObject *py_counters(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#define ONE(field) #field, (unsigned long long)atomic_load(&counters.field)
	return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsK}", ONE(requests), ONE(from_ssd), ONE(bytes_from_ssd),
			     ONE(lookups), ONE(getattrs), ONE(readdirs), ONE(slow), ONE(faults), ONE(bytes_staged),
			     ONE(waited), ONE(from_origin), ONE(bytes_from_origin), ONE(files_fetched),
			     ONE(bytes_fetched), ONE(files_pooled), ONE(bytes_pooled));
#undef ONE
}

static PyObject *note_latency(struct latency *of, PyObject *arg)
{
	long long ns = PyLong_AsLongLong(arg);

	if (ns == -1 && PyErr_Occurred())
		return NULL;
	latency_add(of, ns);
	Py_RETURN_NONE;
}

static PyObject *latencies(struct latency *of)
{
	PyObject *buckets = PyList_New(LATENCY_BUCKETS);

	for (size_t k = 0; buckets && k < LATENCY_BUCKETS; k++)
		list_put(&buckets, k, PyLong_FromUnsignedLongLong(atomic_load(&of->buckets[k])));
	return Py_BuildValue("NK", buckets, (unsigned long long)atomic_load(&of->sum_ns));
}

static PyObject *py_note_origin_read(PyObject *module, PyObject *arg)
{
	(void)module;
	return note_latency(&origin_reads, arg);
}

static PyObject *py_note_mount_read(PyObject *module, PyObject *arg)
{
	(void)module;
	return note_latency(&mount_reads, arg);
}

static PyObject *py_origin_reads(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return latencies(&origin_reads);
}

static PyObject *py_mount_reads(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return latencies(&mount_reads);
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    NO_ARGUMENT(event_fd),
    NO_ARGUMENT(take_events),
    WITH_KEYWORDS(note_read),
    NO_ARGUMENT(ram_bytes),
    WITH_KEYWORDS(ram_take),
    NO_ARGUMENT(counters),
    ONE_ARGUMENT(note_origin_read),
    NO_ARGUMENT(origin_reads),
    ONE_ARGUMENT(note_mount_read),
    NO_ARGUMENT(mount_reads),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int events_add_to(PyObject *module)
{
#define CONSTANT(name) PyModule_AddIntConstant(module, #name, name)
	return PyModule_AddFunctions(module, methods) || CONSTANT(STREAM_HEAD_BYTES) || CONSTANT(LATENCY_SHIFT) ||
		       CONSTANT(EVENT_FAULT) || CONSTANT(EVENT_STREAM) || CONSTANT(EVENT_UNREAD) ||
		       CONSTANT(EVENT_PUNCHED)
		   ? -1
		   : 0;
#undef CONSTANT
}
