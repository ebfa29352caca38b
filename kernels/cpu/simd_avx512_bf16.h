// Pairs of bf16 values on top of AVX-512: 16 products of pairs, each added to a float. The processor rounds these
// sums in its own way and takes denormals for zero, so every product with weights in pairs is computed with them.
#pragma once
#include <cstring>

#include "simd_avx512.h"

namespace {
using pairs = __m512bh;

static inline pairs v_load(const Pair* p) { return (pairs)_mm512_loadu_si512(p); }
// Floats of whole numbers up to 127 keep their lower half zero: their upper one is the number in bf16.
static inline pairs v_load(const BytePair* p) {
    const int8_t* bytes = p->bytes;
    const __m512i even = (__m512i)v_load(bytes), odd = (__m512i)v_load(bytes + kPairGroup);
    return (pairs)_mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
}
static inline pairs v_set(Pair p) {
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return (pairs)_mm512_set1_epi32(bits);
}
static inline vec v_fma(pairs a, pairs b, vec c) { return _mm512_dpbf16_ps(c, a, b); }

// Lane by lane the values of two rows.
static inline pairs v_load_pairs(const bf16* even, const bf16* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    return (pairs)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 rows' neighbouring columns in pairs: target[pair of columns][row]. Returns the number of columns.
static inline int transpose(const bf16* const* rows, int64_t column, int left, Pair* target, int64_t stride) {
    const int words = left < 32 ? left / 2 : 16;
    const __mmask16 mask = static_cast<__mmask16>((1u << words) - 1);
    vec r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_ps(mask, rows[i] + column);
    transpose_words(r);
    for (int i = 0; i < words; ++i) _mm512_storeu_ps(target + i * stride, r[i]);
    return 2 * words;
}

// A whole number of vectors side by side; the target may be where the values are.
static inline void put(const float* values, int count, Pair* target) {
    for (int i = 0; i < count; i += 32)
        _mm512_storeu_si512(target + i / 2, (__m512i)_mm512_cvtne2ps_pbh(v_load(values + i + 16), v_load(values + i)));
}

static inline void put(const float* values, int count, Pair* target, int stride) {
    for (int i = 0; i < count; i += 32, values += 32) {
        const int left = count - i < 32 ? count - i : 32;
        const uint32_t mask = left == 32 ? ~0u : (1u << left) - 1;
        const vec low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), values);
        const vec high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), values + 16);
        Pair words[16];
        _mm512_storeu_si512(words, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        for (int w = 0; w < (left + 1) / 2; ++w, target += stride) *target = words[w];
    }
}
}  // namespace
