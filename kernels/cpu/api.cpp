// The exported functions: choice of the instruction set, contexts, one step, the machine's limits.
#include "api.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>

#include "isa.h"

struct PdsContext {
    const Isa* isa;
    Pool pool;
    Planner planner;
    PdsContext(const Isa* chosen, int threads) : isa(chosen), pool(threads) {}
};

namespace {
bool has(const Isa& isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (&isa == &kAvx2Isa) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (&isa == &kAvx512Isa) return has_avx512;
#if defined(PDS_HAS_AVX512_BF16)
    if (&isa == &kAvx512Bf16Isa) return has_avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return &isa == &kPortableIsa;
}

const Isa* const kAll[] = {
#if defined(__x86_64__)
#if defined(PDS_HAS_AVX512_BF16)
    &kAvx512Bf16Isa,
#endif
    &kAvx512Isa, &kAvx2Isa,
#endif
    &kPortableIsa};

const Isa* find(const char* name) {
    for (const Isa* isa : kAll)
        if (has(*isa) && (!name || !*name || !strcmp(name, isa->name))) return isa;
    return nullptr;
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs work(thread) on all threads and returns how long it took.
template <class Work>
double timed(Pool& pool, Work work) {
    const double start = seconds();
    pool.run([](void* argument, int thread) { (*static_cast<Work*>(argument))(thread); }, &work);
    return seconds() - start;
}

volatile float sink;
}  // namespace

const char* pds_best_isa() { return find(nullptr)->name; }

PdsContext* pds_create(int32_t num_threads, const char* isa) {
    const Isa* chosen = find(isa);
    if (!chosen || num_threads < 1) return nullptr;
    try {
        return new PdsContext(chosen, num_threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void pds_destroy(PdsContext* context) { delete context; }

const char* pds_isa(const PdsContext* context) { return context->isa->name; }

int32_t pds_packed_type(const PdsContext* context, int32_t weight_type) {
    switch (weight_type) {
        case kBf16: return context->isa->packed_bf16;
        case kI8: return context->isa->packed_i8;
        default: return weight_type;
    }
}

int32_t pds_step(PdsContext* context, const PdsModel* model, const PdsBatch* batch) {
    Step step{};
    step.model = model;
    step.batch = batch;
    step.pool = &context->pool;
    try {
        if (!context->planner.plan(step, context->isa->limits)) return 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
    timed(context->pool, [&](int thread) { context->isa->step(step, thread); });
    return 0;
}

double pds_read_gb_per_s(PdsContext* context, const float* data, int64_t num_floats) {
    const int threads = context->pool.num_threads();
    const int64_t share = num_floats / threads;
    const double elapsed =
        timed(context->pool, [&](int thread) { sink = context->isa->read(data + thread * share, share); });
    return share * threads * 4e-9 / elapsed;
}

double pds_fma_gflops(PdsContext* context, int32_t packed_type, int64_t iterations) {
    std::atomic<int64_t> flops{0};
    const double elapsed = timed(context->pool, [&](int) {
        const Burned burned = context->isa->burn(packed_type, iterations);
        sink = burned.value;
        flops += burned.flops;
    });
    return flops * 1e-9 / elapsed;
}
