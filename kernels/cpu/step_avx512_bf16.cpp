// Compiled for AVX-512 with its bf16 products, where the compiler knows them; called only where the processor has
// them. Weights that are not in pairs are computed as on any other AVX-512 processor.
#if defined(__x86_64__)
#define PDS_AVX512 1
#include "isa.h"
#include "simd_avx512_bf16.h"
#include "step.h"
#include "machine.h"

static void run_step(const Step& step, int thread) {
    if (step.model->weight_type == kBf16Pairs)
        run_weights<Pair>(step, thread);
    else
        kAvx512Isa.step(step, thread);
}

const Isa kAvx512Bf16Isa = {"avx512_bf16", {kMaxRows, kWidth}, kBf16Pairs, run_step, burn, burn_flops, read_all};
#endif
