// What each op is told: one plain struct an op. Knows shapes and pointers, and how much work that is.
// Does not know threads (cpu_engine.cpp), Python (bindings.cpp) nor recording (program.h), which follow from `given`.
//
// An op that may be part of a forward pass has
//   given(call)  calls `call` with the fields the caller sets, in the order Python gives them; the engine sets the rest
//   work()       multiply-adds, roughly
//   m            rows of the batch
// Shape letters as in src/forerun/kernels/ops.py. No standard library here: see kernels_impl.inc.
#pragma once

#include <cstdint>

namespace forerun {

enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };  // int8: KV only
enum class Activation : int32_t { kSilu, kGeluTanh, kClippedSwiglu, kSigmoid, kSiluWithin7, kSiluWithin16, kSquaredRelu };

constexpr int64_t kLanes = 16;            // outputs in a weight panel, keys in a score group
constexpr int64_t kChunk = 128;           // inputs summed before they join the running total
constexpr int64_t kAttentionSplit = 256;  // visible keys in a split of the softmax
constexpr int64_t kGroupedBlock = 16;     // inputs a grouped matrix is filled up to a multiple of
constexpr int64_t kMaxUnitRows = 512;      // rows of a unit of a grouped matrix
constexpr int64_t kMaxHeadDim = 576;
constexpr int64_t kStackHeadDim = 256;  // attention over larger heads takes its work space from the heap
constexpr int64_t kMaxHeadsPerGroup = 64;
constexpr int64_t kMaxRowsTogether = 16;  // rows of a sequence that read its keys together

// Where the numbers of a matrix of codes lie: panels of 16 outputs, each with codes (bytes [k, 16], or nibbles [k / 2, 16]
// whose low halves are even inputs), scales (floats [num_groups, 16], or bytes), where there are units shifts and units
// (floats [1 + num_units, 16]), and offsets (floats [num_groups, 16]), which are taken from code times scale. Scale
// bytes stand for scale_values, times the unit, plus the shift.
struct CodedLayout {
    const float* values;        // [16] that nibbles stand for, or null: codes are bytes
    const float* scale_values;  // [256], or null: scales are floats
    const int64_t* order;       // [k], the inputs that columns multiply, or null: their own
    int64_t zero;               // what bytes count from, below 0: they are e4m3
    int64_t group_size;
    int64_t groups_a_unit;                                 // 0: no units
    int64_t scales_at, units_at, offsets_at, panel_bytes;  // bytes from a panel's start; offsets at 0: none
};
static_assert(sizeof(CodedLayout) == 10 * 8, "src/forerun/kernels/cpu/coded.py writes these words one by one");
constexpr int64_t kMaxCodedRows = 96;  // of a unit of a matrix of codes

struct LinearArgs {
    const float* x;      // [m, k]
    const void* weight;  // [panels, k, 16], or panels as the layout says
    const float* bias;   // [n] or null
    float* y;            // [m, n]
    int64_t m, n, k;
    int64_t whole_n;  // outputs of the matrix that these are a part of, or all
    Dtype dtype;
    const CodedLayout* layout;  // of codes, or null
    int64_t panels_per_unit, rows_per_unit;  // a unit is a group of panels times a block of rows
    int64_t groups_owned;  // by a thread, whose units are neighbours
    uint16_t* parts;  // [m * 3 * k] where activations are split into parts for it, else null

    template <class F>
    auto given(F call) {
        return call(x, weight, bias, y, m, n, k, whole_n, dtype, layout);
    }
    int64_t work() const { return m * n * k; }
};

struct PackArgs {
    const void* weight;  // [n, k]
    void* packed;        // [panels, k, 16], k even if dtype has two bytes, the last panel zero-padded
    int64_t n, k;
    Dtype dtype;
};

// How scales and offsets are stored: as they are, or as whole numbers that count a float16 of their unit.
enum class ScaleKind : int32_t {
    kFloat32 = 0,
    kFloat16 = 1,
    kBytes = 2,
    kNibbles = 3,
    kPowers = 4,
    kFloat8 = 5,
    kOddNibbles = 6,
    kSignedNibbles = 7,
};
// Storages besides numbers of bits: 4 bits, which stand for a byte of `table`, and points of a grid.
constexpr int kTabled = 9, kGrid = 10;
constexpr int64_t kStretch = 128;  // inputs whose points of a grid lie together

// Runs of neighbouring codes that are points of a grid, their signs aside; see grouped_layout.h.
struct GridLayout {
    const uint16_t* points;  // [2^bits], or null: no grid
    int64_t stretch_bytes, signs_at;
    int run;    // codes of a point: 8 or 4
    int bits;   // of the number of a point, 8 at least
    int signs;  // stored of eight codes: 8, 7, 1 or 0
};

// See grouped_layout.h.
struct GroupedLayout {
    int64_t group_size, num_groups, num_steps;
    int64_t k_padded;
    int64_t high_at, scales_at;  // bytes from a panel's start
    int64_t groups_a_unit;
    int64_t unit_bytes, head_bytes, group_bytes;  // of scales: of a unit, of what they count, of a group
    int64_t panel_bytes;
    int storage;  // bits a code occupies, kTabled or kGrid
    ScaleKind scales;
    bool has_offsets;
    float unit_scale;  // what units, or scales of e4m3, are multiples of
    uint8_t table[16];
    GridLayout grid;
};

constexpr int code_bits(int storage) { return storage >= kTabled ? 4 : storage; }
constexpr int dot_bits(int storage) { return storage >= kTabled ? 8 : storage; }  // of what is multiplied

struct GroupedArgs {
    const float* x;         // [m, k]
    const uint8_t* weight;  // [panels, panel_bytes]
    const float* bias;      // [n] or null
    float* y;               // [m, n]
    const int64_t* order;   // [k]: column i of the weight multiplies input order[i]; or null
    int64_t m, n, k;
    int64_t zero;  // what a code of 0 stands for is -zero
    GroupedLayout layout;
    int64_t panels_per_unit, rows_per_unit, groups_owned;  // as of LinearArgs; set by the engine, as are the next
    int64_t section, section_rows;           // inputs, whole groups, and rows of a unit of quantizing
    int64_t row_words;                       // k / 4, filled up to whole lines of 64 bytes
    int32_t* words;                          // [m, row_words] scratch: the activations as integers
    float* steps;                            // [m, num_steps, 3] scratch: scales and sums

    template <class F>
    auto given(F call) {
        return call(x, weight, bias, y, order, m, n, k, zero, layout);
    }
    int64_t work() const { return m * n * k; }
};

struct NormArgs {
    const float* x;       // [m, h]
    float* residual;      // [m, h] or null: residual += x is what gets normalised
    const float* weight;  // [h]
    float* y;             // [m, h]
    int64_t m, h;
    float eps;
    bool centered;  // the mean is subtracted first

    template <class F>
    auto given(F call) {
        return call(x, residual, weight, y, m, h, eps, centered);
    }
    int64_t work() const { return m * h; }
};

struct ScaledArgs {
    const float* x;  // [m, h]
    float* y;        // [m, h]
    int64_t m, h;
    float factor, cap;  // cap 0: none
    int64_t piece;      // of a row that is a unit, set by the engine

    template <class F>
    auto given(F call) {
        return call(x, y, m, h, factor, cap);
    }
    int64_t work() const { return m * h * (cap > 0.0f ? 4 : 1); }
};

struct GatedArgs {
    const float* x;  // [m, 2f]: gate, up; of a squared ReLU [m, f]
    float* y;        // [m, f]
    int64_t m, f;
    Activation activation;
    int64_t piece;  // of a row that is a unit, set by the engine

    template <class F>
    auto given(F call) {
        return call(x, y, m, f, activation);
    }
    int64_t work() const { return m * f * 4; }
};

struct SelectArgs {
    const float* x;         // [any, h]
    const int64_t* row_ids;  // [m], or null for all rows in order
    float* y;               // [m, h]
    int64_t m, h;

    template <class F>
    auto given(F call) {
        return call(x, row_ids, y, m, h);
    }
    int64_t work() const { return m * h; }
};

struct ColumnsArgs {
    const float* x;  // [m, x_stride], its columns from x_first on
    float* y;        // [m, y_stride], its columns from y_first on
    int64_t m, width, x_stride, x_first, y_stride, y_first;

    template <class F>
    auto given(F call) {
        return call(x, y, m, width, x_stride, x_first, y_stride, y_first);
    }
    int64_t work() const { return m * width; }
};

struct AddArgs {
    const float* x;  // [m, h]
    float* y;        // [m, h]: y += x
    int64_t m, h;

    template <class F>
    auto given(F call) {
        return call(x, y, m, h);
    }
    int64_t work() const { return m * h; }
};

struct FillArgs {
    float* y;  // [m, h]
    int64_t m, h;
    float value;

    template <class F>
    auto given(F call) {
        return call(y, m, h, value);
    }
    int64_t work() const { return m * h; }
};

struct ScatterArgs {
    const float* x;      // [m, n]
    const int64_t* ids;  // [n], different from each other
    float* y;            // [m, h]: column i of x becomes column ids[i], the others stay
    int64_t m, n, h;

    template <class F>
    auto given(F call) {
        return call(x, ids, y, m, n, h);
    }
    int64_t work() const { return m * n; }
};

struct EmbeddingArgs {
    const int64_t* ids;  // [m]
    const void* table;   // [v, h], or the same packed for `linear`
    float* y;            // [m, h]
    int64_t m, h, v;
    Dtype dtype;
    bool packed;
    const CodedLayout* layout;  // of codes, or null

    template <class F>
    auto given(F call) {
        return call(ids, table, y, m, h, v, dtype, packed, layout);
    }
    int64_t work() const { return m * h; }
};

struct Heads {
    int64_t num_q, num_kv, head_dim, rotary_dim;
    bool interleaved;  // rotated pairs are stored as neighbours, else in two halves
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
    int64_t max_position, num_blocks;  // what positions and the slots' blocks stay below

    template <class F>
    auto given(F call) {
        return call(qkv, heads.num_q, heads.num_kv, heads.head_dim, heads.rotary_dim, heads.interleaved, table,
                    max_position, positions, slots, kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.block_size,
                    kv.dtype, num_blocks, q_norm, k_norm, eps, m);
    }
    int64_t work() const { return m * heads.row_size(); }
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
    int64_t max_position, num_blocks;

    template <class F>
    auto given(F call) {
        return call(queries, latents, num_heads, rank, rope_dim, interleaved, table, max_position, positions, slots,
                    kv.values, kv.block_size, kv.dtype, num_blocks, norm, eps, m);
    }
    int64_t work() const { return m * (num_heads + 1) * (rank + rope_dim); }
};

struct HeadLinearArgs {
    const float* x;      // [m, heads, k + passed]
    const void* weight;  // [heads, panels, k, 16]
    float* y;            // [m, heads, n + passed]
    int64_t m, heads, n, k, passed;
    Dtype dtype;

    template <class F>
    auto given(F call) {
        return call(x, weight, y, m, heads, n, k, passed, dtype);
    }
    int64_t work() const { return m * heads * n * k; }
};

struct RouteArgs {
    const float* logits;      // [m, e]
    const float* correction;  // [e] or null
    float* y;                 // [m, e]
    int64_t m, e;
    int64_t top_k, num_groups, top_groups;
    bool sigmoid, normalize;
    float scale, smallest_sum;  // the second is added to the sum that normalizes
    float* scratch;  // [m, 3, e], set by the engine

    template <class F>
    auto given(F call) {
        return call(logits, correction, y, m, e, top_k, sigmoid, normalize, scale, num_groups, top_groups,
                    smallest_sum);
    }
    int64_t work() const { return m * e * top_k; }
};

struct AttentionArgs {
    const float* qkv;  // [m, q_stride], the queries first
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
    int64_t chunk;       // > 0: visible keys below the last multiple of it that a row reaches do not count
    const float* sinks;  // [Q]: a score of each head beside its keys', which has no value; or null
    int64_t m;
    int64_t max_visible;  // an upper bound of the keys a row sees
    int64_t max_splits;     // set by the engine, as are the next two
    int64_t rows_per_unit;  // neighbouring rows in a unit, at most kMaxRowsTogether and 64 query vectors a KV head
    float* partials;  // [m, Q, max_splits, value_dim + 2] when the splits of a row are computed apart, else null
    float cap;        // given by the caller: scores are bounded softly by it; 0: not

    template <class F>
    auto given(F call) {
        return call(qkv, y, heads.num_q, heads.num_kv, heads.head_dim, value_dim, q_stride, kv.keys, kv.values,
                    kv.key_scales, kv.value_scales, kv.block_size, kv.dtype, seq_ids, prefix_lens, tree_masks, tree_starts,
                    block_tables, max_blocks, scale, window, chunk, sinks, m, max_visible, cap);
    }
    int64_t work() const { return m * heads.num_q * heads.head_dim * max_visible * 2; }
};

struct GumbelArgs {
    const float* logits;         // [., v]
    const int64_t* rows;         // [r]: which of them; null: the first r
    const double* temperatures;  // [r]
    const int64_t *seeds, *positions, *streams;  // [r]
    int64_t r, v, k;
    int64_t parts, part_size;  // a row's vocabulary is searched in `parts` pieces
    float* maxima;             // [r, parts] scratch: the pieces' largest logits, NaN for a piece holding NaN or +inf
    int64_t* ids;              // [r, parts, k] scratch or result
    double* scores;            // [r, parts, k]
};

}  // namespace forerun
