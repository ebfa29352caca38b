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
    const PdsBatch& batch = *step.batch;
    int longest = 0;
    for (int i = 0; i < batch.num_slices; ++i)
        longest = std::max(longest, batch.slices[i].start + batch.slices[i].num_rows);
    const int splits = (longest + kSplitTokens - 1) / kSplitTokens;
    const bool is_decode = !step.writes_kv_first;
    const bool are_few = batch.num_slices * step.model->num_kv_heads < 2 * step.pool->num_threads();
    num_splits_ = is_decode && are_few && splits > 1 ? splits : 0;
    items_.clear();
    wanted_items_.clear();
    for (int i = 0, wanted = 0; i < batch.num_slices; ++i) {
        const PdsSlice& slice = batch.slices[i];
        cut(step, {.slice = i, .num_queries = slice.num_rows, .first_output = slice.first_row}, items_);
        auto is_row = [&](int row) { return wanted < batch.num_logit_rows && batch.logit_rows[wanted] == row; };
        for (int row = slice.first_row; row < slice.first_row + slice.num_rows; ++row) {
            const int first = wanted, query = row - slice.first_row;
            for (; is_row(row) && row < slice.first_row + slice.num_rows; ++row) ++wanted;
            if (wanted > first)
                cut(step, {.slice = i, .first_query = query, .num_queries = wanted - first, .first_output = first},
                    wanted_items_);
        }
    }
    auto is_longer = [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; };
    std::stable_sort(items_.begin(), items_.end(), is_longer);
    std::stable_sort(wanted_items_.begin(), wanted_items_.end(), is_longer);
}

// Cuts the queries of `run`, which belong to one slice and to neighbouring rows of the result.
void Planner::cut(const Step& step, AttentionItem run, std::vector<AttentionItem>& items) const {
    const int heads = step.model->num_kv_heads, most = std::max(1, kItemRows / (step.model->num_heads / heads));
    const bool all_heads = run.num_queries == 1 && step.batch->num_slices >= 2 * step.pool->num_threads();
    for (int done = 0; done < run.num_queries; done += most) {
        AttentionItem item = run;
        item.first_query += done;
        item.first_output += done;
        item.num_queries = std::min(most, run.num_queries - done);
        item.num_heads = all_heads ? heads : 1;
        item.split = -1;
        const int64_t keys = step.batch->slices[run.slice].start + item.first_query + item.num_queries;
        item.cost = keys * item.num_queries * item.num_heads;
        const int splits = static_cast<int>((keys + kSplitTokens - 1) / kSplitTokens);
        for (; item.first_head < heads; item.first_head += item.num_heads) {
            if (!num_splits_) items.push_back(item);
            for (int split = 0; num_splits_ && split < splits; ++split) {
                item.split = split;
                items.push_back(item);
            }
        }
    }
}

bool Planner::plan(Step& step, const Limits& limits) {
    const PdsModel& model = *step.model;
    const PdsBatch& batch = *step.batch;
    const int threads = step.pool->num_threads(), group = model.num_heads / model.num_kv_heads;
    const size_t rows = batch.num_rows;
    // Attention writes the KV of a slice with a single row itself, unless it skips some in the last layer.
    step.writes_kv_first = batch.num_rows != batch.num_slices || batch.num_rows != batch.num_logit_rows;
    cut_attention(step);
    step.all = {Tiling(batch.num_rows, limits.max_tile), nullptr, items_.data(), static_cast<int>(items_.size())};
    step.wanted = {Tiling(batch.num_logit_rows, limits.max_tile), batch.logit_rows, wanted_items_.data(),
                   static_cast<int>(wanted_items_.size())};
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
