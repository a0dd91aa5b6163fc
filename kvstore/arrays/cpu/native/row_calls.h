/* The module's functions for row-sparse keys: merge_ids, take_rows and update_rows.
 *
 * Included by kernels.c. Rows lie where their table has them, so what a row costs is mostly the
 * wait for memory: a few rows ahead it is asked for. A row's arithmetic is that of whole keys
 * (rules.h). Nothing is written before all numbers of rows are known to be in range.
 */

enum { AHEAD = 12, LINE = 64, MOST_LINES = 16 };

/* Buffers of one call, the first of which are written to. */
struct buffers {
    Py_buffer *views;
    Py_ssize_t count;
};

static enum outcome hold(struct buffers *buffers, PyObject *array, int flags)
{
    const enum outcome outcome = get(array, &buffers->views[buffers->count], flags);
    if (outcome == DONE)
        buffers->count++;
    return outcome;
}

static enum outcome hold_all(struct buffers *buffers, PyObject *arrays, int flags)
{
    enum outcome outcome = DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < PySequence_Fast_GET_SIZE(arrays); i++)
        outcome = hold(buffers, PySequence_Fast_GET_ITEM(arrays, i), flags);
    return outcome;
}

static PyObject *let_go(struct buffers *buffers, enum outcome outcome, PyObject *result)
{
    while (buffers->count > 0)
        PyBuffer_Release(&buffers->views[--buffers->count]);
    PyMem_Free(buffers->views);
    return outcome == FAILED ? NULL : result;
}

static inline void ask_for(const char *row, size_t row_bytes, int writes)
{
    for (size_t at = 0, lines = 0; at < row_bytes && lines < MOST_LINES; at += LINE, lines++) {
        if (writes)
            __builtin_prefetch(row + at, 1);
        else
            __builtin_prefetch(row + at, 0);
    }
}

static int all_below(const int64_t *numbers, size_t count, size_t limit)
{
    uint64_t highest = 0; /* of numbers without a sign: negative ones are the highest */
    for (size_t i = 0; i < count; i++)
        highest = (uint64_t)numbers[i] > highest ? (uint64_t)numbers[i] : highest;
    return count == 0 || highest < limit;
}

/* -- ids -------------------------------------------------------------------------------- */

struct list {
    const int64_t *ids;
    int64_t *places;
    size_t at, count;
};

/* Two lists until one ends, without a branch that nobody can foresee: a place that is written too
 * early is written again. */
static size_t merge_two(struct list *a, struct list *b, int64_t *merged)
{
    size_t found = 0, i = 0, j = 0;
    for (; i < a->count && j < b->count; found++) {
        const int64_t left = a->ids[i], right = b->ids[j];
        merged[found] = left < right ? left : right;
        a->places[i] = (int64_t)found;
        b->places[j] = (int64_t)found;
        i += left <= right;
        j += right <= left;
    }
    a->at = i;
    b->at = j;
    return found;
}

static size_t merge(struct list *lists, Py_ssize_t num_lists, int64_t *merged)
{
    for (size_t found = num_lists == 2 ? merge_two(lists, lists + 1, merged) : 0;; found++) {
        int64_t least = INT64_MAX;
        int is_any = 0;
        for (Py_ssize_t i = 0; i < num_lists; i++) {
            if (lists[i].at < lists[i].count) {
                const int64_t id = lists[i].ids[lists[i].at];
                least = id < least ? id : least;
                is_any = 1;
            }
        }
        if (!is_any)
            return found;
        merged[found] = least;
        for (Py_ssize_t i = 0; i < num_lists; i++)
            if (lists[i].at < lists[i].count && lists[i].ids[lists[i].at] == least)
                lists[i].places[lists[i].at++] = (int64_t)found;
    }
}

PyDoc_STRVAR(merge_ids_doc, "merge_ids(merged, places, ids)\n--\n\nSee kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *merge_ids(PyObject *self, PyObject *args)
{
    struct buffers buffers = {0};
    PyObject *merged, *places, *ids;
    struct list *lists = NULL;
    size_t total = 0, found = 0;
    enum outcome outcome = DONE;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO", &merged, &places, &ids))
        return NULL;
    if (!is_sequence(places) || !is_sequence(ids) ||
        PySequence_Fast_GET_SIZE(places) != PySequence_Fast_GET_SIZE(ids))
        return PyErr_Format(PyExc_ValueError, "places and ids must be lists of equal length");
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(ids);
    buffers.views = PyMem_New(Py_buffer, 2 * count + 1);
    lists = PyMem_New(struct list, count + 1);
    if (buffers.views == NULL || lists == NULL) {
        PyMem_Free(lists);
        PyMem_Free(buffers.views);
        return PyErr_NoMemory();
    }
    outcome = hold(&buffers, merged, PyBUF_WRITABLE);
    if (outcome == DONE)
        outcome = hold_all(&buffers, places, PyBUF_WRITABLE);
    if (outcome == DONE)
        outcome = hold_all(&buffers, ids, PyBUF_SIMPLE);
    for (Py_ssize_t i = 0; outcome == DONE && i < count; i++) {
        const Py_buffer *to = &buffers.views[1 + i], *from = &buffers.views[1 + count + i];
        if (to->len != from->len || from->len % 8 != 0)
            outcome = refuse("places must be as long as their ids");
        lists[i] = (struct list){from->buf, to->buf, 0, (size_t)from->len / 8};
        total += (size_t)from->len;
    }
    if (outcome == DONE && (size_t)buffers.views[0].len < total)
        outcome = refuse("there is not enough room for the ids");
    if (outcome == DONE) {
        Py_BEGIN_ALLOW_THREADS
        found = merge(lists, count, buffers.views[0].buf);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(lists);
    if (outcome == DECLINED)
        outcome = refuse("ids and places must be contiguous arrays");
    return let_go(&buffers, outcome, outcome == DONE ? PyLong_FromSize_t(found) : NULL);
}

/* -- copies of rows --------------------------------------------------------------------- */

PyDoc_STRVAR(take_rows_doc, "take_rows(table, places, out, row_bytes)\n--\n\nSee kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *take_rows(PyObject *self, PyObject *args)
{
    Py_buffer views[3] = {{0}};
    PyObject *arrays[3];
    enum outcome outcome = DONE;
    size_t row_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOn", &arrays[0], &arrays[1], &arrays[2], &row_bytes))
        return NULL;
    for (int i = 0; outcome == DONE && i < 3; i++)
        outcome = get(arrays[i], &views[i], i == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (outcome == DONE) {
        const char *table = views[0].buf;
        const int64_t *places = views[1].buf;
        const size_t count = (size_t)views[1].len / 8;
        char *out = views[2].buf;
        if (row_bytes == 0 || (size_t)views[2].len != count * row_bytes ||
            !all_below(places, count, (size_t)views[0].len / row_bytes)) {
            outcome = refuse("these rows do not fit the table or the array to fill");
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (size_t i = 0; i < count; i++) {
                if (i + AHEAD < count)
                    ask_for(table + (size_t)places[i + AHEAD] * row_bytes, row_bytes, 0);
                memcpy(out + i * row_bytes, table + (size_t)places[i] * row_bytes, row_bytes);
            }
            Py_END_ALLOW_THREADS
        }
    }
    for (int i = 0; i < 3; i++)
        if (views[i].obj != NULL)
            PyBuffer_Release(&views[i]);
    return outcome == FAILED ? NULL : PyBool_FromLong(outcome == DONE);
}

/* -- updates ---------------------------------------------------------------------------- */

struct rows_call {
    struct numbers numbers;
    struct work work; /* of the row that is updated */
    PyObject *weight, *states, *places, *values, *at;
    struct buffers buffers; /* weight, states and master, places, values, and where they belong */
    Py_ssize_t num_arrays, num_values;
    size_t width, count;
    Py_ssize_t start, stop; /* of the rows to update */
    int rule, kind, weight_kind;
};

static const int64_t *places_of(const struct rows_call *call, Py_ssize_t part)
{
    return call->buffers.views[call->num_arrays + 1 + call->num_values + part].buf;
}

static size_t num_places(const struct rows_call *call, Py_ssize_t part)
{
    const Py_ssize_t first = call->num_arrays + 1 + call->num_values;
    return (size_t)call->buffers.views[first + part].len / 8;
}

static enum outcome check_rows(const struct rows_call *call)
{
    const Py_buffer *views = call->buffers.views;
    const size_t wide_size = call->weight_kind == FLOAT64 ? 8 : 4;
    const size_t row_bytes = call->width * SIZES[call->weight_kind];
    const size_t num_rows = row_bytes == 0 ? 0 : (size_t)views[0].len / row_bytes;
    for (Py_ssize_t i = 1; i < call->num_arrays; i++)
        if ((size_t)views[i].len != num_rows * call->width * wide_size)
            return refuse("states must be as long as the weight");
    if (call->start < 0 || call->stop < call->start || (size_t)call->stop > call->count)
        return refuse("a span does not fit the rows of the sum");
    if (!all_below(views[call->num_arrays].buf, call->count, num_rows))
        return refuse("the table has no such row");
    for (Py_ssize_t i = 0; i < call->num_values; i++) {
        const int64_t *at = places_of(call, i);
        const size_t count = num_places(call, i);
        const size_t nbytes = (size_t)views[call->num_arrays + 1 + i].len;
        if (nbytes != count * call->width * SIZES[call->kind])
            return refuse("there must be a row of values for each place");
        for (size_t row = 0; row < count; row++)
            if (at[row] < 0 || (size_t)at[row] >= call->count || (row > 0 && at[row] <= at[row - 1]))
                return refuse("the places of values must be sorted ones of the sum");
    }
    return DONE;
}

/* Where the first of sorted numbers stands that is not below. */
static size_t lower(const int64_t *numbers, size_t count, Py_ssize_t least)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (numbers[middle] < least)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ``given`` has room for a contribution more than there are, and ``next`` a place for each. */
static void update_each(struct rows_call *call, int set, Py_buffer *given, size_t *next,
                        const char *zeros)
{
    const Py_buffer *views = call->buffers.views, *values = &views[call->num_arrays + 1];
    const int64_t *places = views[call->num_arrays].buf;
    struct work *work = &call->work;
    const int num_states = work->num_states, has_master = work->master != NULL;
    const size_t row_bytes = call->width * SIZES[call->weight_kind];
    const size_t wide_bytes = call->width * (call->weight_kind == FLOAT64 ? 8 : 4);
    const size_t value_bytes = call->width * SIZES[call->kind];
    for (Py_ssize_t i = 0; i < call->num_values; i++)
        next[i] = lower(places_of(call, i), num_places(call, i), call->start);
    for (size_t row = (size_t)call->start; row < (size_t)call->stop; row++) {
        if (row + AHEAD < call->count) {
            const size_t soon = (size_t)places[row + AHEAD];
            ask_for((const char *)views[0].buf + soon * row_bytes, row_bytes, 1);
            for (Py_ssize_t i = 1; i < call->num_arrays; i++)
                ask_for((const char *)views[i].buf + soon * wide_bytes, wide_bytes, 1);
        }
        size_t count = 1;
        for (Py_ssize_t i = 0; i < call->num_values; i++)
            if (next[i] < num_places(call, i) && (size_t)places_of(call, i)[next[i]] == row)
                given[count++].buf = (char *)values[i].buf + value_bytes * next[i]++;
        if (count == 1)
            continue;
        /* Where a contribution lacks the row, its dense form adds 0.0. */
        const int is_in_all = count == (size_t)call->num_values + 1;
        given[0].buf = (char *)zeros;
        work->contributions = given + is_in_all;
        work->num_contributions = count - (size_t)is_in_all;
        const size_t place = (size_t)places[row];
        work->weight = (char *)views[0].buf + place * row_bytes;
        for (int i = 0; i < num_states; i++)
            work->states[i] = (char *)views[1 + i].buf + place * wide_bytes;
        if (has_master)
            work->master = (char *)views[1 + num_states].buf + place * wide_bytes;
        sets[set].run(work);
    }
}

static enum outcome hold_rows(struct rows_call *call)
{
    if (!is_sequence(call->states) || !is_sequence(call->values) || !is_sequence(call->at))
        return refuse("states, values and their places must be lists or tuples");
    if (call->rule <= ASSIGN || call->rule >= NUM_RULES || call->kind < 0 ||
        call->kind >= NUM_KINDS || call->weight_kind < 0 || call->weight_kind >= NUM_KINDS ||
        (call->kind != call->weight_kind &&
         (call->kind == FLOAT64 || call->weight_kind == FLOAT64 ||
          (call->kind != FLOAT32 && call->weight_kind != FLOAT32))))
        return refuse("no such rule, or these kinds cannot be combined");
    const int has_master = SIZES[call->weight_kind] == 2;
    call->num_arrays = 1 + PySequence_Fast_GET_SIZE(call->states);
    call->num_values = PySequence_Fast_GET_SIZE(call->values);
    if (call->num_arrays != 1 + NUM_STATES[call->rule] + has_master)
        return DECLINED;
    if (call->num_values == 0 || PySequence_Fast_GET_SIZE(call->at) != call->num_values)
        return refuse("values need places, one array each");
    call->buffers.views = PyMem_New(Py_buffer, call->num_arrays + 1 + 2 * call->num_values);
    if (call->buffers.views == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    enum outcome outcome = hold(&call->buffers, call->weight, PyBUF_WRITABLE);
    if (outcome == DONE)
        outcome = hold_all(&call->buffers, call->states, PyBUF_WRITABLE);
    if (outcome == DONE)
        outcome = hold(&call->buffers, call->places, PyBUF_SIMPLE);
    if (outcome == DONE)
        outcome = hold_all(&call->buffers, call->values, PyBUF_SIMPLE);
    if (outcome == DONE)
        outcome = hold_all(&call->buffers, call->at, PyBUF_SIMPLE);
    if (outcome == DONE && call->buffers.count != call->num_arrays + 1 + 2 * call->num_values)
        return refuse("an argument has changed");
    if (outcome == DONE) {
        call->count = (size_t)call->buffers.views[call->num_arrays].len / 8;
        outcome = check_rows(call);
    }
    if (outcome == DONE)
        call->work = (struct work){
            .rule = call->rule,
            .numbers = &call->numbers,
            .kind = call->kind,
            .weight_kind = call->weight_kind,
            .length = call->width,
            .num_states = NUM_STATES[call->rule],
            .master = has_master ? call->buffers.views[call->num_arrays - 1].buf : NULL,
        };
    return outcome;
}

PyDoc_STRVAR(update_rows_doc,
             "update_rows(formula, weight_kind, kind, width, weight, states, places, values, at, "
             "start, stop)"
             "\n--\n\nSee kvstore/arrays/cpu/_kernels.pyi.");

static PyObject *update_rows(PyObject *self, PyObject *args)
{
    struct rows_call call = {0};
    struct numbers *by = &call.numbers;
    (void)self;
    if (!PyArg_ParseTuple(args, "(iddddddddd)iinOOOOOnn", &call.rule, &by->rescale, &by->limit,
                          &by->decay, &by->rate, &by->momentum, &by->beta1, &by->beta2,
                          &by->epsilon, &by->late_decay, &call.weight_kind, &call.kind,
                          &call.width, &call.weight, &call.states, &call.places, &call.values,
                          &call.at, &call.start, &call.stop))
        return NULL;
    enum outcome outcome = hold_rows(&call);
    if (outcome == DONE) {
        Py_buffer *given = PyMem_Calloc((size_t)call.num_values + 1, sizeof *given);
        size_t *next = PyMem_Calloc((size_t)call.num_values, sizeof *next);
        char *zeros = PyMem_Calloc(call.width + 1, SIZES[call.kind]);
        if (given == NULL || next == NULL || zeros == NULL) {
            PyErr_NoMemory();
            outcome = FAILED;
        } else {
            const int set = chosen;
            Py_BEGIN_ALLOW_THREADS
            update_each(&call, set, given, next, zeros);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(given);
        PyMem_Free(next);
        PyMem_Free(zeros);
    }
    return let_go(&call.buffers, outcome, outcome == FAILED ? NULL : PyBool_FromLong(outcome == DONE));
}
