// Compiled with -mavx512f and its usual companions; called only where the processor has them.
#if defined(__x86_64__)
#define PDS_AVX512 1
#include "isa.h"
#include "simd_avx512.h"
#include "step_widening.h"

const Isa kAvx512Isa = {"avx512", {kMaxRows, kWidth}, kBf16, kI8, run_step, burn, read_all};
#endif
