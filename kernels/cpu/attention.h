// Paged attention straight from block tables, for decode and for prefill chunks alike.
//
// For each query row the context is walked in tiles of 64 tokens (online softmax) inside splits of 512 tokens;
// splits are merged in ascending order. Tile and split borders are absolute positions, keys a row does not see get
// weight 0 exactly, and every product is one chain of multiply-adds: a row's result is the same whether it is
// computed alone, in a chunk, or split by split on several threads.
//
// With operands in pairs and a cache in bf16, products are those of pairs too: of neighbouring dims of queries and
// keys, and of neighbouring tokens' weights and values. Tiles begin at even positions, so the same tokens meet always.
#pragma once
#include "gemm.h"
#include "rows.h"

namespace {
constexpr float kMinusInf = -__builtin_inff();

// Softmax state of some rows: acc[row][dim] (not yet divided), max[row], sum[row][kWidth lanes]
struct Softmax {
    float *acc, *max, *sum;
    void reset(int rows, int dim) {
        for (int i = 0; i < rows; ++i) max[i] = kMinusInf;
        memset(acc, 0, sizeof(float) * rows * dim);
        memset(sum, 0, sizeof(float) * rows * kWidth);
    }
};

// this row's state := merge(this, other), `other` covering later tokens
static inline void merge_row(const Softmax& into, const Softmax& other, int row, int other_row, int dim) {
    const float a = into.max[row], b = other.max[other_row], top = a > b ? a : b;
    if (top == kMinusInf) return;
    const vec wa = v_set(exp_one(a - top)), wb = v_set(exp_one(b - top));
    float *acc = into.acc + row * dim, *sum = into.sum + row * kWidth;
    const float* more = other.acc + other_row * dim;
    for (int d = 0; d < dim; d += kWidth)
        v_store(acc + d, v_fma(v_load(more + d), wb, v_mul(v_load(acc + d), wa)));
    v_store(sum, v_fma(v_load(other.sum + other_row * kWidth), wb, v_mul(v_load(sum), wa)));
    into.max[row] = top;
}

// What attention multiplies: elements of a panel of keys. Values as they are, or two tokens' values in pairs.
template <class KV, class Operand>
using Key = std::conditional_t<std::is_same_v<KV, bf16> && kIsPaired<Operand>, Pair, float>;

template <class K, class KV>
static inline auto load_values(const KV* const* values, int step, int64_t column) {
    if constexpr (kIsPaired<K>)
        return v_load_pairs(values[2 * step] + column, values[2 * step + 1] + column);
    else
        return v_load(values[step] + column);
}

// acc[R][NV vectors at column] = acc * alpha[R] + p[R][64 tokens] . values, values[token] pointing at rows of one head
template <class K, class KV, int R, int NV>
static inline void add_values(float* acc, int dim, const float* alpha, const Word<K>* p, const KV* const* values,
                              int64_t column, int tokens) {
    vec sum[R][NV];
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
        vec factor = v_set(alpha[i]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[i][v] = v_mul(v_load(acc + i * dim + v * kWidth), factor);
    }
    for (int j = 0; j < steps_of<K>(tokens); ++j) {
        decltype(load_values<K>(values, j, column)) value[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) value[v] = load_values<K>(values, j, column + v * kWidth);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i) {
            const auto weight = v_set(p[i * (kKeyTile / kDepth<K>) + j]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sum[i][v] = v_fma(weight, value[v], sum[i][v]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) v_store(acc + i * dim + v * kWidth, sum[i][v]);
    }
}

template <class K, class KV, int R>
static void add_values_all(float* acc, int dim, const float* alpha, const Word<K>* p, const KV* const* values,
                           int64_t offset, int tokens) {
    constexpr int widest = R <= kMaxVecRows ? kMaxVecs : kMaxVecs / 2;
    int d = 0;
    for (; d + widest * kWidth <= dim; d += widest * kWidth)
        add_values<K, KV, R, widest>(acc + d, dim, alpha, p, values, offset + d, tokens);
    for (; d + 2 * kWidth <= dim; d += 2 * kWidth)
        add_values<K, KV, R, 2>(acc + d, dim, alpha, p, values, offset + d, tokens);
    for (; d < dim; d += kWidth) add_values<K, KV, R, 1>(acc + d, dim, alpha, p, values, offset + d, tokens);
}

template <class K, class KV>
struct AddValues {
    using Function = void (*)(float*, int, const float*, const Word<K>*, const KV* const*, int64_t, int);
    static Function of(int rows) {
        switch (rows) {
            case 1: return add_values_all<K, KV, 1>;
            case 2: return add_values_all<K, KV, 2>;
            case 3: return add_values_all<K, KV, 3>;
#if !defined(PDS_PORTABLE)
            case 4: return add_values_all<K, KV, 4>;
            case 5: return add_values_all<K, KV, 5>;
            case 6: return add_values_all<K, KV, 6>;
#endif
#if defined(PDS_AVX512)
            case 7: return add_values_all<K, KV, 7>;
            case 8: return add_values_all<K, KV, 8>;
            case 9: return add_values_all<K, KV, 9>;
            case 10: return add_values_all<K, KV, 10>;
            case 11: return add_values_all<K, KV, 11>;
            case 12: return add_values_all<K, KV, 12>;
#endif
            default: __builtin_unreachable();
        }
    }
};

// Where this step's sequences keep a layer's keys and values.
template <class KV>
struct LayerCache {
    KV* base;                 // the layer's part of block 0
    int64_t block_stride, value_offset, token_stride;
    int block_size;
    KV* key(const int32_t* table, int position) const {
        return base + table[position / block_size] * block_stride + position % block_size * token_stride;
    }
};

template <class KV>
static LayerCache<KV> layer_cache(const PdsModel& model, const PdsBatch& batch, int layer) {
    const int64_t token = static_cast<int64_t>(model.num_kv_heads) * model.head_dim;
    const int64_t half = token * model.block_size;
    return {static_cast<KV*>(batch.kv_cache) + layer * 2 * half, model.num_layers * 2 * half, half, token,
            model.block_size};
}

// Rotates and stores one token's key and stores its value, for one KV head.
template <class KV>
static void write_kv(const Step& step, const PdsLayer& layer, const LayerCache<KV>& cache, const int32_t* table,
                     int row, int position, int head) {
    const PdsModel& model = *step.model;
    const int dim = model.head_dim, half = dim / 2;
    const float* source = step.qkv + static_cast<int64_t>(row) * layer.qkv.n + (model.num_heads + head) * dim;
    float rotated[512];
    rotate_head(source, layer.k_norm, model.norm_eps, model.rope_cos + static_cast<int64_t>(position) * half,
                model.rope_sin + static_cast<int64_t>(position) * half, dim, 1.0f, rotated);
    KV* key = cache.key(table, position) + head * dim;
    KV* value = key + cache.value_offset;
    const float* values = source + model.num_kv_heads * dim;
    for (int d = 0; d < dim; d += kWidth) {
        v_store(key + d, v_load(rotated + d));
        v_store(value + d, v_load(values + d));
    }
}

// `Operand`: words of the operand that its results become
template <class KV, class Operand>
class Attention {
    using K = Key<KV, Operand>;

public:
    Attention(const Step& step, const PdsLayer& layer, int layer_index, const Tiling& outputs, float* scratch)
        : step_(step), model_(*step.model), layer_(layer), outputs_(outputs),
          cache_(layer_cache<KV>(model_, *step.batch, layer_index)), dim_(model_.head_dim),
          steps_(steps_of<K>(model_.head_dim)), group_(model_.num_heads / model_.num_kv_heads) {
        const int rows = (kItemRows + group_ > model_.num_heads ? kItemRows + group_ : model_.num_heads) + kMaxRows;
        float *queries, *keys;  // words take the room of floats at most
        float** targets[] = {&queries, &part_.acc, &whole_.acc, &keys, &scores_, &part_.sum, &whole_.sum, &part_.max,
                             &whole_.max};
        const int sizes[] = {rows * dim_, rows * dim_, rows * dim_, kKeyTile * dim_, kMaxRows * kKeyTile,
                             rows * kWidth, rows * kWidth, rows, rows};
        for (int i = 0; i < 9; ++i) {
            *targets[i] = scratch;
            scratch += sizes[i];
        }
        queries_ = reinterpret_cast<Word<K>*>(queries);
        keys_ = reinterpret_cast<K*>(keys);
    }

    void run(const AttentionItem& item) {
        slice_ = &step_.batch->slices[item.slice];
        table_ = step_.batch->block_tables + slice_->table;
        first_position_ = slice_->start + item.first_query;
        rows_per_head_ = item.num_queries * group_;
        tiling_ = Tiling(rows_per_head_, kMaxRows);
        const int rows = rows_per_head_ * item.num_heads, end = first_position_ + item.num_queries;
        int begin = 0;
        if (layer_.window && first_position_ + 1 > layer_.window)
            begin = static_cast<int>(first_position_ + 1 - layer_.window);
        int split = begin / kSplitTokens, last_split = (end - 1) / kSplitTokens;
        const bool is_partial = item.split >= 0;
        if (!step_.writes_kv_first && (!is_partial || item.split == last_split))
            for (int h = 0; h < item.num_heads; ++h)
                write_kv(step_, layer_, cache_, table_, slice_->first_row, first_position_, item.first_head + h);
        pack_queries(item);
        whole_.reset(rows, dim_);
        if (is_partial) {
            part_.reset(rows, dim_);
            if (item.split >= split) run_split(item, item.split, begin, end);
            finish_partial(item, last_split + 1);
            return;
        }
        for (; split <= last_split; ++split) {
            part_.reset(rows, dim_);
            run_split(item, split, begin, end);
            for (int row = 0; row < rows; ++row) merge_row(whole_, part_, row, row, dim_);
        }
        write_output(item);
    }

private:
    // queries_[head][tile][steps of dim][rows of the tile]; row = query * group + head of the group
    void pack_queries(const AttentionItem& item) {
        const int half = dim_ / 2;
        float rotated[512];
        for (int h = 0; h < item.num_heads; ++h)
            for (int t = 0; t < tiling_.tiles; ++t)
                for (int i = 0; i < tiling_.size(t); ++i) {
                    const int row = tiling_.start(t) + i, query = row / group_;
                    const int head = (item.first_head + h) * group_ + row % group_;
                    const int64_t position = first_position_ + query;
                    const int64_t batch_row = slice_->first_row + item.first_query + query;
                    rotate_head(step_.qkv + batch_row * layer_.qkv.n + head * dim_, layer_.q_norm, model_.norm_eps,
                                model_.rope_cos + position * half, model_.rope_sin + position * half, dim_,
                                model_.softmax_scale, rotated);
                    put(rotated, dim_, queries_ + (h * rows_per_head_ + tiling_.start(t)) * steps_ + i,
                        tiling_.size(t));
                }
    }

    void run_split(const AttentionItem& item, int split, int begin, int end) {
        int low = split * kSplitTokens, high = low + kSplitTokens;
        if (low < begin) low = begin / kKeyTile * kKeyTile;
        if (high > end) high = end;
        const KV *rows[2][kKeyTile], *value_rows[kKeyTile];
        locate(low, high, rows[0]);
        for (int token = low, turn = 0; token < high; token += kKeyTile, turn ^= 1) {
            const int tokens = high - token < kKeyTile ? high - token : kKeyTile;
            const int following = token + kKeyTile < high ? locate(token + kKeyTile, high, rows[turn ^ 1]) : 0;
            for (int j = 0; j < kKeyTile; ++j) value_rows[j] = rows[turn][j] + cache_.value_offset;
            for (int h = 0; h < item.num_heads; ++h) {
                const int64_t offset = (item.first_head + h) * dim_;
                if (item.num_queries == 1)
                    for (int j = 0; j < following; ++j) fetch_row(rows[turn ^ 1][j] + offset);
                run_tile(h, offset, token, tokens, rows[turn], value_rows);
            }
        }
    }

    // Pointers to the keys of a tile's tokens; beyond `end` the last one again. Returns the number of tokens.
    int locate(int token, int end, const KV** rows) const {
        const int count = end - token < kKeyTile ? end - token : kKeyTile;
        int block = token / cache_.block_size, slot = token % cache_.block_size;
        for (int j = 0; j < count; ++block, slot = 0) {
            const KV* key = cache_.base + table_[block] * cache_.block_stride + slot * cache_.token_stride;
            for (; slot < cache_.block_size && j < count; ++slot, key += cache_.token_stride) rows[j++] = key;
        }
        for (int j = count; j < kKeyTile; ++j) rows[j] = rows[count - 1];
        return count;
    }

    void fetch_row(const KV* key) const {
        const char* keys = reinterpret_cast<const char*>(key);
        const char* values = reinterpret_cast<const char*>(key + cache_.value_offset);
        for (int i = 0; i < dim_ * static_cast<int>(sizeof(KV)); i += kLine) {
            prefetch(keys + i);
            prefetch(values + i);
        }
    }

    // One KV head against one tile of keys and values
    void run_tile(int h, int64_t offset, int token, int tokens, const KV* const* key_rows,
                  const KV* const* value_rows) {
        const int panels = (tokens + kPanel - 1) / kPanel;
        for (int j = 0; j < panels * kPanel; j += kWidth)
            for (int d = 0; d < dim_;)
                d += transpose(key_rows + j, offset + d, dim_ - d,
                               keys_ + (j / kPanel * steps_ + d / kDepth<K>) * kPanel + j % kPanel, kPanel);
        float alpha[kMaxRows], panel_scores[kMaxRows * kPanel];
        for (int t = 0; t < tiling_.tiles; ++t) {
            const int start = tiling_.start(t), size = tiling_.size(t), state_row = h * rows_per_head_ + start;
            for (int panel = 0; panel < panels; ++panel) {
                Ahead nothing{nullptr, nullptr, 0};
                Tiles<K>::of(size)(queries_ + state_row * steps_, keys_ + panel * steps_ * kPanel, steps_, panel_scores,
                                   false, nothing);
                for (int i = 0; i < size; ++i)
                    memcpy(scores_ + i * kKeyTile + panel * kPanel, panel_scores + i * kPanel, sizeof(float) * kPanel);
            }
            for (int i = 0; i < size; ++i)
                alpha[i] = soften(scores_ + i * kKeyTile, state_row + i,
                                  first_position_ + (start + i) / group_ - token, panels * kPanel);
            AddValues<K, KV>::of(size)(part_.acc + state_row * dim_, dim_, alpha, weights(size), value_rows, offset,
                                       tokens);
        }
    }

    // The weights of some rows as they are multiplied, in the place of their scores.
    const Word<K>* weights(int rows) {
        if constexpr (kIsPaired<K>) put(scores_, rows * kKeyTile, reinterpret_cast<Word<K>*>(scores_));
        return reinterpret_cast<const Word<K>*>(scores_);
    }

    // Turns one row's scores into weights; `diagonal` is the row's own position counted from the tile's first token.
    // Returns the factor for what the row has accumulated so far.
    float soften(float* scores, int row, int diagonal, int width) {
        const int high = diagonal + 1 < width ? diagonal + 1 : width;
        const int64_t window_low = layer_.window ? diagonal + 1 - layer_.window : 0;
        const int low = window_low > 0 ? static_cast<int>(window_low < width ? window_low : width) : 0;
        if (high <= low) {
            memset(scores, 0, sizeof(float) * width);
            return 1.0f;
        }
        if (low > 0 || high < width)
            for (int j = 0; j < width; j += kWidth)
                v_store(scores + j, v_mask_range(v_load(scores + j), low - j, high - j));
        vec highest = v_load(scores);
        for (int j = kWidth; j < width; j += kWidth) highest = v_max(highest, v_load(scores + j));
        const float old = part_.max[row], tile_max = v_highest(highest), top = old > tile_max ? old : tile_max;
        const float alpha = old == top ? 1.0f : exp_one(old - top);
        float* lanes = part_.sum + row * kWidth;
        vec sum = v_mul(v_load(lanes), v_set(alpha));
        for (int j = 0; j < width; j += kWidth) {
            vec weight = v_exp(v_sub(v_load(scores + j), v_set(top)));
            v_store(scores + j, weight);
            sum = v_add(sum, weight);
        }
        v_store(lanes, sum);
        part_.max[row] = top;
        return alpha;
    }

    // Stores this split's state; the thread that finishes a context's last split merges all of them in order.
    void finish_partial(const AttentionItem& item, int num_splits) {
        const int heads = model_.num_kv_heads, pair = item.slice * heads + item.first_head;
        const int floats = group_ * (dim_ + kWidth + 1);
        float* all = step_.partials + static_cast<int64_t>(pair) * step_.num_splits * floats;
        auto state_at = [&](int split) {
            float* p = all + static_cast<int64_t>(split) * floats;
            return Softmax{p, p + group_ * (dim_ + kWidth), p + group_ * dim_};
        };
        const Softmax own = state_at(item.split);
        memcpy(own.acc, part_.acc, sizeof(float) * group_ * dim_);
        memcpy(own.sum, part_.sum, sizeof(float) * group_ * kWidth);
        memcpy(own.max, part_.max, sizeof(float) * group_);
        int32_t* finished = &step_.unfinished[pair].next;
        if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) < num_splits) return;
        __atomic_store_n(finished, 0, __ATOMIC_RELAXED);
        for (int split = 0; split < num_splits; ++split)
            for (int row = 0; row < group_; ++row) merge_row(whole_, state_at(split), row, row, dim_);
        write_output(item);
    }

    void write_output(const AttentionItem& item) {
        const int steps = steps_of<Operand>(model_.num_heads * dim_), head_steps = steps_of<Operand>(dim_);
        float values[512];
        for (int h = 0; h < item.num_heads; ++h)
            for (int i = 0; i < rows_per_head_; ++i) {
                const int row = h * rows_per_head_ + i;
                const int output = item.first_output + i / group_;
                const int tile = outputs_.tile_of(output), size = outputs_.size(tile);
                const int start = outputs_.start(tile), head = (item.first_head + h) * group_ + i % group_;
                const float inverse = 1.0f / v_sum(v_load(whole_.sum + row * kWidth));
                const float* acc = whole_.acc + row * dim_;
                for (int d = 0; d < dim_; ++d) values[d] = acc[d] * inverse;
                put(values, dim_,
                    reinterpret_cast<Operand*>(step_.attended) + static_cast<int64_t>(start) * steps +
                        static_cast<int64_t>(head) * head_steps * size + output - start,
                    size);
            }
    }

    const Step& step_;
    const PdsModel& model_;
    const PdsLayer& layer_;
    const Tiling& outputs_;
    const LayerCache<KV> cache_;
    const int dim_, steps_, group_;
    const PdsSlice* slice_ = nullptr;
    const int32_t* table_ = nullptr;
    int first_position_ = 0, rows_per_head_ = 0;
    Tiling tiling_;
    Word<K>* queries_;
    K* keys_;
    float* scores_;
    Softmax part_, whole_;
};
}  // namespace
