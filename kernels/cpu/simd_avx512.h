// AVX-512 vectors: 16 floats. Everything is in an unnamed namespace: code compiled for one instruction set must
// never be merged by the linker with the same template compiled for another.
#pragma once
#include <immintrin.h>

#include "api.h"

namespace {
using bf16 = uint16_t;
using vec = __m512;
constexpr int kWidth = 16;
constexpr int kMaxRows = 12;      // 12 x 2 accumulators + 2 weights of 32 registers
constexpr int kNarrowRows = 12;   // up to this many rows a tile is kNarrowVecs wide, above kWideVecs
constexpr int kNarrowVecs = 2;
constexpr int kMaxVecs = 4;       // attention: widest group of head-dim vectors ...
constexpr int kMaxVecRows = 5;    // ... up to this many rows, half as wide above

static inline vec v_zero() { return _mm512_setzero_ps(); }
static inline vec v_set(float x) { return _mm512_set1_ps(x); }
static inline vec v_load(const float* p) { return _mm512_loadu_ps(p); }
static inline vec v_load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vec v_load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void v_store(float* p, vec a) { _mm512_storeu_ps(p, a); }
static inline void v_store(bf16* p, vec a) {  // round to nearest even; finite values only
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline float v_sum(vec a) { return _mm512_reduce_add_ps(a); }
static inline float v_highest(vec a) { return _mm512_reduce_max_ps(a); }
static inline vec v_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n in [-126, 127]
static inline vec v_scale(vec a, vec n) { return _mm512_scalef_ps(a, n); }
// a where x >= limit, else 0
static inline vec v_keep_from(vec a, vec x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), a);
}
// a in lanes [low, high), -inf elsewhere
static inline vec v_mask_range(vec a, int low, int high) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 in = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) &
                   _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), in, a);
}

// 16 x 16 words of 32 bits, in place: rows become columns
static inline void transpose_words(vec* r) {
    vec t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    // r[4i + j] now holds, in 128-bit lane l, column 4l + j of rows 4i..4i+3
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        vec a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
        vec c = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
        t[j] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
        t[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 16 rows (row pointers) from `column` on -> target[column][row], target rows `stride` floats apart.
// Returns the number of columns done, at most `left`.
static inline int transpose(const float* const* rows, int64_t column, int, float* target, int64_t stride) {
    vec r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = v_load(rows[i] + column);
    transpose_words(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v_store(target + i * stride, r[i]);
    return 16;
}
static inline int transpose(const bf16* const* rows, int64_t column, int left, float* target, int64_t stride) {
    vec r[16];
    if (left < 32) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) r[i] = v_load(rows[i] + column);
        transpose_words(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) v_store(target + i * stride, r[i]);
        return 16;
    }
    // pairs of columns travel together as words
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + column);
    transpose_words(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        __m512i pair = _mm512_castps_si512(r[i]);
        v_store(target + 2 * i * stride, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
        v_store(target + (2 * i + 1) * stride,
                _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
    }
    return 32;
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
}  // namespace
