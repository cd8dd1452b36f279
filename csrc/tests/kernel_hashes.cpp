// Runs every kernel of every instruction set that this CPU has on made inputs, and prints what came out of it:
//   INSTRUCTION_SET CASE HASH
// The hashes are the same on every CPU (tests/kernels/test_instruction_sets.py). No Python, no threads, no files.
#include "hashing.h"
#include "recurrent_hashes.h"

#include <limits>

#include "../grouped_layout.h"

namespace forerun {
namespace {

template <class T>
Array<T> packed(Run& run, Array<T>& weight, int64_t n, int64_t k) {
    const int64_t panels = divide_up(n, kLanes), stored = sizeof(T) == 2 ? k + k % 2 : k;
    Array<T> to(panels * stored * kLanes);
    FORERUN_CALL(run, pack, (PackArgs{weight.begin(), to.begin(), n, k, kDtype<T>}), panels);
    return to;
}

template <class T>
void run_linear(Run& run, int64_t m, int64_t n, int64_t k, int64_t rows_per_unit) {
    Generator from{static_cast<uint64_t>(m * n + k)};
    auto weight = numbers<T>(from, n * k);
    auto x = numbers<float>(from, m * k), bias = numbers<float>(from, n);
    auto panels = packed<T>(run, weight, n, k);
    Floats y(m * n);
    LinearArgs args{x.begin(), panels.begin(), bias.begin(), y.begin(), m, n, k, n, kDtype<T>, nullptr, 4,
                    rows_per_unit, 1, nullptr};
    Array<uint16_t> parts(3 * m * k);
    if (run.table().split_activations && sizeof(T) == 2 && k % 32 == 0) {
        args.parts = parts.begin();
        run.table().split_activations(args, 0, m);
    }
    FORERUN_CALL(run, linear, args, divide_up(divide_up(n, kLanes), 4) * divide_up(m, rows_per_unit));
    run.print(join("linear", {m, n, k}) + "-" + kDtypeName<T>, y);
}

// Codes of e4m3 (but NaN) or nibbles, with scales that are floats, or bytes with units and shifts; or integers with
// offsets, the last column first.
void run_coded(Run& run, int64_t m, int64_t k, bool nibbles, bool counted, bool integers = false) {
    constexpr int64_t n = 40, group_size = 32, rows_per_unit = 24;
    const int64_t panels = divide_up(n, kLanes), groups = divide_up(k, group_size);
    const int64_t scales_at = divide_up((nibbles ? k / 2 : k) * kLanes, 64) * 64;
    const int64_t units_at = scales_at + divide_up(groups * kLanes * (counted ? 1 : 4), 64) * 64;
    const int64_t offsets_at = units_at + (counted ? 2 * kLanes * 4 : 0);
    const int64_t panel_bytes = offsets_at + (integers ? groups * kLanes * 4 : 0);
    Generator from{static_cast<uint64_t>(m * k + nibbles)};
    Array<uint8_t> weight(panels * panel_bytes, [&](int64_t) { return from.below(2) << 7 | from.below(127); });
    auto values = numbers<float>(from, 16), scale_values = numbers<float>(from, 256), floats = numbers<float>(from, 4096);
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* panel = weight.begin() + p * panel_bytes;
        if (!counted) std::memcpy(panel + scales_at, floats.begin() + p, static_cast<size_t>(groups * kLanes * 4));
        if (counted) std::memcpy(panel + units_at, floats.begin() + p, 2 * kLanes * 4);
        if (integers) std::memcpy(panel + offsets_at, floats.begin() + 64 + p, static_cast<size_t>(groups * kLanes * 4));
    }
    Array<int64_t> order(k, [&](int64_t i) { return k - 1 - i; });
    const CodedLayout layout{nibbles ? values.begin() : nullptr, counted ? scale_values.begin() : nullptr,
                             integers ? order.begin() : nullptr, integers ? 100 : -1, group_size, counted ? groups : 0,
                             scales_at, units_at, integers ? offsets_at : 0, panel_bytes};
    auto x = numbers<float>(from, m * k), bias = numbers<float>(from, n);
    Floats y(m * n);
    const LinearArgs args{x.begin(), weight.begin(), bias.begin(), y.begin(), m, n, k, n, Dtype::kFloat32, &layout, 4,
                          rows_per_unit, 1, nullptr};
    FORERUN_CALL(run, coded, args, divide_up(m, rows_per_unit));
    run.print(join("coded", {m, k, nibbles, counted, integers}), y);
    Array<int64_t> ids(7, [&](int64_t) { return from.below(n); });
    Floats rows(7 * k);
    const EmbeddingArgs table{ids.begin(), weight.begin(), rows.begin(), 7, k, n, Dtype::kFloat32, true, &layout};
    FORERUN_CALL(run, embedding, table, 7);
    run.print(join("coded-rows", {m, k, nibbles, counted, integers}), rows);
}

void run_all_coded(Run& run) {
    for (int64_t m = 1; m <= 9; ++m) run_coded(run, m, 300, m % 2 == 0, m % 4 < 2);
    run_coded(run, 29, 256, false, false);
    run_coded(run, 29, 255, false, true);
    for (bool nibbles : {false, true}) run_coded(run, 29, 300, nibbles, false, true);
}

void run_all_linear(Run& run) {
    for (int64_t m = 1; m <= 9; ++m) {
        run_linear<float>(run, m, 150, 131, 24);
        run_linear<uint16_t>(run, m, 150, 131, 24);
    }
    run_linear<float>(run, 29, 40, 300, 24);
    run_linear<uint16_t>(run, 29, 40, 299, 24);
}

template <class T>
void run_embedding(Run& run, int64_t v, int64_t h) {
    Generator from{static_cast<uint64_t>(v * h)};
    auto table = numbers<T>(from, v * h);
    auto panels = packed<T>(run, table, v, h);
    Array<int64_t> ids(7, [&](int64_t) { return from.below(v); });
    for (bool is_packed : {false, true}) {
        Floats y(7 * h);
        const void* at = is_packed ? panels.begin() : table.begin();
        FORERUN_CALL(run, embedding, (EmbeddingArgs{ids.begin(), at, y.begin(), 7, h, v, kDtype<T>, is_packed, nullptr}), 7);
        run.print(join("embedding", {h, is_packed}) + "-" + kDtypeName<T>, y);
    }
}

// Numbers that rows of activations seldom hold: not finite, tiny, halves, zeros of both signs.
void put_oddities(Floats& x) {
    const float odd[] = {std::numeric_limits<float>::infinity(), 88.5f, -104.0f, -0.0f, 0x1p-130f, 0.5f, -1.5f,
                         std::numeric_limits<float>::quiet_NaN(), 3e38f, -std::numeric_limits<float>::infinity()};
    float* to = x.begin();
    for (float number : odd) *to++ = number;
}

void run_rowwise(Run& run, int64_t h) {
    constexpr int64_t m = 3;
    Generator from{static_cast<uint64_t>(h)};
    auto x = numbers<float>(from, m * h), residual = numbers<float>(from, m * h), weight = numbers<float>(from, h);
    Floats y(m * h), gated(m * h), both = numbers<float>(from, 2 * m * h);
    FORERUN_CALL(run, rms_norm, (NormArgs{x.begin(), nullptr, weight.begin(), y.begin(), m, h, 1e-5f, false}), m);
    run.print(join("rms_norm", {h}), y);
    FORERUN_CALL(run, rms_norm, (NormArgs{x.begin(), residual.begin(), weight.begin(), y.begin(), m, h, 1e-5f, false}), m);
    run.print(join("rms_norm-residual", {h}), y, residual);
    FORERUN_CALL(run, rms_norm, (NormArgs{x.begin(), nullptr, weight.begin(), y.begin(), m, h, 1e-5f, true}), m);
    run.print(join("rms_norm-centered", {h}), y);
    FORERUN_CALL(run, add_rows, (AddArgs{x.begin(), y.begin(), m, h}), m);
    run.print(join("add_rows", {h}), y);
    put_oddities(both);
    for (float cap : {0.0f, 30.0f}) {
        FORERUN_CALL(run, scaled, (ScaledArgs{both.begin(), gated.begin(), m, h, 1.3f, cap, 48}), m * divide_up(h, 48));
        run.print(join("scaled", {h, cap > 0.0f}), gated);
    }
    for (Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kSigmoid, Activation::kSiluWithin7,
                                  Activation::kSquaredRelu}) {
        FORERUN_CALL(run, gated_act, (GatedArgs{both.begin(), gated.begin(), m, h, activation, 48}), m * divide_up(h, 48));
        run.print(join("gated_act", {h, static_cast<int64_t>(activation)}), gated);
    }
}

template <class T>
void run_rope(Run& run, int64_t d, int64_t rotary, bool normed, bool interleaved) {
    constexpr int64_t m = 4, b = 8, num_blocks = 3, positions_end = 50;
    const Heads heads{4, 2, d, rotary, interleaved};
    Generator from{static_cast<uint64_t>(d + rotary)};
    auto qkv = numbers<float>(from, m * heads.row_size()), angles = numbers<float>(from, positions_end * rotary);
    auto q_norm = numbers<float>(from, d), k_norm = numbers<float>(from, d);
    const int64_t rows = num_blocks * b * heads.num_kv;
    auto keys = numbers<T>(from, rows * d), values = numbers<T>(from, rows * d);
    auto key_scales = numbers<float>(from, rows), value_scales = numbers<float>(from, rows);
    Array<int32_t> positions(m, [&](int64_t) { return from.below(positions_end); });
    Array<int32_t> slots(m, [&](int64_t i) { return 5 * i + 1; });
    const KV kv{keys.begin(), values.begin(), key_scales.begin(), value_scales.begin(), b, kDtype<T>};
    const RopeArgs args{qkv.begin(), heads, angles.begin(), positions.begin(), slots.begin(), kv,
                        normed ? q_norm.begin() : nullptr, normed ? k_norm.begin() : nullptr, 1e-6f, m, positions_end,
                        num_blocks};
    FORERUN_CALL(run, rope_and_cache, args, m);
    run.print(join("rope_and_cache", {d, rotary, normed, interleaved}) + "-" + kDtypeName<T>, qkv, keys, values, key_scales,
              value_scales);
}

template <class T>
void run_latent_rope(Run& run, bool interleaved) {
    constexpr int64_t m = 3, num_heads = 3, rank = 40, rope_dim = 16, d = rank + rope_dim, b = 8, positions_end = 50;
    Generator from{1};
    auto queries = numbers<float>(from, m * num_heads * d), latents = numbers<float>(from, m * d);
    auto angles = numbers<float>(from, positions_end * rope_dim), norm = numbers<float>(from, rank);
    auto values = numbers<T>(from, 2 * b * d);
    Array<int32_t> positions(m, [&](int64_t) { return from.below(positions_end); });
    Array<int32_t> slots(m, [&](int64_t i) { return 4 * i + 2; });
    const KV kv{nullptr, values.begin(), nullptr, nullptr, b, kDtype<T>};
    const LatentRopeArgs args{queries.begin(), latents.begin(), num_heads, rank, rope_dim, interleaved, angles.begin(),
                              positions.begin(), slots.begin(), kv, norm.begin(), 1e-6f, m, positions_end, 2};
    FORERUN_CALL(run, latent_rope, args, m);
    run.print(join("latent_rope", {interleaved}) + "-" + kDtypeName<T>, queries, latents, values);
}

void run_route(Run& run, int64_t e, int64_t num_groups, bool sigmoid) {
    constexpr int64_t m = 5;
    Generator from{static_cast<uint64_t>(e)};
    auto logits = numbers<float>(from, m * e), correction = numbers<float>(from, e);
    Floats y(m * e), scratch(m * 3 * e);
    const RouteArgs args{logits.begin(), sigmoid ? correction.begin() : nullptr, y.begin(), m, e, 3, num_groups,
                         (num_groups + 1) / 2, sigmoid, sigmoid, 1.25f, 1e-20f, scratch.begin()};
    FORERUN_CALL(run, route, args, m);
    run.print(join("route", {e, num_groups, sigmoid}), y);
}

// Rows of two sequences: prefixes of 300 and 37 keys, then trees.
struct Rows {
    static constexpr int64_t kNum = 8, kMaxBlocks = 64, kMaxVisible = 310;
    Array<int32_t> seq_ids{kNum}, prefix_lens{kNum}, tree_starts{2}, block_tables{2 * kMaxBlocks};
    Array<int64_t> tree_masks{kNum};

    Rows() {
        const int64_t masks[kNum] = {0x1, 0x3, 0x7, 0x9, 0x19, 0x1, 0x5, 0x0};  // a chain, branches, no tree
        for (int64_t i = 0; i < kNum; ++i) {
            seq_ids[i] = i >= 5;
            prefix_lens[i] = i < 5 ? 300 : 37;
            tree_masks[i] = masks[i];
        }
        tree_starts[0] = 300;
        tree_starts[1] = 37;
        for (int64_t i = 0; i < 2 * kMaxBlocks; ++i) block_tables[i] = static_cast<int32_t>(i * 5 % (2 * kMaxBlocks));
    }
};

struct AttentionCase {
    int64_t num_q, num_kv, head_dim, value_dim, block_size, window, rows_per_unit;
    bool latent;  // keys and values are the same vectors
    int64_t chunk = 0;
    bool sinks = false;
    float cap = 0.0f;
};

template <class T>
void run_attention(Run& run, const AttentionCase& c) {
    Generator from{static_cast<uint64_t>(c.head_dim * c.num_q + c.window)};
    Rows rows;
    const int64_t entries = 2 * Rows::kMaxBlocks * c.block_size * (c.latent ? 1 : c.num_kv);
    auto keys = numbers<T>(from, entries * c.head_dim), values = numbers<T>(from, entries * c.head_dim);
    auto key_scales = numbers<float>(from, entries), value_scales = numbers<float>(from, entries);
    auto qkv = numbers<float>(from, Rows::kNum * c.num_q * c.head_dim);
    auto sinks = numbers<float>(from, c.num_q);
    Floats y(Rows::kNum * c.num_q * c.value_dim), split_y(Rows::kNum * c.num_q * c.value_dim);
    const bool scaled = sizeof(T) == 1;
    const KV kv{c.latent ? nullptr : keys.begin(), values.begin(), scaled ? key_scales.begin() : nullptr,
                scaled ? value_scales.begin() : nullptr, c.block_size, kDtype<T>};
    const int64_t max_splits = divide_up(Rows::kMaxVisible, kAttentionSplit);
    const Heads heads{c.num_q, c.num_kv, c.head_dim, 0, false};
    AttentionArgs args{qkv.begin(), y.begin(), heads, c.value_dim, c.num_q * c.head_dim, kv, rows.seq_ids.begin(),
                       rows.prefix_lens.begin(), rows.tree_masks.begin(), rows.tree_starts.begin(),
                       rows.block_tables.begin(), Rows::kMaxBlocks, 0.125f, c.window, c.chunk, c.sinks ? sinks.begin() : nullptr,
                       Rows::kNum, Rows::kMaxVisible, max_splits, c.rows_per_unit, nullptr, c.cap};
    const std::string sizes =
        join("", {c.num_q, c.head_dim, c.block_size, c.window, c.chunk, c.cap > 0.0f}) + "-" + kDtypeName<T>;
    const int64_t pairs = divide_up(Rows::kNum, c.rows_per_unit) * c.num_kv;
    FORERUN_CALL(run, attention, args, pairs);
    run.print("attention" + sizes, y);
    Floats partials(Rows::kNum * c.num_q * max_splits * (c.value_dim + 2));
    args.y = split_y.begin();
    args.partials = partials.begin();
    FORERUN_CALL(run, attention_split, args, pairs * max_splits);
    FORERUN_CALL(run, attention_combine, args, Rows::kNum * c.num_kv);
    run.print("attention_split" + sizes, split_y);
}

void run_all_attention(Run& run) {
    const AttentionCase plain{6, 2, 80, 80, 16, 0, 4, false}, odd{3, 1, 44, 44, 5, 0, 2, false};
    const AttentionCase windowed{2, 2, 32, 32, 8, 70, 1, false}, latent{4, 1, 56, 40, 8, 0, 3, true};
    const AttentionCase sunk{4, 2, 64, 64, 16, 40, 4, false, 0, true}, chunked{2, 1, 64, 64, 16, 0, 4, false, 64};
    const AttentionCase capped{4, 2, 64, 64, 16, 0, 4, false, 0, false, 5.0f}, wide{3, 1, 300, 300, 16, 0, 4, false};
    for (const AttentionCase& c : {plain, odd, windowed, sunk, chunked, capped, wide}) {
        run_attention<float>(run, c);
        run_attention<uint16_t>(run, c);
        run_attention<int8_t>(run, c);
    }
    run_attention<float>(run, latent);
    run_attention<uint16_t>(run, latent);
    run_attention<float>(run, {2, 1, 288, 288, 16, 0, 8, false});
}

void run_gumbel(Run& run, int64_t v, int64_t k, double temperature) {
    constexpr int64_t r = 3;
    Generator from{static_cast<uint64_t>(v + k)};
    const int64_t part_size = v < 20000 ? divide_up(v, 64) * 64 : 16384, parts = divide_up(v, part_size);
    Floats logits(r * v, [&](int64_t) { return 4.0f * from.number(); }), maxima(r * parts);
    Array<double> temperatures(r, [&](int64_t) { return temperature; }), scores(r * parts * k);
    Array<int64_t> seeds(r, [&](int64_t) { return from.next(); }), positions(r, [&](int64_t) { return from.next(); });
    Array<int64_t> streams(r, [](int64_t i) { return i; }), ids(r * parts * k);
    const GumbelArgs args{logits.begin(), nullptr, temperatures.begin(), seeds.begin(), positions.begin(), streams.begin(),
                          r, v, k, parts, part_size, maxima.begin(), ids.begin(), scores.begin()};
    FORERUN_CALL(run, gumbel_maxima, args, r * parts);
    FORERUN_CALL(run, gumbel_search, args, r * parts);
    run.print(join("gumbel", {v, k, static_cast<int64_t>(10 * temperature)}), maxima, ids, scores);
}

struct GroupedCase {
    int64_t m, n, k, group_size;
    int storage;
    ScaleKind scales;
    bool offsets, order;
    bool tabled = false;
    int run = 0, point_bits = 0, signs = 0;  // of a grid
};

void run_grouped(Run& run, const GroupedCase& c) {
    constexpr uint8_t kTable[16] = {3, 250, 128, 127, 0, 255, 1, 77, 200, 90, 31, 164, 140, 111, 12, 222};
    const bool paired = c.scales >= ScaleKind::kOddNibbles;
    const bool counted = c.scales == ScaleKind::kBytes || c.scales == ScaleKind::kNibbles || paired;
    Generator from{static_cast<uint64_t>(c.m * c.k + c.storage)};
    Array<uint16_t> points(c.run ? 1 << c.point_bits : 0, [&](int64_t) { return from.below(1 << 16) & 0x7777; });
    const GridLayout grid = c.run ? grid_layout(points.begin(), c.run, c.point_bits, c.signs) : GridLayout{};
    const GroupedLayout layout = grouped_layout(c.k, c.group_size, c.storage, c.scales, c.offsets, counted ? 8 : 1,
                                                c.tabled ? kTable : nullptr, c.run ? 0.125f : 1.0f, grid);
    Array<uint16_t> numbers_of_points(c.n * c.k, [&](int64_t) { return c.run ? from.below(1 << c.point_bits) : 0; });
    const int64_t panels = divide_up(c.n, kLanes), rows_per_unit = 48, groups = c.n * layout.num_groups;
    Array<uint8_t> codes(c.n * c.k, [&](int64_t) { return from.below(1 << c.storage); });
    Array<uint8_t> weight(panels * layout.panel_bytes);
    Array<uint16_t> halves(groups, [&](int64_t) { return 0x1000 + from.below(0x1000); });
    auto floats = numbers<float>(from, groups), x = numbers<float>(from, c.m * c.k), bias = numbers<float>(from, c.n);
    if (c.m == 5) put_oddities(x);
    Array<int64_t> order(c.k, [&](int64_t i) { return (i * 7 + 3) % c.k; });
    Array<uint8_t> counts(groups, [&](int64_t) { return from.below(256); });
    Array<uint8_t> powers(groups, [&](int64_t i) { return i % 50 ? 96 + from.below(64) : i / 50 % 2; });
    Array<uint8_t> floats8(groups, [&](int64_t) { return from.below(127); });
    const void* all[] = {floats.begin(), halves.begin(),  counts.begin(), counts.begin(),
                         powers.begin(), floats8.begin(), counts.begin(), counts.begin()};
    const void* scales = all[static_cast<int>(c.scales)];
    const void* units = counted ? halves.begin() : nullptr;
    const void* offsets = c.offsets && c.scales != ScaleKind::kNibbles && !paired ? scales : nullptr;
    const void* offset_units = c.offsets && !paired ? units : nullptr;
    pack_grouped_panels({codes.begin(), scales, offsets, units, offset_units, numbers_of_points.begin(), weight.begin(), c.n,
                         c.k, layout}, 0, panels);
    const int64_t row_words = divide_up(layout.k_padded, 64) * 16;
    const int64_t section = c.m < 4 ? divide_up(c.k, layout.group_size) * layout.group_size : 2 * layout.group_size;
    Array<int32_t> words(c.m * row_words);
    Floats steps(c.m * layout.num_steps * 3), y(c.m * c.n);
    const GroupedArgs args{x.begin(), weight.begin(), bias.begin(), y.begin(), c.order ? order.begin() : nullptr, c.m,
                           c.n, c.k, (1 << c.storage) / 2, layout, 2, rows_per_unit, 2, section, c.m, row_words,
                           words.begin(), steps.begin()};
    FORERUN_CALL(run, grouped_quantize, args, divide_up(c.k, section));
    FORERUN_CALL(run, grouped, args, divide_up(panels, 2) * divide_up(c.m, rows_per_unit));
    const int64_t kind = static_cast<int64_t>(c.scales);
    const std::string name = join("grouped", {c.m, c.k, c.group_size, c.storage, kind, c.offsets, c.order, c.tabled});
    run.print(name + join("", {c.run, c.point_bits, c.signs}), y);
}

void run_all_grouped(Run& run) {
    constexpr ScaleKind kFloat = ScaleKind::kFloat32, kHalf = ScaleKind::kFloat16, kBytes = ScaleKind::kBytes;
    for (int storage : {2, 3, 4, 5, 6, 8}) {
        for (int64_t m = 1; m <= 6; ++m) run_grouped(run, {m, 50, 288, 32, storage, kHalf, m % 2 == 0, false});
        run_grouped(run, {3, 37, 271, 16, storage, kFloat, true, true});
        run_grouped(run, {13, 40, 512, 256, storage, kHalf, false, false});
        run_grouped(run, {17, 16, 128, 128, storage, kFloat, storage == 4, false});
        for (int64_t m : {1, 5, 9, 12}) run_grouped(run, {m, 50, 512, 32, storage, kBytes, m == 5, false});
        run_grouped(run, {4, 50, 512, 16, storage, ScaleKind::kNibbles, true, false});
    }
    for (ScaleKind by : {kHalf, kBytes, ScaleKind::kPowers}) run_grouped(run, {6, 50, 512, 32, 4, by, false, false, true});
    run_grouped(run, {6, 50, 512, 16, 4, ScaleKind::kFloat8, false, false, true});
    constexpr ScaleKind kOdd = ScaleKind::kOddNibbles, kSigned = ScaleKind::kSignedNibbles;
    for (int64_t m : {1, 3, 13}) {
        run_grouped(run, {m, 50, 768, 32, 4, kOdd, false, false, true, 8, 8, 7});
        run_grouped(run, {m, 50, 768, 16, 4, kOdd, false, false, true, 8, 10, 8});
        run_grouped(run, {m, 50, 768, 32, 4, kOdd, false, false, true, 4, 8, 7});
        run_grouped(run, {m, 50, 768, 32, 4, kOdd, false, false, true, 4, 9, 8});
        run_grouped(run, {m, 50, 768, 32, 2, kSigned, true, false, false, 8, 11, 0});
        run_grouped(run, {m, 50, 768, 256, 2, kHalf, false, false, false, 8, 13, 0});
        run_grouped(run, {m, 50, 768, 16, 4, kOdd, false, false, true, 8, 11, 1});
    }
}

bool run_all(const KernelTable& table) {
    Run run(table);
    run_all_linear(run);
    run_all_coded(run);
    run_embedding<float>(run, 30, 33);
    run_embedding<uint16_t>(run, 30, 33);
    for (int64_t h : {61, 64}) run_rowwise(run, h);
    run_rope<float>(run, 40, 24, true, false);
    run_rope<float>(run, 40, 24, true, true);
    run_rope<uint16_t>(run, 40, 40, false, true);
    run_rope<int8_t>(run, 40, 40, true, false);
    for (bool interleaved : {false, true}) {
        run_latent_rope<float>(run, interleaved);
        run_latent_rope<uint16_t>(run, interleaved);
    }
    for (int64_t value_dim : {40, 64}) run_recurrent(run, value_dim);
    run_route(run, 20, 1, false);
    run_route(run, 24, 4, true);
    run_all_attention(run);
    for (double temperature : {0.0, 0.3, 1.0}) {
        run_gumbel(run, 1000, 1, temperature);
        run_gumbel(run, 20011, 5, temperature);
    }
    run_all_grouped(run);
    return run.complete();
}

}  // namespace
}  // namespace forerun

int main() {
    bool complete = true;
    for (const auto find : forerun::kKernelTables) {
        if (const forerun::KernelTable* table = find()) complete = forerun::run_all(*table) && complete;
    }
    return complete ? 0 : 1;
}
