// The digest of KV blocks: src/pdserve/transfer/digest.py defines it. Two sums of products modulo 2**64, which do
// not depend on their order. Some blocks are walked side by side: every weight is loaded once for all of them, and
// memory answers several streams sooner than one. Along each block in one go, since its fetching starts anew where
// a stream ends. A run's weights stay in the first cache; its sums are multiplied by its factor.
#include "api.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_X86_COPIES 1
#endif

namespace {
constexpr int64_t kRunWords = 512;

// Adds w . x and v . (x ^ x >> 32) of the whole words of each of some blocks to its two sums. Words need not be aligned.
using AddUp = void (*)(const char* const* blocks, const uint64_t* w, const uint64_t* v, int64_t num_words,
                       uint64_t* const* sums);

// A part of one run, without its factor.
void add_up_words(const char* words, const uint64_t* w, const uint64_t* v, int64_t num_words, uint64_t* sums) {
    uint64_t sum_x = 0, sum_y = 0;
    for (int64_t i = 0; i < num_words; ++i) {
        int64_t x;
        std::memcpy(&x, words + 8 * i, 8);
        sum_x += w[i] * static_cast<uint64_t>(x);
        sum_y += v[i] * static_cast<uint64_t>(x ^ (x >> 32));
    }
    sums[0] += sum_x;
    sums[1] += sum_y;
}

void add_run(const uint64_t* run_sums, uint64_t factor_x, uint64_t factor_y, uint64_t* sums) {
    sums[0] += factor_x * run_sums[0];
    sums[1] += factor_y * run_sums[1];
}

void add_up_portable(const char* const* blocks, const uint64_t* w, const uint64_t* v, int64_t num_words,
                     uint64_t* const* sums) {
    for (int64_t first = 0, run = kRunWords; first < num_words; first += kRunWords, ++run) {
        uint64_t run_sums[2] = {};
        add_up_words(blocks[0] + 8 * first, w, v, std::min(kRunWords, num_words - first), run_sums);
        add_run(run_sums, w[run], v[run], sums[0]);
    }
}

#ifdef HAS_X86_COPIES
// Fetched ahead, since the processor's own prefetcher stops at every page; few streams have more room to.
constexpr int64_t ahead_bytes(int num_blocks) { return num_blocks == 1 ? 4096 : num_blocks == 2 ? 2048 : 1024; }

// A product of 64-bit words is low.low + (low.high + high.low << 32); the shift waits until a run is added up.
template <int N>
__attribute__((target("avx2"))) void add_up_avx2(const char* const* blocks, const uint64_t* w, const uint64_t* v,
                                                 int64_t num_words, uint64_t* const* sums) {
    for (int64_t first = 0, run = kRunWords; first < num_words; first += kRunWords, ++run) {
        const int64_t count = std::min(kRunWords, num_words - first);
        __m256i low_x[N], cross_x[N], low_y[N], cross_y[N];
        for (int n = 0; n < N; ++n) low_x[n] = cross_x[n] = low_y[n] = cross_y[n] = _mm256_setzero_si256();
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            const __m256i weight_x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i));
            const __m256i weight_y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i));
            for (int n = 0; n < N; ++n) {
                const char* words = blocks[n] + 8 * (first + i);
                if (i % 8 == 0) _mm_prefetch(words + ahead_bytes(N), _MM_HINT_T0);
                const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
                const __m256i high = _mm256_srli_epi64(x, 32);
                const __m256i y = _mm256_xor_si256(x, high);  // its low halves; the high ones: x's, xored with their sign
                const __m256i y_high = _mm256_srli_epi64(_mm256_xor_si256(x, _mm256_srai_epi32(x, 31)), 32);
                low_x[n] = _mm256_add_epi64(low_x[n], _mm256_mul_epu32(x, weight_x));
                cross_x[n] = _mm256_add_epi64(cross_x[n], _mm256_mul_epu32(high, weight_x));
                cross_x[n] = _mm256_add_epi64(cross_x[n], _mm256_mul_epu32(x, _mm256_srli_epi64(weight_x, 32)));
                low_y[n] = _mm256_add_epi64(low_y[n], _mm256_mul_epu32(y, weight_y));
                cross_y[n] = _mm256_add_epi64(cross_y[n], _mm256_mul_epu32(y_high, weight_y));
                cross_y[n] = _mm256_add_epi64(cross_y[n], _mm256_mul_epu32(y, _mm256_srli_epi64(weight_y, 32)));
            }
        }
        for (int n = 0; n < N; ++n) {
            uint64_t lanes[2][4], run_sums[2] = {};
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes[0]),
                                _mm256_add_epi64(low_x[n], _mm256_slli_epi64(cross_x[n], 32)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes[1]),
                                _mm256_add_epi64(low_y[n], _mm256_slli_epi64(cross_y[n], 32)));
            for (int lane = 0; lane < 4; ++lane) {
                run_sums[0] += lanes[0][lane];
                run_sums[1] += lanes[1][lane];
            }
            add_up_words(blocks[n] + 8 * (first + i), w + i, v + i, count - i, run_sums);
            add_run(run_sums, w[run], v[run], sums[n]);
        }
    }
}

// The low halves of 64-bit products are one instruction here: memory is what it waits for.
template <int N>
__attribute__((target("avx512f,avx512dq"))) void add_up_avx512(const char* const* blocks, const uint64_t* w,
                                                               const uint64_t* v, int64_t num_words,
                                                               uint64_t* const* sums) {
    __m512i sum_x[N], sum_y[N];
    for (int n = 0; n < N; ++n) sum_x[n] = sum_y[n] = _mm512_setzero_si512();
    for (int64_t first = 0, run = kRunWords; first < num_words; first += kRunWords, ++run) {
        const int64_t count = std::min(kRunWords, num_words - first);
        __m512i run_x[N], run_y[N];
        for (int n = 0; n < N; ++n) run_x[n] = run_y[n] = _mm512_setzero_si512();
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) {
            const __m512i weight_x = _mm512_loadu_si512(w + i), weight_y = _mm512_loadu_si512(v + i);
            for (int n = 0; n < N; ++n) {
                const char* words = blocks[n] + 8 * (first + i);
                _mm_prefetch(words + ahead_bytes(N), _MM_HINT_T0);
                const __m512i x = _mm512_loadu_si512(words);
                const __m512i y = _mm512_xor_si512(x, _mm512_srai_epi64(x, 32));
                run_x[n] = _mm512_add_epi64(run_x[n], _mm512_mullo_epi64(x, weight_x));
                run_y[n] = _mm512_add_epi64(run_y[n], _mm512_mullo_epi64(y, weight_y));
            }
        }
        const __m512i factor_x = _mm512_set1_epi64(w[run]), factor_y = _mm512_set1_epi64(v[run]);
        for (int n = 0; n < N; ++n) {
            sum_x[n] = _mm512_add_epi64(sum_x[n], _mm512_mullo_epi64(run_x[n], factor_x));
            sum_y[n] = _mm512_add_epi64(sum_y[n], _mm512_mullo_epi64(run_y[n], factor_y));
            if (i == count) continue;
            uint64_t last_sums[2] = {};
            add_up_words(blocks[n] + 8 * (first + i), w + i, v + i, count - i, last_sums);
            add_run(last_sums, w[run], v[run], sums[n]);
        }
    }
    for (int n = 0; n < N; ++n) {
        sums[n][0] += static_cast<uint64_t>(_mm512_reduce_add_epi64(sum_x[n]));
        sums[n][1] += static_cast<uint64_t>(_mm512_reduce_add_epi64(sum_y[n]));
    }
}
#endif

constexpr int kMaxSideBySide = 4;

struct Copy {
    const char* name;
    AddUp side_by_side[kMaxSideBySide];  // for 1 .. 4 blocks; null: not that many
    bool (*works)();
};

const Copy kCopies[] = {
#ifdef HAS_X86_COPIES
    {"avx512", {add_up_avx512<1>, add_up_avx512<2>, add_up_avx512<3>, add_up_avx512<4>},
     [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }},
    // Four registers of sums a block: more than two blocks would not fit.
    {"avx2", {add_up_avx2<1>, add_up_avx2<2>}, [] { return __builtin_cpu_supports("avx2") != 0; }},
#endif
    {"portable", {add_up_portable}, [] { return true; }},
};

const Copy* find_copy(const char* name) {
    for (const Copy& copy : kCopies)
        if (copy.works() && (!name || !std::strcmp(name, copy.name))) return &copy;
    return nullptr;
}

void sum_blocks(const Copy& copy, const char* pool, int64_t block_bytes, const int64_t* block_ids, int64_t num_ids,
                const uint64_t* w, const uint64_t* v, uint64_t* sums) {
    const int64_t num_whole = block_bytes / 8, rest = block_bytes % 8;
    const int64_t place = num_whole % kRunWords, run = kRunWords + num_whole / kRunWords;  // of a last, short word
    std::fill(sums, sums + 2 * num_ids, 0);
    for (int64_t first = 0; first < num_ids;) {
        int count = static_cast<int>(std::min<int64_t>(kMaxSideBySide, num_ids - first));
        while (!copy.side_by_side[count - 1]) --count;
        const char* blocks[kMaxSideBySide];
        uint64_t* block_sums[kMaxSideBySide];
        for (int n = 0; n < count; ++n) {
            blocks[n] = pool + block_ids[first + n] * block_bytes;
            block_sums[n] = sums + 2 * (first + n);
        }
        copy.side_by_side[count - 1](blocks, w, v, num_whole, block_sums);
        for (int n = 0; n < count && rest; ++n) {
            char last[8] = {};
            std::memcpy(last, blocks[n] + 8 * num_whole, rest);
            uint64_t last_sums[2] = {};
            add_up_words(last, w + place, v + place, 1, last_sums);
            add_run(last_sums, w[run], v[run], block_sums[n]);
        }
        first += count;
    }
}
}  // namespace

void pds_block_sums(const void* pool, int64_t block_bytes, const int64_t* block_ids, int64_t num_ids,
                    const uint64_t* w, const uint64_t* v, uint64_t* sums) {
    sum_blocks(*find_copy(nullptr), static_cast<const char*>(pool), block_bytes, block_ids, num_ids, w, v, sums);
}

int64_t pds_num_wrong_blocks(const void* pool, int64_t num_blocks, int64_t block_bytes, const int64_t* block_ids,
                             int64_t num_ids, const void* announced, const uint64_t* w, const uint64_t* v) {
    if (!std::all_of(block_ids, block_ids + num_ids, [=](int64_t id) { return id >= 0 && id < num_blocks; })) return -1;
    const Copy& copy = *find_copy(nullptr);
    int64_t num_wrong = 0;
    for (int64_t first = 0; first < num_ids; first += kMaxSideBySide) {
        const int64_t count = std::min<int64_t>(kMaxSideBySide, num_ids - first);
        uint64_t found[2 * kMaxSideBySide];
        sum_blocks(copy, static_cast<const char*>(pool), block_bytes, block_ids + first, count, w, v, found);
        for (int64_t i = 0; i < count; ++i)
            num_wrong += std::memcmp(found + 2 * i, static_cast<const char*>(announced) + 16 * (first + i), 16) != 0;
    }
    return num_wrong;
}

// The same by one instruction set (avx512 | avx2 | portable), to compare them all: 1 where this machine lacks it.
PDS_API int32_t pds_block_sums_by(const char* isa, const void* pool, int64_t block_bytes, const int64_t* block_ids,
                                  int64_t num_ids, const uint64_t* w, const uint64_t* v, uint64_t* sums) {
    const Copy* copy = find_copy(isa);
    if (!copy) return 1;
    sum_blocks(*copy, static_cast<const char*>(pool), block_bytes, block_ids, num_ids, w, v, sums);
    return 0;
}
