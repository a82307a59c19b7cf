/* Vectors for any processor: `wide` has the length of a register, WIDE floats; `vec` has LANES everywhere, for which the
   compiler uses several registers where they are shorter. Compilers are poor at that, so that most work is done in wide
   vectors. */

#include <math.h>
#include <stdint.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif

typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t iwide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define ONE_COPY __attribute__((noinline))
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define ONE_COPY __attribute__((noipa))
#define UNROLLED _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1")
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif

static inline vec load(const float *at) { return *(const vec *)at; }

static inline void store(float *at, vec x) { *(vec *)at = x; }

static inline vec larger(vec x, vec y) {
    ivec mask = x > y;
    return (vec)(((ivec)x & mask) | ((ivec)y & ~mask));
}

/* Each run of 2 * width lanes of two vectors, folded to half its length: a run of the first, one of the second, and so
   on. If LANES vectors are folded in pairs four times, lane i of the result is the sum of all lanes of vector i. */
#define FOLDED(x, y, width) (SHUFFLE(x, y, ALL_FROM(width, 0)) + SHUFFLE(x, y, ALL_FROM(width, width)))
#define FROM(lane, width, plus) (lane) + (plus) + ((lane) % (2 * (width)) < (width) ? 0 : LANES - (width))
#define ALL_FROM(w, p) \
    FROM(0, w, p), FROM(1, w, p), FROM(2, w, p), FROM(3, w, p), FROM(4, w, p), FROM(5, w, p), FROM(6, w, p), \
    FROM(7, w, p), FROM(8, w, p), FROM(9, w, p), FROM(10, w, p), FROM(11, w, p), FROM(12, w, p), FROM(13, w, p), \
    FROM(14, w, p), FROM(15, w, p)

/* The sum or the largest of all lanes, folded in halves until one lane is left. */
static inline float folded(vec x, int take_larger) {
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = !take_larger                  ? lanes[i] + lanes[i + width]
                       : lanes[i] > lanes[i + width] ? lanes[i]
                                                     : lanes[i + width];
    return lanes[0];
}

/* e^x to about two units in the last place: 2^n times a polynomial of the remainder of x. */
static inline vec exponential(vec x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const vec least = (vec){0} - 87.0f, most = (vec){0} + 88.0f;
    x = larger(x, least);
    x = (vec){0} - larger((vec){0} - x, (vec){0} - most);
    vec n = (x * 1.44269504f + round) - round;
    vec rest = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    vec p = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)power;
}
