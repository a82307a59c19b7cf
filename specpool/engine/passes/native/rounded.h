/* Activations rounded to 8 bits, and their GEMM with quantized panels.

   A row consists of parts of PART inputs with one scale each: the largest magnitude / 127. The dot product of a part is
   an integer, so it is exact. Floating-point terms are added in the order of the inputs, so a row has the same bits in
   every batch. decoder.py compiles this mode without fused multiply-adds, so a row also has the same bits on every
   processor. */

#include "dots.h"

#ifndef ROUND_ACTIVATIONS
#define ROUND_ACTIVATIONS 0
#endif

/* Hides the origin of a pointer, so the compiler reloads the memory instead of keeping values in registers and spilling
   them. */
#define FORGET(pointer) __asm__ volatile("" : "+r"(pointer))

/* Parts to prefetch ahead of the current one. */
#define ROUNDED_AHEAD 6

#define MAX_CODE 127
/* Parts whose largest magnitude is not above this round to zero. The product of a scale and a float16 scale is therefore
   never subnormal: some threads may flush such numbers to zero. */
#define MIN_LARGEST 1e-20f

/* A part of a row, with words in the order of `code_word`. Arrays are [parts, rows], so one pointer serves a tile of
   rows. */
typedef struct {
    int32_t words[CODE_WORDS];
    float scale;     /* NaN if a number of the part is not finite */
    float total;     /* the sum of the part, as rounded */
    int32_t sums[2]; /* of the codes of each half of the part */
} RoundedPart;

/* Lane i of the result is lane i ^ `mask` of x. */
#define SWAPPED(x, mask) SHUFFLE(x, x, ALL_LANES(mask))
#define FOUR_LANES(i, m) (i) ^ (m), ((i) + 1) ^ (m), ((i) + 2) ^ (m), ((i) + 3) ^ (m)
#if WIDE == 16
#define ALL_LANES(m) FOUR_LANES(0, m), FOUR_LANES(4, m), FOUR_LANES(8, m), FOUR_LANES(12, m)
#elif WIDE == 8
#define ALL_LANES(m) FOUR_LANES(0, m), FOUR_LANES(4, m)
#else
#define ALL_LANES(m) FOUR_LANES(0, m)
#endif

static INLINE iwide larger_int(iwide x, iwide y) {
    iwide mask = x > y;
    return (x & mask) | (y & ~mask);
}

/* The largest of all lanes. */
static INLINE int32_t largest_lane(iwide x) {
#if WIDE > 8
    x = larger_int(x, SWAPPED(x, 8));
#endif
#if WIDE > 4
    x = larger_int(x, SWAPPED(x, 4));
#endif
    x = larger_int(x, SWAPPED(x, 2));
    return larger_int(x, SWAPPED(x, 1))[0];
}

/* The sum of all lanes. */
static INLINE int32_t lane_sum(iwide x) {
#if WIDE > 8
    x += SWAPPED(x, 8);
#endif
#if WIDE > 4
    x += SWAPPED(x, 4);
#endif
    x += SWAPPED(x, 2);
    return x[0] + x[1];
}

/* Shifts each code to its byte in the even or odd word of its group. `first`: input of the first lane. */
static INLINE iwide in_word(iwide codes, int first) {
    iwide shifts;
    for (int i = 0; i < WIDE; i++) shifts[i] = (first + i) % GROUP / 2 * 8;
    return (codes & 255) << shifts;
}

/* Writes the even and odd words of the groups of LANES codes. */
static INLINE void put_words(const iwide *codes, int32_t *to) {
#if WIDE == 4
    for (int s = 0; s < SLICES; s += 2, to += 2) {
        iwide both = in_word(codes[s], 0) | in_word(codes[s + 1], WIDE);
        both |= SWAPPED(both, 2);
        to[0] = both[0], to[1] = both[1];
    }
#else
    for (int s = 0; s < SLICES; s++) {
        iwide both = in_word(codes[s], 0);
        both |= SWAPPED(both, 4);
        both |= SWAPPED(both, 2);
        for (int i = 0; i < WIDE; i += GROUP) *to++ = both[i], *to++ = both[i + 1];
    }
#endif
}

/* Rounds one part. The bits of magnitudes compare as integers; infinities and NaN exceed finite numbers. */
static INLINE void round_part(const float *x, RoundedPart *to) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const int32_t infinite = 0x7f800000;
    iwide peaks = (iwide)at(x, 0) & 0x7fffffff;
    for (int i = 1; i < PART / WIDE; i++) peaks = larger_int((iwide)at(x, i) & 0x7fffffff, peaks);
    union { int32_t bits; float number; } largest = {largest_lane(peaks)};
    if (largest.bits >= infinite) {
        *to = (RoundedPart){.scale = NAN, .total = NAN};
        return;
    }
    float inverse = largest.number > MIN_LARGEST ? MAX_CODE / largest.number : 0;
    for (int half = 0; half < PART / LANES; half++, x += LANES) {
        iwide codes[SLICES], sum = {0};
        for (int s = 0; s < SLICES; s++) sum += codes[s] = (iwide)(at(x, s) * inverse + round) - 0x4B400000;
        to->sums[half] = lane_sum(sum);
        put_words(codes, to->words + half * LANES / 4);
    }
    to->scale = largest.number > MIN_LARGEST ? largest.number / MAX_CODE : 0;
    to->total = to->scale * (float)(to->sums[0] + to->sums[1]);
}

/* Rounds row `row` of `rows`, with `size` numbers. Skips the numbers after the last whole part: only dense panels use
   them. */
static void round_row(const float *x, int64_t size, int64_t row, int64_t rows, RoundedPart *to) {
    for (int64_t i = 0; i + PART <= size; i += PART) round_part(x + i, to + i / PART * rows + row);
}

/* The zero point of the codes in `add_products`. */
static INLINE int zero_point(int kind) {
    return bits_of(kind) == 8 ? UNSIGNED_CODES * 128 : middle_of(kind);
}

/* out [rows, PANEL] of one panel, for `rows` <= TILE rows of `parts` parts. `stride`: number of all rows. `kind` and
   `rows` are constants at every call. */
static INLINE void rounded_tile(int kind, int rows, const char *panel, int64_t parts, const RoundedPart *x,
                                int64_t stride, const float *bias, float *out, int64_t outputs) {
    wide sums[TILE][PIECES];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PIECES; p++) {
            sums[r][p] = (wide){0};
            if (bias) sums[r][p] = at(bias, p);
        }
    for (int64_t part = 0; part < parts; part++, x += stride) {
        const char *codes = part_at(kind, panel, part) + own_of(kind);
        for (int64_t i = -own_of(kind); i < part_bytes(kind) - own_of(kind); i += 64)
            __builtin_prefetch(codes + ROUNDED_AHEAD * part_bytes(kind) + i, 0, 2);
        UNROLLED
        for (int first = 0; first < PART; first += inputs_of(kind)) {
            Scales scales = scales_of(kind, panel, part, first);
            UNROLLED
            for (int p = 0; p < PIECES; p++) {
                iwide dots[TILE], pairs[TILE];
                const RoundedPart *own = x;
                FORGET(own);
                for (int r = 0; r < rows; r++) {
                    int32_t sum = own[r].sums[first > 0];
                    if (inputs_of(kind) == PART) sum += own[r].sums[1];
                    dots[r] = (iwide){0} - zero_point(kind) * sum;
                }
                UNROLLED
                for (int word = first / 4; word < (first + inputs_of(kind)) / 4; word++) {
                    iwide code = code_word(kind, codes, p, word);
                    for (int r = 0; r < rows; r++)
                        add_products(bits_of(kind), word, &dots[r], &pairs[r], code, own[r].words[word]);
                }
                for (int r = 0; r < rows; r++) {
                    sums[r][p] += numbers(dots[r]) * (scales.scale[p] * own[r].scale);
                    if (has_offset(kind)) sums[r][p] += scales.offset[p] * own[r].total;
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PIECES; p++) put(out + r * outputs, p, sums[r][p]);
}
