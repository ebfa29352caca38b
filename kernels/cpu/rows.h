// What happens to single rows between the matrix products: exponential, RMS norm, rotary embedding.
#pragma once
#include <cmath>
#include <cstring>

#include "operand.h"
#include "plan.h"

namespace {
// e^x within 2 units in the last place; 0 below -87.3, which includes -inf; finite above 88.3
static inline vec v_exp(vec x) {
    const float lowest = -87.3f;
    vec c = v_max(v_set(lowest), v_min(v_set(88.3f), x));
    vec n = v_round(v_mul(c, v_set(1.44269504088896341f)));
    vec r = v_fma(n, v_set(-0.693359375f), c);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vec p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set(1.0f));
    return v_keep_from(v_scale(p, n), x, lowest);
}
static inline float exp_one(float x) {
    float lanes[kWidth];
    v_store(lanes, v_exp(v_set(x)));
    return lanes[0];
}

static inline vec v_silu(vec x) { return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x)))); }

// 1 / sqrt(mean(x^2) + eps) over n values; x is zero from n up to `padded`, a multiple of 16
static inline float inverse_rms(const float* x, int n, int padded, float eps) {
    vec sum = v_zero();
    for (int i = 0; i < padded; i += kWidth) {
        vec v = v_load(x + i);
        sum = v_fma(v, v, sum);
    }
    return 1.0f / sqrtf(v_sum(sum) / static_cast<float>(n) + eps);
}

// Norm of one row into a packed operand
template <class Word>
static inline void norm_row(const float* x, const float* weight, int n, int padded, float eps, Word* target,
                            int stride) {
    constexpr int piece = 256;
    const float r = inverse_rms(x, n, padded, eps);
    for (int first = 0; first < n; first += piece) {
        const int count = n - first < piece ? n - first : piece;
        float values[piece];
        for (int i = 0; i < count; ++i) values[i] = x[first + i] * r * weight[first + i];
        put(values, count, target, stride);
        target += static_cast<int64_t>(piece / kDepth<Word>) * stride;
    }
}

// One head's query or key: optional RMS norm, rotation of halves, factor. source and target differ.
static inline void rotate_head(const float* source, const float* norm, float eps, const float* cosine,
                               const float* sine, int dim, float factor, float* target) {
    float normed[512];
    if (norm) {
        const float r = inverse_rms(source, dim, dim, eps);
        for (int i = 0; i < dim; ++i) normed[i] = source[i] * r * norm[i];
        source = normed;
    }
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = source[i], b = source[i + half];
        target[i] = (a * cosine[i] - b * sine[i]) * factor;
        target[i + half] = (b * cosine[i] + a * sine[i]) * factor;
    }
}

static inline void embed_row(const PdsModel& model, int32_t token, float* x, int padded) {
    const int64_t first = static_cast<int64_t>(token) * model.hidden;
    if (model.embed_type == kF32) {
        memcpy(x, static_cast<const float*>(model.embed) + first, model.hidden * sizeof(float));
    } else {
        const bf16* row = static_cast<const bf16*>(model.embed) + first;
        for (int i = 0; i < model.hidden; ++i) {
            const uint32_t bits = static_cast<uint32_t>(row[i]) << 16;
            memcpy(x + i, &bits, sizeof bits);
        }
    }
    for (int i = model.hidden; i < padded; ++i) x[i] = 0.0f;
}
}  // namespace
