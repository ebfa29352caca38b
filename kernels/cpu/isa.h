// The entry points that exist once per instruction set.
#pragma once
#include "plan.h"

struct Isa {
    const char* name;
    Limits limits;
    void (*step)(const Step&, int thread);
    float (*burn)(int64_t iterations);
    int64_t (*burn_flops)(int64_t iterations);
    float (*read)(const float*, int64_t);
};

extern const Isa kPortableIsa;
#if defined(__x86_64__)
extern const Isa kAvx2Isa, kAvx512Isa;
#endif
