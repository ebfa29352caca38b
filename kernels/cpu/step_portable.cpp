#define PDS_PORTABLE 1
#include "isa.h"
#include "simd_portable.h"
#include "step_widening.h"

const Isa kPortableIsa = {"portable", {kMaxRows, kWidth}, kBf16, run_step, burn, burn_flops, read_all};
