// Compiled for AVX-512 with its bf16 products, where the compiler knows them; called only where the processor has
// them. Weights that are not in pairs are computed as on any other AVX-512 processor.
#if defined(__x86_64__)
#define PDS_AVX512 1
#include "isa.h"
#include "simd_avx512_bf16.h"
#include "step.h"
#include "machine.h"

static void run_step(const Step& step, int thread) {
    switch (step.model->weight_type) {
        case kBf16Pairs: return run_weights<Pair>(step, thread);
        case kI8Pairs: return run_weights<BytePair>(step, thread);
        default: return kAvx512Isa.step(step, thread);
    }
}

static Burned burn(int32_t packed_type, int64_t iterations) {
    return packed_type == kF32 ? burn_as<float>(iterations) : burn_as<Pair>(iterations);
}

const Isa kAvx512Bf16Isa = {"avx512_bf16", {kMaxRows, kWidth}, kBf16Pairs, kI8Pairs, run_step, burn, read_all};
#endif
