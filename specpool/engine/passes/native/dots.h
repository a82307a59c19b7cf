/* Integer dot products of codes and activations. Integer sums are exact, so results are the same on every processor.

   A word holds 4 codes of one output: signed 8-bit codes, or shorter unsigned ones. `x` is a word of 4 signed
   activations from -127 to 127. */

#include "panels.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

/* Number of words whose products fit into the sum of a 16-bit lane. Each word adds two products to a lane. */
static INLINE int words_in_16_bits(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

/* Whether 8-bit codes are converted to unsigned by adding 128, for instructions that need it. Dot products then exceed
   the true ones by 128 times the sum of the activations. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && WIDE == 8)
#define UNSIGNED_CODES 1
#else
#define UNSIGNED_CODES 0
#endif

/* Adds the products of word `word` of a dot product to `dots`. `pairs`: sums in 16-bit lanes, on processors without
   byte dot products. `bits` and `word` are constants at every call. The number of words of a dot product is a multiple
   of words_in_16_bits. */
static INLINE void add_products(int bits, int word, iwide *dots, iwide *pairs, iwide codes, int32_t x) {
#if defined(__AVX512VNNI__)
    if (bits == 8) codes ^= (iwide){0} + (int32_t)0x80808080;
    *dots = (iwide)_mm512_dpbusd_epi32((__m512i)*dots, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && WIDE == 8
    if (bits == 8) codes ^= (iwide){0} + (int32_t)0x80808080;
    *dots = (iwide)_mm256_dpbusd_avx_epi32((__m256i)*dots, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
    /* Move the sign of an 8-bit code to the activation. */
    __m512i unsigned_codes = (__m512i)codes, activations = _mm512_set1_epi32(x);
    if (bits == 8) {
        __mmask64 negative = _mm512_movepi8_mask(unsigned_codes);
        activations = _mm512_mask_sub_epi8(activations, negative, _mm512_setzero_si512(), activations);
        unsigned_codes = _mm512_abs_epi8(unsigned_codes);
    }
    __m512i products = _mm512_maddubs_epi16(unsigned_codes, activations);
    int in_16_bits = words_in_16_bits(bits);
    *pairs = word % in_16_bits ? (iwide)_mm512_add_epi16((__m512i)*pairs, products) : (iwide)products;
    if ((word + 1) % in_16_bits == 0) *dots += (iwide)_mm512_madd_epi16((__m512i)*pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && WIDE == 8
    __m256i unsigned_codes = (__m256i)codes, activations = _mm256_set1_epi32(x);
    if (bits == 8) {
        activations = _mm256_sign_epi8(activations, unsigned_codes);
        unsigned_codes = _mm256_abs_epi8(unsigned_codes);
    }
    __m256i products = _mm256_maddubs_epi16(unsigned_codes, activations);
    int in_16_bits = words_in_16_bits(bits);
    *pairs = word % in_16_bits ? (iwide)_mm256_add_epi16((__m256i)*pairs, products) : (iwide)products;
    if ((word + 1) % in_16_bits == 0) *dots += (iwide)_mm256_madd_epi16((__m256i)*pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    *dots = (iwide)vdotq_s32((int32x4_t)*dots, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
    for (int i = 0; i < 4; i++) *dots += (codes << (24 - 8 * i) >> 24) * (int8_t)(x >> 8 * i);
#endif
    (void)bits, (void)word, (void)pairs;
}
