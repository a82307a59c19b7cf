/* Vectors for any processor: `wide` is a register of WIDE floats. Sums along a row always have LANES lanes, in SLICES
   vectors, so all processors add in the same order. */

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif
#define LANES 16
#define SLICES (LANES / WIDE)

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
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (iwide){__VA_ARGS__})
#endif

static INLINE wide at(const float *from, int piece) { return *(const wide *)(from + piece * WIDE); }

static INLINE void put(float *to, int piece, wide numbers) { *(wide *)(to + piece * WIDE) = numbers; }

static INLINE wide larger(wide x, wide y) {
    iwide mask = x > y;
    return (wide)(((iwide)x & mask) | ((iwide)y & ~mask));
}

/* Folds each run of 2 * width lanes to half its length, alternating runs of `x` and `y`. Folding WIDE vectors in pairs
   down to one leaves the sum of all lanes of vector i in lane i. */
#define FOLDED(x, y, width) (SHUFFLE(x, y, ALL_FROM(width, 0)) + SHUFFLE(x, y, ALL_FROM(width, width)))
#define FROM(lane, width, plus) (lane) + (plus) + ((lane) % (2 * (width)) < (width) ? 0 : WIDE - (width))
#define FOUR_FROM(l, w, p) FROM(l, w, p), FROM(l + 1, w, p), FROM(l + 2, w, p), FROM(l + 3, w, p)
#if WIDE == 16
#define ALL_FROM(w, p) FOUR_FROM(0, w, p), FOUR_FROM(4, w, p), FOUR_FROM(8, w, p), FOUR_FROM(12, w, p)
#elif WIDE == 8
#define ALL_FROM(w, p) FOUR_FROM(0, w, p), FOUR_FROM(4, w, p)
#else
#define ALL_FROM(w, p) FOUR_FROM(0, w, p)
#endif

/* The sum or maximum of all LANES lanes, by folding halves. */
static INLINE float folded(const wide *slices, int take_larger) {
    float lanes[LANES];
    for (int s = 0; s < SLICES; s++) put(lanes, s, slices[s]);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = !take_larger                  ? lanes[i] + lanes[i + width]
                       : lanes[i] > lanes[i + width] ? lanes[i]
                                                     : lanes[i + width];
    return lanes[0];
}

/* e^x, accurate to about two units in the last place: 2^n times a polynomial. */
static INLINE wide exponential(wide x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const wide lowest = (wide){0} - 87.0f, highest = (wide){0} + 88.0f;
    x = larger(lowest, x); /* NaN stays NaN */
    x = (wide){0} - larger((wide){0} - highest, (wide){0} - x);
    wide n = (x * 1.44269504f + round) - round;
    wide rest = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    wide p = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    iwide power = (__builtin_convertvector(n, iwide) + 127) << 23;
    return p * (wide)power;
}

/* tanh(x), accurate to about two units in the last place: an odd polynomial near 0, exponentials elsewhere. */
static INLINE wide hyperbolic_tangent(wide x) {
    wide square = x * x, size = larger(x, (wide){0} - x);
    wide p = -5.70498872745e-3f * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    wide near = p * square * x + x, far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    iwide is_far = size >= 0.625f, is_negative = x < 0.0f; /* NaN is not far, and stays NaN */
    far = (wide)(((iwide)far & ~is_negative) | ((iwide)((wide){0} - far) & is_negative));
    return (wide)(((iwide)far & is_far) | ((iwide)near & ~is_far));
}

/* log(1 + e^x), accurate to a few units in the last place: the series of 2 artanh(t), for t = y / (2 + y) and y = e^-|x|. */
static INLINE wide softplus(wide x) {
    wide zero = {0}, y = exponential(zero - larger(x, zero - x)), t = y / (2.0f + y), square = t * t;
    wide p = square * (1 / 15.0f) + 1 / 13.0f;
    p = p * square + 1 / 11.0f;
    p = p * square + 1 / 9.0f;
    p = p * square + 1 / 7.0f;
    p = p * square + 1 / 5.0f;
    p = p * square + 1 / 3.0f;
    return larger(zero, x) + 2.0f * (p * square * t + t);
}
