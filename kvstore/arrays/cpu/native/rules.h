/* The formulas, for one type of numbers and one set of instructions: included by loops.h.
 *
 * REAL is float or double, LOOSE the same at any address, ROOT its square root, and NAME gives a
 * function of this type and set its name. Every line is one operation of the Python formula
 * (kvstore/optimizer/sgd.py, adam.py), in its order, with its numbers rounded to REAL first as
 * NumPy rounds a Python float (NEP 50).
 */

/* The total may be a or b itself, so nothing here is `restrict`. */
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

/* Elements of a gradient: a block of it, and what is still to be added to it or NULL. */
struct NAME(gradient) {
    const LOOSE *sum, *last;
};

/* What all formulas begin with. A factor of 1 and a limit without end change no bit; a NaN stays
 * what it is, as in np.minimum and np.maximum. */
static TARGET ALWAYS_INLINE REAL NAME(scaled)(const struct NAME(gradient) *of, size_t i,
                                              const struct numbers *by, int has_last)
{
    return (has_last ? of->sum[i] + of->last[i] : of->sum[i]) * (REAL)by->rescale;
}

static TARGET ALWAYS_INLINE REAL NAME(clipped)(REAL grad, const struct numbers *by)
{
    const REAL high = by->limit > 0.0 ? (REAL)by->limit : (REAL)INFINITY, low = -high;
    const REAL bounded = high < grad ? high : grad;
    return low > bounded ? low : bounded;
}

/* The loops are compiled once for every choice of their last arguments, so they have no branches. */
static TARGET ALWAYS_INLINE void NAME(sgd_loop)(const struct numbers *by, LOOSE *restrict weight,
                                                LOOSE *restrict velocity,
                                                const struct NAME(gradient) *of, size_t n,
                                                enum rule rule, int has_last, int decays)
{
    const REAL decay = (REAL)by->decay, rate = (REAL)by->rate, momentum = (REAL)by->momentum;
    for (size_t i = 0; i < n; i++) {
        REAL g = NAME(clipped)(NAME(scaled)(of, i, by, has_last), by);
        if (decays)
            g += decay * weight[i];
        if (rule == TORCH_MOMENTUM) { /* the rate multiplies the whole velocity */
            const REAL speed = velocity[i] * momentum + g;
            velocity[i] = speed;
            weight[i] -= speed * rate;
        } else if (rule == MOMENTUM) {
            const REAL speed = velocity[i] * momentum - g * rate;
            velocity[i] = speed;
            weight[i] += speed;
        } else {
            weight[i] -= g * rate;
        }
    }
}

static TARGET void NAME(sgd)(enum rule rule, const struct numbers *by, LOOSE *weight,
                             LOOSE *velocity, const struct NAME(gradient) *of, size_t n)
{
#define SGD_LOOP(...) NAME(sgd_loop)(by, weight, velocity, of, n, __VA_ARGS__)
#define SGD_LOOPS(RULE)                                                                           \
    switch ((of->last != NULL) << 1 | (by->decay != 0.0)) {                                       \
    case 0: SGD_LOOP(RULE, 0, 0); break;                                                          \
    case 1: SGD_LOOP(RULE, 0, 1); break;                                                          \
    case 2: SGD_LOOP(RULE, 1, 0); break;                                                          \
    case 3: SGD_LOOP(RULE, 1, 1); break;                                                          \
    }
    if (rule == SGD) {
        SGD_LOOPS(SGD)
    } else if (rule == MOMENTUM) {
        SGD_LOOPS(MOMENTUM)
    } else {
        SGD_LOOPS(TORCH_MOMENTUM)
    }
#undef SGD_LOOPS
#undef SGD_LOOP
}

static TARGET ALWAYS_INLINE void NAME(adam_loop)(const struct numbers *by, LOOSE *restrict weight,
                                                 LOOSE *restrict mean, LOOSE *restrict var,
                                                 const struct NAME(gradient) *of, size_t n,
                                                 int has_last, int decays, int decays_late)
{
    const REAL beta1 = (REAL)by->beta1, rest1 = (REAL)(1.0 - by->beta1);
    const REAL beta2 = (REAL)by->beta2, rest2 = (REAL)(1.0 - by->beta2);
    const REAL rate = (REAL)by->rate, epsilon = (REAL)by->epsilon;
    const REAL decay = (REAL)by->decay, late_decay = (REAL)by->late_decay;
    for (size_t i = 0; i < n; i++) {
        REAL g = NAME(scaled)(of, i, by, has_last);
        if (decays)
            g += decay * weight[i];
        g = NAME(clipped)(g, by);
        const REAL m = mean[i] * beta1 + g * rest1;
        const REAL v = var[i] * beta2 + (g * rest2) * g;
        mean[i] = m;
        var[i] = v;
        REAL step = (m * rate) / (ROOT(v) + epsilon);
        if (decays_late)
            step += late_decay * weight[i];
        weight[i] -= step;
    }
}

static TARGET void NAME(adam)(const struct numbers *by, LOOSE *weight, LOOSE *mean, LOOSE *var,
                              const struct NAME(gradient) *of, size_t n)
{
#define ADAM_LOOP(...) NAME(adam_loop)(by, weight, mean, var, of, n, __VA_ARGS__)
    switch ((of->last != NULL) << 2 | (by->decay != 0.0) << 1 | (by->late_decay != 0.0)) {
    case 0: ADAM_LOOP(0, 0, 0); break;
    case 1: ADAM_LOOP(0, 0, 1); break;
    case 2: ADAM_LOOP(0, 1, 0); break;
    case 3: ADAM_LOOP(0, 1, 1); break;
    case 4: ADAM_LOOP(1, 0, 0); break;
    case 5: ADAM_LOOP(1, 0, 1); break;
    case 6: ADAM_LOOP(1, 1, 0); break;
    case 7: ADAM_LOOP(1, 1, 1); break;
    }
#undef ADAM_LOOP
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

/* The sum of the first of the contributions. */
static TARGET void NAME(sum)(LOOSE *total, const struct work *work, size_t count, size_t start,
                             size_t n)
{
    REAL scratch[2][BLOCK];
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

/* A block of weights from the block of gradients. 16-bit weights are what their master rounds to. */
static TARGET void NAME(update)(const struct work *work, const struct NAME(gradient) *of,
                                size_t start, size_t n)
{
    char *stored = work->weight + start * SIZES[work->weight_kind];
    LOOSE *weight = (LOOSE *)(work->master == NULL ? stored : work->master + start * sizeof(REAL));
    LOOSE *states[MOST_STATES] = {NULL};
    for (int i = 0; i < work->num_states; i++)
        states[i] = (LOOSE *)work->states[i] + start;
    if (work->rule == ADAM)
        NAME(adam)(work->numbers, weight, states[0], states[1], of, n);
    else
        NAME(sgd)(work->rule, work->numbers, weight, states[0], of, n);
    if (work->master != NULL)
        NARROW(work->weight_kind, stored, weight, n);
}

/* One block of the weight. */
static TARGET void NAME(block)(const struct work *work, size_t start, size_t n)
{
    REAL scratch[2][BLOCK];
    const size_t count = work->num_contributions;
    char *stored = work->weight + start * SIZES[work->weight_kind];
    if (work->rule != ASSIGN) {
        /* The last is added in the loop that updates. */
        const void *first = work->contributions[0].buf, *last = work->contributions[count - 1].buf;
        struct NAME(gradient) of = {(LOOSE *)scratch[0], NULL};
        if (count > 2)
            NAME(sum)((LOOSE *)scratch[0], work, count - 1, start, n);
        else
            of.sum = NAME(load)(work->kind, first, start, n, scratch[0]);
        if (count > 1)
            of.last = NAME(load)(work->kind, last, start, n, scratch[1]);
        NAME(update)(work, &of, start, n);
    } else if (count == 1 && work->kind == work->weight_kind) {
        /* Bits are copied: a signalling NaN stays one. */
        const char *from = work->contributions[0].buf;
        memmove(stored, from + start * SIZES[work->kind], n * SIZES[work->kind]);
    } else if (work->weight_kind == WIDE_KIND) {
        NAME(sum)((LOOSE *)stored, work, count, start, n);
    } else {
        NAME(sum)((LOOSE *)scratch[0], work, count, start, n);
        NARROW(work->weight_kind, stored, scratch[0], n);
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
