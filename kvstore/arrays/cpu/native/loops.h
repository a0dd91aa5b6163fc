/* Everything that computes, for one set of instructions: included by kernels.c once for each.
 *
 * TARGET is the attribute of its functions and SET gives a function of this set its name. With
 * HAS_F16C the processor converts float16; without, integers do, with the same rounding.
 */

static inline TARGET float SET(up)(uint16_t half)
{
    /* The exponent is put right by a multiplication, which is exact for subnormals too. */
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t bits;
    float value;
    memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u; /* infinity and NaN */
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static inline TARGET uint16_t SET(down)(float value)
{
    /* To nearest, ties to even. For what becomes subnormal an addition rounds: the last bit of a
     * number just above 1/2 is worth the last bit of a float16 below 2**-14. */
    uint32_t bits, sign, normal, small, special;
    float shifted;
    memcpy(&bits, &value, 4);
    sign = bits & 0x80000000u;
    bits ^= sign;
    normal = (bits + 0xc8000fffu + ((bits >> 13) & 1)) >> 13;
    memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    memcpy(&small, &shifted, 4);
    small -= 0x3f000000u;
    special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    normal = bits >= 0x47800000u ? special : normal;
    return (uint16_t)((bits < 0x38800000u ? small : normal) | (sign >> 16));
}

/* Like ml_dtypes: to nearest, ties to even; every NaN becomes the quiet one of its sign. */
static inline TARGET uint16_t SET(upper_half)(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static TARGET void SET(widen)(enum kind kind, float *restrict to, const void *from, size_t n)
{
    const loose_half *halves = from;
    size_t i = 0;
    if (kind == BFLOAT16) {
        for (; i < n; i++) {
            const uint32_t bits = (uint32_t)halves[i] << 16;
            memcpy(&to[i], &bits, 4);
        }
        return;
    }
#ifdef HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
    for (; i < n; i++)
        to[i] = SET(up)(halves[i]);
}

static TARGET void SET(narrow)(enum kind kind, void *to, const loose_float *restrict from, size_t n)
{
    loose_half *halves = to;
    size_t i = 0;
    if (kind == BFLOAT16) {
        for (; i < n; i++)
            halves[i] = SET(upper_half)(from[i]);
        return;
    }
#ifdef HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(halves + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        halves[i] = SET(down)(from[i]);
}

/* Codes of 0 to 3, four in a byte, the first one in the most significant bits. */
static TARGET void SET(together_2bit)(uint8_t *restrict to, const uint8_t *restrict codes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        /* One product has all four in its last byte; they meet nowhere, so nothing is carried. */
        uint32_t four;
        memcpy(&four, codes + 4 * i, 4);
        to[i] = (uint8_t)(four * 0x40100401u >> 24);
#else
        const uint8_t *own = codes + 4 * i;
        to[i] = (uint8_t)(own[0] << 6 | own[1] << 4 | own[2] << 2 | own[3]);
#endif
    }
}

/* Codes of 0 and 1, eight in a byte, the first one in the most significant bit. */
static TARGET void SET(together_1bit)(uint8_t *restrict to, const uint8_t *restrict codes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        to[i] = (uint8_t)(eight * 0x8040201008040201u >> 56);
#else
        unsigned byte = 0;
        for (size_t place = 0; place < 8; place++)
            byte = byte << 1 | codes[8 * i + place];
        to[i] = (uint8_t)byte;
#endif
    }
}

#define REAL float
#define LOOSE loose_float
#define BITS uint32_t
#define LOOSE_BITS loose_uint32
#define RINT rintf
#define ROOT sqrtf
#define WIDE_KIND FLOAT32
#define WIDEN SET(widen)
#define NARROW SET(narrow)
#define NAME(name) SET(name##_float)
#include "rules.h"
#include "codecs.h"
#undef REAL
#undef LOOSE
#undef BITS
#undef LOOSE_BITS
#undef RINT
#undef ROOT
#undef WIDE_KIND
#undef WIDEN
#undef NARROW
#undef NAME

#define REAL double
#define LOOSE loose_double
#define BITS uint64_t
#define LOOSE_BITS loose_uint64
#define RINT rint
#define ROOT sqrt
#define WIDE_KIND FLOAT64
/* Nothing is computed in float64 but float64; prepare() has seen to it. */
#define WIDEN(kind, to, from, n) ((void)(n), abort())
#define NARROW(kind, to, from, n) abort()
#define NAME(name) SET(name##_double)
#include "rules.h"
#include "codecs.h"
#undef REAL
#undef LOOSE
#undef BITS
#undef LOOSE_BITS
#undef RINT
#undef ROOT
#undef WIDE_KIND
#undef WIDEN
#undef NARROW
#undef NAME

static TARGET void SET(run)(const struct work *work)
{
    if (work->kind == FLOAT64)
        SET(run_double)(work);
    else
        SET(run_float)(work);
}
