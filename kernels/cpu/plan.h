// What a step needs beside model and batch: how rows are tiled, which pieces attention is cut into, and the memory
// for intermediate results. Made by the calling thread, read by all; independent of the instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api.h"
#include "pool.h"

// Rows cut into tiles of nearly equal size, none above max_tile. A packed operand keeps tile after tile,
// each [K][rows of the tile]: element (row, k) lies at start(tile) * K + k * size(tile) + row - start(tile).
struct Tiling {
    int rows = 0, tiles = 0, base = 0, extra = 0;
    Tiling() = default;
    Tiling(int num_rows, int max_tile)
        : rows(num_rows), tiles((num_rows + max_tile - 1) / max_tile), base(tiles ? num_rows / tiles : 0),
          extra(tiles ? num_rows % tiles : 0) {}
    int start(int tile) const { return tile * base + (tile < extra ? tile : extra); }
    int size(int tile) const { return base + (tile < extra ? 1 : 0); }
    int tile_of(int row) const {
        int wide = extra * (base + 1);
        return row < wide ? row / (base + 1) : extra + (row - wide) / base;
    }
};

// One piece of attention: some queries of one slice, some KV heads, some splits of the context.
struct AttentionItem {
    int32_t slice, first_query, num_queries, first_head, num_heads;
    int32_t first_output;   // row of the result that belongs to the first query
    int32_t split;     // -1: all splits; else only this one, merged by whoever finishes last
    int64_t cost;
};

// Rows that a layer computes to its end: all of them; in the last layer those whose logits are wanted.
struct Selection {
    Tiling tiling;
    const int32_t* rows;           // of the batch; null: all
    const AttentionItem* items;
    int num_items;
    int row(int i) const { return rows ? rows[i] : i; }
};

struct alignas(64) Counter { int32_t next; };

// Memory that grows and is never shrunk; huge pages where the system grants them.
class Buffer {
public:
    ~Buffer();
    float* floats(size_t count);   // null: out of memory
private:
    float* data_ = nullptr;
    size_t capacity_ = 0;
};

struct Limits { int max_tile, width; };

struct Step {
    const PdsModel* model;
    const PdsBatch* batch;
    Pool* pool;
    Selection all, wanted;
    bool writes_kv_first;              // all KV is written before attention reads any, not by who first needs it
    int num_splits;                    // > 0: items are cut by split, partial results below
    Counter* counters;                 // one per phase, starting at num_threads
    Counter* unfinished;               // [slice][KV head], only when cut by split
    int hidden_padded, scratch_floats;
    float *x, *normed, *qkv, *attended, *activated, *partials, *scratch;
};

constexpr int kBlockRows = 240;        // rows whose accumulators stay in cache while K is walked in pieces
constexpr int kItemRows = 96;          // query rows (queries x heads per KV head) of one prefill attention item

class Planner {
public:
    bool plan(Step& step, const Limits& limits);   // false: out of memory
private:
    void cut_attention(const Step& step);
    void cut(const Step& step, AttentionItem run, std::vector<AttentionItem>& items) const;
    std::vector<AttentionItem> items_, wanted_items_;
    std::vector<Counter> counters_, unfinished_;
    Buffer memory_;
    int num_splits_ = 0;
};

static inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
