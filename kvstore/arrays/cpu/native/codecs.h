/* The codecs 2bit, 1bit and int8, for one type of numbers and one set of instructions: included by
 * loops.h after rules.h, with the same macros.
 *
 * The rules stand in kvstore/compression/value_codecs.py and int8.py; every line is one of their operations.
 */

/* -- codes of a block; with `rest` its numbers become what was lost, else they are only read --- */

static TARGET void NAME(codes_2bit)(LOOSE *restrict p, int rest, uint8_t *restrict codes,
                                    double threshold, size_t n)
{
    const REAL high = (REAL)threshold, low = -(REAL)threshold;
    for (size_t i = 0; i < n; i++)
        codes[i] = (uint8_t)((p[i] >= high) * 3 + (p[i] <= low) * 2);
    if (rest)
        for (size_t i = 0; i < n; i++) {
            const REAL step = p[i] >= high ? high : p[i] <= low ? low : (REAL)0;
            p[i] -= step;
        }
}

static TARGET void NAME(codes_1bit)(LOOSE *restrict p, int rest, uint8_t *restrict codes,
                                    double threshold, size_t n)
{
    const REAL border = (REAL)threshold;
    for (size_t i = 0; i < n; i++)
        codes[i] = (uint8_t)(p[i] > border);
    if (rest)
        for (size_t i = 0; i < n; i++) {
            const REAL step = p[i] > border ? (REAL)1 : (REAL)-1;
            p[i] -= step;
        }
}

/* One scale and its codes. */
static TARGET void NAME(codes_int8)(LOOSE *restrict p, int rest, loose_byte *restrict codes,
                                    LOOSE *scale, size_t n)
{
    BITS peak_bits = 0;
    REAL peak;
    for (size_t i = 0; i < n; i++) {
        /* Without the sign, bits are ordered as magnitudes are. */
        const BITS bits = ((const LOOSE_BITS *)p)[i] & ((BITS)-1 >> 1);
        peak_bits = bits > peak_bits ? bits : peak_bits;
    }
    memcpy(&peak, &peak_bits, sizeof peak);
    const REAL by = peak / (REAL)127;
    *scale = by;
    if (by == (REAL)0) {
        memset(codes, 0, n);
        return; /* and all is lost, which is what is there */
    }
    for (size_t start = 0; start < n; start += BLOCK) {
        const size_t length = n - start < BLOCK ? n - start : BLOCK;
        REAL steps[BLOCK];
        for (size_t i = 0; i < length; i++) {
            const REAL step = RINT(p[start + i] / by);
            const REAL bounded = step > (REAL)127 ? (REAL)127 : step;
            steps[i] = bounded < (REAL)-127 ? (REAL)-127 : bounded;
        }
        for (size_t i = 0; i < length; i++)
            codes[start + i] = (loose_byte)(int)steps[i];
        if (rest)
            for (size_t i = 0; i < length; i++)
                p[start + i] -= steps[i] * by;
    }
}

/* -- spans ----------------------------------------------------------------------------------- */

/* The numbers from start on with the residual's added, which is kept there if there is one. */
static TARGET LOOSE *NAME(gather)(const struct coding *by, size_t start, size_t n, REAL *scratch)
{
    LOOSE *own = (LOOSE *)by->residual + start;
    LOOSE *given;
    if (by->source == NULL)
        return own;
    given = NAME(load)(by->kind, by->source, start, n, scratch);
    if (by->residual == NULL)
        return given;
    NAME(add_one)(own, given, n);
    return own;
}

static TARGET void NAME(encode_bits)(const struct coding *by, size_t start, size_t stop)
{
    const size_t each = by->codec == TWO_BIT ? 4 : 8;
    for (; start < stop; start += BLOCK) {
        REAL scratch[BLOCK];
        uint8_t codes[BLOCK + 8];
        const size_t n = stop - start < BLOCK ? stop - start : BLOCK;
        const size_t num_bytes = (n + each - 1) / each;
        LOOSE *p = NAME(gather)(by, start, n, scratch);
        const int rest = by->residual != NULL;
        memset(codes + n, 0, 8);
        if (by->codec == TWO_BIT) {
            NAME(codes_2bit)(p, rest, codes, by->number, n);
            SET(together_2bit)(by->payload + start / 4, codes, num_bytes);
        } else {
            NAME(codes_1bit)(p, rest, codes, by->number, n);
            SET(together_1bit)(by->payload + start / 8, codes, num_bytes);
        }
    }
    if (stop == by->length) {
        const size_t end = (stop + each - 1) / each;
        memset(by->payload + end, 0, by->payload_bytes - end);
    }
}

static TARGET void NAME(encode_int8)(const struct coding *by, size_t start, size_t stop)
{
    const size_t block = (size_t)by->number;
    LOOSE *scales = (LOOSE *)by->payload;
    loose_byte *codes =
        (loose_byte *)(by->payload + (by->length + block - 1) / block * sizeof(REAL));
    /* Where there is nothing to keep what is added in, it is a block that fits or the source. */
    for (; start < stop; start += block) {
        const size_t n = stop - start < block ? stop - start : block;
        LOOSE *p;
        REAL scratch[BLOCK];
        if (by->residual != NULL)
            for (size_t i = 0; i < n; i += BLOCK)
                (void)NAME(gather)(by, start + i, n - i < BLOCK ? n - i : BLOCK, scratch);
        p = by->residual != NULL ? (LOOSE *)by->residual + start
                                 : NAME(load)(by->kind, by->source, start, n, scratch);
        NAME(codes_int8)(p, by->residual != NULL, codes + start, scales + start / block, n);
    }
}

static TARGET void NAME(encode)(const struct coding *by, size_t start, size_t stop)
{
    if (by->codec == INT8)
        NAME(encode_int8)(by, start, stop);
    else
        NAME(encode_bits)(by, start, stop);
}

/* The numbers of each byte of 2bit, and of each half of one of 1bit. */
static TARGET void NAME(tabulate)(const struct coding *by, REAL (*table)[4])
{
    const REAL high = (REAL)by->number, numbers[4] = {0, 0, -high, high};
    if (by->codec == TWO_BIT)
        for (int byte = 0; byte < 256; byte++)
            for (int place = 0; place < 4; place++)
                table[byte][place] = numbers[byte >> (6 - 2 * place) & 3];
    if (by->codec == ONE_BIT)
        for (int half = 0; half < 16; half++)
            for (int place = 0; place < 4; place++)
                table[half][place] = half >> (3 - place) & 1 ? (REAL)1 : (REAL)-1;
}

static TARGET void NAME(expand_2bit)(const struct coding *by, const REAL (*table)[4], LOOSE *to,
                                     size_t start, size_t n)
{
    const uint8_t *from = by->payload + start / 4;
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        memcpy(to + i, table[from[i / 4]], sizeof table[0]);
    if (i < n)
        memcpy(to + i, table[from[i / 4]], (n - i) * sizeof(REAL));
}

static TARGET void NAME(expand_1bit)(const struct coding *by, const REAL (*table)[4], LOOSE *to,
                                     size_t start, size_t n)
{
    const uint8_t *from = by->payload + start / 8;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(to + i, table[from[i / 8] >> 4], sizeof table[0]);
        memcpy(to + i + 4, table[from[i / 8] & 15], sizeof table[0]);
    }
    for (; i < n; i++)
        to[i] = from[i / 8] >> (7 - i % 8) & 1 ? (REAL)1 : (REAL)-1;
}

static TARGET void NAME(expand_int8)(const struct coding *by, LOOSE *to, size_t start, size_t n)
{
    const size_t block = (size_t)by->number;
    const LOOSE *scales = (const LOOSE *)by->payload;
    const loose_byte *codes =
        (const loose_byte *)(by->payload + (by->length + block - 1) / block * sizeof(REAL));
    while (n > 0) {
        const size_t rest = block - start % block, length = rest < n ? rest : n;
        const REAL scale = scales[start / block];
        for (size_t i = 0; i < length; i++)
            to[i] = (REAL)codes[start + i] * scale;
        to += length;
        start += length;
        n -= length;
    }
}

static TARGET void NAME(expand)(const struct coding *by, const REAL (*table)[4], LOOSE *to,
                                size_t start, size_t n)
{
    if (by->codec == TWO_BIT)
        NAME(expand_2bit)(by, table, to, start, n);
    else if (by->codec == ONE_BIT)
        NAME(expand_1bit)(by, table, to, start, n);
    else
        NAME(expand_int8)(by, to, start, n);
}

static TARGET void NAME(decode)(const struct coding *by, size_t start, size_t stop)
{
    LOOSE *out = (LOOSE *)by->out;
    REAL table[256][4];
    NAME(tabulate)(by, table);
    if (!by->add) {
        NAME(expand)(by, (const REAL(*)[4])table, out + start, start, stop - start);
        return;
    }
    for (; start < stop; start += 4 * BLOCK) {
        REAL scratch[4 * BLOCK];
        const size_t n = stop - start < 4 * BLOCK ? stop - start : 4 * BLOCK;
        NAME(expand)(by, (const REAL(*)[4])table, (LOOSE *)scratch, start, n);
        NAME(add_one)(out + start, (LOOSE *)scratch, n);
    }
}
