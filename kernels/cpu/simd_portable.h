// Vectors of 4 floats in the compiler's own vector extension: SSE2, NEON, or scalars. Always built, used where
// no other instruction set fits. Unnamed namespace for the reason given in simd_avx512.h.
#pragma once
#include <cmath>
#include <cstring>

#include "api.h"

namespace {
using bf16 = uint16_t;
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kMaxRows = 3;
constexpr int kNarrowRows = 1;
constexpr int kNarrowVecs = 8;
constexpr int kMaxVecs = 4;
constexpr int kMaxVecRows = 2;

static inline vec v_zero() { return vec{0, 0, 0, 0}; }
static inline vec v_set(float x) { return vec{x, x, x, x}; }
static inline vec v_load(const float* p) {
    vec a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline vec v_load(const bf16* p) {
    ivec a = {p[0], p[1], p[2], p[3]};
    return (vec)(a << 16);
}
static inline vec v_load(const int8_t* p) { return vec{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
static inline void v_store(float* p, vec a) { memcpy(p, &a, sizeof a); }
static inline void v_store(bf16* p, vec a) {  // round to nearest even; finite values only
    ivec bits = (ivec)a;
    bits = bits + ((bits >> 16) & 1) + 0x7fff;
    for (int i = 0; i < 4; ++i) p[i] = (bf16)((uint32_t)bits[i] >> 16);
}
static inline vec v_fma(vec a, vec b, vec c) { return a * b + c; }
static inline vec v_add(vec a, vec b) { return a + b; }
static inline vec v_sub(vec a, vec b) { return a - b; }
static inline vec v_mul(vec a, vec b) { return a * b; }
static inline vec v_div(vec a, vec b) { return a / b; }
static inline vec select(ivec condition, vec a, vec b) {
    return (vec)((condition & (ivec)a) | (~condition & (ivec)b));
}
static inline vec v_max(vec a, vec b) { return select(a > b, a, b); }
static inline vec v_min(vec a, vec b) { return select(a < b, a, b); }
static inline float v_sum(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
static inline float v_highest(vec a) {
    float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}
static inline vec v_round(vec a) {  // |a| < 2^22
    const vec big = v_set(12582912.0f);
    return (a + big) - big;
}
// a * 2^n for whole n in [-126, 127]
static inline vec v_scale(vec a, vec n) {
    ivec power = {(int32_t)n[0], (int32_t)n[1], (int32_t)n[2], (int32_t)n[3]};
    return a * (vec)((power + 127) << 23);
}
// a where x >= limit, else 0
static inline vec v_keep_from(vec a, vec x, float limit) { return (vec)(~(x < v_set(limit)) & (ivec)a); }
// a in lanes [low, high), -inf elsewhere
static inline vec v_mask_range(vec a, int low, int high) {
    const ivec lane = {0, 1, 2, 3};
    return select((lane >= low) & (lane < high), a, v_set(-__builtin_inff()));
}

// 4 rows (row pointers) of 4 values from `column` on -> target[column][row], target rows `stride` floats apart.
// Returns the number of columns done.
template <class T>
static inline int transpose(const T* const* rows, int64_t column, int, float* target, int64_t stride) {
    for (int i = 0; i < 4; ++i) {
        vec row = v_load(rows[i] + column);
        for (int j = 0; j < 4; ++j) target[j * stride + i] = row[j];
    }
    return 4;
}
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
}  // namespace
