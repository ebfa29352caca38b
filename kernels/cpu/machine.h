// The machine's physical limits, for benchmarks.
#pragma once
#include "plan.h"

namespace {
// Multiply-adds on registers alone; returns a value that depends on all of them.
static float burn(int64_t iterations) {
    constexpr int chains = kWidth == 4 ? 6 : 12;
    vec acc[chains];
    for (int i = 0; i < chains; ++i) acc[i] = v_set(1.0f + 1e-3f * i);
    vec b = v_set(0.999f), c = v_set(1e-4f);
    for (int64_t k = 0; k < iterations; ++k) {
        asm volatile("" : "+x"(b), "+x"(c));
#pragma GCC unroll 12
        for (int i = 0; i < chains; ++i) acc[i] = v_fma(acc[i], b, c);
    }
    float total = 0;
    for (int i = 0; i < chains; ++i) total += v_sum(acc[i]);
    return total;
}
static int64_t burn_flops(int64_t iterations) { return iterations * (kWidth == 4 ? 6 : 12) * kWidth * 2; }

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
