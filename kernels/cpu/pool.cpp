#include "pool.h"

#include <atomic>
#include <thread>
#include <vector>

#include "relax.h"

namespace {
constexpr int kSpins = 800;  // some 20 to 40 microseconds: longer than a barrier, far shorter than a time slice

void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
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
        wait_while(shared_->job, job);
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
        wait_while(shared_->generation, generation);
    }
}
