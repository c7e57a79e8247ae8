/* The Python face of plan/, and of what ahead/ stages, drops and lists. The contract is in _native.pyi. */
#include "python.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "../ahead/ahead.h"
#include "../front/front.h"
#include "../plan/plan.h"
#include "../trace/trace.h"

#define LIST_MOST 65536

/* ---- flags and observations --------------------------------------------------------------- */
static PyObject *py_plan_begin(PyObject *module, PyObject *unused)
{
	int err;

	(void)module;
	(void)unused;
	WITHOUT_GIL(err = plan_begin());
	return err ? os_error(err) : Py_NewRef(Py_None);
}

static PyObject *py_plan_end(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	WITHOUT_GIL(plan_end());
	Py_RETURN_NONE;
}

static PyObject *py_plan_mark(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned char add, remove;
	Py_buffer inos;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*bb", KEYWORDS("inos", "add", "remove"), &inos, &add,
					 &remove) ||
	    !are_inos(&inos))
		return NULL;
	/* With the GIL: it waits for no lock, and to get the GIL back may take milliseconds. */
	for (Py_ssize_t i = 0; i < inos.len / 4; i++)
		if (ino_at(&inos, i) <= table_count())
			plan_mark(ino_at(&inos, i), add, remove);
	PyBuffer_Release(&inos);
	Py_RETURN_NONE;
}

static PyObject *py_plan_flags(PyObject *module, PyObject *args, PyObject *kwargs)
{
	Py_buffer inos;
	PyObject *out;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*", KEYWORDS("inos"), &inos) || !are_inos(&inos))
		return NULL;
	out = PyBytes_FromStringAndSize(NULL, inos.len / 4);
	for (Py_ssize_t i = 0; out && i < inos.len / 4; i++)
		PyBytes_AS_STRING(out)[i] = (char)plan_flags(ino_at(&inos, i));
	PyBuffer_Release(&inos);
	return out;
}

static PyObject *py_seen_fd(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(plan_seen_fd());
}

static PyObject *py_take_seen(PyObject *module, PyObject *arg)
{
	Py_ssize_t most = PyNumber_AsSsize_t(arg, PyExc_OverflowError);
	PyObject *out = NULL;
	struct seen *taken;
	char *columns, *at;
	uint32_t lost;
	size_t count;

	(void)module;
	if (most == -1 && PyErr_Occurred())
		return NULL;
	most = most < 0 ? 0 : most > LIST_MOST ? LIST_MOST : most;
	taken = malloc((size_t)most * sizeof(*taken) + 1);
	columns = malloc((size_t)most * 13 + 1);
	if (!taken || !columns) {
		free(taken);
		free(columns);
		return PyErr_NoMemory();
	}
	WITHOUT_GIL(count = plan_take_seen((size_t)most, taken, &lost));
	at = columns;
	for (size_t i = 0; i < count; i++, at += 4) {
		memcpy(at, &taken[i].ino, 4);
		memcpy(at + 4 * count, &taken[i].process, 4);
		memcpy(at + 8 * count, &taken[i].parent, 4);
		columns[12 * count + i] = (char)taken[i].kind;
	}
	out = Py_BuildValue("y#y#y#y#I", columns, (Py_ssize_t)(4 * count), columns + 12 * count, (Py_ssize_t)count,
			    columns + 4 * count, (Py_ssize_t)(4 * count), columns + 8 * count, (Py_ssize_t)(4 * count),
			    lost);
	free(taken);
	free(columns);
	return out;
}

static PyObject *py_note_seen(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg;
	bool stands = false;
	int what, tid = 0;
	uint8_t kind = 0;
	uint64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi|i", KEYWORDS("ino", "what", "tid"), &ino_arg, &what, &tid) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (what != SEEN_LOOKUP && what != SEEN_SSD && what != SEEN_ORIGIN)
		return PyErr_Format(PyExc_ValueError, "what: %d", what);
	if (ino > table_count())
		ino = 0;
	if (what == SEEN_LOOKUP && ino && !plan_is_asking(tid))
		trace_saw_open((uint32_t)ino, (uint32_t)tid, TRACE_LOOKUPS);
	else if (what != SEEN_LOOKUP && ino && trace_is(TRACE_ON))
		trace_note_read((uint32_t)ino, (uint8_t)what, (uint32_t)tid);
	if (what == SEEN_LOOKUP)
		kind = plan_cut_wire((uint32_t)ino, tid);
	if (kind)
		plan_saw_lookup((uint32_t)ino, kind, tid);
	else if (what == SEEN_LOOKUP)
		stands = plan_flags((uint32_t)ino) & PLAN_ARMED; /* and the look-up is one of our own */
	else if (ino)
		plan_saw_read((uint32_t)ino, (uint8_t)what, tid);
	return PyBool_FromLong(stands);
}

static PyObject *py_arm(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long armed = 0;
	Py_buffer inos;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iy*", KEYWORDS("fuse_fd", "inos"), &fd, &inos) ||
	    !are_inos(&inos))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t i = 0; i < inos.len / 4; i++)
		armed += ahead_arm(fd, ino_at(&inos, i));
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&inos);
	return PyLong_FromLong(armed);
}

static PyObject *py_open_unseen(PyObject *module, PyObject *path)
{
	const char *name = PyBytes_AsString(path);
	struct asking *me;
	int fd;

	(void)module;
	if (!name)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	me = plan_asking_begin();
	fd = open(name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	fd = fd < 0 ? -errno : fd;
	plan_asking_end(me);
	Py_END_ALLOW_THREADS
	return fd < 0 ? os_error(fd) : PyLong_FromLong(fd);
}

/* ---- pages -------------------------------------------------------------------------------- */
static PyObject *py_stage(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct scratch *scratch = NULL;
	Py_buffer inos, moves = {0};
	PyObject *out = NULL;
	uint32_t *numbers = NULL;
	struct mount mount;
	int err = -ENOMEM;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iyy*|y*", KEYWORDS("fuse_fd", "mountpoint", "inos", "moves"),
					 &mount.fd, &mount.point, &inos, &moves))
		return NULL;
	mount.is_fronted = front_running();
	if (inos.len % 4 || (moves.len && moves.len != inos.len / 4)) {
		PyErr_SetString(PyExc_ValueError, "inos: four bytes each, moves: one");
		goto end;
	}
	scratch = scratch_get();
	numbers = malloc((size_t)inos.len + 1);
	out = PyBytes_FromStringAndSize(NULL, inos.len / 4);
	if (scratch && numbers && out) {
		memcpy(numbers, inos.buf, (size_t)inos.len);
		WITHOUT_GIL(err = ahead_stage(&mount, numbers, moves.len ? moves.buf : NULL, (size_t)inos.len / 4,
					      (uint8_t *)PyBytes_AS_STRING(out), scratch));
	}
	if (err) {
		Py_CLEAR(out);
		PyErr_NoMemory();
	}
end:
	free(numbers);
	scratch_put(scratch);
	PyBuffer_Release(&moves);
	PyBuffer_Release(&inos);
	return out;
}

static PyObject *py_count_within(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long most, size = 0;
	PyThreadState *without_gil;
	Py_ssize_t count = 0;
	Py_buffer inos;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*K", KEYWORDS("inos", "bytes"), &inos, &most) ||
	    !are_inos(&inos))
		return NULL;
	without_gil = lock_read();
	for (; count < inos.len / 4; count++) {
		const struct node *n = node_at(ino_at(&inos, count));

		size += n ? table.nodes[node_primary(ino_at(&inos, count))].size : 0;
		if (count && size > most)
			break;
	}
	unlock(without_gil);
	PyBuffer_Release(&inos);
	return PyLong_FromSsize_t(count);
}

struct pushed_file {
	Py_buffer data;
	struct version version;
	uint64_t ino;
};

static PyObject *py_push_files(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *list, *out = NULL, *version;
	struct pushed_file *files;
	Py_ssize_t count, ready = 0;
	struct mount mount;
	char *results;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iyO!", KEYWORDS("fuse_fd", "mountpoint", "files"), &mount.fd,
					 &mount.point, &PyList_Type, &list))
		return NULL;
	mount.is_fronted = front_running();
	count = PyList_GET_SIZE(list);
	files = calloc((size_t)count + 1, sizeof(*files));
	if (!files)
		return PyErr_NoMemory();
	for (; ready < count; ready++) {
		struct pushed_file *file = &files[ready];
		PyObject *ino;

		/* The list may change while a buffer is being asked for. */
		if (ready >= PyList_GET_SIZE(list) || !PyTuple_Check(PyList_GET_ITEM(list, ready))) {
			PyErr_SetString(PyExc_TypeError, "files: a list of tuples");
			break;
		}
		if (!PyArg_ParseTuple(PyList_GET_ITEM(list, ready), "OOy*;ino, version, data", &ino, &version,
				      &file->data))
			break;
		if (!take_ino(ino, &file->ino) || !convert_version(version, &file->version)) {
			PyBuffer_Release(&file->data);
			break;
		}
		if (file->ino > UINT32_MAX)
			file->ino = 0; /* unknown */
	}
	if (ready == count)
		out = PyBytes_FromStringAndSize(NULL, count);
	if (out) {
		results = PyBytes_AS_STRING(out);
		Py_BEGIN_ALLOW_THREADS
		for (Py_ssize_t i = 0; i < count; i++)
			results[i] = (char)ahead_push(&mount, (uint32_t)files[i].ino, &files[i].version,
						      files[i].data.buf, (size_t)files[i].data.len);
		Py_END_ALLOW_THREADS
	}
	while (ready)
		PyBuffer_Release(&files[--ready].data);
	free(files);
	return out;
}

static PyObject *py_drop(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct mount mount;
	Py_buffer inos;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "yy*i", KEYWORDS("mountpoint", "inos", "fuse_fd"), &mount.point,
					 &inos, &mount.fd) ||
	    !are_inos(&inos))
		return NULL;
	mount.is_fronted = front_running();
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t i = 0; i < inos.len / 4; i++)
		ahead_drop(&mount, ino_at(&inos, i));
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&inos);
	Py_RETURN_NONE;
}

static PyObject *py_segments_of(PyObject *module, PyObject *arg)
{
	struct number_list segnos = {0}, unknown = {0};
	PyObject *out = NULL;
	Py_buffer marks;
	int err;

	(void)module;
	if (PyObject_GetBuffer(arg, &marks, PyBUF_SIMPLE))
		return NULL;
	WITHOUT_GIL(err = table_segments(marks.buf, (size_t)marks.len, &segnos, &unknown));
	PyBuffer_Release(&marks);
	if (err)
		os_error(err);
	else
		out = Py_BuildValue("y#y#", segnos.items ? (char *)segnos.items : "", (Py_ssize_t)segnos.count * 4,
				    unknown.items ? (char *)unknown.items : "", (Py_ssize_t)unknown.count * 4);
	free(segnos.items);
	free(unknown.items);
	return out;
}

static PyObject *py_ask_pages(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned within_ms;
	PyObject *out;
	Py_buffer inos;
	uint32_t *copy;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iy*I", KEYWORDS("fuse_fd", "inos", "within_ms"), &fd, &inos,
					 &within_ms) ||
	    !are_inos(&inos))
		return NULL;
	out = PyBytes_FromStringAndSize(NULL, inos.len / 4);
	copy = malloc((size_t)inos.len + 1);
	if (out && copy) {
		memcpy(copy, inos.buf, (size_t)inos.len);
		WITHOUT_GIL(window_ask(fd, copy, (size_t)inos.len / 4, (uint8_t *)PyBytes_AS_STRING(out), within_ms));
	} else {
		Py_CLEAR(out);
		PyErr_NoMemory();
	}
	free(copy);
	PyBuffer_Release(&inos);
	return out;
}

/* ---- module ------------------------------------------------------------------------------- */
/* clang-format off */
static PyMethodDef methods[] = {
    NO_ARGUMENT(plan_begin),
    NO_ARGUMENT(plan_end),
    WITH_KEYWORDS(plan_mark),
    WITH_KEYWORDS(plan_flags),
    NO_ARGUMENT(seen_fd),
    ONE_ARGUMENT(take_seen),
    WITH_KEYWORDS(note_seen),
    WITH_KEYWORDS(arm),
    ONE_ARGUMENT(open_unseen),
    WITH_KEYWORDS(stage),
    WITH_KEYWORDS(count_within),
    WITH_KEYWORDS(push_files),
    WITH_KEYWORDS(drop),
    WITH_KEYWORDS(ask_pages),
    ONE_ARGUMENT(segments_of),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int plan_add_to(PyObject *module)
{
#define CONSTANT(name) PyModule_AddIntConstant(module, #name, name)
	return PyModule_AddFunctions(module, methods) || CONSTANT(PLAN_ARMED) || CONSTANT(PLAN_WANTED) ||
		       CONSTANT(PLAN_QUEUED) || CONSTANT(PLAN_FLYING) || CONSTANT(PLAN_STAGED) ||
		       CONSTANT(PLAN_FAILED) || CONSTANT(SEEN_LOOKUP) || CONSTANT(SEEN_SSD) || CONSTANT(SEEN_ORIGIN) ||
		       CONSTANT(PUSH_NO_BYTES) || CONSTANT(PUSHED) || CONSTANT(PUSH_CHANGED) ||
		       CONSTANT(PUSH_REFUSED) || CONSTANT(PUSH_LARGE) || CONSTANT(PUSH_READ) || CONSTANT(PAGES_GONE) ||
		       CONSTANT(PAGES_THERE) || CONSTANT(PLAN_READ) || CONSTANT(PLAN_COMING)
		   ? -1
		   : 0;
#undef CONSTANT
}
