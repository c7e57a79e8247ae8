/* The Python face of kernel/ and front/. The contract is in _native.pyi. */
#include "python.h"

#include "../front/front.h"
#include "../kernel/kernel.h"
#include "../segment/segment.h"

static PyObject *py_push(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg, *version_arg;
	unsigned long long offset;
	struct version version;
	Py_buffer data;
	uint64_t ino;
	int64_t pushed = 0;
	size_t size;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOKy*",
					 KEYWORDS("fuse_fd", "ino", "version", "offset", "data"), &fd, &ino_arg,
					 &version_arg, &offset, &data))
		return NULL;
	if (!take_ino(ino_arg, &ino) || !convert_version(version_arg, &version)) {
		PyBuffer_Release(&data);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	if (offset < version.size && table_is_current(ino, &version)) {
		size = (size_t)data.len;
		if (size > version.size - offset)
			size = version.size - offset;
		pushed = kernel_store(fd, (uint32_t)ino, offset, data.buf, size, &version);
	}
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&data);
	return pushed < 0 ? os_error((int)pushed) : PyLong_FromLongLong(pushed);
}

static PyObject *py_push_cached(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long block, skip;
	const unsigned char *data;
	struct scratch *scratch;
	struct version version;
	PyObject *ino_arg;
	uint64_t ino, packed = 0;
	int fd, result = READ_MISS;
	int64_t pushed = 0;
	uint32_t len = 0;
	bool known;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOKK", KEYWORDS("fuse_fd", "ino", "block", "skip"), &fd,
					 &ino_arg, &block, &skip) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	scratch = scratch_get();
	if (!scratch)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	pthread_rwlock_rdlock(&table.lock);
	known = node_at(ino) != NULL;
	if (known) {
		version = node_version(&table.nodes[node_primary((uint32_t)ino)]);
		packed = table_location(node_primary((uint32_t)ino), block);
	}
	pthread_rwlock_unlock(&table.lock);
	if (packed) {
		uint64_t start = block * BLOCK_BYTES;

		len = version.size - start < BLOCK_BYTES ? (uint32_t)(version.size - start) : BLOCK_BYTES;
		if (skip >= len) {
			result = READ_OK;
		} else {
			len -= (uint32_t)skip;
			result = block_read((uint32_t)ino, block, packed, len + (uint32_t)skip, (uint32_t)skip, len,
					    scratch, &data);
			if (result == READ_OK)
				pushed = kernel_store(fd, (uint32_t)ino, start + skip, data, len, &version);
		}
	}
	Py_END_ALLOW_THREADS
	scratch_put(scratch);
	if (!known)
		return unknown_inode(ino);
	if (pushed < 0)
		return os_error((int)pushed);
	return PyLong_FromLong(result == READ_OK ? (long)pushed : -1);
}

static PyObject *py_inval_inode(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long long offset, length;
	PyObject *ino_arg;
	uint64_t ino;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOLL", KEYWORDS("fuse_fd", "ino", "offset", "length"), &fd,
					 &ino_arg, &offset, &length) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	WITHOUT_GIL(err = kernel_inval_inode(fd, ino, offset, length));
	return err < 0 ? os_error(err) : PyBool_FromLong(err);
}

static PyObject *py_inval_entry(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *parent_arg;
	const char *name;
	Py_ssize_t len;
	uint64_t parent;
	int fd, err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOy#", KEYWORDS("fuse_fd", "parent", "name"), &fd, &parent_arg,
					 &name, &len) ||
	    !take_ino(parent_arg, &parent))
		return NULL;
	WITHOUT_GIL(err = kernel_inval_entry(fd, parent, name, (size_t)len));
	return none_or_error(err);
}

static PyObject *py_resend(PyObject *module, PyObject *arg)
{
	int fd = PyObject_AsFileDescriptor(arg), err;

	(void)module;
	if (fd < 0)
		return NULL;
	WITHOUT_GIL(err = kernel_resend(fd));
	return none_or_error(err);
}

/* ---- front -------------------------------------------------------------------------------- */
static PyObject *py_why_not_interposed(PyObject *module, PyObject *unused)
{
	const char *why = front_why_not();

	(void)module;
	(void)unused;
	return PyUnicode_FromString(why ? why : "");
}

static PyObject *py_configure_session(PyObject *module, PyObject *args, PyObject *kwargs)
{
	double negative_timeout_s;
	int enabled, threads;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pid", KEYWORDS("front", "threads", "negative_timeout_s"),
					 &enabled, &threads, &negative_timeout_s))
		return NULL;
	if (threads < 1 || front_configure(enabled, (unsigned)threads, negative_timeout_s)) {
		PyErr_SetString(PyExc_ValueError, "configure_session: 1 to 64 threads, and before pyfuse3.init");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_keep_root_acl(PyObject *module, PyObject *args, PyObject *kwargs)
{
	Py_buffer value;
	long long ctime_ns;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*L", KEYWORDS("value", "ctime_ns"), &value, &ctime_ns))
		return NULL;
	raw_keep_root_acl(value.buf, (size_t)value.len, ctime_ns);
	PyBuffer_Release(&value);
	Py_RETURN_NONE;
}

static PyObject *py_configure_answers(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const char *hintsd;
	int has_acls = false;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y|p", KEYWORDS("hintsd", "has_acls"), &hintsd, &has_acls))
		return NULL;
	if (raw_configure(hintsd, has_acls)) {
		PyErr_SetString(PyExc_ValueError, "configure_answers: a path has at most 4095 bytes");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_resume_session(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	if (front_resume()) {
		PyErr_SetString(PyExc_ValueError, "resume_session: once, after pyfuse3.init");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *py_read_asker(PyObject *module, PyObject *unused)
{
	int64_t begun_ns;
	int asker = front_asker(&begun_ns);

	(void)module;
	(void)unused;
	return Py_BuildValue("iL", asker, (long long)begun_ns);
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(push),
    WITH_KEYWORDS(push_cached),
    WITH_KEYWORDS(inval_inode),
    WITH_KEYWORDS(inval_entry),
    ONE_ARGUMENT(resend),
    NO_ARGUMENT(why_not_interposed),
    WITH_KEYWORDS(configure_session),
    WITH_KEYWORDS(configure_answers),
    WITH_KEYWORDS(keep_root_acl),
    NO_ARGUMENT(resume_session),
    NO_ARGUMENT(read_asker),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int front_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
