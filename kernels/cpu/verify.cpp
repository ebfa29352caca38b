// Compares KV blocks with their announced digests in a thread of its own, while its owner copies the next ones.
// Without Python, so that neither of the two waits for an interpreter's lock between parts of a few blocks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "api.h"
#include "relax.h"

namespace {
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
constexpr microseconds kStayAwake{4000};  // longer than a READ takes here; falling asleep costs 300
constexpr int64_t kPartBytes = 3 << 19, kLeastBytes = 1 << 18;  // compared at a time
constexpr int kSpinsPerYield = 64;        // a neighbour that wants this core gets it that soon

struct Job {
    Job(int64_t number, const int64_t* block_ids, const uint64_t* digests, size_t count)
        : number(number),
          ids(block_ids, block_ids + count),
          announced(digests, digests + 2 * count),
          found(2 * count),
          num_open(count) {}
    const int64_t number;
    const std::vector<int64_t> ids;
    const std::vector<uint64_t> announced;  // [ids][2]
    std::vector<uint64_t> found;            // [ids][2]
    size_t next = 0;                        // block that nobody compares yet; guarded by the verifier's mutex
    std::atomic<size_t> num_open;           // blocks not compared yet
    std::atomic<int64_t> num_wrong{0};
};

void step_aside() {
    for (int spin = 0; spin < kSpinsPerYield; ++spin) relax();
    std::this_thread::yield();
}
}  // namespace

struct PdsVerifier {
    PdsVerifier(const void* pool, int64_t num_blocks, int64_t block_bytes, const uint64_t* w, const uint64_t* v)
        : pool_(pool),
          num_blocks_(num_blocks),
          block_bytes_(block_bytes),
          least_blocks_(std::max<int64_t>(1, kLeastBytes / block_bytes)),
          part_blocks_(std::max<int64_t>(2, kPartBytes / block_bytes)),
          w_(w),
          v_(v) {
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error&) {
            // There is no thread to be had: `help` does the work.
        }
    }

    ~PdsVerifier() {
        stop_ = true;
        wake();
        if (thread_.joinable()) thread_.join();
    }

    // In any thread.
    void expect() {
        awake_until_ = (Clock::now() + kStayAwake).time_since_epoch().count();
        wake();
    }

    bool has_all(const int64_t* block_ids, int64_t num_ids) const {
        return std::all_of(block_ids, block_ids + num_ids, [this](int64_t id) { return id >= 0 && id < num_blocks_; });
    }

    void begin(std::shared_ptr<Job> job, bool is_for_thread) {
        {
            std::lock_guard lock(mutex_);
            verdicts_.reserve(verdicts_.size() + num_open_ + 1);  // of all jobs: nothing fails later
            jobs_.push_back(job);
            num_waiting_ += job->ids.size();
            ++num_open_;
        }
        if (is_for_thread) expect();
    }

    bool help(microseconds longest) {
        for (const auto until = Clock::now() + longest; num_open_ && Clock::now() < until;)
            if (!compare_part()) step_aside();
        return num_verdicts_ != 0;
    }

    int64_t take(PdsVerdict* verdicts, int64_t room) {
        if (!num_verdicts_) return 0;
        std::lock_guard lock(mutex_);
        const auto end = verdicts_.begin() + std::min<int64_t>(room, verdicts_.size());
        std::copy(verdicts_.begin(), end, verdicts);
        const int64_t count = end - verdicts_.begin();
        verdicts_.erase(verdicts_.begin(), end);
        num_verdicts_ = verdicts_.size();
        return count;
    }

private:
    // Some of the blocks that wait longest; false when none wait. Parts become small, so that two threads end together.
    bool compare_part() {
        if (!num_waiting_) return false;
        std::shared_ptr<Job> owned;
        size_t first, count;
        {
            std::lock_guard lock(mutex_);
            if (jobs_.empty()) return false;
            owned = jobs_.front();
            first = owned->next;
            const size_t left = owned->ids.size() - first;
            count = std::min(left, std::clamp<size_t>(num_waiting_ / 2, least_blocks_, part_blocks_));
            owned->next += count;
            num_waiting_ -= count;
            if (count == left) jobs_.pop_front();
        }
        Job& job = *owned;
        const uint64_t* announced = job.announced.data() + 2 * first;
        uint64_t* found = job.found.data() + 2 * first;
        pds_block_sums(pool_, block_bytes_, job.ids.data() + first, count, w_, v_, found);
        for (size_t i = 0; i < count; ++i)
            job.num_wrong += !std::equal(found + 2 * i, found + 2 * i + 2, announced + 2 * i);
        if (job.num_open.fetch_sub(count) == count) {
            std::lock_guard lock(mutex_);
            verdicts_.push_back({job.number, job.num_wrong});
            num_verdicts_ = verdicts_.size();
            --num_open_;
        }
        return true;
    }

    void wake() {
        if (!is_asleep_) return;
        num_calls_.fetch_add(1);
        num_calls_.notify_one();
    }

    bool has_reason_to_stay_awake() const {
        return stop_ || num_waiting_ || Clock::now().time_since_epoch().count() < awake_until_;
    }

    void work() {
        while (!stop_) {
            if (compare_part()) continue;
            if (has_reason_to_stay_awake()) {
                step_aside();
                continue;
            }
            const uint32_t calls = num_calls_;
            is_asleep_ = true;
            if (!has_reason_to_stay_awake()) num_calls_.wait(calls);
            is_asleep_ = false;
        }
    }

    const void* const pool_;
    const int64_t num_blocks_, block_bytes_;
    const size_t least_blocks_, part_blocks_;
    const uint64_t *const w_, *const v_;
    std::mutex mutex_;
    std::deque<std::shared_ptr<Job>> jobs_;  // that have blocks nobody compares yet; guarded by mutex_
    std::vector<PdsVerdict> verdicts_;       // guarded by mutex_
    // To be read without the lock: blocks that nobody compares yet, jobs without a verdict, and verdicts.
    std::atomic<size_t> num_waiting_{0}, num_open_{0}, num_verdicts_{0};
    std::atomic<Clock::rep> awake_until_{0};
    std::atomic<uint32_t> num_calls_{0};
    std::atomic<bool> is_asleep_{false}, stop_{false};
    std::thread thread_;  // the last one: it uses all of the above
};

PdsVerifier* pds_verifier_create(const void* pool, int64_t num_blocks, int64_t block_bytes, const uint64_t* w,
                                 const uint64_t* v) {
    return new (std::nothrow) PdsVerifier(pool, num_blocks, block_bytes, w, v);
}

void pds_verifier_destroy(PdsVerifier* verifier) { delete verifier; }

void pds_verifier_expect(PdsVerifier* verifier) { verifier->expect(); }

int32_t pds_verifier_begin(PdsVerifier* verifier, int64_t job, const int64_t* block_ids, const uint64_t* sums,
                           int64_t num_ids, int32_t is_for_thread) {
    if (!verifier->has_all(block_ids, num_ids)) return 2;
    try {
        verifier->begin(std::make_shared<Job>(job, block_ids, sums, num_ids), is_for_thread);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

int32_t pds_verifier_help(PdsVerifier* verifier, int64_t longest_us) {
    return verifier->help(microseconds(longest_us));
}

int64_t pds_verifier_take(PdsVerifier* verifier, PdsVerdict* verdicts, int64_t room) {
    return verifier->take(verdicts, room);
}
