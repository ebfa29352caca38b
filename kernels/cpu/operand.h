// The packed operand of a matrix product: rows cut into tiles (see Tiling), tile after tile, each
// [steps of k][rows of the tile] words. A step is one k, a word one float; with weights in pairs a step is two
// neighbouring k, a word their two values rounded to bf16.
#pragma once
#include <type_traits>

#include "api.h"

namespace {
template <class T>
constexpr bool kIsPaired = std::is_same_v<T, Pair> || std::is_same_v<T, BytePair>;

template <class T>
constexpr int kDepth = kIsPaired<T> ? 2 : 1;   // values of k in a word, and in an element of a panel

template <class T>
using Word = std::conditional_t<kIsPaired<T>, Pair, float>;

template <class T>
static constexpr int steps_of(int k) { return (k + kDepth<T> - 1) / kDepth<T>; }

// Stores consecutive values of one row, the first of them at `target`; a pair's second half is zero behind the last.
static inline void put(const float* values, int count, float* target, int stride) {
    for (int i = 0; i < count; ++i) target[static_cast<int64_t>(i) * stride] = values[i];
}
}  // namespace
