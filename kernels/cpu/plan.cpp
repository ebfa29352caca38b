#include "plan.h"

#include <algorithm>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

static void advise_huge_pages(void* address, size_t num_bytes) {
#if defined(__linux__)
    constexpr uintptr_t page = 2u << 20;
    uintptr_t first = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
    uintptr_t last = (reinterpret_cast<uintptr_t>(address) + num_bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)address, (void)num_bytes;
#endif
}

Buffer::~Buffer() { std::free(data_); }

float* Buffer::floats(size_t count) {
    if (count > capacity_) {
        std::free(data_);
        size_t num_bytes = (count * sizeof(float) + (2u << 20) - 1) / (2u << 20) * (2u << 20);
        data_ = static_cast<float*>(std::aligned_alloc(2u << 20, num_bytes));
        capacity_ = data_ ? num_bytes / sizeof(float) : 0;
        if (data_) advise_huge_pages(data_, num_bytes);
    }
    return data_;
}

// Whole contexts when there are plenty of them, else one KV head each, else one split each.
void Planner::cut_attention(const Step& step) {
    const PdsModel& model = *step.model;
    const PdsBatch& batch = *step.batch;
    const int group = model.num_heads / model.num_kv_heads, heads = model.num_kv_heads;
    const int wanted = 2 * step.pool->num_threads();
    const bool is_decode = !step.writes_kv_first;
    int longest = 0;
    for (int i = 0; i < batch.num_slices; ++i)
        longest = std::max(longest, batch.slices[i].start + batch.slices[i].num_rows);
    const int splits = (longest + kSplitTokens - 1) / kSplitTokens;
    num_splits_ = is_decode && batch.num_slices * heads < wanted && splits > 1 ? splits : 0;
    items_.clear();
    for (int i = 0; i < batch.num_slices; ++i) {
        const PdsSlice& slice = batch.slices[i];
        const bool all_heads = slice.num_rows == 1 && batch.num_slices >= wanted;
        const int queries = std::max(1, kItemRows / group);
        for (int query = 0; query < slice.num_rows; query += queries) {
            const int count = std::min(queries, slice.num_rows - query);
            const int64_t keys = slice.start + query + count;
            for (int head = 0; head < heads; head += all_heads ? heads : 1) {
                AttentionItem item{i, query, count, head, all_heads ? heads : 1, -1, 0};
                item.cost = keys * count * item.num_heads;
                const int own_splits = static_cast<int>((keys + kSplitTokens - 1) / kSplitTokens);
                if (!num_splits_) items_.push_back(item);
                for (int split = 0; num_splits_ && split < own_splits; ++split) {
                    item.split = split;
                    items_.push_back(item);
                }
            }
        }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

bool Planner::plan(Step& step, const Limits& limits) {
    const PdsModel& model = *step.model;
    const PdsBatch& batch = *step.batch;
    const int threads = step.pool->num_threads(), group = model.num_heads / model.num_kv_heads;
    const size_t rows = batch.num_rows;
    step.rows = Tiling(batch.num_rows, limits.max_tile);
    step.logit_rows = Tiling(batch.num_logit_rows, limits.max_tile);
    step.writes_kv_first = batch.num_rows != batch.num_slices;
    cut_attention(step);
    step.items = items_.data();
    step.num_items = static_cast<int>(items_.size());
    step.num_splits = num_splits_;
    counters_.assign(8 * model.num_layers + 4, Counter{threads});
    step.counters = counters_.data();
    unfinished_.assign(num_splits_ ? batch.num_slices * model.num_kv_heads : 0, Counter{0});
    step.unfinished = unfinished_.data();

    const int dim = model.head_dim;
    const size_t item_rows = std::max<size_t>(kItemRows + group, model.num_heads) + limits.max_tile;
    step.hidden_padded = round_up(model.hidden, kPanel);
    // norm operand, tile outputs, then attention: q, keys, scores, two states (accumulators, maximum, sum lanes)
    const size_t scratch = static_cast<size_t>(limits.max_tile) * step.hidden_padded + kBlockRows * kPanel +
                           item_rows * dim * 3 + static_cast<size_t>(kKeyTile) * dim +
                           limits.max_tile * kKeyTile + item_rows * (2 + 2 * limits.width) + 1024;
    step.scratch_floats = round_up(static_cast<int>(scratch), 16);
    const PdsMatrix& down = model.num_layers ? model.layers[0].down : model.head;
    const size_t sizes[] = {
        rows * step.hidden_padded,
        std::max<size_t>(rows, batch.num_logit_rows) * step.hidden_padded,
        rows * (model.num_layers ? model.layers[0].qkv.n : 0),
        rows * model.num_heads * dim,
        rows * down.k,
        static_cast<size_t>(num_splits_) * batch.num_slices * model.num_heads * (dim + 2 * 16),
        static_cast<size_t>(threads) * step.scratch_floats,
    };
    size_t total = 0;
    for (size_t size : sizes) total += (size + 31) / 16 * 16;
    float* next = memory_.floats(total);
    if (!next) return false;
    float** targets[] = {&step.x, &step.normed, &step.qkv, &step.attended, &step.activated, &step.partials, &step.scratch};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        *targets[i] = next;
        next += (sizes[i] + 31) / 16 * 16;
    }
    return true;
}
