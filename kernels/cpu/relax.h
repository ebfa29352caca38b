// What a thread does between two looks at a value that another one is about to change.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
#include <atomic>
static inline void relax() { std::atomic_signal_fence(std::memory_order_seq_cst); }
#endif
