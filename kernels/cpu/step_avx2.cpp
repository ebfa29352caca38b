// Compiled with -mavx2 -mfma; called only where the processor has both.
#if defined(__x86_64__)
#include "isa.h"
#include "simd_avx2.h"
#include "step_widening.h"

const Isa kAvx2Isa = {"avx2", {kMaxRows, kWidth}, kBf16, kI8, run_step, burn, read_all};
#endif
