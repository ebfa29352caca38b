// The machine's physical limits, for benchmarks.
#pragma once
#include "isa.h"
#include "operand.h"

namespace {
// Multiply-adds on registers alone, as for weights of type T; the value depends on all of them.
template <class T>
static Burned burn_as(int64_t iterations) {
    constexpr int chains = kWidth == 4 ? 6 : 12;
    vec acc[chains];
    for (int i = 0; i < chains; ++i) acc[i] = v_set(1.0f + 1e-3f * i);
    auto b = v_set(Word<T>{}), c = b;
    for (int64_t k = 0; k < iterations; ++k) {
        asm volatile("" : "+x"(b), "+x"(c));
#pragma GCC unroll 12
        for (int i = 0; i < chains; ++i) acc[i] = v_fma(b, c, acc[i]);
    }
    float total = 0;
    for (int i = 0; i < chains; ++i) total += v_sum(acc[i]);
    return {total, iterations * chains * kWidth * kDepth<T> * 2};
}

static float read_all(const float* data, int64_t count) {
    vec a = v_zero(), b = v_zero(), c = v_zero(), d = v_zero();
    for (int64_t i = 0; i + 4 * kWidth <= count; i += 4 * kWidth) {
        a = v_add(a, v_load(data + i));
        b = v_add(b, v_load(data + i + kWidth));
        c = v_add(c, v_load(data + i + 2 * kWidth));
        d = v_add(d, v_load(data + i + 3 * kWidth));
    }
    return v_sum(v_add(v_add(a, b), v_add(c, d)));
}
}  // namespace
