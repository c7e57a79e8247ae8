/* hintsd.orders._mt19937: what torch's generator of the CPU draws, without torch. The contract is in
 * hintsd/orders/_mt19937.pyi.
 *
 * A state has torch's layout (torch.Generator.get_state()): a mt19937 (Matsumoto and Nishimura 1998), and behind it
 * what drawing normal numbers has left, which stays as it is. A number below a bound is a remainder; a permutation is
 * Fisher's and Yates's, from the front (ATen's DistributionsHelper and randperm_cpu).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define WORDS 624
#define MIDDLE 397
#define STATE_BYTES 5056
#define PERMUTED_MOST (UINT32_MAX / 20) /* longer ones are drawn with 64 bits */
#define BELOW_MOST ((1u << 28) - 1)	/* torch draws larger ones with 64 bits, of late */
#define KEYWORDS(...) ((char *[]){__VA_ARGS__, NULL})

struct saved {
	uint64_t seed;
	int32_t left, seeded;
	uint64_t next;
	uint64_t words[WORDS];
};
struct generator {
	uint32_t words[WORDS];
	uint32_t left, next; /* words until all are made anew; the next one */
};

static void generator_seed(struct generator *g, uint32_t seed)
{
	g->words[0] = seed;
	for (uint32_t i = 1; i < WORDS; i++)
		g->words[i] = 1812433253u * (g->words[i - 1] ^ g->words[i - 1] >> 30) + i;
	g->left = 1;
	g->next = 0;
}

static uint32_t twisted(uint32_t high, uint32_t low)
{
	return ((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1 ^ (low & 1 ? 0x9908b0dfu : 0);
}

static void generator_renew(struct generator *g)
{
	uint32_t *w = g->words;
	uint32_t i = 0;

	for (; i < WORDS - MIDDLE; i++)
		w[i] = w[i + MIDDLE] ^ twisted(w[i], w[i + 1]);
	for (; i < WORDS - 1; i++)
		w[i] = w[i + MIDDLE - WORDS] ^ twisted(w[i], w[i + 1]);
	w[i] = w[i + MIDDLE - WORDS] ^ twisted(w[i], w[0]);
	g->left = WORDS;
	g->next = 0;
}

static uint32_t generator_next(struct generator *g)
{
	uint32_t y;

	if (!--g->left)
		generator_renew(g);
	y = g->words[g->next++];
	y ^= y >> 11;
	y ^= y << 7 & 0x9d2c5680u;
	y ^= y << 15 & 0xefc60000u;
	return y ^ y >> 18;
}

/* ---- the state as bytes ------------------------------------------------------------------- */
static bool generator_load(struct generator *g, const Py_buffer *state)
{
	struct saved saved;

	if (state->len != STATE_BYTES) {
		PyErr_Format(PyExc_ValueError, "a state has %d bytes", STATE_BYTES);
		return false;
	}
	memcpy(&saved, state->buf, sizeof(saved));
	if (saved.seeded != 1 || saved.left < 1 || saved.left > WORDS ||
	    saved.next > (uint64_t)(WORDS + 1 - saved.left)) {
		PyErr_SetString(PyExc_ValueError, "this is no state of a mt19937");
		return false;
	}
	for (size_t i = 0; i < WORDS; i++)
		g->words[i] = (uint32_t)saved.words[i];
	g->left = (uint32_t)saved.left;
	g->next = (uint32_t)saved.next;
	return true;
}

/* `before`: NULL: of a generator that was just seeded. */
static PyObject *generator_store(const struct generator *g, const void *before, uint64_t seed)
{
	char bytes[STATE_BYTES] = {0};
	struct saved saved = {.seed = seed, .seeded = 1};

	if (before) {
		memcpy(bytes, before, sizeof(bytes));
		memcpy(&saved, before, sizeof(saved));
	}
	saved.left = (int32_t)g->left;
	saved.next = g->next;
	for (size_t i = 0; i < WORDS; i++)
		saved.words[i] = g->words[i];
	memcpy(bytes, &saved, sizeof(saved));
	return PyBytes_FromStringAndSize(bytes, sizeof(bytes));
}

/* ---- functions ---------------------------------------------------------------------------- */
static PyObject *py_seeded(PyObject *module, PyObject *arg)
{
	uint64_t seed = PyLong_AsUnsignedLongLongMask(arg);
	struct generator g;

	(void)module;
	if (seed == UINT64_MAX && PyErr_Occurred())
		return NULL;
	generator_seed(&g, (uint32_t)seed);
	return generator_store(&g, NULL, seed);
}

static PyObject *py_draw_seed(PyObject *module, PyObject *arg)
{
	PyObject *after, *drawn = NULL;
	struct generator g;
	uint64_t high, low;
	Py_buffer state;

	(void)module;
	if (PyObject_GetBuffer(arg, &state, PyBUF_SIMPLE))
		return NULL;
	if (generator_load(&g, &state)) {
		high = generator_next(&g);
		low = generator_next(&g);
		after = generator_store(&g, state.buf, 0);
		if (after)
			drawn = Py_BuildValue("KN", (unsigned long long)((high << 32 | low) & INT64_MAX), after);
	}
	PyBuffer_Release(&state);
	return drawn;
}

/* `below`: 0: a permutation. */
static PyObject *draw(Py_buffer *state, uint32_t below, Py_buffer *out)
{
	const uint64_t count = (uint64_t)out->len / sizeof(int64_t);
	int64_t *numbers = out->buf;
	struct generator g;

	if (out->itemsize != sizeof(int64_t) || (!below && count >= PERMUTED_MOST)) {
		PyErr_SetString(PyExc_ValueError, "out: numbers of 64 bits, and not so many");
		return NULL;
	}
	if (!generator_load(&g, state))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	for (uint64_t i = 0; i < count; i++)
		numbers[i] = below ? (int64_t)(generator_next(&g) % below) : (int64_t)i;
	for (uint64_t i = 0; !below && i + 1 < count; i++) {
		uint64_t other = i + generator_next(&g) % (uint32_t)(count - i);
		int64_t number = numbers[i];

		numbers[i] = numbers[other];
		numbers[other] = number;
	}
	Py_END_ALLOW_THREADS
	return generator_store(&g, state->buf, 0);
}

static PyObject *drawn(PyObject *args, PyObject *kwargs, const char *format, char **names, long long *below)
{
	PyObject *after = NULL, *out_arg;
	Py_buffer state, out;
	bool is_read = below ? PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &state, below, &out_arg)
			     : PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &state, &out_arg);

	if (!is_read)
		return NULL;
	if (below && (*below < 1 || *below > BELOW_MOST))
		PyErr_Format(PyExc_ValueError, "below: 1 to %u", BELOW_MOST);
	else if (!PyObject_GetBuffer(out_arg, &out, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)) {
		after = draw(&state, below ? (uint32_t)*below : 0, &out);
		PyBuffer_Release(&out);
	}
	PyBuffer_Release(&state);
	return after;
}

static PyObject *py_permute(PyObject *module, PyObject *args, PyObject *kwargs)
{
	(void)module;
	return drawn(args, kwargs, "y*O", KEYWORDS("state", "out"), NULL);
}

static PyObject *py_draw(PyObject *module, PyObject *args, PyObject *kwargs)
{
	long long below;

	(void)module;
	return drawn(args, kwargs, "y*LO", KEYWORDS("state", "below", "out"), &below);
}

/* clang-format off */
static PyMethodDef methods[] = {
    {"seeded", py_seeded, METH_O, NULL},
    {"draw_seed", py_draw_seed, METH_O, NULL},
    {"permute", (PyCFunction)(void (*)(void))py_permute, METH_VARARGS | METH_KEYWORDS, NULL},
    {"draw", (PyCFunction)(void (*)(void))py_draw, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};
/* clang-format on */

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hintsd.orders._mt19937",
    .m_doc = "What torch's generator of the CPU draws (see hintsd/orders/_mt19937.pyi).",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__mt19937(void) { return PyModule_Create(&definition); }
