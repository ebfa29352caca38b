// AVX2 + FMA vectors: 8 floats. Unnamed namespace for the reason given in simd_avx512.h.
#pragma once
#include <immintrin.h>

#include "api.h"

namespace {
using bf16 = uint16_t;
using vec = __m256;
constexpr int kWidth = 8;
constexpr int kMaxRows = 6;      // 6 x 2 accumulators + 2 weights of 16 registers
constexpr int kNarrowRows = 2;
constexpr int kNarrowVecs = 4;
constexpr int kMaxVecs = 4;
constexpr int kMaxVecRows = 2;

static inline vec v_zero() { return _mm256_setzero_ps(); }
static inline vec v_set(float x) { return _mm256_set1_ps(x); }
static inline vec v_load(const float* p) { return _mm256_loadu_ps(p); }
static inline vec v_load(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vec v_load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline void v_store(float* p, vec a) { _mm256_storeu_ps(p, a); }
static inline void v_store(bf16* p, vec a) {  // round to nearest even; finite values only
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128((__m128i*)p, packed);
}
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline float v_sum(vec a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float v_highest(vec a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
static inline vec v_round(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n in [-126, 127]
static inline vec v_scale(vec a, vec n) {
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}
// a where x >= limit, else 0
static inline vec v_keep_from(vec a, vec x, float limit) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ));
}
// a in lanes [low, high), -inf elsewhere
static inline vec v_mask_range(vec a, int low, int high) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), a, _mm256_castsi256_ps(in));
}

// 8 rows (row pointers) of 8 values from `column` on -> target[column][row], target rows `stride` floats apart.
// Returns the number of columns done.
template <class T>
static inline int transpose(const T* const* rows, int64_t column, int, float* target, int64_t stride) {
    vec r[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = v_load(rows[i] + column);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        v_store(target + j * stride, _mm256_permute2f128_ps(r[j], r[4 + j], 0x20));
        v_store(target + (4 + j) * stride, _mm256_permute2f128_ps(r[j], r[4 + j], 0x31));
    }
    return 8;
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
}  // namespace
