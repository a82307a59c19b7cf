/* The layouts of weights: panels of PANEL outputs, each of one kind. Quantized kinds are widened to float32 right before
   use, with the rounding of the reference. panels.py writes these layouts.

   FLOAT32: [inputs, PANEL]. BFLOAT16: the same, with the two halves of a panel interleaved.

   Quantized kinds consist of parts of PART inputs, with one scale per output. A weight is code * scale, plus an offset in
   some kinds. The codes of a part come in groups of GROUP inputs. 32-bit words hold codes of one output, lowest bits
   first. The words of the PANEL outputs are adjacent, and so are their scales.

   8 bits: two words per group, one for even and one for odd inputs. 4 bits: one word per group; each byte holds an even
   input, then the next odd one. 5 and 6 bits: the lower 4 bits in the same layout, then one or two words per part with
   the upper bits; byte j holds those of inputs 2 j and 2 j + 1 of each group in turn. A shift and a mask thus extract
   4 even or 4 odd inputs of a group into the bytes of a word (`code_word`), as integer dot products need them. */

#include "vectors.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PANEL 32
#define PART 32
/* Inputs that are decoded together. */
#define GROUP 8
/* Vectors of a panel, and of its first half. */
#define PIECES (PANEL / WIDE)
#define HALF (PIECES / 2)
/* Bytes of one word per output, for half a panel and a full one. */
#define HALF_WORDS 64
#define WORDS 128

enum Kind { FLOAT32, BFLOAT16, INT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K };

typedef struct {
    const char *weight;
    int64_t kind;
} Panel;

typedef struct {
    wide scale[PIECES], sixteenth[PIECES], offset[PIECES];
} Scales;

/* --- Layout. All of these fold to constants for a constant kind. */

static INLINE int has_offset(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K; }

static INLINE int bits_of(int kind) {
    return kind == INT8 || kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 ? 5 : 4;
}

/* The zero point of unsigned codes. */
static INLINE int middle_of(int kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : 0; }

/* Parts of a block, which share the scale of their scales. */
static INLINE int parts_of(int kind) { return kind == Q4_K || kind == Q6_K ? 8 : 1; }

/* Inputs that share a scale. */
static INLINE int inputs_of(int kind) { return kind == Q6_K ? PART / 2 : PART; }

/* Bytes of a panel's header, and of a block's header. */
static INLINE int64_t first_of(int kind) { return kind == INT8 ? WORDS : 0; }
static INLINE int64_t shared_of(int kind) { return kind == Q4_K ? WORDS : kind == Q6_K ? HALF_WORDS : 0; }

/* Bytes of a part's scales, which precede its codes. */
static INLINE int64_t own_of(int kind) {
    return kind == INT8 ? 0 : parts_of(kind) == 1 && has_offset(kind) ? WORDS : HALF_WORDS;
}

static INLINE int64_t part_bytes(int kind) { return own_of(kind) + (int64_t)PART * PANEL * bits_of(kind) / 8; }

static INLINE const char *shared_at(int kind, const char *panel, int64_t part) {
    int64_t bytes = shared_of(kind) + parts_of(kind) * part_bytes(kind);
    return panel + first_of(kind) + part / parts_of(kind) * bytes;
}

static INLINE const char *part_at(int kind, const char *panel, int64_t part) {
    return shared_at(kind, panel, part) + shared_of(kind) + part % parts_of(kind) * part_bytes(kind);
}

/* --- Numbers of a piece of a panel */

static INLINE iwide words(const char *at, int piece) { return *(const iwide *)(at + piece * 4 * WIDE); }

static INLINE wide numbers(iwide integers) { return __builtin_convertvector(integers, wide); }

/* Each word holds two bfloat16, one of each half of the panel. */
static INLINE wide of_bfloat16(const char *pairs, int piece) {
    iwide both = words(pairs, piece % HALF);
    if (piece < HALF) return (wide)(both << 16);
    return (wide)(both & ~0xffff);
}

/* float16 numbers of the PANEL outputs, in order. */
static INLINE wide of_float16(const char *at, int piece) {
    at += piece * 2 * WIDE;
#if defined(__AVX512F__)
    return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif defined(__F16C__)
    return (wide)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#else
    iwide bits;
    for (int i = 0; i < WIDE; i++) bits[i] = ((const uint16_t *)at)[i];
    /* Shift exponent and fraction into place. Avoids subnormal arithmetic, which a process may have disabled. */
    iwide size = (bits & 0x7fff) << 13, subnormal = size < 1 << 23;
    wide normal = (wide)(size + (112 << 23)), small = (wide)(size + (113 << 23)) - 0x1p-14f;
    return (wide)(((iwide)normal & ~subnormal) | ((iwide)small & subnormal) | (bits & 0x8000) << 16);
#endif
}

/* The first or second byte of a half of the panel. Each word holds two bytes for both halves. */
static INLINE iwide byte_of(const char *at, int piece, int second) {
    return words(at, piece % HALF) << (24 - 16 * second - (piece < HALF ? 0 : 8));
}

/* The scales of `inputs_of(kind)` inputs of a part, from input `first` on. All multiplications here are exact. */
static INLINE Scales scales_of(int kind, const char *panel, int64_t part, int first) {
    Scales scales;
    const char *shared = shared_at(kind, panel, part), *own = part_at(kind, panel, part);
    for (int p = 0; p < PIECES; p++) {
        if (kind == INT8) {
            scales.scale[p] = (wide)words(panel, p);
        } else if (kind == Q4_K) {
            scales.scale[p] = of_float16(shared, p) * numbers(byte_of(own, p, 0) >> 24 & 255);
            scales.offset[p] = -(of_float16(shared + HALF_WORDS, p) * numbers(byte_of(own, p, 1) >> 24 & 255));
        } else if (kind == Q6_K) {
            scales.scale[p] = of_float16(shared, p) * numbers(byte_of(own, p, first > 0) >> 24);
        } else {
            scales.scale[p] = of_float16(own, p);
            if (has_offset(kind)) scales.offset[p] = of_float16(own + HALF_WORDS, p);
        }
        scales.sixteenth[p] = scales.scale[p] * 0.0625f;
    }
    return scales;
}

/* The codes of input `i` of a group of GROUP inputs, times 16 for odd 4-bit inputs. `codes`: the first codes of the part.
   Loads words at offsets that put the code into the lowest or highest byte, because a shift costs as much as a
   multiplication. Reads up to 3 bytes before and after the codes. */
static INLINE wide number(int kind, const char *codes, int piece, int group, int i) {
    if (bits_of(kind) == 8) return numbers(words(codes + (2 * group + i % 2) * WORDS + i / 2 - 3, piece) >> 24);
    codes += group * WORDS + i / 2;
    if (bits_of(kind) == 4) {
        int unit = i % 2 ? 16 : 1;
        wide code = numbers(words(codes, piece) & 15 * unit);
        if (middle_of(kind)) code -= (float)(middle_of(kind) * unit);
        return code;
    }
    iwide code = words(codes, piece) >> i % 2 * 4 & 15;
    const char *high = codes - group * WORDS - i / 2 + PART * PANEL / 2;
    if (bits_of(kind) == 5) code |= (words(high, piece) >> (2 * group + i % 2 + i / 2 * 8) & 1) << 4;
    if (bits_of(kind) == 6)
        code |= (words(high + group / 2 * WORDS, piece) >> (group % 2 * 4 + i % 2 * 2 + i / 2 * 8) & 3) << 4;
    return numbers(code - middle_of(kind));
}

/* Words of a part: the even, then the odd inputs of each group. */
#define CODE_WORDS (PART / 4)

/* The codes of 4 inputs, one in each byte. `codes`: the first codes of the part. 8-bit codes are signed. */
static INLINE iwide code_word(int kind, const char *codes, int piece, int word) {
    if (bits_of(kind) == 8) return words(codes + word * WORDS, piece);
    const char *high = codes + PART * PANEL / 2;
    iwide code = words(codes + word / 2 * WORDS, piece) >> word % 2 * 4 & 0x0f0f0f0f;
    if (bits_of(kind) == 5) code |= (words(high, piece) >> word & 0x01010101) << 4;
    if (bits_of(kind) == 6) code |= (words(high + word / 4 * WORDS, piece) >> word % 4 * 2 & 0x03030303) << 4;
    return code;
}

/* The weights of input `i` of a group. A code times a 16-bit scale is exact, so the result rounds once, whether or not the
   compiler fuses the addition. */
static INLINE wide weight_of(int kind, const char *codes, const Scales *scales, int piece, int group, int i) {
    int high = bits_of(kind) == 4 && i % 2;
    wide weight = number(kind, codes, piece, group, i) * (high ? scales->sixteenth : scales->scale)[piece];
    if (has_offset(kind)) weight += scales->offset[piece];
    return weight;
}

/* Dense panels; `at` is the first weight of the input. */
static INLINE int is_dense(int kind) { return kind == FLOAT32 || kind == BFLOAT16; }

static INLINE int64_t dense_bytes(int kind) { return kind == BFLOAT16 ? HALF_WORDS : WORDS; }

static INLINE wide dense_weight(int kind, const char *at, int piece) {
    if (kind == BFLOAT16) return of_bfloat16(at, piece);
    return (wide)words(at, piece);
}
