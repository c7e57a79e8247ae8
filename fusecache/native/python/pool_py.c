/* The Python face of pool/. The contract is in _native.pyi. */
#include "python.h"

#include <netdb.h>
#include <string.h>

#include "../pool/pool.h"

static PyObject *py_pool_begin(PyObject *module, PyObject *args, PyObject *kwargs)
{
	struct pool_settings settings = {.dataset = NULL};
	char why[POOL_WHY_BYTES] = "";
	long long min_age_ns, patience_ns;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "szzzzzLL",
					 KEYWORDS("dataset", "user", "password", "ca", "certificate", "private_key",
						  "min_age_ns", "patience_ns"),
					 &settings.dataset, &settings.user, &settings.password, &settings.ca,
					 &settings.certificate, &settings.private_key, &min_age_ns, &patience_ns))
		return NULL;
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

static PyObject *py_pool_address(PyObject *module, PyObject *args, PyObject *kwargs)
{
	const struct addrinfo hints = {
	    .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
	    .ai_socktype = SOCK_STREAM,
	};
	const char *address, *port;
	struct addrinfo *found;
	unsigned server;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Iss", KEYWORDS("server", "address", "port"), &server, &address,
					 &port))
		return NULL;
	if (getaddrinfo(address, port, &hints, &found))
		return PyErr_Format(PyExc_ValueError, "%s: no address", address);
	pool_address(server, found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
	Py_RETURN_NONE;
}

static PyObject *py_pool_slots(PyObject *module, PyObject *arg)
{
	char *bytes;
	Py_ssize_t size;

	(void)module;
	if (PyBytes_AsStringAndSize(arg, &bytes, &size))
		return NULL;
	if (size != POOL_SLOTS)
		return PyErr_Format(PyExc_ValueError, "%d slots", (int)POOL_SLOTS);
	pool_slots((const uint8_t *)bytes);
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
		list_append(&out,
			    Py_BuildValue("{sssssssOsOsIsKsK}", "host", state.host, "port", state.port, "why",
					  state.why, "has_address", state.has_address ? Py_True : Py_False,
					  "is_left_alone", state.is_left_alone ? Py_True : Py_False, "connections",
					  state.connections, "hits", (unsigned long long)state.hits, "failures",
					  (unsigned long long)state.failures));
	return out;
}

/* clang-format off */
static PyMethodDef methods[] = {
    WITH_KEYWORDS(pool_begin),
    WITH_KEYWORDS(pool_server),
    WITH_KEYWORDS(pool_address),
    ONE_ARGUMENT(pool_slots),
    WITH_KEYWORDS(pool_get),
    WITH_KEYWORDS(pool_finish),
    WITH_KEYWORDS(pool_note_origin),
    NO_ARGUMENT(pool_counters),
    NO_ARGUMENT(pool_servers),
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

int pool_add_to(PyObject *module) { return PyModule_AddFunctions(module, methods); }
