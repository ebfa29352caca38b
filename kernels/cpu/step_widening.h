// A step where narrow weights are widened to floats in registers.
#pragma once
#include "machine.h"
#include "step.h"

namespace {
static void run_step(const Step& step, int thread) {
    switch (step.model->weight_type) {
        case kF32: return run_weights<float>(step, thread);
        case kBf16: return run_weights<bf16>(step, thread);
        default: return run_weights<int8_t>(step, thread);
    }
}

static Burned burn(int32_t, int64_t iterations) { return burn_as<float>(iterations); }
}  // namespace
