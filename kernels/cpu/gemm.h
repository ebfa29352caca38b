// Matrix products with packed operands. Every output element is one chain of fused multiply-adds over ascending k,
// whatever the tile's height: a row's result does not depend on its neighbours.
#pragma once
#include "plan.h"

namespace {
constexpr int kWideVecs = 2;        // vectors per pass of a tile with more than kNarrowRows rows
constexpr int kPieceK = 768;        // K is walked in pieces, so that piece of a panel and the next one fit in L2
constexpr int kLine = 64;
// Fetching ahead pays once a row of weights (64 bytes) keeps the multipliers busy longer than memory needs for it;
// below that the processor's own prefetcher, undisturbed, is a third faster.
constexpr int kBusyLine = 6;

struct Team {
    Pool* pool;
    Counter* counter;
    int thread, threads;
    int first() const { return thread; }
    int claim() const { return __atomic_fetch_add(&counter->next, 1, __ATOMIC_RELAXED); }
    void next_phase() {
        pool->barrier();
        ++counter;
    }
};

// Memory to be fetched while a tile computes.
struct Ahead {
    const char* next;
    const char* end;
    int lines;   // per four steps of k
};

// y[R][32] (columns of this pass) = or += a[K][R]^T . w[K][32]
template <class T, int R, int NV>
static inline void tile_pass(const float* a, const T* w, int k_len, float* y, bool resume, Ahead& ahead) {
    vec acc[R][NV];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[i][v] = resume ? v_load(y + i * kPanel + v * kWidth) : v_zero();
    }
    auto multiply = [&](const float* ak, const T* wk) __attribute__((always_inline)) {
        vec b[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) b[v] = v_load(wk + v * kWidth);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i) {
            vec c = v_set(ak[i]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) acc[i][v] = v_fma(c, b[v], acc[i][v]);
        }
    };
    int k = 0;
    for (; k + 4 <= k_len; k += 4) {
        const char* stop = ahead.next + ahead.lines * kLine;
        if (stop > ahead.end) stop = ahead.end;
        for (; ahead.next < stop; ahead.next += kLine) prefetch(ahead.next);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) multiply(a + u * R, w + u * kPanel);
        a += 4 * R;
        w += 4 * kPanel;
    }
    for (; k < k_len; ++k, a += R, w += kPanel) multiply(a, w);
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) v_store(y + i * kPanel + v * kWidth, acc[i][v]);
    }
}

template <class T, int R>
static void tile(const float* a, const T* w, int k_len, float* y, bool resume, Ahead& ahead) {
    constexpr int vecs = R <= kNarrowRows ? kNarrowVecs : kWideVecs;
    for (int column = 0; column < kPanel; column += vecs * kWidth)
        tile_pass<T, R, vecs>(a, w + column, k_len, y + column, resume, ahead);
}

template <class T>
struct Tiles {
    using Function = void (*)(const float*, const T*, int, float*, bool, Ahead&);
    static Function of(int rows) {
        switch (rows) {
            case 1: return tile<T, 1>;
            case 2: return tile<T, 2>;
            case 3: return tile<T, 3>;
#if !defined(PDS_PORTABLE)
            case 4: return tile<T, 4>;
            case 5: return tile<T, 5>;
            case 6: return tile<T, 6>;
#endif
#if defined(PDS_AVX512)
            case 7: return tile<T, 7>;
            case 8: return tile<T, 8>;
            case 9: return tile<T, 9>;
            case 10: return tile<T, 10>;
            case 11: return tile<T, 11>;
            case 12: return tile<T, 12>;
#endif
            default: __builtin_unreachable();
        }
    }
};

static inline void scale_and_bias(float* y, int rows, const PdsMatrix& matrix, int panel) {
    const float* scale = matrix.scale ? matrix.scale + panel * kPanel : nullptr;
    const float* bias = matrix.bias ? matrix.bias + panel * kPanel : nullptr;
    for (int i = 0; i < rows; ++i, y += kPanel) {
        if (scale)
            for (int c = 0; c < kPanel; c += kWidth) v_store(y + c, v_mul(v_load(y + c), v_load(scale + c)));
        if (bias)
            for (int c = 0; c < kPanel; c += kWidth) v_store(y + c, v_add(v_load(y + c), v_load(bias + c)));
    }
}

// One phase: panels are claimed one at a time. `next` is the matrix of the following phase, whose first panel this
// thread fetches while it works on its last one. use(first row, rows, panel, y[rows][32]) gets the results.
template <class T, class Use>
static void multiply(const Team& team, const float* a, const Tiling& rows, const PdsMatrix& matrix,
                     const PdsMatrix* next, float* y, Use use) {
    const bool fetches = rows.rows * 4 >= kBusyLine * static_cast<int>(sizeof(T));
    const int num_panels = matrix.n / kPanel, k_all = matrix.k;
    const int block_tiles = kBlockRows / kMaxRows;
    const T* panels = static_cast<const T*>(matrix.panels);
    for (int panel = team.first(); panel < num_panels;) {
        const int following = team.claim();
        for (int tile0 = 0; tile0 < rows.tiles; tile0 += block_tiles) {
            const int tile1 = tile0 + block_tiles < rows.tiles ? tile0 + block_tiles : rows.tiles;
            const int row0 = rows.start(tile0);
            for (int k0 = 0; k0 < k_all; k0 += kPieceK) {
                const int k_len = k_all - k0 < kPieceK ? k_all - k0 : kPieceK;
                const bool is_last = k0 + k_len == k_all;
                const T* piece = panels + (static_cast<int64_t>(panel) * k_all + k0) * kPanel;
                Ahead ahead{nullptr, nullptr, 0};
                if (fetches && tile1 == rows.tiles) {
                    const T* target = piece + static_cast<int64_t>(k_len) * kPanel;
                    int64_t k_next = k_all - k0 - k_len < kPieceK ? k_all - k0 - k_len : kPieceK;
                    if (is_last) {
                        target = panels + static_cast<int64_t>(following) * k_all * kPanel;
                        k_next = k_all < kPieceK ? k_all : kPieceK;
                        if (following >= num_panels) {
                            k_next = 0;
                            if (next && team.thread * kPanel < next->n) {
                                target = static_cast<const T*>(next->panels) +
                                         static_cast<int64_t>(team.thread) * next->k * kPanel;
                                k_next = next->k < kPieceK ? next->k : kPieceK;
                            }
                        }
                    }
                    const int64_t num_bytes = k_next * kPanel * sizeof(T);
                    const int turns = (tile1 - tile0) * ((k_len + 3) / 4);
                    ahead = {reinterpret_cast<const char*>(target), reinterpret_cast<const char*>(target) + num_bytes,
                             static_cast<int>((num_bytes / kLine + turns - 1) / turns)};
                }
                for (int t = tile0; t < tile1; ++t) {
                    const int start = rows.start(t), size = rows.size(t);
                    float* yt = y + (start - row0) * kPanel;
                    Tiles<T>::of(size)(a + static_cast<int64_t>(start) * k_all + k0 * size, piece, k_len, yt, k0 > 0,
                                       ahead);
                    if (is_last) {
                        scale_and_bias(yt, size, matrix, panel);
                        use(start, size, panel, yt);
                    }
                }
            }
        }
        panel = following;
    }
}
}  // namespace
