// Packs row-major weights into panels, on as many threads as asked for; see api.h for the layout.
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "api.h"
#include "plan.h"

namespace {
float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float tiny = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -tiny : tiny;
}

uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void read_row(const void* source, int32_t type, int64_t row, int64_t k, float* target) {
    if (type == kF32) {
        memcpy(target, static_cast<const float*>(source) + row * k, k * sizeof(float));
        return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(source) + row * k;
    for (int64_t i = 0; i < k; ++i)
        target[i] = type == kBf16 ? from_bits(static_cast<uint32_t>(halves[i]) << 16) : from_half(halves[i]);
}

int64_t byte_of_pair(int64_t k, int lane) {
    return k / 2 * 2 * kPanel + lane / kPairGroup * 2 * kPairGroup + k % 2 * kPairGroup + lane % kPairGroup;
}

void write_column(const float* row, int64_t k, void* panel, int32_t type, int lane, float* scale) {
    if (type == kF32) {
        float* target = static_cast<float*>(panel) + lane;
        for (int64_t i = 0; i < k; ++i) target[i * kPanel] = row[i];
    } else if (type == kBf16) {
        uint16_t* target = static_cast<uint16_t*>(panel) + lane;
        for (int64_t i = 0; i < k; ++i) target[i * kPanel] = to_bf16(row[i]);
    } else if (type == kBf16Pairs) {
        Pair* target = static_cast<Pair*>(panel) + lane;
        for (int64_t i = 0; i < k; i += 2)
            target[i / 2 * kPanel] = {to_bf16(row[i]), i + 1 < k ? to_bf16(row[i + 1]) : uint16_t{0}};
    } else {
        float highest = 0;
        for (int64_t i = 0; i < k; ++i) highest = std::fmax(highest, std::fabs(row[i]));
        *scale = highest / 127.0f;
        const float inverse = highest > 0 ? 127.0f / highest : 0.0f;
        int8_t* target = static_cast<int8_t*>(panel);
        for (int64_t i = 0; i < k; ++i)
            target[type == kI8Pairs ? byte_of_pair(i, lane) : i * kPanel + lane] =
                static_cast<int8_t>(std::nearbyint(row[i] * inverse));
    }
}
}  // namespace

void pds_pack(const void* source, int32_t source_type, int64_t rows, int64_t k, int64_t k_packed, void* panels,
              int32_t type, float* scale, int64_t group, int64_t stride, int64_t offset, int32_t num_threads) {
    const bool is_paired = type == kBf16Pairs || type == kI8Pairs;
    const int64_t value_bytes = type == kF32 ? 4 : type == kBf16 || type == kBf16Pairs ? 2 : 1;
    const int64_t panel_bytes = (is_paired ? (k_packed + 1) / 2 * 2 : k_packed) * kPanel * value_bytes;
    auto work = [&](int64_t first, int64_t last) {
        std::vector<float> row(k);
        for (int64_t r = first; r < last; ++r) {
            const int64_t column = r / group * stride + offset + r % group;
            char* panel = static_cast<char*>(panels) + column / kPanel * panel_bytes;
            read_row(source, source_type, r, k, row.data());
            write_column(row.data(), k, panel, type, static_cast<int>(column % kPanel), scale ? scale + column : nullptr);
        }
    };
    std::vector<std::thread> threads;
    // whole panels per thread: threads seldom meet in a cache line
    const int64_t share = (rows / num_threads + kPanel - 1) / kPanel * kPanel;
    for (int t = 1; t < num_threads; ++t)
        if (t * share < rows)
            threads.emplace_back(work, t * share, t + 1 == num_threads || (t + 1) * share > rows ? rows : (t + 1) * share);
    work(0, num_threads == 1 || share > rows || share == 0 ? rows : share);
    for (auto& thread : threads) thread.join();
}
