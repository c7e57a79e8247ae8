/* The Python face of pool/. The contract is in _native.pyi. */
#include "python.h"

#include <netdb.h>
#include <string.h>

#include "../ahead/ahead.h"
#include "../pool/pool.h"

static PyObject *py_pool_begin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct pool_settings settings = {.dataset = NULL};
	char why[POOL_WHY_BYTES] = "";
	long long min_age_ns, patience_ns;
	int has_peers;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "szzzzzLLp",
					 KEYWORDS("dataset", "user", "password", "ca", "certificate", "private_key",
						  "min_age_ns", "patience_ns", "has_peers"),
					 &settings.dataset, &settings.user, &settings.password, &settings.ca,
					 &settings.certificate, &settings.private_key, &min_age_ns, &patience_ns,
					 &has_peers))
		return NULL;
	settings.has_peers = has_peers;
	settings.min_age_ns = min_age_ns;
	settings.patience_ns = patience_ns;
	if (!pool_begin(&settings, why))
		return PyErr_Format(PyExc_ValueError, "%s", why);
	Py_RETURN_NONE;
}

static PyObject *py_pool_server(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const char *host, *port;
	int index;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ss", KEYWORDS("host", "port"), &host, &port))
		return NULL;
	index = pool_server(host, port);
	return index < 0 ? os_error(index) : PyLong_FromLong(index);
}

/* NULL: a Python error. Digits alone: nobody is asked. */
static struct addrinfo *address_of(const char *address, const char *port)
{
	const struct addrinfo hints = {
	    .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
	    .ai_socktype = SOCK_STREAM,
	};
	struct addrinfo *found;

	if (!getaddrinfo(address, port, &hints, &found))
		return found;
	PyErr_Format(PyExc_ValueError, "%s: no address", address);
	return NULL;
}

static PyObject *py_pool_address(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const char *address, *port;
	struct addrinfo *found;
	unsigned server;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Iss", KEYWORDS("server", "address", "port"), &server, &address,
					 &port))
		return NULL;
	found = address_of(address, port);
	if (!found)
		return NULL;
	pool_address(server, found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
	Py_RETURN_NONE;
}

static PyObject *py_pool_slots(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static uint8_t nobody[POOL_SLOTS];
	const char *servers, *heirs = NULL;
	Py_ssize_t size, heirs_size = POOL_SLOTS;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#|z#", KEYWORDS("servers", "heirs"), &servers, &size, &heirs,
					 &heirs_size))
		return NULL;
	if (size != POOL_SLOTS || (heirs && heirs_size != POOL_SLOTS))
		return PyErr_Format(PyExc_ValueError, "%d slots", (int)POOL_SLOTS);
	memset(nobody, POOL_NO_SERVER, sizeof(nobody));
	pool_slots((const uint8_t *)servers, heirs ? (const uint8_t *)heirs : nobody);
	Py_RETURN_NONE;
}

static PyObject *py_pool_get(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct pool_ticket ticket;
	PyObject *ino_arg, *version_arg, *bytes;
	struct version version;
	unsigned block, size;
	uint64_t ino;
	bool found;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOII", KEYWORDS("ino", "version", "block", "size"), &ino_arg,
					 &version_arg, &block, &size) ||
	    !take_ino(ino_arg, &ino) || !convert_version(version_arg, &version))
		return NULL;
	if (!ino || ino > table_count())
		return unknown_inode(ino);
	if (size > BLOCK_BYTES) {
		PyErr_SetString(PyExc_ValueError, "larger than one block");
		return NULL;
	}
	bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	if (!bytes)
		return NULL;
	WITHOUT_GIL(
	    found = pool_get((uint32_t)ino, &version, block, (unsigned char *)PyBytes_AS_STRING(bytes), size, &ticket));
	if (found)
		return Py_BuildValue("Ny#", bytes, (const char *)&ticket, (Py_ssize_t)sizeof(ticket));
	Py_DECREF(bytes);
	return Py_BuildValue("Oy#", Py_None, (const char *)&ticket, (Py_ssize_t)sizeof(ticket));
}

static PyObject *py_pool_finish(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct pool_ticket ticket;
	const char *packed;
	Py_ssize_t packed_size;
	Py_buffer data;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#z*", KEYWORDS("ticket", "data"), &packed, &packed_size,
					 &data))
		return NULL;
	if (packed_size != sizeof(ticket) || data.len > BLOCK_BYTES) {
		PyBuffer_Release(&data);
		PyErr_SetString(PyExc_ValueError, "no ticket, or larger than one block");
		return NULL;
	}
	memcpy(&ticket, packed, sizeof(ticket));
	WITHOUT_GIL(pool_finish(&ticket, data.buf, (uint32_t)data.len));
	PyBuffer_Release(&data);
	Py_RETURN_NONE;
}

static PyObject *py_pool_note_origin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long long ns;
	unsigned size;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LI", KEYWORDS("ns", "size"), &ns, &size))
		return NULL;
	pool_note_origin(ns, size);
	Py_RETURN_NONE;
}

static PyObject *py_pool_counters(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#define ONE(field) #field, (unsigned long long)atomic_load(&pool_counters.field)
	return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", ONE(misses), ONE(waits), ONE(leases), ONE(written),
			     ONE(bytes_written), ONE(failures), ONE(damaged), ONE(moved), ONE(skipped));
#undef ONE
}

static PyObject *py_pool_servers(PyObject *module, PyObject *unused)
{
	PyObject *out = PyList_New(0);
	struct pool_state state;

	(void)module;
	(void)unused;
	for (unsigned i = 0; out && pool_look(i, &state); i++)
		list_append(&out, Py_BuildValue("{sssssssOsOsOsIsKsK}", "host", state.host, "port", state.port, "why",
						state.why, "has_address", state.has_address ? Py_True : Py_False,
						"is_left_alone", state.is_left_alone ? Py_True : Py_False, "is_self",
						state.is_self ? Py_True : Py_False, "connections", state.connections,
						"hits", (unsigned long long)state.hits, "failures",
						(unsigned long long)state.failures));
	return out;
}

/* ---- what other hosts ask for ------------------------------------------------------------- */
static PyObject *py_pool_meet(PyObject *module, PyObject *arg)
{
	long server = PyLong_AsLong(arg);
	bool is_there;

	(void)module;
	if (server == -1 && PyErr_Occurred())
		return NULL;
	WITHOUT_GIL(is_there = server >= 0 && pool_meet((unsigned)server));
	return PyBool_FromLong(is_there);
}

static PyObject *py_serve_begin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const char *address, *port;
	struct addrinfo *found;
	int err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ss", KEYWORDS("address", "port"), &address, &port))
		return NULL;
	found = address_of(address, port);
	if (!found)
		return NULL;
	err = asked_begin(found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
	return none_or_error(err);
}

static PyObject *py_serve_holds(PyObject *module, PyObject *args, PyObject *kwargs)
{
	unsigned long long bytes, limit_bytes;
	const char *version;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKs", KEYWORDS("held_bytes", "limit_bytes", "version"), &bytes,
					 &limit_bytes, &version))
		return NULL;
	serve_holds(bytes, limit_bytes, version);
	Py_RETURN_NONE;
}

static PyObject *py_serve_counters(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
#define ONE(field) #field, (unsigned long long)atomic_load(&serve_counters.field)
	return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", ONE(connections), ONE(refused), ONE(requests), ONE(hits),
			     ONE(fetched), ONE(bytes), ONE(stale), ONE(busy), ONE(malformed));
#undef ONE
}

static PyObject *py_asked_enable(PyObject *module, PyObject *arg)
{
	int is_enabled = PyObject_IsTrue(arg);

	(void)module;
	if (is_enabled < 0)
		return NULL;
	return none_or_error(asked_enable(is_enabled));
}

static PyObject *py_asked_fd(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromLong(asked_fd());
}

static PyObject *py_asked_take(PyObject *module, PyObject *unused)
{
	struct asked_block blocks[ASKED_MOST];
	size_t count = asked_take(blocks, ASKED_MOST);
	PyObject *out = PyList_New(0);

	(void)module;
	(void)unused;
	for (size_t i = 0; out && i < count; i++)
		list_append(&out, Py_BuildValue("II", blocks[i].ino, blocks[i].block));
	return out;
}

static PyObject *py_asked_waits(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct asked_block which;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "II", KEYWORDS("ino", "block"), &which.ino, &which.block))
		return NULL;
	return PyBool_FromLong(asked_waits(which));
}

static PyObject *py_asked_end(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct version version = {0};
	struct asked_block which;
	PyObject *version_arg;
	Py_buffer data;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIOz*", KEYWORDS("ino", "block", "version", "data"), &which.ino,
					 &which.block, &version_arg, &data))
		return NULL;
	if (version_arg != Py_None && !convert_version(version_arg, &version)) {
		PyBuffer_Release(&data);
		return NULL;
	}
	WITHOUT_GIL(asked_end(which, &version, data.buf, (size_t)data.len));
	PyBuffer_Release(&data);
	Py_RETURN_NONE;
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(pool_begin),
    WITH_KEYWORDS(pool_server),
    WITH_KEYWORDS(pool_address),
    WITH_KEYWORDS(pool_slots),
    WITH_KEYWORDS(pool_get),
    WITH_KEYWORDS(pool_finish),
    WITH_KEYWORDS(pool_note_origin),
    NO_ARGUMENT(pool_counters),
    NO_ARGUMENT(pool_servers),
    ONE_ARGUMENT(pool_meet),
    WITH_KEYWORDS(serve_begin),
    WITH_KEYWORDS(serve_holds),
    NO_ARGUMENT(serve_counters),
    ONE_ARGUMENT(asked_enable),
    NO_ARGUMENT(asked_fd),
    NO_ARGUMENT(asked_take),
    WITH_KEYWORDS(asked_waits),
    WITH_KEYWORDS(asked_end),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int pool_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
