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
constexpr int64_t kLeastUnits = 4;           // a thread should own of a matrix
constexpr int64_t kActivations = 512;        // of a row that are computed as one unit
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

}  // namespace

CpuEngine::CpuEngine(int num_threads, const std::string& isa, const std::vector<ThreadPool::Cpus>& pins)
    : table_(pick_table(isa)), pool_(num_threads, pins) {}

std::vector<std::string> CpuEngine::available() {
    std::vector<std::string> names;
    for (const auto find : kKernelTables) {
        if (const KernelTable* table = find()) names.emplace_back(table->name);
    }
    return names;
}

// As many as there are threads, or a multiple of it, unless there is too little to do: then every thread owns the same
// part of the units of a matrix, however the matrix is cut for this many rows.
int64_t CpuEngine::num_chunks(int64_t units, int64_t work_per_unit) const {
    const int64_t threads = pool_.num_threads(), work = units * work_per_unit;
    if (threads == 1 || work < kWorthSharing) return 1;
    const int64_t most = std::min({units, threads * kChunksPerThread, work / kSmallestChunk});
    return most > threads ? most / threads * threads : most;
}

// Panels are packed by the threads that will read them, so that their memory lies near.
void CpuEngine::pack(const PackArgs& args) { share(table_->pack, args, divide_up(args.n, kLanes), args.k * 16, true); }

// By the whole matrix alone, never by the rows of x, nor by how many of its outputs are multiplied here.
bool CpuEngine::splits(const LinearArgs& args) const {
    return table_->split_activations && args.dtype == Dtype::kBFloat16 && args.k % kSplitInputs == 0 &&
           args.whole_n * args.k > kSplitFrom;
}

// So many as are wanted, fewer where a thread would own few units: with many threads two panels more or less count.
int64_t CpuEngine::panels_in_unit(int64_t n, int64_t wanted) const {
    const int64_t panels = divide_up(n, kLanes), threads = pool_.num_threads();
    const int64_t group = panels < threads * table_->panel_group * kLeastUnits ? 1 : table_->panel_group;
    const int64_t balanced = std::max<int64_t>(1, panels / (threads * kChunksPerThread));
    return divide_up(std::min(wanted, balanced), group) * group;
}

CpuEngine::Cut<LinearArgs> CpuEngine::cut(LinearArgs args) const {
    const bool split = splits(args);
    const int64_t row_tile = split ? 16 : 6, step = 2 * row_tile;
    const int64_t panel_bytes = args.layout ? args.layout->panel_bytes : args.k * kLanes * element_size(args.dtype);
    const int64_t row_bytes = args.k * static_cast<int64_t>(sizeof(float));
    args.rows_per_unit = std::max(2 * step, kRowBlockBytes / std::max<int64_t>(row_bytes, 1) / step * step);
    if (args.layout) args.rows_per_unit = std::min(args.rows_per_unit, kMaxCodedRows);
    const int64_t rows = std::min(args.m, args.rows_per_unit);
    const int64_t part = std::max<int64_t>(1, panel_bytes * divide_up(rows, row_tile));
    args.panels_per_unit = panels_in_unit(args.n, split ? kSplitPanels : std::max<int64_t>(1, kUnitBytes / part));
    const int64_t groups = divide_up(divide_up(args.n, kLanes), args.panels_per_unit);
    args.groups_owned = divide_up(groups, pool_.num_threads());
    const int64_t work = args.panels_per_unit * args.k * divide_up(rows, split ? 16 : 4);
    return {args, groups * divide_up(args.m, args.rows_per_unit), work};
}

void CpuEngine::linear(const LinearArgs& given) {
    Cut<LinearArgs> product = cut(given);
    LinearArgs& args = product.args;
    if (args.layout) return share(table_->coded, args, product.units, product.work_per_unit);
    if (!splits(args)) return share(table_->linear, args, product.units, product.work_per_unit);
    const Scratch::Piece piece = scratch_.take(static_cast<size_t>(args.m * args.k) * 3 * sizeof(uint16_t));
    args.parts = static_cast<uint16_t*>(piece.memory());
    share(table_->split_activations, args, args.m, args.k / 4);
    share(table_->linear, args, product.units, product.work_per_unit);
}

void CpuEngine::pack_grouped(const PackGroupedArgs& args) {
    share(&pack_grouped_panels, args, divide_up(args.n, kLanes), args.k * 16, true);
}

CpuEngine::Cut<GroupedArgs> CpuEngine::cut(GroupedArgs args) const {
    const GroupedLayout& layout = args.layout;
    args.rows_per_unit = std::clamp<int64_t>(kGroupedRowBytes / layout.k_padded / 48 * 48, 48, kMaxUnitRows);
    const int64_t rows = std::min(args.m, args.rows_per_unit);
    const int64_t wanted = std::max<int64_t>(1, kUnitBytes / (layout.panel_bytes * divide_up(rows, 12)));
    args.panels_per_unit = panels_in_unit(args.n, wanted);
    const int64_t groups = divide_up(divide_up(args.n, kLanes), args.panels_per_unit);
    args.groups_owned = divide_up(groups, pool_.num_threads());
    const int64_t work = args.panels_per_unit * args.k * divide_up(rows, 4) / 2;
    return {args, groups * divide_up(args.m, args.rows_per_unit), work};
}

std::vector<int64_t> CpuEngine::owned_panels(int64_t m, int64_t n, int64_t k, const GroupedLayout& layout) const {
    GroupedArgs args{};
    args.m = m;
    args.n = n;
    args.k = k;
    args.layout = layout;
    const Cut<GroupedArgs> product = cut(args);
    const Job<GroupedArgs> job{nullptr, nullptr, product.units, num_chunks(product.units, product.work_per_unit)};
    std::vector<int64_t> owned;
    for (int64_t thread = 0, begin = 0; thread < num_threads(); ++thread) {
        const int64_t unit = job.begin(ThreadPool::first_chunk(thread + 1, num_threads(), job.chunks));
        const int64_t end = std::min(divide_up(n, kLanes), unit * product.args.panels_per_unit);
        owned.push_back(end - begin);
        begin = end;
    }
    return owned;
}

void CpuEngine::grouped(const GroupedArgs& given) {
    if (given.m <= 0) return;
    Cut<GroupedArgs> product = cut(given);
    GroupedArgs& args = product.args;
    const GroupedLayout& layout = args.layout;
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
    share(table_->grouped, args, product.units, product.work_per_unit);
}

void CpuEngine::rms_norm(const NormArgs& args) { share(table_->rms_norm, args, args.m, args.h / 4); }

void CpuEngine::add(const AddArgs& args) { share(table_->add_rows, args, args.m, args.h / 8); }

void CpuEngine::gated_act(const GatedArgs& given) {
    GatedArgs args = given;
    args.piece = std::min(std::max<int64_t>(args.f, 1), kActivations);
    share(table_->gated_act, args, args.m * divide_up(args.f, args.piece), args.piece);
}

void CpuEngine::scaled(const ScaledArgs& given) {
    ScaledArgs args = given;
    args.piece = std::min(std::max<int64_t>(args.h, 1), kActivations);
    share(table_->scaled, args, args.m * divide_up(args.h, args.piece), args.piece / 2);
}

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
        job.table->linear({x, weight, nullptr, y, m, n, k, n, args.dtype, nullptr, panels, m, 1, nullptr}, 0, 1);
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
    const int64_t most = args.window > 0 ? args.window : args.chunk > 0 ? args.chunk : max_visible;
    const int64_t visible = std::min(max_visible, most);
    const int64_t queries = args.rows_per_unit * (heads.num_q / heads.num_kv);
    const int64_t work = visible * heads.head_dim * queries / 8;  // for a pair
    const bool apart = args.max_splits > 1 && pairs < pool_.num_threads() * kUnitsPerThread && pool_.num_threads() > 1;
    if (!apart) return share(table_->attention, args, pairs, work);
    const size_t size = static_cast<size_t>(args.m * heads.num_q * args.max_splits * (args.value_dim + 2));
    const Scratch::Piece piece = scratch_.take(size * sizeof(float));
    args.partials = static_cast<float*>(piece.memory());
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

struct Moves {
    KV kv;
    int64_t num_kv, head_dim;
    const int32_t *sources, *targets;
    int64_t num;
};

// One head's share of a row, whose block's heads lie one behind the other.
template <class T>
void move_head(const KV& kv, int64_t head_dim, int64_t from, int64_t source, int64_t to, int64_t target) {
    const int64_t b = kv.block_size;
    T* keys = static_cast<T*>(kv.keys);
    T* values = static_cast<T*>(kv.values);
    for (int64_t i = 0; i < head_dim; ++i) {
        if (keys) keys[(to * head_dim + i) * b + target] = keys[(from * head_dim + i) * b + source];
        values[(to * b + target) * head_dim + i] = values[(from * b + source) * head_dim + i];
    }
}

void move_any_head(const KV& kv, int64_t head_dim, int64_t from, int64_t source, int64_t to, int64_t target) {
    switch (kv.dtype) {
        case Dtype::kFloat32: return move_head<float>(kv, head_dim, from, source, to, target);
        case Dtype::kBFloat16: return move_head<uint16_t>(kv, head_dim, from, source, to, target);
        case Dtype::kInt8: move_head<int8_t>(kv, head_dim, from, source, to, target);
    }
    for (float* scales : {kv.key_scales, kv.value_scales}) {
        scales[to * kv.block_size + target] = scales[from * kv.block_size + source];
    }
}

// All rows' heads [begin, end), in the order of the rows: a row may move to where another one came from.
void move_heads(const Moves& moves, int64_t begin, int64_t end) {
    const int64_t b = moves.kv.block_size;
    for (int64_t head = begin; head < end; ++head) {
        for (int64_t i = 0; i < moves.num; ++i) {
            const int64_t source = moves.sources[i], target = moves.targets[i];
            move_any_head(moves.kv, moves.head_dim, source / b * moves.num_kv + head, source % b,
                          target / b * moves.num_kv + head, target % b);
        }
    }
}

}  // namespace

void CpuEngine::move_rows(const KV& kv, int64_t num_kv, int64_t head_dim, const int32_t* sources,
                          const int32_t* targets, int64_t num) {
    share(&move_heads, Moves{kv, num_kv, head_dim, sources, targets, num}, num_kv, num * head_dim * 2);
}

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

}  // namespace forerun
