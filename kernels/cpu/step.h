// One forward step over a packed batch: embed, then per layer norm, qkv, keys and values into the cache, attention,
// output projection, norm, gate and up, down; then logits of the rows that sample. In the last layer only these rows
// go beyond their keys and values. Threads meet between phases and claim pieces inside them.
#pragma once
#include "attention.h"

namespace {
template <class T, class KV>
class Runner {
public:
    Runner(const Step& step, int thread)
        : step_(step), model_(*step.model), batch_(*step.batch),
          team_{step.pool, step.counters, thread, step.pool->num_threads()},
          scratch_(step.scratch + static_cast<int64_t>(thread) * step.scratch_floats),
          products_(scratch_ + kMaxRows * step.hidden_padded), rest_(products_ + kBlockRows * kPanel) {}

    void run() {
        for (int row = team_.thread; row < batch_.num_rows; row += team_.threads)
            embed_row(model_, batch_.token_ids[row], row_of(row), step_.hidden_padded);
        team_.next_phase();
        for (int i = 0; i < model_.num_layers; ++i) run_layer(i);
        if (batch_.num_logit_rows) run_head();
    }

private:
    // Memory for floats holds words just as well.
    static Word<T>* words(float* memory) { return reinterpret_cast<Word<T>*>(memory); }
    float* row_of(int row) const { return step_.x + static_cast<int64_t>(row) * step_.hidden_padded; }

    void run_layer(int index) {
        const PdsLayer& layer = model_.layers[index];
        const bool is_last = index + 1 == model_.num_layers;
        const PdsMatrix& following = is_last ? model_.head : model_.layers[index + 1].qkv;
        const Selection& some = is_last ? step_.wanted : step_.all;
        auto add = [&](int start, int rows, int panel, const float* y) {
            for (int i = 0; i < rows; ++i)
                for (int c = 0; c < kPanel; c += kWidth) {
                    float* x = row_of(some.row(start + i)) + panel * kPanel + c;
                    v_store(x, v_add(v_load(x), v_load(y + i * kPanel + c)));
                }
        };
        const Word<T>* operand = normed(step_.all, layer.attention_norm);
        multiply<T>(team_, operand, step_.all.tiling, layer.qkv, &layer.o, products_,
                    [&](int start, int rows, int panel, const float* y) {
                        for (int i = 0; i < rows; ++i)
                            memcpy(step_.qkv + static_cast<int64_t>(start + i) * layer.qkv.n + panel * kPanel,
                                   y + i * kPanel, sizeof(float) * kPanel);
                    });
        team_.next_phase();
        attend(layer, index, some);
        multiply<T>(team_, words(step_.attended), some.tiling, layer.o, &layer.gate_up, products_, add);
        team_.next_phase();
        operand = normed(some, layer.mlp_norm);
        multiply<T>(team_, operand, some.tiling, layer.gate_up, &layer.down, products_,
                    [&](int start, int rows, int panel, const float* y) {
                        activate(layer, some.tiling, start, rows, panel, y);
                    });
        team_.next_phase();
        multiply<T>(team_, words(step_.activated), some.tiling, layer.down, &following, products_, add);
        team_.next_phase();
    }

    void attend(const PdsLayer& layer, int index, const Selection& some) {
        if (step_.writes_kv_first) {
            const LayerCache<KV> cache = layer_cache<KV>(model_, batch_, index);
            for (int s = team_.first(); s < batch_.num_rows; s = team_.claim()) {
                const PdsSlice& slice = slice_of(s);
                for (int head = 0; head < model_.num_kv_heads; ++head)
                    write_kv(step_, layer, cache, batch_.block_tables + slice.table, s,
                             slice.start + s - slice.first_row, head);
            }
            team_.next_phase();
        }
        Attention<KV, Word<T>> attention(step_, layer, index, some.tiling, rest_);
        for (int i = team_.first(); i < some.num_items; i = team_.claim()) attention.run(some.items[i]);
        team_.next_phase();
    }

    const PdsSlice& slice_of(int row) const {
        int low = 0, high = batch_.num_slices;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (batch_.slices[middle].first_row <= row ? low : high) = middle;
        }
        return batch_.slices[low];
    }

    // One panel: 16 gate columns, then their 16 up columns -> columns of the operand of `down`
    void activate(const PdsLayer& layer, const Tiling& tiling, int start, int rows, int panel, const float* y) const {
        const int size = tiling.size(tiling.tile_of(start));
        Word<T>* target = words(step_.activated) + static_cast<int64_t>(start) * steps_of<T>(layer.down.k) +
                          static_cast<int64_t>(panel) * steps_of<T>(kGateGroup) * size;
        for (int i = 0; i < rows; ++i) {
            float values[kGateGroup];
            for (int c = 0; c < kGateGroup; c += kWidth) {
                const float* gate = y + i * kPanel + c;
                v_store(values + c, v_mul(v_silu(v_load(gate)), v_load(gate + kGateGroup)));
            }
            put(values, kGateGroup, target + i, size);
        }
    }

    // Packed operand of normed rows. A single tile is made by every thread for itself: cheaper than meeting.
    const Word<T>* normed(const Selection& some, const float* weight) {
        const Tiling& rows = some.tiling;
        const bool alone = rows.tiles == 1;
        Word<T>* target = words(alone ? scratch_ : step_.normed);
        const int steps = steps_of<T>(model_.hidden);
        for (int t = alone ? 0 : team_.first(); t < rows.tiles; t = alone ? t + 1 : team_.claim()) {
            const int start = rows.start(t), size = rows.size(t);
            for (int i = 0; i < size; ++i)
                norm_row(row_of(some.row(start + i)), weight, model_.hidden, step_.hidden_padded,
                         model_.norm_eps, target + static_cast<int64_t>(start) * steps + i, size);
        }
        if (!alone) team_.next_phase();
        return target;
    }

    void run_head() {
        const Word<T>* operand = normed(step_.wanted, model_.final_norm);
        multiply<T>(team_, operand, step_.wanted.tiling, model_.head, nullptr, products_,
                    [&](int start, int rows, int panel, const float* y) {
                        for (int i = 0; i < rows; ++i)
                            memcpy(batch_.logits + static_cast<int64_t>(start + i) * model_.head.n + panel * kPanel,
                                   y + i * kPanel, sizeof(float) * kPanel);
                    });
    }

    const Step& step_;
    const PdsModel& model_;
    const PdsBatch& batch_;
    Team team_;
    float *scratch_, *products_, *rest_;
};

template <class T>
static void run_weights(const Step& step, int thread) {
    if (step.model->kv_type == kBf16)
        Runner<T, bf16>(step, thread).run();
    else
        Runner<T, float>(step, thread).run();
}
}  // namespace
