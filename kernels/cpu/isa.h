// The entry points that exist once per instruction set.
#pragma once
#include "plan.h"

// What registers computed at their limit, and with how many operations.
struct Burned { float value; int64_t flops; };

struct Isa {
    const char* name;
    Limits limits;
    PdsType packed_bf16, packed_i8;   // how these weights are packed for it: one by one, or in pairs
    void (*step)(const Step&, int thread);
    Burned (*burn)(int32_t packed_type, int64_t iterations);
    float (*read)(const float*, int64_t);
};

extern const Isa kPortableIsa;
#if defined(__x86_64__)
extern const Isa kAvx2Isa, kAvx512Isa, kAvx512Bf16Isa;   // the last one only with PDS_HAS_AVX512_BF16
#endif
