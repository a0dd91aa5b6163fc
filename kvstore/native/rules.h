/* The formulas, for one type of numbers and one set of instructions: included by loops.h.
 *
 * REAL is float or double, LOOSE the same at any address, ROOT its square root, and NAME gives a
 * function of this type and set its name. Every line is one operation of the Python formula
 * (kvstore/optimizer/sgd.py, adam.py), in its order, with its numbers rounded to REAL first as
 * NumPy rounds a Python float (NEP 50).
 */

/* The total may be a itself, so nothing here is `restrict`. */
static TARGET void NAME(add_first)(LOOSE *total, const LOOSE *a, const LOOSE *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        total[i] = a[i] + b[i];
}

static TARGET void NAME(add_one)(LOOSE *total, const LOOSE *a, size_t n)
{
    for (size_t i = 0; i < n; i++)
        total[i] += a[i];
}

static TARGET void NAME(add_two)(LOOSE *total, const LOOSE *a, const LOOSE *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        total[i] = (total[i] + a[i]) + b[i];
}

static TARGET void NAME(rescale)(REAL *grad, double factor, size_t n)
{
    const REAL by = (REAL)factor;
    if (factor == 1.0)
        return;
    for (size_t i = 0; i < n; i++)
        grad[i] *= by;
}

/* A NaN stays what it is, as in np.minimum and np.maximum. */
static TARGET void NAME(clip)(REAL *grad, double limit, size_t n)
{
    const REAL high = (REAL)limit, low = (REAL)-limit;
    if (!(limit > 0.0))
        return;
    for (size_t i = 0; i < n; i++) {
        const REAL bounded = high < grad[i] ? high : grad[i];
        grad[i] = low > bounded ? low : bounded;
    }
}

static TARGET void NAME(add_decay)(REAL *restrict grad, const LOOSE *weight, double decay, size_t n)
{
    const REAL by = (REAL)decay;
    if (decay == 0.0)
        return;
    for (size_t i = 0; i < n; i++)
        grad[i] += by * weight[i];
}

static TARGET void NAME(descend)(LOOSE *restrict weight, const REAL *step, size_t n)
{
    for (size_t i = 0; i < n; i++)
        weight[i] -= step[i];
}

static TARGET void NAME(sgd)(const struct numbers *by, LOOSE *restrict weight,
                             LOOSE *restrict velocity, REAL *restrict grad, size_t n)
{
    const REAL rate = (REAL)by->rate, momentum = (REAL)by->momentum;
    NAME(rescale)(grad, by->rescale, n);
    NAME(clip)(grad, by->limit, n);
    NAME(add_decay)(grad, weight, by->decay, n);
    for (size_t i = 0; i < n; i++)
        grad[i] *= rate;
    if (velocity == NULL) {
        NAME(descend)(weight, grad, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const REAL speed = velocity[i] * momentum - grad[i];
        velocity[i] = speed;
        weight[i] += speed;
    }
}

static TARGET void NAME(adam)(const struct numbers *by, LOOSE *restrict weight,
                              LOOSE *restrict mean, LOOSE *restrict var, REAL *restrict grad,
                              size_t n)
{
    const REAL beta1 = (REAL)by->beta1, rest1 = (REAL)(1.0 - by->beta1);
    const REAL beta2 = (REAL)by->beta2, rest2 = (REAL)(1.0 - by->beta2);
    const REAL rate = (REAL)by->rate, epsilon = (REAL)by->epsilon;
    NAME(rescale)(grad, by->rescale, n);
    NAME(add_decay)(grad, weight, by->decay, n);
    NAME(clip)(grad, by->limit, n);
    for (size_t i = 0; i < n; i++) {
        const REAL g = grad[i];
        const REAL m = mean[i] * beta1 + g * rest1;
        const REAL v = var[i] * beta2 + (g * rest2) * g;
        mean[i] = m;
        var[i] = v;
        grad[i] = (m * rate) / (ROOT(v) + epsilon);
    }
    NAME(add_decay)(grad, weight, by->late_decay, n);
    NAME(descend)(weight, grad, n);
}

/* Elements from start on, as REAL: where they lie, or widened into scratch. */
static TARGET LOOSE *NAME(load)(enum kind kind, const void *all, size_t start, size_t n,
                                REAL *scratch)
{
    char *from = (char *)all + start * SIZES[kind];
    if (kind == WIDE_KIND)
        return (LOOSE *)from;
    WIDEN(kind, scratch, from, n);
    return (LOOSE *)scratch;
}

static TARGET void NAME(sum)(LOOSE *total, const struct work *work, size_t start, size_t n)
{
    REAL scratch[2][BLOCK];
    const size_t count = work->num_contributions;
    const LOOSE *a = NAME(load)(work->kind, work->contributions[0].buf, start, n, scratch[0]), *b;
    size_t next = 2;
    if (count == 1) {
        memcpy(total, a, n * sizeof(REAL));
        return;
    }
    b = NAME(load)(work->kind, work->contributions[1].buf, start, n, scratch[1]);
    NAME(add_first)(total, a, b, n);
    for (; next + 1 < count; next += 2) {
        a = NAME(load)(work->kind, work->contributions[next].buf, start, n, scratch[0]);
        b = NAME(load)(work->kind, work->contributions[next + 1].buf, start, n, scratch[1]);
        NAME(add_two)(total, a, b, n);
    }
    if (next < count) {
        a = NAME(load)(work->kind, work->contributions[next].buf, start, n, scratch[0]);
        NAME(add_one)(total, a, n);
    }
}

/* A block of weights from the block of summed gradients, which is overwritten. 16-bit weights are
 * what their master rounds to. */
static TARGET void NAME(update)(const struct work *work, REAL *grad, size_t start, size_t n)
{
    char *stored = work->weight + start * SIZES[work->weight_kind];
    LOOSE *weight = (LOOSE *)(work->master == NULL ? stored : work->master + start * sizeof(REAL));
    LOOSE *states[MOST_STATES] = {NULL};
    for (int i = 0; i < work->num_states; i++)
        states[i] = (LOOSE *)work->states[i] + start;
    if (work->rule == ADAM)
        NAME(adam)(work->numbers, weight, states[0], states[1], grad, n);
    else
        NAME(sgd)(work->numbers, weight, states[0], grad, n);
    if (work->master != NULL)
        NARROW(work->weight_kind, stored, weight, n);
}

/* One block of the weight. */
static TARGET void NAME(block)(const struct work *work, size_t start, size_t n)
{
    REAL grad[BLOCK];
    char *stored = work->weight + start * SIZES[work->weight_kind];
    if (work->rule != ASSIGN) {
        NAME(sum)((LOOSE *)grad, work, start, n);
        NAME(update)(work, grad, start, n);
    } else if (work->num_contributions == 1 && work->kind == work->weight_kind) {
        /* Bits are copied: a signalling NaN stays one. */
        const char *from = work->contributions[0].buf;
        memmove(stored, from + start * SIZES[work->kind], n * SIZES[work->kind]);
    } else if (work->weight_kind == WIDE_KIND) {
        NAME(sum)((LOOSE *)stored, work, start, n);
    } else {
        NAME(sum)((LOOSE *)grad, work, start, n);
        NARROW(work->weight_kind, stored, grad, n);
    }
}

/* All of one piece of work. */
static TARGET void NAME(run)(const struct work *work)
{
    const size_t size = SIZES[work->weight_kind];
    for (size_t begin = 0; begin < work->length; begin += STRETCH) {
        const size_t rest = work->length - begin, length = rest < STRETCH ? rest : STRETCH;
        for (size_t start = 0; start < length; start += BLOCK)
            NAME(block)(work, begin + start, length - start < BLOCK ? length - start : BLOCK);
        for (size_t i = 0; i < work->num_outs; i++)
            memcpy((char *)work->outs[i].buf + begin * size, work->weight + begin * size,
                   length * size);
    }
}
