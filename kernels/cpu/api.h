// The C ABI of the CPU kernels: plain structs and functions on raw pointers, mirrored field by field in
// kernels/cpu/ops.py. Never allocates anything its caller has to free except a PdsContext.
//
// Packed weights: panels of 32 output columns, [ceil(N / 32)][K][32], columns beyond N zero. All matrices are
// y[M][N] = x[M][K] . w[N][K]^T. gate and up are interleaved in groups of 16 columns, so that one panel holds
// 16 gate columns and the 16 up columns that belong to them. In pairs, panels are [ceil(N / 32)][ceil(K / 2)][32][2]:
// two neighbouring k of a column lie side by side, the last one zero when K is odd; of int8, 16 columns' even k lie
// before their odd ones: [ceil(N / 32)][ceil(K / 2)][2][2][16].
#pragma once
#include <cstdint>

#if defined(_WIN32)
#define PDS_API extern "C" __declspec(dllexport)
#else
#define PDS_API extern "C" __attribute__((visibility("default")))
#endif

constexpr int kPanel = 32;           // columns of a weight panel
constexpr int kGateGroup = 16;       // columns of gate, then of up, inside one panel
constexpr int kKeyTile = 64;         // tokens whose scores exist at a time
constexpr int kSplitTokens = 512;    // attention over a context is computed in splits of this many tokens, then merged

enum PdsType : int32_t { kF32 = 0, kBf16 = 1, kI8 = 2, kF16 = 3, kBf16Pairs = 4, kI8Pairs = 5 };

constexpr int kPairGroup = 16;         // columns of int8 pairs
struct Pair { uint16_t even, odd; };   // bf16 values of two neighbouring k
struct BytePair { int8_t bytes[2]; };  // a sixteenth of the bytes of a group

struct PdsMatrix {
    const void* panels;   // packed, PdsModel.weight_type
    const float* scale;   // [N] per output row, int8 only, else null
    const float* bias;    // [N] or null
    int32_t k, n;         // n a multiple of 32, k and n as packed
};

struct PdsLayer {
    PdsMatrix qkv, o, gate_up, down;
    const float* attention_norm;   // [hidden]
    const float* mlp_norm;         // [hidden]
    const float* q_norm;           // [head_dim] or null
    const float* k_norm;           // [head_dim] or null
    int64_t window;                // keys a query sees, itself included; 0 = all
};

struct PdsModel {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, block_size;
    int32_t weight_type, kv_type, embed_type;
    float norm_eps, softmax_scale;
    const void* embed;             // [vocab][hidden] row-major, embed_type
    const float* final_norm;       // [hidden]
    PdsMatrix head;
    const float* rope_cos;         // [max positions][head_dim / 2]
    const float* rope_sin;
    const PdsLayer* layers;
};

struct PdsSlice {
    int32_t first_row, num_rows;   // rows of the packed batch
    int32_t start;                 // position of the first row
    int32_t table;                 // offset of its block table in PdsBatch.block_tables
};

struct PdsBatch {
    int32_t num_rows, num_slices, num_logit_rows;
    const int32_t* token_ids;      // [num_rows]
    const PdsSlice* slices;        // [num_slices], ascending rows without gaps
    const int32_t* block_tables;
    const int32_t* logit_rows;     // [num_logit_rows], ascending
    void* kv_cache;                // [blocks][num_layers][2][block_size][num_kv_heads][head_dim]
    float* logits;                 // [num_logit_rows][head.n]
};

struct PdsContext;

PDS_API const char* pds_best_isa();                                      // avx512_bf16 | avx512 | ...
PDS_API PdsContext* pds_create(int32_t num_threads, const char* isa);    // null: this machine lacks that ISA
PDS_API void pds_destroy(PdsContext*);
PDS_API const char* pds_isa(const PdsContext*);
PDS_API int32_t pds_packed_type(const PdsContext*, int32_t weight_type);  // in which its steps want weights packed
PDS_API int32_t pds_step(PdsContext*, const PdsModel*, const PdsBatch*); // 0, or 1: out of memory

// Packs rows of a row-major [rows][k] matrix into panels. Source row r becomes output column
// (r / group) * stride + offset + r % group. Columns and k beyond the source must be zero already.
// int8: symmetric per row, scale[column] = max|row| / 127.
PDS_API void pds_pack(const void* source, int32_t source_type, int64_t rows, int64_t k, int64_t k_packed,
                      void* panels, int32_t type, float* scale, int64_t group, int64_t stride, int64_t offset,
                      int32_t num_threads);

// The digests of KV blocks (src/pdserve/transfer/digest.py): sums[num_ids][2] over blocks of a pool, by the calling
// thread alone. w and v hold the weights of 512 places in a run of 64-bit words, then those of a block's runs; the
// last word is filled up with zeros.
PDS_API void pds_block_sums(const void* pool, int64_t block_bytes, const int64_t* block_ids, int64_t num_ids,
                            const uint64_t* w, const uint64_t* v, uint64_t* sums);

// Blocks whose digest is not the announced one (16 bytes each). -1: the pool has no such block.
PDS_API int64_t pds_num_wrong_blocks(const void* pool, int64_t num_blocks, int64_t block_bytes,
                                     const int64_t* block_ids, int64_t num_ids, const void* announced,
                                     const uint64_t* w, const uint64_t* v);

// Physical limits of this machine, for benchmarks.
PDS_API double pds_read_gb_per_s(PdsContext*, const float* data, int64_t num_floats);
PDS_API double pds_fma_gflops(PdsContext*, int32_t packed_type, int64_t iterations);  // of weights of this type
