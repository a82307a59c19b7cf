/* The functions of `numerics/elementary.py` and `numerics/noise.py`, with the same bits. Compile without fused
   multiply-adds: each operation must round. */

#include "vectors.h"

typedef uint32_t uwide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

#define CONVERT(x, type) __builtin_convertvector(x, type)

static INLINE float float_of_bits(int32_t bits) {
    union { int32_t bits; float number; } both = {bits};
    return both.number;
}

static INLINE int32_t bits_of_float(float number) {
    union { float number; int32_t bits; } both = {number};
    return both.bits;
}

/* --- Logarithms */

#define SQRT_HALF_BITS 0x3F3504F3
#define MANTISSA_MASK ((1 << 23) - 1)
#define LOG2_HIGH 0.693359375f
#define LOG2_LOW -2.1219444170128554e-4f

/* log(2^exponent * (1 + f)) */
static INLINE float log_of(float f, int32_t exponent) {
    static const float terms[] = {0.08700393885374069f, -0.14267481863498688f, 0.14914777874946594f,
                                  -0.1657758504152298f, 0.19963063299655914f,  -0.2500133812427521f,
                                  0.3333390951156616f};
    float powers = (float)exponent, square = f * f, total = f * terms[0] + terms[1];
    for (int i = 2; i < 7; i++) total = total * f + terms[i];
    total = total * f * square;
    total = total + powers * LOG2_LOW + square * -0.5f + f;
    return total + powers * LOG2_HIGH;
}

/* Splits into a mantissa from sqrt(1/2) to sqrt(2) and an exponent. */
static INLINE float mantissa_of(float x, int32_t *exponent) {
    int32_t shifted = bits_of_float(x) - SQRT_HALF_BITS;
    *exponent = shifted >> 23;
    return float_of_bits((shifted & MANTISSA_MASK) + SQRT_HALF_BITS);
}

static INLINE float negative_log(float x) {
    int32_t exponent;
    float mantissa = mantissa_of(x, &exponent);
    return -log_of(mantissa - 1.0f, exponent);
}

static INLINE float negative_log1m(float u) {
    int32_t exponent;
    float mantissa = mantissa_of(1.0f - u, &exponent);
    return -log_of(exponent == 0 ? -u : mantissa - 1.0f, exponent);
}

/* --- Probability masses */

#define MASS_BITS 40

/* exp(x) in units of 2^-40 for x <= 0, before rounding down to an integer. */
static INLINE wide masses(wide x) {
    const float bias = 12582912.0f;
    x = larger(x, (wide){0} - 60.0f);
    wide rounded = x * 1.4426950216293335f + bias;
    iwide exponent = (iwide)rounded - 0x4B400000;
    rounded = rounded - bias;
    x = x + rounded * -LOG2_HIGH + rounded * -LOG2_LOW;
    wide power = x * 0.008312055841088295f + 0.04189445078372955f;
    power = power * x + 0.16667133569717407f;
    power = power * x + 0.4999920129776001f;
    power = power * (x * x) + x + 1.0f;
    return (wide)((iwide)power + ((exponent + MASS_BITS) << 23));
}

/* --- Noise */

/* Exceeds the noise of every token. */
#define MAX_NOISE 23.0f

static INLINE uwide mix(uwide x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static INLINE uwide noise_bits(uwide token_ids, uint32_t first, uint32_t second) {
    return mix(mix(token_ids ^ first) + second);
}

/* An upper bound of the noise, as in `noise.py`. */
static INLINE wide noise_bound(uwide bits) {
    const float slope = -0.6931471805599453 / (1 << 23), offset = (127 + 31) * 0.6931471805599453 + 1e-4;
    wide half = CONVERT((iwide)(bits >> 1), wide) + 0.25f;
    return CONVERT((iwide)half, wide) * slope + offset;
}

static INLINE float gumbel(uint32_t bits) {
    float u = ((float)(bits >> 16) * 65536.0f + ((float)(bits & 0xFFFF) + 0.5f)) * 0x1p-32f;
    if (u > 1 - 0x1p-24f) u = 1 - 0x1p-24f;
    return negative_log(negative_log1m(u));
}
