#include "pool.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "relax.h"

namespace {
// How often a thread looks before it sleeps in the kernel. For work it waits long, and sleeps at once. At barriers it is
// patient (0.5 ms): being woken up costs up to 0.3 ms on a virtual machine, many times what most barriers take. But when
// the others lost their core to somebody else, looking only takes a core from them as well; so after a wait in vain it
// becomes patient again little by little.
constexpr int kFewLooks = 800, kManyLooks = 30000, kMoreLooks = 400;

// Whether the value changed meanwhile.
bool look(const std::atomic<uint32_t>& value, uint32_t old, int times) {
    for (int i = 0; i < times; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        relax();
    }
    return false;
}

void sleep_while(const std::atomic<uint32_t>& value, uint32_t old) {
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void wait_at_barrier(const std::atomic<uint32_t>& generation, uint32_t old) {
    thread_local int patience = kManyLooks;
    if (look(generation, old, patience)) {
        patience = std::min(patience + kMoreLooks, kManyLooks);
    } else {
        patience = kFewLooks;
        sleep_while(generation, old);
    }
}
}  // namespace

struct Pool::Shared {
    alignas(64) std::atomic<uint32_t> job{0};        // raised by one for every run
    alignas(64) std::atomic<uint32_t> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};  // raised by one when a barrier opens
    void (*function)(void*, int) = nullptr;
    void* argument = nullptr;
    bool stop = false;
    std::vector<std::thread> threads;
};

Pool::Pool(int num_threads) : num_threads_(num_threads), shared_(new Shared) {
    for (int thread = 1; thread < num_threads; ++thread)
        shared_->threads.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    shared_->stop = true;
    shared_->job.fetch_add(1, std::memory_order_release);
    shared_->job.notify_all();
    for (auto& thread : shared_->threads) thread.join();
    delete shared_;
}

void Pool::work(int thread) {
    for (uint32_t job = 0;; ++job) {
        if (!look(shared_->job, job, kFewLooks)) sleep_while(shared_->job, job);
        if (shared_->stop) return;
        shared_->function(shared_->argument, thread);
        barrier();
    }
}

void Pool::run(void (*function)(void*, int), void* argument) {
    shared_->function = function;
    shared_->argument = argument;
    shared_->job.fetch_add(1, std::memory_order_release);
    shared_->job.notify_all();
    function(argument, 0);
    barrier();
}

void Pool::barrier() {
    if (num_threads_ == 1) return;
    uint32_t generation = shared_->generation.load(std::memory_order_relaxed);
    if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(num_threads_)) {
        shared_->arrived.store(0, std::memory_order_relaxed);
        shared_->generation.fetch_add(1, std::memory_order_release);
        shared_->generation.notify_all();
    } else {
        wait_at_barrier(shared_->generation, generation);
    }
}
