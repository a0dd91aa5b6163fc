/* The compiled kernels of kvstore/arrays/cpu/kernels.py: the module kvstore.arrays.cpu._kernels.
 *
 * This file takes Python's arguments apart, checks them, lets the interpreter's lock go and calls
 * the arithmetic in loops.h, rules.h and codecs.h, which is compiled once for any processor and
 * once for AVX2. Nothing is kept between calls. What is not a contiguous buffer is declined (False), what
 * does not fit is a ValueError, both before anything is written.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INTERFACE 5 /* must be that of kernels.py, which leaves an older or newer build alone */

/* Calls on fewer bytes keep the interpreter's lock: to hand it over can cost more than they do. */
#define BRIEF 65536

static const size_t SIZES[NUM_KINDS] = {4, 8, 2, 2};
static const int NUM_STATES[NUM_RULES] = {0, 0, 1, 2, 1};

#define TARGET
#define SET(name) plain_##name
#include "loops.h"
#undef TARGET
#undef SET

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,f16c")))
#define SET(name) avx2_##name
#define HAS_F16C
#include "loops.h"
#undef TARGET
#undef SET
#undef HAS_F16C

static int has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* -- sets of instructions ---------------------------------------------------------------- */

static struct {
    const char *name;
    void (*run)(const struct work *);
    void (*encode_float)(const struct coding *, size_t, size_t);
    void (*encode_double)(const struct coding *, size_t, size_t);
    void (*decode_float)(const struct coding *, size_t, size_t);
    void (*decode_double)(const struct coding *, size_t, size_t);
} sets[2];
static int num_sets, chosen; /* guarded by the interpreter's lock */

static void find_sets(void)
{
    num_sets = 0;
#if defined(__x86_64__)
    if (has_avx2()) {
        sets[num_sets].name = "avx2";
        sets[num_sets].encode_float = avx2_encode_float;
        sets[num_sets].encode_double = avx2_encode_double;
        sets[num_sets].decode_float = avx2_decode_float;
        sets[num_sets].decode_double = avx2_decode_double;
        sets[num_sets++].run = avx2_run;
    }
#endif
    sets[num_sets].name = "plain";
    sets[num_sets].encode_float = plain_encode_float;
    sets[num_sets].encode_double = plain_encode_double;
    sets[num_sets].decode_float = plain_decode_float;
    sets[num_sets].decode_double = plain_decode_double;
    sets[num_sets++].run = plain_run;
    chosen = 0;
}

static PyObject *use(PyObject *self, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8(name);
    (void)self;
    if (text == NULL)
        return NULL;
    for (int i = 0; i < num_sets; i++) {
        if (strcmp(sets[i].name, text) == 0) {
            chosen = i;
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no instructions named %R", name);
}

/* -- arguments --------------------------------------------------------------------------- */

struct call {
    struct numbers numbers;
    int rule, kind, weight_kind, has_master;
    PyObject *weight, *states, *rows, *outs;
    Py_buffer *views; /* weight, states and master, then of each row contributions and outs */
    Py_ssize_t num_views, most_views, num_bytes;
    struct work *works; /* one for each row */
};

enum outcome { FAILED = -1, DECLINED, DONE };

static enum outcome refuse(const char *text)
{
    PyErr_SetString(PyExc_ValueError, text);
    return FAILED;
}

static int is_sequence(PyObject *object)
{
    return PyList_Check(object) || PyTuple_Check(object);
}

/* Checks the shape of the arguments, and makes room for all of them. */
static enum outcome prepare(struct call *call)
{
    if (!is_sequence(call->states) || !is_sequence(call->rows) || !is_sequence(call->outs))
        return refuse("states, rows and outs must be lists or tuples");
    if (call->rule < 0 || call->rule >= NUM_RULES || call->kind < 0 || call->kind >= NUM_KINDS ||
        call->weight_kind < 0 || call->weight_kind >= NUM_KINDS)
        return refuse("no such rule or kind");
    if (call->kind != call->weight_kind &&
        (call->kind == FLOAT64 || call->weight_kind == FLOAT64 ||
         (call->kind != FLOAT32 && call->weight_kind != FLOAT32)))
        return refuse("these kinds cannot be combined");
    const Py_ssize_t num_states = PySequence_Fast_GET_SIZE(call->states);
    const Py_ssize_t num_rows = PySequence_Fast_GET_SIZE(call->rows);
    const Py_ssize_t num_outs = PySequence_Fast_GET_SIZE(call->outs);
    call->has_master = call->rule != ASSIGN && SIZES[call->weight_kind] == 2;
    if (num_states != NUM_STATES[call->rule] + call->has_master)
        return DECLINED;
    if (num_outs != 0 && num_outs != num_rows)
        return refuse("outs must have as many rows as there are rows, or none");
    call->most_views = 1 + num_states;
    for (int outs = 0; outs < 2; outs++) {
        PyObject *rows = outs ? call->outs : call->rows;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(rows); i++) {
            PyObject *row = PySequence_Fast_GET_ITEM(rows, i);
            if (!is_sequence(row))
                return refuse("a row must be a list or tuple");
            if (!outs && PySequence_Fast_GET_SIZE(row) == 0)
                return refuse("a row needs at least one contribution");
            call->most_views += PySequence_Fast_GET_SIZE(row);
        }
    }
    call->views = PyMem_New(Py_buffer, call->most_views);
    call->works = PyMem_New(struct work, num_rows + 1);
    if (call->views == NULL || call->works == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    return DONE;
}

static enum outcome view(struct call *call, PyObject *array, int flags)
{
    if (call->num_views == call->most_views)
        return refuse("a row has changed");
    if (PyObject_GetBuffer(array, &call->views[call->num_views], flags) == 0) {
        call->num_bytes += call->views[call->num_views++].len;
        return DONE;
    }
    /* What NumPy raises for arrays with strides, and for those that are read-only. */
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError))
        return FAILED;
    PyErr_Clear();
    return DECLINED;
}

static enum outcome view_all(struct call *call, PyObject *arrays, int flags)
{
    enum outcome outcome = DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < PySequence_Fast_GET_SIZE(arrays); i++)
        outcome = view(call, PySequence_Fast_GET_ITEM(arrays, i), flags);
    return outcome;
}

/* One row's work, whose contributions begin at this element of the weight. */
static enum outcome plan_row(struct call *call, Py_ssize_t index, size_t *element)
{
    struct work *work = &call->works[index];
    const size_t weight_size = SIZES[call->weight_kind];
    const size_t wide_size = call->weight_kind == FLOAT64 ? 8 : 4;
    PyObject *row = PySequence_Fast_GET_ITEM(call->rows, index);
    *work = (struct work){
        .rule = call->rule,
        .numbers = &call->numbers,
        .kind = call->kind,
        .weight_kind = call->weight_kind,
        .weight = (char *)call->views[0].buf + *element * weight_size,
        .num_states = NUM_STATES[call->rule],
        .contributions = &call->views[call->num_views],
    };
    for (int i = 0; i < work->num_states; i++)
        work->states[i] = (char *)call->views[1 + i].buf + *element * wide_size;
    if (call->has_master)
        work->master = (char *)call->views[1 + work->num_states].buf + *element * wide_size;
    enum outcome outcome = view_all(call, row, PyBUF_SIMPLE);
    if (outcome != DONE)
        return outcome;
    work->outs = &call->views[call->num_views];
    work->num_contributions = (size_t)(work->outs - work->contributions);
    if (PySequence_Fast_GET_SIZE(call->outs) != 0)
        outcome = view_all(call, PySequence_Fast_GET_ITEM(call->outs, index), PyBUF_WRITABLE);
    if (outcome != DONE)
        return outcome;
    work->num_outs = (size_t)(&call->views[call->num_views] - work->outs);
    if (work->num_contributions == 0)
        return refuse("a row has changed");
    work->length = (size_t)work->contributions[0].len / SIZES[call->kind];
    for (size_t i = 0; i < work->num_contributions; i++)
        if ((size_t)work->contributions[i].len != work->length * SIZES[call->kind])
            return refuse("the contributions of a row must have one length");
    for (size_t i = 0; i < work->num_outs; i++)
        if ((size_t)work->outs[i].len != work->length * weight_size)
            return refuse("outs must be as long as their contributions");
    *element += work->length;
    return DONE;
}

/* Gets hold of all memory, and works out who has which part of it. */
static enum outcome plan(struct call *call)
{
    const size_t wide_size = call->weight_kind == FLOAT64 ? 8 : 4;
    size_t length = 0;
    enum outcome outcome = view(call, call->weight, PyBUF_WRITABLE);
    if (outcome == DONE)
        outcome = view_all(call, call->states, PyBUF_WRITABLE);
    for (Py_ssize_t i = 0; outcome == DONE && i < PySequence_Fast_GET_SIZE(call->rows); i++)
        outcome = plan_row(call, i, &length);
    if (outcome != DONE)
        return outcome;
    if ((size_t)call->views[0].len != length * SIZES[call->weight_kind])
        return refuse("the rows must be as long as the weight");
    for (Py_ssize_t i = 1; i <= PySequence_Fast_GET_SIZE(call->states); i++)
        if ((size_t)call->views[i].len != length * wide_size)
            return refuse("states must be as long as the weight");
    return DONE;
}

static void compute(const struct call *call, Py_ssize_t num_rows, int set)
{
    for (Py_ssize_t i = 0; i < num_rows; i++)
        sets[set].run(&call->works[i]);
}

PyDoc_STRVAR(run_doc,
             "run(formula, weight_kind, kind, weight, states, rows, outs)\n--\n\n"
             "See kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *run(PyObject *self, PyObject *args)
{
    struct call call = {0};
    struct numbers *by = &call.numbers;
    (void)self;
    if (!PyArg_ParseTuple(args, "(iddddddddd)iiOOOO", &call.rule, &by->rescale, &by->limit,
                          &by->decay, &by->rate, &by->momentum, &by->beta1, &by->beta2,
                          &by->epsilon, &by->late_decay, &call.weight_kind, &call.kind,
                          &call.weight, &call.states, &call.rows, &call.outs))
        return NULL;
    enum outcome outcome = prepare(&call);
    if (outcome == DONE)
        outcome = plan(&call);
    if (outcome == DONE) {
        const Py_ssize_t num_rows = PySequence_Fast_GET_SIZE(call.rows);
        const int set = chosen;
        if (call.num_bytes < BRIEF) {
            compute(&call, num_rows, set);
        } else {
            Py_BEGIN_ALLOW_THREADS
            compute(&call, num_rows, set);
            Py_END_ALLOW_THREADS
        }
    }
    while (call.num_views > 0)
        PyBuffer_Release(&call.views[--call.num_views]);
    PyMem_Free(call.views);
    PyMem_Free(call.works);
    return outcome == FAILED ? NULL : PyBool_FromLong(outcome == DONE);
}

#include "coding_calls.h"
#include "row_calls.h"

/* -- the module -------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, run_doc},
    {"encode", encode, METH_VARARGS, encode_doc},
    {"decode", decode, METH_VARARGS, decode_doc},
    {"merge_ids", merge_ids, METH_VARARGS, merge_ids_doc},
    {"take_rows", take_rows, METH_VARARGS, take_rows_doc},
    {"update_rows", update_rows, METH_VARARGS, update_rows_doc},
    {"use", use, METH_O, "use(name)\n--\n\nCompute with this set of instructions from now on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.arrays.cpu._kernels",
    .m_doc = "Sums and updates in C; kvstore/arrays/cpu/kernels.py is the door to it.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    PyObject *made = PyModule_Create(&module), *names = NULL;
    if (made == NULL)
        return NULL;
    find_sets();
    names = num_sets == 2 ? Py_BuildValue("(ss)", sets[0].name, sets[1].name)
                          : Py_BuildValue("(s)", sets[0].name);
    if (names == NULL || PyModule_AddObject(made, "INSTRUCTIONS", names) < 0) {
        Py_XDECREF(names);
        Py_DECREF(made);
        return NULL;
    }
    if (PyModule_AddIntConstant(made, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
