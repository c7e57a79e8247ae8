/* The Python face of native_plan.c and native_fetch.c. The contract is in _native.pyi. */
#include "native_py.h"

#include <stdlib.h>
#include <string.h>

#define LIST_MOST 65536
#define FETCH_TAKE_MOST 65536

/* Inode numbers as packed u32, which may lie anywhere. */
static uint32_t ino_at(const Py_buffer *inos, Py_ssize_t i)
{
	uint32_t ino;

	memcpy(&ino, (const char *)inos->buf + 4 * i, 4);
	return ino;
}

bool are_inos(Py_buffer *inos)
{
	if (inos->len % 4 == 0)
		return true;
	PyErr_SetString(PyExc_ValueError, "inos: four bytes each");
	PyBuffer_Release(inos);
	return false;
}

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
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*bb", KEYWORDS("inos", "add", "remove"), &inos,
					 &add, &remove) ||
	    !are_inos(&inos))
		return NULL;
	/* With the GIL: it waits for nobody, and to get the GIL back may take milliseconds. */
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
	out = Py_BuildValue("y#y#y#y#I", columns, (Py_ssize_t)(4 * count), columns + 12 * count,
			    (Py_ssize_t)count, columns + 4 * count, (Py_ssize_t)(4 * count),
			    columns + 8 * count, (Py_ssize_t)(4 * count), lost);
	free(taken);
	free(columns);
	return out;
}

static PyObject *py_note_seen(PyObject *module, PyObject *args, PyObject *kwargs)
{
	PyObject *ino_arg;
	bool stands = false;
	int what, tid = 0;
	uint64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oi|i", KEYWORDS("ino", "what", "tid"), &ino_arg,
					 &what, &tid) ||
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
		stands = plan_saw_lookup((uint32_t)ino, tid);
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
		armed += plan_arm(fd, ino_at(&inos, i));
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&inos);
	return PyLong_FromLong(armed);
}

/* ---- pages -------------------------------------------------------------------------------- */
static PyObject *py_stage(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct scratch *scratch = NULL;
	Py_buffer inos, moves = {0};
	PyObject *out = NULL;
	const char *mountpoint;
	uint32_t *numbers = NULL;
	int fd, err = -ENOMEM;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iyy*|y*",
					 KEYWORDS("fuse_fd", "mountpoint", "inos", "moves"), &fd,
					 &mountpoint, &inos, &moves))
		return NULL;
	if (inos.len % 4 || (moves.len && moves.len != inos.len / 4)) {
		PyErr_SetString(PyExc_ValueError, "inos: four bytes each, moves: one");
		goto end;
	}
	scratch = scratch_get();
	numbers = malloc((size_t)inos.len + 1);
	out = PyBytes_FromStringAndSize(NULL, inos.len / 4);
	if (scratch && numbers && out) {
		memcpy(numbers, inos.buf, (size_t)inos.len);
		WITHOUT_GIL(err = plan_stage(fd, mountpoint, numbers, moves.len ? moves.buf : NULL,
					     (size_t)inos.len / 4, (uint8_t *)PyBytes_AS_STRING(out),
					     scratch));
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
	const char *mountpoint;
	Py_ssize_t count, ready = 0;
	char *results;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iyO!", KEYWORDS("fuse_fd", "mountpoint", "files"),
					 &fd, &mountpoint, &PyList_Type, &list))
		return NULL;
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
			results[i] = (char)plan_push(fd, mountpoint, (uint32_t)files[i].ino, &files[i].version,
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
	const char *mountpoint;
	Py_buffer inos;
	int fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "yy*i", KEYWORDS("mountpoint", "inos", "fuse_fd"),
					 &mountpoint, &inos, &fd) ||
	    !are_inos(&inos))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t i = 0; i < inos.len / 4; i++)
		plan_drop(fd, mountpoint, ino_at(&inos, i));
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

/* ---- listing ------------------------------------------------------------------------------ */
static PyObject *listed_to_tuple(const struct listed *listed, Py_ssize_t count, uint32_t next)
{
	PyObject *inos = PyBytes_FromStringAndSize(NULL, count * 4);
	PyObject *sizes = PyBytes_FromStringAndSize(NULL, count * 8);
	PyObject *kinds = PyBytes_FromStringAndSize(NULL, count);
	PyObject *stored = PyBytes_FromStringAndSize(NULL, count);
	PyObject *lengths = PyBytes_FromStringAndSize(NULL, count * 2);
	PyObject *names = NULL;
	size_t len, total = 0;

	/* Names of published nodes never change: no lock. */
	for (Py_ssize_t i = 0; i < count; i++) {
		node_name(&table.nodes[listed[i].node], &len);
		total += len;
	}
	names = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
	if (!inos || !sizes || !kinds || !stored || !lengths || !names) {
		Py_XDECREF(inos);
		Py_XDECREF(sizes);
		Py_XDECREF(kinds);
		Py_XDECREF(stored);
		Py_XDECREF(lengths);
		Py_XDECREF(names);
		return NULL;
	}
	total = 0;
	for (Py_ssize_t i = 0; i < count; i++) {
		const unsigned char *name = node_name(&table.nodes[listed[i].node], &len);
		uint16_t len16 = (uint16_t)len;

		memcpy(PyBytes_AS_STRING(inos) + 4 * i, &listed[i].ino, 4);
		memcpy(PyBytes_AS_STRING(sizes) + 8 * i, &listed[i].size, 8);
		memcpy(PyBytes_AS_STRING(lengths) + 2 * i, &len16, 2);
		PyBytes_AS_STRING(kinds)[i] = (char)listed[i].kind;
		PyBytes_AS_STRING(stored)[i] = (char)listed[i].stored;
		memcpy(PyBytes_AS_STRING(names) + total, name, len);
		total += len;
	}
	return Py_BuildValue("NNNNNNI", inos, sizes, kinds, stored, lengths, names, next);
}

static PyObject *py_list_directory(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long after;
	struct listed *listed;
	PyObject *ino_arg, *out = NULL;
	Py_ssize_t most;
	ssize_t count;
	uint32_t next;
	uint64_t ino;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKn", KEYWORDS("ino", "after", "most"), &ino_arg,
					 &after, &most) ||
	    !take_ino(ino_arg, &ino))
		return NULL;
	if (most < 1) { /* no page would ever end */
		PyErr_SetString(PyExc_ValueError, "most: at least 1");
		return NULL;
	}
	most = most > LIST_MOST ? LIST_MOST : most;
	listed = malloc((size_t)most * sizeof(*listed));
	if (!listed)
		return PyErr_NoMemory();
	WITHOUT_GIL(count = plan_list(ino, after, (size_t)most, listed, &next));
	if (count >= 0)
		out = listed_to_tuple(listed, count, next);
	else if (count == -ENOENT)
		unknown_inode(ino);
	else if (count == -EAGAIN)
		PyErr_SetString(PyExc_ValueError, "the directory is not LISTED");
	else
		os_error((int)count);
	free(listed);
	return out;
}

/* ---- fetch pool --------------------------------------------------------------------------- */
static void jobs_free(struct fetch_job *jobs)
{
	while (jobs) {
		struct fetch_job *job = jobs;

		jobs = job->next;
		Py_DECREF((PyObject *)job->owner);
		free(job);
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
	struct fetch_job *job;
	int answers = false;
	long long tag;
	uint64_t ino;
	int err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL|p", KEYWORDS("ino", "version", "tag", "answers"), &ino_arg,
					 &version_arg, &tag, &answers) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	jobs_free(fetch_abandoned());
	if (!ino || ino > table_count())
		return unknown_inode(ino);
	if (version.size > BLOCK_BYTES) {
		PyErr_SetString(PyExc_ValueError, "larger than one block");
		return NULL;
	}
	bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)version.size);
	if (!bytes)
		return NULL;
	job = malloc(sizeof(*job));
	if (!job) {
		Py_DECREF(bytes);
		return PyErr_NoMemory();
	}
	*job = (struct fetch_job){
	    .owner = bytes,
	    .into = (unsigned char *)PyBytes_AS_STRING(bytes),
	    .version = version,
	    .tag = tag,
	    .ino = (uint32_t)ino,
	    .answers = answers,
	};
	err = fetch_submit(job);
	if (!err)
		Py_RETURN_NONE;
	jobs_free(job);
	if (err != -EINVAL)
		return os_error(err);
	PyErr_SetString(PyExc_RuntimeError, "the fetch pool is not started");
	return NULL;
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
	struct fetch_job *jobs;
	PyObject *out;

	(void)module;
	if (most == -1 && PyErr_Occurred())
		return NULL;
	jobs_free(fetch_abandoned());
	out = PyList_New(0);
	if (!out)
		return NULL;
	jobs = fetch_take(most < 0 ? 0 : (size_t)most);
	for (const struct fetch_job *job = jobs; out && job; job = job->next)
		list_append(&out, Py_BuildValue("LIOiLL", (long long)job->tag, job->ino,
						job->error ? Py_None : (PyObject *)job->owner, job->error,
						(long long)job->begun_ns, (long long)job->ended_ns));
	jobs_free(jobs);
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

static PyObject *py_fetch_pending(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromUnsignedLongLong(fetch_pending());
}

static PyObject *py_fetch_stop(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	jobs_free(fetch_end());
	jobs_free(fetch_abandoned());
	Py_RETURN_NONE;
}

/* ---- module ------------------------------------------------------------------------------- */
static PyMethodDef methods[] = {
    NO_ARGUMENT(plan_begin),
    NO_ARGUMENT(plan_end),
    WITH_KEYWORDS(plan_mark),
    WITH_KEYWORDS(plan_flags),
    NO_ARGUMENT(seen_fd),
    ONE_ARGUMENT(take_seen),
    WITH_KEYWORDS(note_seen),
    WITH_KEYWORDS(arm),
    WITH_KEYWORDS(stage),
    WITH_KEYWORDS(count_within),
    WITH_KEYWORDS(push_files),
    WITH_KEYWORDS(drop),
    WITH_KEYWORDS(ask_pages),
    ONE_ARGUMENT(segments_of),
    WITH_KEYWORDS(list_directory),
    WITH_KEYWORDS(missed_enable),
    ONE_ARGUMENT(missed_fresh),
    ONE_ARGUMENT(missed_pass),
    WITH_KEYWORDS(fetch_start),
    WITH_KEYWORDS(fetch_submit),
    NO_ARGUMENT(fetch_fd),
    ONE_ARGUMENT(fetch_take),
    NO_ARGUMENT(fetch_pending),
    NO_ARGUMENT(fetch_stop),
    {NULL, NULL, 0, NULL},
};

int plan_add_to(PyObject *module)
{
#define CONSTANT(name) PyModule_AddIntConstant(module, #name, name)
	return PyModule_AddFunctions(module, methods) || CONSTANT(PLAN_ARMED) || CONSTANT(PLAN_WANTED) ||
	       CONSTANT(PLAN_QUEUED) || CONSTANT(PLAN_FLYING) || CONSTANT(PLAN_STAGED) ||
	       CONSTANT(PLAN_FAILED) || CONSTANT(SEEN_LOOKUP) || CONSTANT(SEEN_SSD) ||
	       CONSTANT(SEEN_ORIGIN) || CONSTANT(PUSH_NO_BYTES) || CONSTANT(PUSHED) ||
	       CONSTANT(PUSH_CHANGED) || CONSTANT(PUSH_REFUSED) || CONSTANT(PUSH_LARGE) ||
	       CONSTANT(PUSH_READ) || CONSTANT(PAGES_GONE) || CONSTANT(PAGES_THERE) || CONSTANT(PLAN_READ) ||
	       CONSTANT(PLAN_COMING)
		   ? -1
		   : 0;
#undef CONSTANT
}
