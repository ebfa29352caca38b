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
