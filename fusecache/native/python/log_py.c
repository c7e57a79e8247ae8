/* The Python face of log/, and of what table/ knows of many locations. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>
#include <string.h>

#include "../log/log.h"
#include "../segment/segment.h"

#define BUFFER_BYTES_MOST (1u << 30)

/* Buffers of u32 may lie anywhere. */
static uint32_t *aligned(const Py_buffer *numbers)
{
	uint32_t *copy = malloc((size_t)numbers->len + 1);

	if (copy)
		memcpy(copy, numbers->buf, (size_t)numbers->len);
	return copy;
}

static PyObject *segment_counts(const struct segment_count *counts, size_t count)
{
	PyObject *out = PyList_New((Py_ssize_t)count);

	for (size_t i = 0; out && i < count; i++)
		list_put(&out, i, Py_BuildValue("IK", counts[i].segno, (unsigned long long)counts[i].count));
	return out;
}

/* ---- the log ------------------------------------------------------------------------------ */
static const char *refusal(const struct log_settings *settings, const Py_buffer *segnos, const Py_buffer *fds,
			   const Py_buffer *uuid, const Py_buffer *dataset)
{
	if (!settings->chunks || settings->chunks > LOG_CHUNKS_MOST)
		return "chunks: 1 to 4096";
	if (!settings->buffer_bytes || settings->buffer_bytes % PAGE || settings->buffer_bytes > BUFFER_BYTES_MOST)
		return "buffer_bytes: a multiple of 4096";
	if ((size_t)segnos->len != (size_t)settings->chunks * 4 || (size_t)fds->len != (size_t)settings->chunks * 4)
		return "segnos, fds: four bytes for each chunk";
	return uuid->len != 16 || dataset->len != 16 ? "uuid, dataset: 16 bytes" : NULL;
}

static PyObject *py_log_begin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	Py_buffer segnos, fds, uuid, dataset;
	uint32_t *numbers = NULL, *files = NULL;
	struct log_settings settings;
	PyObject *out = NULL;
	long long credit;
	const char *wrong;
	int err = -ENOMEM;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIy*y*y*y*bL",
					 KEYWORDS("chunks", "buffer_bytes", "segnos", "fds", "uuid", "dataset",
						  "algorithm", "credit_bytes"),
					 &settings.chunks, &settings.buffer_bytes, &segnos, &fds, &uuid, &dataset,
					 &settings.algorithm, &credit))
		return NULL;
	wrong = refusal(&settings, &segnos, &fds, &uuid, &dataset);
	if (wrong) {
		PyErr_SetString(PyExc_ValueError, wrong);
	} else {
		settings.credit_bytes = credit;
		memcpy(settings.uuid, uuid.buf, 16);
		memcpy(settings.dataset, dataset.buf, 16);
		numbers = aligned(&segnos);
		files = aligned(&fds);
		if (numbers && files)
			WITHOUT_GIL(err = log_begin(&settings, numbers, (const int *)files));
		out = err ? os_error(err) : Py_NewRef(Py_None);
	}
	free(numbers);
	free(files);
	PyBuffer_Release(&segnos);
	PyBuffer_Release(&fds);
	PyBuffer_Release(&uuid);
	PyBuffer_Release(&dataset);
	return out;
}

static PyObject *py_log_assign(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned chunk;
	Py_buffer inos;
	uint32_t *numbers;
	int err = -ENOMEM;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*I", KEYWORDS("inos", "chunk"), &inos, &chunk) ||
	    !are_inos(&inos))
		return NULL;
	numbers = aligned(&inos);
	if (numbers)
		WITHOUT_GIL(err = log_assign(numbers, (size_t)inos.len / 4, chunk));
	free(numbers);
	PyBuffer_Release(&inos);
	if (err == -EINVAL)
		return PyErr_Format(PyExc_ValueError, "the log has no chunk %u", chunk);
	return err ? os_error(err) : Py_NewRef(Py_None);
}

static PyObject *py_log_open(PyObject *module, PyObject *unused)
{
	int err = log_open();

	(void)module;
	(void)unused;
	return err ? os_error(err) : Py_NewRef(Py_None);
}

static PyObject *py_log_wants(PyObject *module, PyObject *arg)
{
	uint64_t ino;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	return PyBool_FromLong(ino <= table_count() && log_wants((uint32_t)ino));
}

static PyObject *py_log_move(PyObject *module, PyObject *arg)
{
	const unsigned char *payload;
	struct scratch *scratch;
	uint32_t known, size = 0;
	struct version version;
	uint64_t ino, packed = 0;
	int err = -ESTALE;

	(void)module;
	if (!take_ino(arg, &ino))
		return NULL;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	known = ino <= table_count() ? (uint32_t)ino : 0;
	if (table_version(known, &version) && version.size && version.size <= BLOCK_BYTES) {
		size = (uint32_t)version.size;
		table_locations(&known, 1, &packed);
	}
	if (packed && block_read(known, 0, packed, size, 0, size, scratch, &payload) == READ_OK)
		/* They were read together. */
		err = log_move(known, packed, payload - location_unpack(packed).header_len);
	Py_END_ALLOW_THREADS
	scratch_put(scratch);
	return PyLong_FromLong(-err);
}

static PyObject *py_log_add(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg, *version_arg;
	unsigned char digest[32] = {0};
	unsigned long long fetched_ns;
	Py_buffer name, payload;
	struct version version;
	PyObject *out = NULL;
	uint64_t ino;
	int err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOy*Ky*",
					 KEYWORDS("ino", "version", "digest", "fetched_ns", "payload"), &ino_arg,
					 &version_arg, &name, &fetched_ns, &payload))
		return NULL;
	if (name.len > (Py_ssize_t)sizeof(digest)) {
		PyErr_SetString(PyExc_ValueError, "digest: at most 32 bytes");
	} else if (take_ino(ino_arg, &ino) && convert_version(version_arg, &version)) {
		memcpy(digest, name.buf, (size_t)name.len);
		if (ino > table_count() || payload.len > (Py_ssize_t)BLOCK_BYTES)
			err = -ENOENT;
		else
			WITHOUT_GIL(err = log_add((uint32_t)ino, &version, digest, fetched_ns, payload.buf,
						  (uint32_t)payload.len));
		out = PyBool_FromLong(!err);
	}
	PyBuffer_Release(&name);
	PyBuffer_Release(&payload);
	return out;
}

static PyObject *py_log_read(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg, *version_arg, *out;
	unsigned long long offset;
	struct version version;
	Py_ssize_t size;
	uint64_t ino;
	bool found = false;
	void *to;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKn", KEYWORDS("ino", "version", "offset", "size"), &ino_arg,
					 &version_arg, &offset, &size) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	if (ino > table_count() || !log_holds((uint32_t)ino))
		Py_RETURN_NONE;
	out = PyBytes_FromStringAndSize(NULL, size);
	if (!out)
		return NULL;
	to = PyBytes_AS_STRING(out);
	WITHOUT_GIL(found = log_read((uint32_t)ino, &version, offset, to, (size_t)size));
	if (found)
		return out;
	Py_DECREF(out);
	Py_RETURN_NONE;
}

static PyObject *py_log_credit(PyObject *module, PyObject *arg)
{
	long long more = PyLong_AsLongLong(arg);

	(void)module;
	if (more == -1 && PyErr_Occurred())
		return NULL;
	return PyLong_FromLongLong(log_credit(more));
}

static PyObject *py_log_flush(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	WITHOUT_GIL(log_flush());
	Py_RETURN_NONE;
}

static PyObject *py_log_end(PyObject *module, PyObject *unused)
{
	struct segment_end *ends = malloc(LOG_CHUNKS_MOST * sizeof(*ends));
	PyObject *out;
	size_t count;

	(void)module;
	(void)unused;
	if (!ends)
		return PyErr_NoMemory();
	WITHOUT_GIL(count = log_end(ends));
	out = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; out && i < count; i++)
		list_put(&out, i, Py_BuildValue("IKi", ends[i].segno, (unsigned long long)ends[i].length, ends[i].err));
	free(ends);
	return out;
}

static PyObject *py_log_counters(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#define ONE(field) #field, (unsigned long long)atomic_load(&log_counters.field)
	return Py_BuildValue("{sKsKsKsKsKsKsK}", ONE(written_bytes), ONE(waiting_bytes), ONE(moved), ONE(added),
			     ONE(refused), ONE(failed), ONE(buffer_bytes));
#undef ONE
}

static PyObject *py_log_left(PyObject *module, PyObject *unused)
{
	struct segment_count *left;
	PyObject *out;
	size_t count;
	int err;

	(void)module;
	(void)unused;
	err = log_left(&left, &count);
	if (err)
		return os_error(err);
	out = segment_counts(left, count);
	free(left);
	return out;
}

/* ---- many locations ----------------------------------------------------------------------- */
static PyObject *py_log_survey(PyObject *module, PyObject *unused)
{
	struct segment_use *uses;
	PyObject *out;
	size_t count;
	int err;

	(void)module;
	(void)unused;
	WITHOUT_GIL(err = log_survey(&uses, &count));
	if (err)
		return os_error(err);
	out = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; out && i < count; i++)
		list_put(&out, i,
			 Py_BuildValue("IKKK", uses[i].segno, (unsigned long long)uses[i].files,
				       (unsigned long long)uses[i].bytes, (unsigned long long)uses[i].to_come));
	free(uses);
	return out;
}

static PyObject *py_log_drain(PyObject *module, PyObject *arg)
{
	uint32_t *numbers;
	Py_buffer segnos;

	(void)module;
	if (arg == Py_None) {
		log_drain(NULL, 0);
		Py_RETURN_NONE;
	}
	if (PyObject_GetBuffer(arg, &segnos, PyBUF_SIMPLE) || !are_inos(&segnos))
		return NULL;
	numbers = aligned(&segnos);
	if (numbers)
		log_drain(numbers, (size_t)segnos.len / 4);
	PyBuffer_Release(&segnos);
	return numbers ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

struct placed {
	uint64_t packed; /* ordered as (segno, offset) */
	int64_t number;
};

static int compare_placed(const void *a, const void *b)
{
	const struct placed *x = a, *y = b;

	if (x->packed != y->packed)
		return x->packed < y->packed ? -1 : 1;
	return x->number < y->number ? -1 : x->number > y->number;
}

/* false: no memory */
static bool sort_placed(const uint32_t *inos, size_t count, int64_t *order)
{
	struct placed *placed = malloc(count * sizeof(*placed) + 1);
	uint64_t *packed = malloc(count * sizeof(*packed) + 1);
	bool done = placed && packed;

	if (done) {
		table_locations(inos, count, packed);
		for (size_t i = 0; i < count; i++)
			placed[i] = (struct placed){packed[i] ? packed[i] : UINT64_MAX, (int64_t)i};
		qsort(placed, count, sizeof(*placed), compare_placed);
		for (size_t i = 0; i < count; i++)
			order[i] = placed[i].number;
	}
	free(placed);
	free(packed);
	return done;
}

static PyObject *py_sort_by_location(PyObject *module, PyObject *arg)
{
	int64_t *order = NULL;
	PyObject *out = NULL;
	bool done = false;
	uint32_t *numbers;
	Py_ssize_t count;
	Py_buffer inos;

	(void)module;
	if (PyObject_GetBuffer(arg, &inos, PyBUF_SIMPLE) || !are_inos(&inos))
		return NULL;
	count = inos.len / 4;
	numbers = aligned(&inos);
	order = malloc((size_t)count * sizeof(*order) + 1);
	if (numbers && order)
		WITHOUT_GIL(done = sort_placed(numbers, (size_t)count, order));
	out = done ? PyBytes_FromStringAndSize((const char *)order, count * (Py_ssize_t)sizeof(*order))
		   : PyErr_NoMemory();
	free(order);
	free(numbers);
	PyBuffer_Release(&inos);
	return out;
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(log_begin),
    WITH_KEYWORDS(log_assign),
    NO_ARGUMENT(log_open),
    ONE_ARGUMENT(log_wants),
    ONE_ARGUMENT(log_move),
    WITH_KEYWORDS(log_add),
    WITH_KEYWORDS(log_read),
    ONE_ARGUMENT(log_credit),
    NO_ARGUMENT(log_flush),
    NO_ARGUMENT(log_end),
    NO_ARGUMENT(log_counters),
    NO_ARGUMENT(log_left),
    NO_ARGUMENT(log_survey),
    ONE_ARGUMENT(log_drain),
    ONE_ARGUMENT(sort_by_location),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int log_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
