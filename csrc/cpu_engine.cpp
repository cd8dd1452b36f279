#include "cpu_engine.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "memory.h"
#include "rows.h"

namespace forerun {
namespace {

// Rough nanoseconds of work below which waking or even telling another thread costs more than it brings.
constexpr int64_t kWorthSharing = 4000;
constexpr int64_t kChunksPerThread = 8;      // so that a descheduled thread holds up a small part only
constexpr int64_t kSmallestChunk = 1000;     // nanoseconds
constexpr int64_t kRowBlockBytes = 192 << 10;  // activations that stay in the second-level cache beside a panel
constexpr int64_t kGroupedRowBytes = 512 << 10;  // likewise, activations of one byte
constexpr int64_t kFewRows = 64;             // whose activations are quantized some inputs at a time
constexpr int64_t kSectionInputs = 512;      // so many
constexpr int64_t kSplitInputs = 32;         // only multiples of this many inputs are split into parts
constexpr int64_t kSplitFrom = 1 << 20;      // weights; smaller matrices wait in the caches, and few rows are faster whole
constexpr int64_t kSplitPanels = 8;          // panels that share activations in parts while those are near
constexpr int64_t kUnitBytes = 48 << 10;     // weights a unit of few rows reads
constexpr int64_t kLine = 64;                // bytes in a cache line
constexpr int64_t kReadPiece = 4 << 20;      // bytes of memory read as one unit; what is left over is not read
constexpr int64_t kPartSize = 16384;         // tokens of a vocabulary piece
constexpr int64_t kUnitsPerThread = 4;       // attention splits a row's keys when there are fewer units than this

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t element_size(Dtype dtype) { return dtype == Dtype::kBFloat16 ? 2 : 4; }

const KernelTable* pick_table(const std::string& isa) {
    for (const auto find : kKernelTables) {
        const KernelTable* table = find();
        if (table && (isa.empty() || isa == table->name)) return table;
    }
    throw std::invalid_argument("instruction set '" + isa + "' is not available on this CPU");
}

template <class Args>
struct Job {
    void (*kernel)(const Args&, int64_t, int64_t);
    const Args* args;
    int64_t units, chunk;

    static void run(const void* job_pointer, int64_t index) {
        const Job& job = *static_cast<const Job*>(job_pointer);
        job.kernel(*job.args, index * job.chunk, std::min(job.units, (index + 1) * job.chunk));
    }
};

}  // namespace

CpuEngine::CpuEngine(int num_threads, const std::string& isa) : table_(pick_table(isa)), pool_(num_threads) {}

std::vector<std::string> CpuEngine::available() {
    std::vector<std::string> names;
    for (const auto find : kKernelTables) {
        if (const KernelTable* table = find()) names.emplace_back(table->name);
    }
    return names;
}

template <class Args>
void CpuEngine::share(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t units,
                      int64_t work_per_unit) {
    if (units <= 0) return;
    if (pool_.num_threads() == 1 || units * work_per_unit < kWorthSharing) return kernel(args, 0, units);
    const int64_t even = divide_up(units, pool_.num_threads() * kChunksPerThread);
    const int64_t chunk = std::max<int64_t>({1, even, kSmallestChunk / std::max<int64_t>(1, work_per_unit)});
    const Job<Args> job{kernel, &args, units, chunk};
    pool_.run(&Job<Args>::run, &job, divide_up(units, chunk));
}

void CpuEngine::pack(const PackArgs& args) { share(table_->pack, args, divide_up(args.n, kLanes), args.k * 16); }

void CpuEngine::linear(const LinearArgs& given) {
    LinearArgs args = given;
    const bool split = table_->split_activations && args.dtype == Dtype::kBFloat16 && args.k % kSplitInputs == 0 &&
                       args.n * args.k > kSplitFrom;  // by the matrix alone, never by the rows
    const int64_t panels = divide_up(args.n, kLanes), group = table_->panel_group, row_tile = split ? 16 : 6;
    const int64_t panel_bytes = args.k * kLanes * element_size(args.dtype);
    const int64_t row_bytes = args.k * static_cast<int64_t>(sizeof(float));
    const int64_t step = 2 * row_tile;
    args.rows_per_unit = std::max(2 * step, kRowBlockBytes / std::max<int64_t>(row_bytes, 1) / step * step);
    const int64_t rows = std::min(args.m, args.rows_per_unit);
    const int64_t part = std::max<int64_t>(1, panel_bytes * divide_up(rows, row_tile));
    const int64_t wanted = split ? kSplitPanels : std::max<int64_t>(1, kUnitBytes / part);
    const int64_t balanced = std::max<int64_t>(1, panels / (pool_.num_threads() * kChunksPerThread));
    args.panels_per_unit = divide_up(std::min(wanted, balanced), group) * group;
    const int64_t units = divide_up(panels, args.panels_per_unit) * divide_up(args.m, args.rows_per_unit);
    const int64_t work = args.panels_per_unit * args.k * divide_up(rows, split ? 16 : 4);
    if (!split) return share(table_->linear, args, units, work);
    const Scratch::Piece piece = scratch_.take(static_cast<size_t>(args.m * args.k) * 3 * sizeof(uint16_t));
    args.parts = static_cast<uint16_t*>(piece.memory());
    share(table_->split_activations, args, args.m, args.k / 4);
    share(table_->linear, args, units, work);
}

void CpuEngine::pack_grouped(const PackGroupedArgs& args) {
    share(&pack_grouped_panels, args, divide_up(args.n, kLanes), args.k * 16);
}

void CpuEngine::grouped(const GroupedArgs& given) {
    if (given.m <= 0) return;
    GroupedArgs args = given;
    const GroupedLayout& layout = args.layout;
    const int64_t panels = divide_up(args.n, kLanes), group = table_->panel_group;
    args.rows_per_unit = std::clamp<int64_t>(kGroupedRowBytes / layout.k_padded / 48 * 48, 48, kMaxUnitRows);
    const int64_t rows = std::min(args.m, args.rows_per_unit);
    const int64_t wanted = std::max<int64_t>(1, kUnitBytes / (layout.panel_bytes * divide_up(rows, 12)));
    const int64_t balanced = std::max<int64_t>(1, panels / (pool_.num_threads() * kChunksPerThread));
    args.panels_per_unit = divide_up(std::min(wanted, balanced), group) * group;
    const int64_t units = divide_up(panels, args.panels_per_unit) * divide_up(args.m, args.rows_per_unit);
    args.row_words = divide_up(layout.k_padded, kLine) * kLine / 4;
    const size_t words = static_cast<size_t>(args.m * args.row_words);
    const size_t steps = static_cast<size_t>(args.m * layout.num_steps * 3);
    const Scratch::Piece piece = scratch_.take(4 * (words + steps) + kLine);  // tiles may read a line too many
    args.words = static_cast<int32_t*>(piece.memory());
    args.steps = reinterpret_cast<float*>(args.words + words);
    // Words of a few rows share cache lines, which threads that took a row each would drive out of each other's caches.
    const bool few = args.m > 1 && args.m <= kFewRows;
    const int64_t groups = std::max(layout.group_size, 2 * kGroupedBlock);  // two of 16 share an activation scale
    args.section = divide_up(few ? kSectionInputs : args.k, groups) * groups;
    args.section_rows = few ? args.m : 1;
    const int64_t quantizing = divide_up(args.k, args.section) * divide_up(args.m, args.section_rows);
    share(table_->grouped_quantize, args, quantizing, args.section_rows * args.section / 4);
    share(table_->grouped, args, units, args.panels_per_unit * args.k * divide_up(rows, 4) / 2);
}

void CpuEngine::rms_norm(const NormArgs& args) { share(table_->rms_norm, args, args.m, args.h / 4); }

void CpuEngine::add(const AddArgs& args) { share(table_->add_rows, args, args.m, args.h / 8); }

void CpuEngine::gated_act(const GatedArgs& args) { share(table_->gated_act, args, args.m, args.f); }

void CpuEngine::embedding(const EmbeddingArgs& args) {
    check_range("token id", args.ids, args.m, args.v);
    share(table_->embedding, args, args.m, args.h / 8);
}

void CpuEngine::grouped_rows(const GroupedRowsArgs& args) {
    check_range("token id", args.ids, args.m, args.n);
    share(&unpack_grouped_rows, args, args.m, args.k * 8);
}

void CpuEngine::rope_and_cache(const RopeArgs& args) {
    check_range("position", args.positions, args.m, args.max_position);
    check_range("cache slot", args.slots, args.m, args.num_blocks * args.kv.block_size);
    share(table_->rope_and_cache, args, args.m, args.heads.row_size() / 2);
}

void CpuEngine::latent_rope(const LatentRopeArgs& args) {
    check_range("position", args.positions, args.m, args.max_position);
    check_range("cache slot", args.slots, args.m, args.num_blocks * args.kv.block_size);
    share(table_->latent_rope, args, args.m, (args.num_heads * args.rope_dim + args.rank) / 2);
}

void CpuEngine::route(const RouteArgs& given) {
    if (given.m <= 0) return;
    RouteArgs args = given;
    const Scratch::Piece piece = scratch_.take(static_cast<size_t>(args.m * args.e) * 3 * sizeof(float));
    args.scratch = static_cast<float*>(piece.memory());
    share(table_->route, args, args.m, args.e * (args.top_k + 4));
}

namespace {

struct HeadJob {
    HeadLinearArgs args;
    const KernelTable* table;
    Scratch* scratch;
};

// All rows of heads [begin, end).
void multiply_heads(const HeadJob& job, int64_t begin, int64_t end) {
    const HeadLinearArgs& args = job.args;
    const int64_t m = args.m, n = args.n, k = args.k, panels = divide_up(n, kLanes);
    const int64_t x_head = k + args.passed, y_head = n + args.passed;
    const int64_t stored_k = args.dtype == Dtype::kBFloat16 ? k + k % 2 : k;  // two-byte weights lie in pairs
    const Scratch::Piece piece = job.scratch->take(static_cast<size_t>(m * (k + n)) * sizeof(float));
    float* x = static_cast<float*>(piece.memory());
    float* y = x + m * k;
    for (int64_t head = begin; head < end; ++head) {
        const float* from = args.x + head * x_head;
        float* to = args.y + head * y_head;
        const char* weight =
            static_cast<const char*>(args.weight) + head * panels * stored_k * kLanes * element_size(args.dtype);
        move_columns(from, args.heads * x_head, x, k, k, m);
        job.table->linear({x, weight, nullptr, y, m, n, k, args.dtype, panels, m, nullptr}, 0, 1);
        move_columns(y, n, to, args.heads * y_head, n, m);
        move_columns(from + k, args.heads * x_head, to + n, args.heads * y_head, args.passed, m);
    }
}

}  // namespace

void CpuEngine::linear_heads(const HeadLinearArgs& args) {
    if (args.m <= 0) return;
    const HeadJob job{args, table_, &scratch_};
    share(&multiply_heads, job, args.heads, args.n * args.k * divide_up(args.m, 4) / 4);
}

int64_t CpuEngine::rows_together(const AttentionArgs& args) const {
    int64_t runs = 1;
    for (int64_t row = 1; row < args.m; ++row) runs += args.seq_ids[row] != args.seq_ids[row - 1];
    const int64_t fitting = std::max<int64_t>(1, kMaxHeadsPerGroup / (args.heads.num_q / args.heads.num_kv));
    int64_t rows = std::min({kMaxRowsTogether, fitting, std::max<int64_t>(1, args.m / runs)});
    const int64_t wanted = pool_.num_threads() * kUnitsPerThread;  // else cores would stand idle
    while (rows > 1 && divide_up(args.m, rows) * args.heads.num_kv * args.max_splits < wanted) rows /= 2;
    return rows;
}

void CpuEngine::attention(const AttentionArgs& given) {
    AttentionArgs args = given;
    const int64_t max_visible = args.max_visible;
    const Heads& heads = args.heads;
    args.max_splits = divide_up(max_visible, kAttentionSplit);
    args.rows_per_unit = rows_together(args);
    const int64_t pairs = divide_up(args.m, args.rows_per_unit) * heads.num_kv;
    const int64_t visible = args.window > 0 ? std::min(max_visible, args.window) : max_visible;
    const int64_t queries = args.rows_per_unit * (heads.num_q / heads.num_kv);
    const int64_t work = visible * heads.head_dim * queries / 8;  // for a pair
    const bool apart = args.max_splits > 1 && pairs < pool_.num_threads() * kUnitsPerThread && pool_.num_threads() > 1;
    if (!apart) return share(table_->attention, args, pairs, work);
    const size_t size = static_cast<size_t>(args.m * heads.num_q * args.max_splits * (args.value_dim + 2));
    const std::unique_ptr<float[]> partials(new float[size]);
    args.partials = partials.get();
    share(table_->attention_split, args, pairs * args.max_splits, work / args.max_splits + 1);
    share(table_->attention_combine, args, args.m * heads.num_kv, args.max_splits * heads.head_dim);
}

namespace {

// Merges the parts' sorted lists of one row.
void merge_parts(const GumbelArgs& args, int64_t row, int64_t* ids, double* scores) {
    std::vector<int64_t> next(static_cast<size_t>(args.parts), 0);
    for (int64_t place = 0; place < args.k; ++place) {
        int64_t best = -1;
        for (int64_t part = 0; part < args.parts; ++part) {
            const int64_t at = next[static_cast<size_t>(part)];
            if (at >= args.k) continue;
            const int64_t mine = (row * args.parts + part) * args.k + at;
            if (best < 0 || args.scores[mine] > args.scores[best]) best = mine;  // earlier parts hold lower ids
        }
        ids[row * args.k + place] = args.ids[best];
        scores[row * args.k + place] = args.scores[best];
        ++next[static_cast<size_t>(best / args.k - row * args.parts)];
    }
}

}  // namespace

void CpuEngine::gumbel(GumbelArgs args, int64_t* ids, double* scores) {
    std::vector<double> unwanted(scores == nullptr ? static_cast<size_t>(args.r * args.k) : 0);
    if (scores == nullptr) scores = unwanted.data();
    args.part_size = args.v <= 2 * kPartSize ? divide_up(std::max<int64_t>(args.v, 1), 64) * 64 : kPartSize;
    args.parts = divide_up(std::max<int64_t>(args.v, 1), args.part_size);
    const int64_t units = args.r * args.parts;
    std::vector<float> maxima(static_cast<size_t>(units));
    args.maxima = maxima.data();
    share(table_->gumbel_maxima, args, units, args.part_size / 16);
    std::vector<int64_t> part_ids;
    std::vector<double> part_scores;
    args.ids = ids;
    args.scores = scores;
    if (args.parts > 1) {
        part_ids.resize(static_cast<size_t>(units * args.k));
        part_scores.resize(static_cast<size_t>(units * args.k));
        args.ids = part_ids.data();
        args.scores = part_scores.data();
    }
    share(table_->gumbel_search, args, units, args.part_size);
    for (int64_t row = 0; args.parts > 1 && row < args.r; ++row) merge_parts(args, row, ids, scores);
}

namespace {

template <class T>
void move_slot(const KV& kv, int64_t num_kv, int64_t head_dim, int64_t source, int64_t target) {
    const int64_t b = kv.block_size, head_size = head_dim * b;
    const int64_t from = source / b * num_kv * head_size, to = target / b * num_kv * head_size;
    T* keys = static_cast<T*>(kv.keys);
    T* values = static_cast<T*>(kv.values);
    for (int64_t head = 0; head < num_kv; ++head) {
        const int64_t from_head = from + head * head_size, to_head = to + head * head_size;
        for (int64_t i = 0; i < head_dim; ++i) {
            if (keys) keys[to_head + i * b + target % b] = keys[from_head + i * b + source % b];
            values[to_head + target % b * head_dim + i] = values[from_head + source % b * head_dim + i];
        }
    }
}

void move_scales(float* scales, int64_t num_kv, int64_t b, int64_t source, int64_t target) {
    const int64_t from = source / b * num_kv * b + source % b, to = target / b * num_kv * b + target % b;
    for (int64_t head = 0; head < num_kv; ++head) scales[to + head * b] = scales[from + head * b];
}

void move_any_slot(const KV& kv, int64_t num_kv, int64_t head_dim, int64_t source, int64_t target) {
    switch (kv.dtype) {
        case Dtype::kFloat32: return move_slot<float>(kv, num_kv, head_dim, source, target);
        case Dtype::kBFloat16: return move_slot<uint16_t>(kv, num_kv, head_dim, source, target);
        case Dtype::kInt8: move_slot<int8_t>(kv, num_kv, head_dim, source, target);
    }
    for (float* scales : {kv.key_scales, kv.value_scales}) move_scales(scales, num_kv, kv.block_size, source, target);
}

}  // namespace

uint64_t CpuEngine::stream_read(const void* data, int64_t size) {
    struct Reading {
        const char* data;
        std::atomic<uint64_t> mixed{0};
    } reading;
    reading.data = static_cast<const char*>(data);
    const auto read = [](const void* context, int64_t piece) {
        auto* shared = const_cast<Reading*>(static_cast<const Reading*>(context));
        const void* from = shared->data + piece * kReadPiece;
        shared->mixed.fetch_xor(read_streams(from, kReadPiece), std::memory_order_relaxed);
    };
    pool_.run(read, &reading, size / kReadPiece);
    return reading.mixed.load();
}

void CpuEngine::move_rows(const KV& kv, int64_t num_kv, int64_t head_dim, const int32_t* sources,
                          const int32_t* targets, int64_t num) {
    for (int64_t i = 0; i < num; ++i) move_any_slot(kv, num_kv, head_dim, sources[i], targets[i]);
}

}  // namespace forerun
