// The entry points that exist once per instruction set.
#pragma once
#include "plan.h"

struct Isa {
    const char* name;
    Limits limits;
    PdsType packed_bf16;   // how weights of bf16 are packed for it: kBf16 or kBf16Pairs
    void (*step)(const Step&, int thread);
    float (*burn)(int64_t iterations);
    int64_t (*burn_flops)(int64_t iterations);
    float (*read)(const float*, int64_t);
};

extern const Isa kPortableIsa;
#if defined(__x86_64__)
extern const Isa kAvx2Isa, kAvx512Isa, kAvx512Bf16Isa;   // the last one only with PDS_HAS_AVX512_BF16
#endif
