/* The Python face of segment/, and of locations in table/. The contract is in _native.pyi. */
#include "python.h"

#include <stdlib.h>

#include "../segment/segment.h"

static PyObject *py_set_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, offset;
	unsigned int segno, header_len;
	PyObject *ino_arg, *version_arg;
	struct version version;
	uint64_t ino;
	int result;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKIKIO",
					 KEYWORDS("ino", "block", "segno", "offset", "header_len", "version"), &ino_arg,
					 &block, &segno, &offset, &header_len, &version_arg) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	WITHOUT_GIL(result = table_set_location(ino, block, (struct location){segno, header_len, offset}, &version));
	if (result == -EINVAL) {
		PyErr_SetString(PyExc_ValueError, "offset or header length of a record out of range");
		return NULL;
	}
	if (result == -ENOENT)
		return unknown_inode(ino);
	return result < 0 ? os_error(result) : PyBool_FromLong(result);
}

static PyObject *py_get_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyThreadState *locked;
	unsigned long long block;
	struct location at;
	PyObject *ino_arg;
	uint64_t ino, packed = 0;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK", KEYWORDS("ino", "block"), &ino_arg, &block) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	locked = lock_read();
	if (node_at(ino))
		packed = table_location(node_primary((uint32_t)ino), block);
	unlock(locked);
	if (!packed)
		Py_RETURN_NONE;
	at = location_unpack(packed);
	return Py_BuildValue("IKI", at.segno, (unsigned long long)at.offset, at.header_len);
}

static PyObject *py_clear_location(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, offset;
	unsigned int segno, header_len;
	PyObject *ino_arg;
	uint64_t ino, at;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK(IKI)", KEYWORDS("ino", "block", "only_if"), &ino_arg, &block,
					 &segno, &offset, &header_len) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	at = location_pack((struct location){segno, header_len, offset});
	WITHOUT_GIL(table_clear_location(ino, block, at));
	Py_RETURN_NONE;
}

static PyObject *py_segment_add(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned int segno;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ii", KEYWORDS("segno", "fd"), &segno, &fd))
		return NULL;
	WITHOUT_GIL(err = segment_add(segno, fd));
	return none_or_error(err);
}

static PyObject *py_segment_drop(PyObject *module, PyObject *arg)
{
	unsigned long segno = PyLong_AsUnsignedLong(arg);

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	WITHOUT_GIL(segment_drop((uint32_t)segno));
	Py_RETURN_NONE;
}

static PyObject *py_segment_known(PyObject *module, PyObject *arg)
{
	unsigned long segno = PyLong_AsUnsignedLong(arg);

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	return PyBool_FromLong(segment_known((uint32_t)segno));
}

static PyObject *py_segment_reads(PyObject *module, PyObject *args)
{
	uint64_t (*pairs)[2] = NULL;
	size_t count = 0, most;
	PyObject *found;

	(void)module;
	(void)args;
	do { /* another may have been opened meanwhile */
		most = count;
		free(pairs);
		pairs = malloc((most + 1) * sizeof(*pairs));
		if (!pairs)
			return PyErr_NoMemory();
		count = segment_reads(pairs, most);
	} while (count > most);
	found = PyDict_New();
	for (size_t i = 0; found && i < count; i++) {
		PyObject *segno = PyLong_FromUnsignedLongLong(pairs[i][0]);
		PyObject *reads = PyLong_FromUnsignedLongLong(pairs[i][1]);

		if (!segno || !reads || PyDict_SetItem(found, segno, reads))
			Py_CLEAR(found);
		Py_XDECREF(segno);
		Py_XDECREF(reads);
	}
	free(pairs);
	return found;
}

static PyObject *py_read_record(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned int header_len, payload_len, segno = 0;
	unsigned long long offset;
	const unsigned char *data;
	struct scratch *scratch;
	PyObject *out = NULL;
	int fd, result;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iKII|I",
					 KEYWORDS("fd", "offset", "header_len", "payload_len", "segno"), &fd, &offset,
					 &header_len, &payload_len, &segno))
		return NULL;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	WITHOUT_GIL(
	    result = record_read_fd(fd, (struct location){segno, header_len, offset}, payload_len, scratch, &data));
	if (result == READ_OK)
		out = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)payload_len);
	else
		PyErr_Format(PyExc_ValueError, "record at %llu: checksum, magic or length mismatch", offset);
	scratch_put(scratch);
	return out;
}

static PyObject *py_read_cached(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct scratch *scratch, *joined = NULL;
	unsigned long long offset;
	struct look found;
	const unsigned char *data;
	PyObject *ino_arg, *out = NULL;
	uint64_t ino;
	Py_ssize_t wanted;
	size_t size;
	int result = READ_MISS;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn", KEYWORDS("ino", "offset", "size"), &ino_arg, &offset,
					 &wanted) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	size = wanted > 0 ? (size_t)wanted : 0;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	if (table_look(ino, offset / BLOCK_BYTES, &found))
		result = file_read(&found, offset, &size, scratch, &joined, &data);
	Py_END_ALLOW_THREADS
	if (result == READ_OK)
		out = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
	scratch_put(scratch);
	scratch_put(joined);
	if (out || PyErr_Occurred())
		return out;
	Py_RETURN_NONE;
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(set_location),
    WITH_KEYWORDS(get_location),
    WITH_KEYWORDS(clear_location),
    WITH_KEYWORDS(segment_add),
    ONE_ARGUMENT(segment_drop),
    ONE_ARGUMENT(segment_known),
    NO_ARGUMENT(segment_reads),
    WITH_KEYWORDS(read_record),
    WITH_KEYWORDS(read_cached),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int segment_add_to(PyObject *module)
{
#define CONSTANT(name) PyModule_AddIntConstant(module, #name, name)
	return PyModule_AddFunctions(module, methods) || CONSTANT(BLOCK_BYTES) || CONSTANT(CHUNK_BYTES) ? -1 : 0;
#undef CONSTANT
}
