// Matrix products with packed operands. Every output element is one chain of fused multiply-adds (or of products of
// pairs) over ascending k, whatever the tile's height: a row's result does not depend on its neighbours.
#pragma once
#include "operand.h"
#include "plan.h"

namespace {
constexpr int kWideVecs = 2;        // vectors per pass of a tile with more than kNarrowRows rows
constexpr int kPieceSteps = 768;    // K is walked in pieces, so that piece of a panel and the next one fit in L2
constexpr int kLine = 64;
// Fetching ahead pays once a line of weights (64 bytes) keeps the multipliers busy longer than memory needs for it;
// below that the processor's own prefetcher, undisturbed, is a third faster.
constexpr int kBusyLine = 6;

static inline int piece_of(int steps) { return steps < kPieceSteps ? steps : kPieceSteps; }

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
    int lines;   // per four steps
};

// y[R][32] (columns of this pass) = or += a[steps][R]^T . w[steps][32]
template <class T, int R, int NV>
static inline void tile_pass(const Word<T>* a, const T* w, int steps, float* y, bool resume, Ahead& ahead) {
    vec acc[R][NV];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[i][v] = resume ? v_load(y + i * kPanel + v * kWidth) : v_zero();
    }
    auto multiply = [&](const Word<T>* ak, const T* wk) __attribute__((always_inline)) {
        decltype(v_load(wk)) b[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) b[v] = v_load(wk + v * kWidth);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i) {
            const auto c = v_set(ak[i]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) acc[i][v] = v_fma(c, b[v], acc[i][v]);
        }
    };
    int k = 0;
    for (; k + 4 <= steps; k += 4) {
        const char* stop = ahead.next + ahead.lines * kLine;
        if (stop > ahead.end) stop = ahead.end;
        for (; ahead.next < stop; ahead.next += kLine) prefetch(ahead.next);
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) multiply(a + u * R, w + u * kPanel);
        a += 4 * R;
        w += 4 * kPanel;
    }
    for (; k < steps; ++k, a += R, w += kPanel) multiply(a, w);
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) v_store(y + i * kPanel + v * kWidth, acc[i][v]);
    }
}

template <class T, int R>
static void tile(const Word<T>* a, const T* w, int steps, float* y, bool resume, Ahead& ahead) {
    constexpr int vecs = R <= kNarrowRows ? kNarrowVecs : kWideVecs;
    for (int column = 0; column < kPanel; column += vecs * kWidth)
        tile_pass<T, R, vecs>(a, w + column, steps, y + column, resume, ahead);
}

template <class T>
struct Tiles {
    using Function = void (*)(const Word<T>*, const T*, int, float*, bool, Ahead&);
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
static void multiply(const Team& team, const Word<T>* a, const Tiling& rows, const PdsMatrix& matrix,
                     const PdsMatrix* next, float* y, Use use) {
    const bool fetches = rows.rows * 4 >= kBusyLine * static_cast<int>(sizeof(T));
    const int num_panels = matrix.n / kPanel, num_steps = steps_of<T>(matrix.k);
    const int block_tiles = kBlockRows / kMaxRows;
    const T* panels = static_cast<const T*>(matrix.panels);
    for (int panel = team.first(); panel < num_panels;) {
        const int following = team.claim();
        for (int tile0 = 0; tile0 < rows.tiles; tile0 += block_tiles) {
            const int tile1 = tile0 + block_tiles < rows.tiles ? tile0 + block_tiles : rows.tiles;
            const int row0 = rows.start(tile0);
            for (int step0 = 0; step0 < num_steps; step0 += kPieceSteps) {
                const int steps = piece_of(num_steps - step0);
                const bool is_last = step0 + steps == num_steps;
                const T* piece = panels + (static_cast<int64_t>(panel) * num_steps + step0) * kPanel;
                Ahead ahead{nullptr, nullptr, 0};
                if (fetches && tile1 == rows.tiles) {
                    const T* target = piece + static_cast<int64_t>(steps) * kPanel;
                    int64_t next_steps = piece_of(num_steps - step0 - steps);
                    if (is_last) {
                        target = panels + static_cast<int64_t>(following) * num_steps * kPanel;
                        next_steps = piece_of(num_steps);
                        if (following >= num_panels) {
                            next_steps = 0;
                            if (next && team.thread * kPanel < next->n) {
                                const int all = steps_of<T>(next->k);
                                target = static_cast<const T*>(next->panels) +
                                         static_cast<int64_t>(team.thread) * all * kPanel;
                                next_steps = piece_of(all);
                            }
                        }
                    }
                    const int64_t num_bytes = next_steps * kPanel * sizeof(T);
                    const int turns = (tile1 - tile0) * ((steps + 3) / 4);
                    ahead = {reinterpret_cast<const char*>(target), reinterpret_cast<const char*>(target) + num_bytes,
                             static_cast<int>((num_bytes / kLine + turns - 1) / turns)};
                }
                for (int t = tile0; t < tile1; ++t) {
                    const int start = rows.start(t), size = rows.size(t);
                    float* yt = y + (start - row0) * kPanel;
                    Tiles<T>::of(size)(a + static_cast<int64_t>(start) * num_steps + step0 * size, piece, steps, yt,
                                       step0 > 0, ahead);
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
