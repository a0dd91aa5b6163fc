/* The module's functions encode and decode: arguments, checks, and the interpreter's lock.
 *
 * Included by kernels.c. One call works on the elements [start, stop) of one array, so that threads
 * can share it; start is a multiple of what shares bytes. The arithmetic stands in codecs.h.
 */

struct coding_call {
    struct coding coding;
    PyObject *arrays[3]; /* source or None, residual or None, payload; or payload and out */
    Py_buffer views[3];
    Py_ssize_t start, stop;
};

/* How many bytes a payload has, and how many elements share bytes; 0 for what there is not. */
static size_t payload_length(const struct coding *by, size_t *unit)
{
    const size_t wide_size = by->kind == FLOAT64 ? 8 : 4;
    switch (by->codec) {
    case TWO_BIT:
        *unit = 16;
        return (by->length + 15) / 16 * 4;
    case ONE_BIT:
        *unit = 32;
        return (by->length + 31) / 32 * 4;
    case INT8:
        *unit = by->number >= 1 && by->number <= MOST_BLOCK ? (size_t)by->number : 0;
        return *unit == 0 ? 0 : (by->length + *unit - 1) / *unit * wide_size + by->length;
    }
    *unit = 0;
    return 0;
}

/* Gets hold of one array; its length in elements. */
static enum outcome get(PyObject *array, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(array, view, flags) == 0)
        return DONE;
    view->obj = NULL;
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError))
        return FAILED;
    PyErr_Clear();
    return DECLINED;
}

static enum outcome check_coding(struct coding_call *call)
{
    struct coding *by = &call->coding;
    size_t unit = 0;
    const size_t wanted = payload_length(by, &unit);
    if (unit == 0 || by->kind < 0 || by->kind >= NUM_KINDS)
        return refuse("no such codec or kind");
    if (by->payload_bytes != wanted)
        return refuse("the payload has a wrong length");
    if (call->start < 0 || call->stop < call->start || (size_t)call->stop > by->length ||
        (size_t)call->start % unit != 0 ||
        ((size_t)call->stop % unit != 0 && (size_t)call->stop != by->length))
        return refuse("a span does not fit its array");
    return DONE;
}

static PyObject *finish(struct coding_call *call, enum outcome outcome,
                        void (*work)(const struct coding *, size_t, size_t))
{
    if (outcome == DONE)
        outcome = check_coding(call);
    if (outcome == DONE) {
        const size_t start = (size_t)call->start, stop = (size_t)call->stop;
        if ((stop - start) * SIZES[call->coding.kind] < BRIEF) {
            work(&call->coding, start, stop);
        } else {
            Py_BEGIN_ALLOW_THREADS
            work(&call->coding, start, stop);
            Py_END_ALLOW_THREADS
        }
    }
    for (int i = 0; i < 3; i++)
        if (call->views[i].obj != NULL)
            PyBuffer_Release(&call->views[i]);
    return outcome == FAILED ? NULL : PyBool_FromLong(outcome == DONE);
}

PyDoc_STRVAR(encode_doc,
             "encode(codec, kind, source, residual, payload, number, start, stop)\n--\n\n"
             "See kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *encode(PyObject *self, PyObject *args)
{
    struct coding_call call = {0};
    struct coding *by = &call.coding;
    enum outcome outcome = DONE;
    size_t length[2] = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "iiOOOdnn", &by->codec, &by->kind, &call.arrays[0],
                          &call.arrays[1], &call.arrays[2], &by->number, &call.start, &call.stop))
        return NULL;
    if (by->kind < 0 || by->kind >= NUM_KINDS)
        outcome = refuse("no such codec or kind");
    for (int i = 0; outcome == DONE && i < 3; i++)
        if (call.arrays[i] != Py_None)
            outcome = get(call.arrays[i], &call.views[i], i == 0 ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    if (outcome == DONE) {
        const size_t wide_size = by->kind == FLOAT64 ? 8 : 4;
        by->source = call.views[0].buf;
        by->residual = call.views[1].buf;
        by->payload = call.views[2].buf;
        by->payload_bytes = (size_t)call.views[2].len;
        length[0] = (size_t)call.views[0].len / SIZES[by->kind];
        length[1] = (size_t)call.views[1].len / wide_size;
        by->length = call.views[0].obj != NULL ? length[0] : length[1];
        if (call.views[2].obj == NULL || (call.views[0].obj == NULL && call.views[1].obj == NULL))
            outcome = refuse("a payload and a source or residual are needed");
        else if (call.views[0].obj != NULL && call.views[1].obj != NULL && length[0] != length[1])
            outcome = refuse("the residual must be as long as the source");
        else if (call.views[0].obj == NULL && wide_size != SIZES[by->kind])
            by->kind = FLOAT32;
        if (outcome == DONE && by->codec == INT8 && by->residual == NULL && by->number > BLOCK &&
            by->kind != FLOAT32 && by->kind != FLOAT64)
            outcome = DECLINED; /* a block would not fit the scratch memory */
    }
    return finish(&call, outcome,
                  by->kind == FLOAT64 ? sets[chosen].encode_double : sets[chosen].encode_float);
}

PyDoc_STRVAR(decode_doc,
             "decode(codec, kind, payload, out, number, start, stop, add)\n--\n\n"
             "See kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *decode(PyObject *self, PyObject *args)
{
    struct coding_call call = {0};
    struct coding *by = &call.coding;
    enum outcome outcome = DONE;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiOOdnnp", &by->codec, &by->kind, &call.arrays[0],
                          &call.arrays[1], &by->number, &call.start, &call.stop, &by->add))
        return NULL;
    if (by->kind != FLOAT32 && by->kind != FLOAT64)
        outcome = refuse("no such codec or kind");
    if (outcome == DONE)
        outcome = get(call.arrays[0], &call.views[0], PyBUF_SIMPLE);
    if (outcome == DONE)
        outcome = get(call.arrays[1], &call.views[1], PyBUF_WRITABLE);
    if (outcome == DONE) {
        by->payload = call.views[0].buf; /* only read */
        by->payload_bytes = (size_t)call.views[0].len;
        by->out = call.views[1].buf;
        by->length = (size_t)call.views[1].len / SIZES[by->kind];
    }
    return finish(&call, outcome,
                  by->kind == FLOAT64 ? sets[chosen].decode_double : sets[chosen].decode_float);
}
