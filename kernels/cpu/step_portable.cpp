#define PDS_PORTABLE 1
#include "isa.h"
#include "simd_portable.h"
#include "step_widening.h"

const Isa kPortableIsa = {"portable", {kMaxRows, kWidth}, kBf16, kI8, run_step, burn, read_all};
