// What one instruction set's kernels are: plain argument structs and a table of functions over ranges of units.
// Knows shapes and pointers. Does not know threads (cpu_engine.cpp cuts the ranges) nor Python (bindings.cpp).
// Shape letters as in src/forerun/kernels/ops.py.
#pragma once

#include <cstdint>

namespace forerun {

enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };  // int8: KV only
enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

constexpr int64_t kLanes = 16;            // outputs in a weight panel, keys in a score group
constexpr int64_t kChunk = 128;           // inputs summed before they join the running total
constexpr int64_t kAttentionSplit = 256;  // visible keys in a split of the softmax
constexpr int64_t kGroupedBlock = 16;     // inputs a grouped matrix is filled up to a multiple of
constexpr int64_t kMaxUnitRows = 512;      // rows of a unit of a grouped matrix
constexpr int64_t kMaxHeadDim = 576;
constexpr int64_t kStackHeadDim = 256;  // attention over larger heads takes its work space from the heap
constexpr int64_t kMaxHeadsPerGroup = 64;
constexpr int64_t kMaxRowsTogether = 16;  // rows of a sequence that read its keys together

struct LinearArgs {
    const float* x;      // [m, k]
    const void* weight;  // [panels, k, 16]
    const float* bias;   // [n] or null
    float* y;            // [m, n]
    int64_t m, n, k;
    Dtype dtype;
    int64_t panels_per_unit, rows_per_unit;  // a unit is a group of panels times a block of rows
    uint16_t* parts;  // [m * 3 * k] where activations are split into parts for it, else null
};

struct PackArgs {
    const void* weight;  // [n, k]
    void* packed;        // [panels, k, 16], k even if dtype has two bytes, the last panel zero-padded
    int64_t n, k;
    Dtype dtype;
};

// See grouped_layout.h.
struct GroupedLayout {
    int64_t group_size, num_groups, num_steps;
    int64_t k_padded;
    int64_t high_at, scales_at, offsets_at;  // bytes from a panel's start; offsets_at is 0 where there are none
    int64_t panel_bytes;
    int storage;  // bits a code occupies
    bool half;    // scales and offsets are float16, else float32
};

struct GroupedArgs {
    const float* x;         // [m, k]
    const uint8_t* weight;  // [panels, panel_bytes]
    const float* bias;      // [n] or null
    float* y;               // [m, n]
    const int64_t* order;   // [k]: column i of the weight multiplies input order[i]; or null
    int64_t m, n, k;
    int64_t zero;  // what a code of 0 stands for is -zero
    GroupedLayout layout;
    int64_t panels_per_unit, rows_per_unit;  // set by the engine, as are the next
    int64_t section, section_rows;           // inputs, whole groups, and rows of a unit of quantizing
    int64_t row_words;                       // k / 4, filled up to whole lines of 64 bytes
    int32_t* words;                          // [m, row_words] scratch: the activations as integers
    float* steps;                            // [m, num_steps, 3] scratch: scales and sums
};

struct NormArgs {
    const float* x;       // [m, h]
    float* residual;      // [m, h] or null: residual += x is what gets normalised
    const float* weight;  // [h]
    const float* bias;    // [h] or null
    float* y;             // [m, h]
    int64_t m, h;
    float eps;
    bool subtract_mean;  // a layer norm
};

struct GatedArgs {
    const float* x;  // [m, 2f]: gate, up
    float* y;        // [m, f]
    int64_t m, f;
    Activation activation;
};

struct SelectArgs {
    const float* x;         // [m, h]
    const int64_t* row_ids;  // [r], or null for all rows in order
    float* y;               // [r, h]
    int64_t r, h;
};

struct ColumnsArgs {
    const float* x;  // [m, x_stride], its columns from x_first on
    float* y;        // [m, y_stride], its columns from y_first on
    int64_t m, width, x_stride, x_first, y_stride, y_first;
};

struct AddArgs {
    const float* x;  // [m, h]
    float* y;        // [m, h]: y += x
    int64_t m, h;
};

struct FillArgs {
    float* y;  // [m, h]
    int64_t m, h;
    float value;
};

struct ScatterArgs {
    const float* x;      // [m, n]
    const int64_t* ids;  // [n], different from each other
    float* y;            // [m, h]: column i of x becomes column ids[i], the others stay
    int64_t m, n, h;
};

struct EmbeddingArgs {
    const int64_t* ids;  // [m]
    const void* table;   // [v, h], or the same packed for `linear`
    float* y;            // [m, h]
    int64_t m, h, v;
    Dtype dtype;
    bool packed;
};

struct Heads {
    int64_t num_q, num_kv, head_dim, rotary_dim;
    int64_t row_size() const { return (num_q + 2 * num_kv) * head_dim; }
};

struct KV {
    void* keys;    // [blocks, G, D, B], or null: `values` are keys too (a latent pool)
    void* values;  // [blocks, G, B, D]
    float* key_scales;    // [blocks, G, B] of an int8 pool, else null
    float* value_scales;  // likewise
    int64_t block_size;
    Dtype dtype;
};

struct RopeArgs {
    float* qkv;            // [m, row_size]
    Heads heads;
    const float* table;    // [max_position, rotary_dim]: cos, sin
    const int32_t* positions;  // [m]
    const int32_t* slots;      // [m]
    KV kv;
    const float* q_norm;  // [D] or null
    const float* k_norm;  // [D] or null
    float eps;
    int64_t m;
    int64_t max_position, num_slots;  // what positions and slots stay below
};

// Attention over latents: queries [num_heads, rank + rope_dim], one vector a position of as many entries.
struct LatentRopeArgs {
    float* queries;  // [m, num_heads, rank + rope_dim]
    float* latents;  // [m, rank + rope_dim]
    int64_t num_heads, rank, rope_dim;
    bool interleaved;
    const float* table;        // [max_position, rope_dim]: cos, sin
    const int32_t* positions;  // [m]
    const int32_t* slots;      // [m]
    KV kv;
    const float* norm;  // [rank]
    float eps;
    int64_t m;
    int64_t max_position, num_slots;
};

struct HeadLinearArgs {
    const float* x;      // [m, heads, k + passed]
    const void* weight;  // [heads, panels, k, 16]
    float* y;            // [m, heads, n + passed]
    int64_t m, heads, n, k, passed;
    Dtype dtype;
};

struct RouteArgs {
    const float* logits;      // [m, e]
    const float* correction;  // [e] or null
    float* y;                 // [m, e]
    int64_t m, e;
    int64_t top_k, num_groups, top_groups;
    bool sigmoid, normalize;
    float scale;
    float* scratch;  // [m, 3, e], set by the engine
};

struct AttentionArgs {
    const float* qkv;  // rows of q_stride entries, which begin with the queries
    float* y;          // [m, Q * value_dim]
    Heads heads;         // over a latent pool num_kv is a number of groups that read the same vectors
    int64_t value_dim;   // entries of a value: head_dim, or the first ones of a latent pool's vectors
    int64_t q_stride;
    KV kv;
    const int32_t* seq_ids;       // [m]
    const int32_t* prefix_lens;   // [m]
    const int64_t* tree_masks;    // [m]
    const int32_t* tree_starts;   // [s]
    const int32_t* block_tables;  // [s, max_blocks]
    int64_t max_blocks;
    float scale;
    int64_t window;
    int64_t m;
    int64_t max_visible;  // an upper bound of the keys a row sees
    int64_t max_splits;     // set by the engine, as are the next two
    int64_t rows_per_unit;  // neighbouring rows in a unit, at most kMaxRowsTogether and 64 query vectors a KV head
    float* partials;  // [m, Q, max_splits, value_dim + 2] when the splits of a row are computed apart, else null
};

struct GumbelArgs {
    const float* logits;         // [r, v]
    const double* temperatures;  // [r]
    const int64_t *seeds, *positions, *streams;  // [r]
    int64_t r, v, k;
    int64_t parts, part_size;  // a row's vocabulary is searched in `parts` pieces
    float* maxima;             // [r, parts] scratch: the pieces' largest logits, NaN for a piece holding NaN or +inf
    int64_t* ids;              // [r, parts, k] scratch or result
    double* scores;            // [r, parts, k]
};

// Every function computes units [begin, end) of its op.
struct KernelTable {
    const char* name;
    int64_t panel_group;  // panels a unit of one row should hold a multiple of
    void (*pack)(const PackArgs&, int64_t begin, int64_t end);        // unit: a panel
    void (*split_activations)(const LinearArgs&, int64_t begin, int64_t end);  // unit: a row; null where not wanted
    void (*linear)(const LinearArgs&, int64_t begin, int64_t end);    // unit: panels x rows
    void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);    // unit: a row, also below
    void (*layer_norm)(const NormArgs&, int64_t begin, int64_t end);
    void (*add_rows)(const AddArgs&, int64_t begin, int64_t end);
    void (*gated_act)(const GatedArgs&, int64_t begin, int64_t end);
    void (*embedding)(const EmbeddingArgs&, int64_t begin, int64_t end);
    void (*rope_and_cache)(const RopeArgs&, int64_t begin, int64_t end);
    void (*latent_rope)(const LatentRopeArgs&, int64_t begin, int64_t end);
    void (*route)(const RouteArgs&, int64_t begin, int64_t end);
    void (*attention)(const AttentionArgs&, int64_t begin, int64_t end);          // unit: rows x KV head
    void (*attention_split)(const AttentionArgs&, int64_t begin, int64_t end);    // unit: rows x KV head x split
    void (*attention_combine)(const AttentionArgs&, int64_t begin, int64_t end);  // unit: row x KV head
    void (*gumbel_maxima)(const GumbelArgs&, int64_t begin, int64_t end);         // unit: row x part
    void (*gumbel_search)(const GumbelArgs&, int64_t begin, int64_t end);         // unit: row x part
    void (*grouped_quantize)(const GroupedArgs&, int64_t begin, int64_t end);     // unit: rows x section
    void (*grouped)(const GroupedArgs&, int64_t begin, int64_t end);              // unit: panels x rows
};

const KernelTable& portable_kernels();
#ifdef FORERUN_X86
const KernelTable* avx2_kernels();    // null if this CPU has none
const KernelTable* avx2vnni_kernels();    // likewise, as are the others; differs from avx2 in grouped kernels only
const KernelTable* avx512_kernels();
const KernelTable* avx512vnni_kernels();  // differs from avx512 in grouped kernels only
const KernelTable* amx_kernels();         // differs from avx512vnni in grouped and dense kernels and attention
#else
inline const KernelTable* avx2_kernels() { return nullptr; }
inline const KernelTable* avx2vnni_kernels() { return nullptr; }
inline const KernelTable* avx512_kernels() { return nullptr; }
inline const KernelTable* avx512vnni_kernels() { return nullptr; }
inline const KernelTable* amx_kernels() { return nullptr; }
#endif

}  // namespace forerun
