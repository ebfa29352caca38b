#define PDS_PORTABLE 1
#include "isa.h"
#include "simd_portable.h"
#include "step.h"

const Isa kPortableIsa = {"portable", {kMaxRows, kWidth}, run_step, burn, burn_flops, read_all};
