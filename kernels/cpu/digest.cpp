// The digest of KV blocks: src/pdserve/transfer/digest.py defines it. Two sums of products modulo 2**64, which do
// not depend on their order; weights are walked in pieces that stay in a core's cache while all blocks use them.
#include "api.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2_COPY 1
#endif

namespace {
constexpr int64_t kPieceWords = 4096;   // of each of two rows of weights, which stay in the second cache: 64 KiB
constexpr int64_t kAheadBytes = 2048;   // fetched ahead: the processor's own prefetcher stops at every page

// sums[0] += w . x, sums[1] += v . (x ^ x >> 32), over num_words words that need not be aligned.
void add_up(const char* block, const uint64_t* w, const uint64_t* v, int64_t num_words, uint64_t* sums) {
    uint64_t sum_x = 0, sum_y = 0;
    for (int64_t i = 0; i < num_words; ++i) {
        int64_t x;
        std::memcpy(&x, block + 8 * i, 8);
        sum_x += w[i] * static_cast<uint64_t>(x);
        sum_y += v[i] * static_cast<uint64_t>(x ^ (x >> 32));
    }
    sums[0] += sum_x;
    sums[1] += sum_y;
}

#ifdef HAS_AVX2_COPY
// A product of 64-bit words is low.low + (low.high + high.low << 32); the shift waits until everything is added up.
__attribute__((target("avx2"))) void add_up_avx2(const char* block, const uint64_t* w, const uint64_t* v,
                                                 int64_t num_words, uint64_t* sums) {
    __m256i low_x = _mm256_setzero_si256(), cross_x = low_x, low_y = low_x, cross_y = low_x;
    int64_t i = 0;
    for (; i + 4 <= num_words; i += 4) {
        if (i % 8 == 0) _mm_prefetch(block + 8 * i + kAheadBytes, _MM_HINT_T0);
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 8 * i));
        const __m256i weight_x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i));
        const __m256i weight_y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i));
        const __m256i high = _mm256_srli_epi64(x, 32);
        const __m256i y = _mm256_xor_si256(x, high);  // its low halves; the high ones are x's, xored with their sign
        const __m256i y_high = _mm256_srli_epi64(_mm256_xor_si256(x, _mm256_srai_epi32(x, 31)), 32);
        low_x = _mm256_add_epi64(low_x, _mm256_mul_epu32(x, weight_x));
        cross_x = _mm256_add_epi64(cross_x, _mm256_mul_epu32(high, weight_x));
        cross_x = _mm256_add_epi64(cross_x, _mm256_mul_epu32(x, _mm256_srli_epi64(weight_x, 32)));
        low_y = _mm256_add_epi64(low_y, _mm256_mul_epu32(y, weight_y));
        cross_y = _mm256_add_epi64(cross_y, _mm256_mul_epu32(y_high, weight_y));
        cross_y = _mm256_add_epi64(cross_y, _mm256_mul_epu32(y, _mm256_srli_epi64(weight_y, 32)));
    }
    uint64_t lanes[2][4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes[0]), _mm256_add_epi64(low_x, _mm256_slli_epi64(cross_x, 32)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes[1]), _mm256_add_epi64(low_y, _mm256_slli_epi64(cross_y, 32)));
    for (int lane = 0; lane < 4; ++lane) {
        sums[0] += lanes[0][lane];
        sums[1] += lanes[1][lane];
    }
    add_up(block + 8 * i, w + i, v + i, num_words - i, sums);
}
#endif

using AddUp = void (*)(const char*, const uint64_t*, const uint64_t*, int64_t, uint64_t*);

AddUp best_add_up() {
#ifdef HAS_AVX2_COPY
    if (__builtin_cpu_supports("avx2")) return add_up_avx2;
#endif
    return add_up;
}
}  // namespace

void pds_block_sums(const void* pool, int64_t block_bytes, const int64_t* block_ids, int64_t num_ids,
                    const uint64_t* w, const uint64_t* v, uint64_t* sums) {
    const auto* bytes = static_cast<const char*>(pool);
    const AddUp add = best_add_up();
    const int64_t num_whole = block_bytes / 8, rest = block_bytes % 8;
    std::fill(sums, sums + 2 * num_ids, 0);
    for (int64_t first = 0; first < num_whole; first += kPieceWords) {
        const int64_t count = std::min(kPieceWords, num_whole - first);
        for (int64_t i = 0; i < num_ids; ++i)
            add(bytes + block_ids[i] * block_bytes + 8 * first, w + first, v + first, count, sums + 2 * i);
    }
    if (rest == 0) return;
    for (int64_t i = 0; i < num_ids; ++i) {
        char last[8] = {};
        std::memcpy(last, bytes + block_ids[i] * block_bytes + 8 * num_whole, rest);
        add_up(last, w + num_whole, v + num_whole, 1, sums + 2 * i);
    }
}
