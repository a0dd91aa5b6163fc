/* What the pieces of kernels.c share: dtypes, rules, and one piece of work.
 *
 * Read kvstore/arrays/cpu/kernels.py first, which says what is computed and for whom; then kernels.c
 * (arguments), loops.h (16-bit floats, blocks) and rules.h (the formulas). Gradient compression:
 * coding_calls.h (arguments) and codecs.h (the rules). Row-sparse keys: row_calls.h.
 */
#ifndef KVSTORE_KERNELS_H
#define KVSTORE_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Bits must be those of NumPy's loops: each operation rounded once, to its own type. */
#if !defined(__GNUC__)
#error "needs GCC or Clang"
#endif
#if defined(__FAST_MATH__)
#error "must not be compiled with -ffast-math"
#endif
#if !defined(FLT_EVAL_METHOD) || FLT_EVAL_METHOD != 0
#error "needs float arithmetic in float and double arithmetic in double"
#endif

/* Elements that are worked on at a time: few enough that all operands of a block and the scratch
 * memory stay in the first two levels of the cache. */
#define BLOCK 1024

/* Elements that are copied to each array to fill at a time, from the cache: for copies of this
 * length and more the C library does not read from memory what it is about to overwrite. */
#define STRETCH 32768

enum kind { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, NUM_KINDS };
enum rule { ASSIGN, SGD, MOMENTUM, ADAM, TORCH_MOMENTUM, NUM_RULES };
enum { MOST_STATES = 2 };

/* The numbers of an optimizer for one update, in the order of kernels.Formula. */
struct numbers {
    double rescale, limit, decay, rate, momentum, beta1, beta2, epsilon, late_decay;
};

/* One key, or one part of it: all pointers are to its first element, aligned or not. */
struct work {
    enum rule rule;
    const struct numbers *numbers;
    enum kind kind;        /* of the contributions */
    enum kind weight_kind; /* of weight and outs */
    size_t length;
    char *weight;
    int num_states;
    char *states[MOST_STATES]; /* in the type that is computed in */
    char *master;              /* what is updated in place of 16-bit weights, as states; or NULL */
    size_t num_contributions, num_outs;
    const Py_buffer *contributions, *outs;
};

enum codec { TWO_BIT = 1, ONE_BIT = 2, INT8 = 5 }; /* their codes in headers */
enum { MOST_BLOCK = 65536 };

/* One array, encoded or to be: all pointers are to its first element or byte, aligned or not. */
struct coding {
    int codec;
    int kind;       /* of the source; what is computed in is float, and double for double */
    double number;  /* the threshold; int8: how many numbers share a scale */
    size_t length, payload_bytes;
    const char *source; /* NULL for zeros */
    char *residual;     /* NULL for none */
    unsigned char *payload;
    char *out; /* in the type that is computed in */
    int add;
};

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Types for memory of others: any alignment, any effective type. */
typedef float loose_float __attribute__((aligned(1), may_alias));
typedef double loose_double __attribute__((aligned(1), may_alias));
typedef uint16_t loose_half __attribute__((aligned(1), may_alias));
typedef int8_t loose_byte __attribute__((may_alias));
typedef uint32_t loose_uint32 __attribute__((aligned(1), may_alias));
typedef uint64_t loose_uint64 __attribute__((aligned(1), may_alias));

#endif
