// The only file here that knows Python: addresses and sizes in, engine calls out.
// Tensors arrive as integers (tensor.data_ptr()), which costs a tenth of converting array objects; the Python side
// (src/forerun/kernels/cpu/backend.py) checks dtypes, shapes and contiguity before it hands over an address.
//
// An op that may be part of a forward pass is bound twice under one name and with the same arguments: on CpuEngine it
// runs, on Program it is recorded.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "chain.h"
#include "cpu_engine.h"
#include "memory.h"
#include "program.h"
#include "suffix_text.h"

namespace nb = nanobind;

namespace forerun {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Multiply-adds above which an op gives the interpreter lock away; giving it away costs more than a short op.
constexpr int64_t kLongOp = 1 << 21;

template <class Call>
void call(int64_t work, Call body) {
    if (work < kLongOp) return body();
    const nb::gil_scoped_release released;
    body();
}

LinearArgs linear(Address x, Address weight, Address bias, Address y, int64_t m, int64_t n, int64_t k, int dtype) {
    return {at<float>(x), at<void>(weight), at<float>(bias), at<float>(y), m, n, k, Dtype{dtype}, 0, 0, nullptr};
}

GroupedArgs grouped(Address x, Address weight, Address bias, Address y, Address order, int64_t m, int64_t n, int64_t k,
                    int64_t group_size, int storage, bool half, bool has_offsets, int64_t zero) {
    GroupedArgs args{};
    args.x = at<float>(x);
    args.weight = at<uint8_t>(weight);
    args.bias = at<float>(bias);
    args.y = at<float>(y);
    args.order = at<int64_t>(order);
    args.m = m;
    args.n = n;
    args.k = k;
    args.zero = zero;
    args.layout = grouped_layout(k, group_size, storage, half, has_offsets);
    return args;
}

NormArgs norm(Address x, Address residual, Address weight, Address bias, Address y, int64_t m, int64_t h, float eps,
              bool subtract_mean) {
    return {at<float>(x), at<float>(residual), at<float>(weight), at<float>(bias), at<float>(y), m, h, eps,
            subtract_mean};
}

GatedArgs gated_act(Address x, Address y, int64_t m, int64_t f, int activation) {
    return {at<float>(x), at<float>(y), m, f, Activation{activation}};
}

EmbeddingArgs embedding(Address ids, Address table, Address y, int64_t m, int64_t h, int64_t v, int dtype,
                        bool packed) {
    return {at<int64_t>(ids), at<void>(table), at<float>(y), m, h, v, Dtype{dtype}, packed};
}

SelectArgs select_rows(Address x, Address row_ids, Address y, int64_t r, int64_t h) {
    return {at<float>(x), at<int64_t>(row_ids), at<float>(y), r, h};
}

ColumnsArgs copy_columns(Address x, Address y, int64_t m, int64_t width, int64_t x_stride, int64_t x_first,
                         int64_t y_stride, int64_t y_first) {
    return {at<float>(x), at<float>(y), m, width, x_stride, x_first, y_stride, y_first};
}

AddArgs add(Address x, Address y, int64_t m, int64_t h) { return {at<float>(x), at<float>(y), m, h}; }

FillArgs fill(Address y, int64_t m, int64_t h, float value) { return {at<float>(y), m, h, value}; }

ScatterArgs scatter_columns(Address x, Address ids, Address y, int64_t m, int64_t n, int64_t h) {
    return {at<float>(x), at<int64_t>(ids), at<float>(y), m, n, h};
}

KV pool(Address keys, Address values, Address key_scales, Address value_scales, int64_t block_size, int dtype) {
    return {at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales), block_size, Dtype{dtype}};
}

RopeArgs rope_and_cache(Address qkv, int64_t num_q, int64_t num_kv, int64_t head_dim, int64_t rotary_dim, Address table,
                        int64_t max_position, Address positions, Address slots, Address keys, Address values,
                        Address key_scales, Address value_scales, int64_t block_size, int dtype, int64_t num_blocks,
                        Address q_norm, Address k_norm, float eps, int64_t m) {
    return {at<float>(qkv),
            {num_q, num_kv, head_dim, rotary_dim},
            at<float>(table),
            at<int32_t>(positions),
            at<int32_t>(slots),
            pool(keys, values, key_scales, value_scales, block_size, dtype),
            at<float>(q_norm),
            at<float>(k_norm),
            eps,
            m,
            max_position,
            num_blocks * block_size};
}

AttentionArgs attention(Address qkv, Address y, int64_t num_q, int64_t num_kv, int64_t head_dim, Address keys,
                        Address values, Address key_scales, Address value_scales, int64_t block_size, int dtype,
                        Address seq_ids, Address prefix_lens, Address tree_masks, Address tree_starts,
                        Address block_tables, int64_t max_blocks, float scale, int64_t window, int64_t m,
                        int64_t max_visible) {
    return {at<float>(qkv),
            at<float>(y),
            {num_q, num_kv, head_dim, 0},
            head_dim,
            (num_q + 2 * num_kv) * head_dim,
            pool(keys, values, key_scales, value_scales, block_size, dtype),
            at<int32_t>(seq_ids),
            at<int32_t>(prefix_lens),
            at<int64_t>(tree_masks),
            at<int32_t>(tree_starts),
            at<int32_t>(block_tables),
            max_blocks,
            scale,
            window,
            m,
            max_visible,
            0,
            0,
            nullptr};
}

// Heads over a latent pool, cut into the fewest groups that the kernels take.
AttentionArgs latent_attention(Address queries, Address y, int64_t num_heads, int64_t rank, int64_t rope_dim,
                               Address latents, int64_t block_size, int dtype, Address seq_ids, Address prefix_lens,
                               Address tree_masks, Address tree_starts, Address block_tables, int64_t max_blocks,
                               float scale, int64_t m, int64_t max_visible) {
    int64_t groups = (num_heads + kMaxHeadsPerGroup - 1) / kMaxHeadsPerGroup;
    while (num_heads % groups != 0) ++groups;
    AttentionArgs args = attention(queries, y, num_heads, groups, rank + rope_dim, 0, latents, 0, 0, block_size, dtype,
                                   seq_ids, prefix_lens, tree_masks, tree_starts, block_tables, max_blocks, scale, 0, m,
                                   max_visible);
    args.value_dim = rank;
    args.q_stride = num_heads * (rank + rope_dim);
    return args;
}

LatentRopeArgs latent_rope(Address queries, Address latents, int64_t num_heads, int64_t rank, int64_t rope_dim,
                           bool interleaved, Address table, int64_t max_position, Address positions, Address slots,
                           Address pool_values, int64_t block_size, int dtype, int64_t num_blocks, Address norm,
                           float eps, int64_t m) {
    return {at<float>(queries),
            at<float>(latents),
            num_heads,
            rank,
            rope_dim,
            interleaved,
            at<float>(table),
            at<int32_t>(positions),
            at<int32_t>(slots),
            pool(0, pool_values, 0, 0, block_size, dtype),
            at<float>(norm),
            eps,
            m,
            max_position,
            num_blocks * block_size};
}

HeadLinearArgs linear_heads(Address x, Address weight, Address y, int64_t m, int64_t heads, int64_t n, int64_t k,
                            int64_t passed, int dtype) {
    return {at<float>(x), at<void>(weight), at<float>(y), m, heads, n, k, passed, Dtype{dtype}};
}

RouteArgs route(Address logits, Address correction, Address y, int64_t m, int64_t e, int64_t top_k, bool sigmoid,
                bool normalize, float scale, int64_t num_groups, int64_t top_groups) {
    return {at<float>(logits), at<float>(correction), at<float>(y), m,         e,     top_k,
            num_groups,        top_groups,            sigmoid,      normalize, scale, nullptr};
}

ExpertsArgs experts(Address x, Address weights, Address base, Address y, int64_t m, const ExpertBank* bank) {
    return {at<float>(x), at<float>(weights), at<float>(base), at<float>(y), m, bank};
}

void add_matrix(ExpertBank& bank, const ExpertMatrix& matrix, bool is_down) {
    (is_down ? bank.down : bank.gate_up).push_back(matrix);
}

void add_linear(ExpertBank& bank, bool is_down, Address weight, int64_t n, int64_t k, int dtype) {
    add_matrix(bank, {false, linear(0, weight, 0, 0, 0, n, k, dtype), {}}, is_down);
}

void add_grouped(ExpertBank& bank, bool is_down, Address weight, Address order, int64_t n, int64_t k,
                 int64_t group_size, int storage, bool half, bool has_offsets, int64_t zero) {
    const GroupedArgs args = grouped(0, weight, 0, 0, order, 0, n, k, group_size, storage, half, has_offsets, zero);
    add_matrix(bank, {true, {}, args}, is_down);
}

int64_t work_of(const LatentRopeArgs& args) { return args.m * (args.num_heads + 1) * (args.rank + args.rope_dim); }
int64_t work_of(const HeadLinearArgs& args) { return args.m * args.heads * args.n * args.k; }
int64_t work_of(const RouteArgs& args) { return args.m * args.e * args.top_k; }
int64_t work_of(const ExpertsArgs& args) { return args.m * args.bank->h * args.bank->f * 3; }
int64_t work_of(const LinearArgs& args) { return args.m * args.n * args.k; }
int64_t work_of(const GroupedArgs& args) { return args.m * args.n * args.k; }
int64_t work_of(const NormArgs& args) { return args.m * args.h; }
int64_t work_of(const GatedArgs& args) { return args.m * args.f * 4; }
int64_t work_of(const EmbeddingArgs& args) { return args.m * args.h; }
int64_t work_of(const SelectArgs& args) { return args.r * args.h; }
int64_t work_of(const ColumnsArgs& args) { return args.m * args.width; }
int64_t work_of(const AddArgs& args) { return args.m * args.h; }
int64_t work_of(const FillArgs& args) { return args.m * args.h; }
int64_t work_of(const ScatterArgs& args) { return args.m * args.n; }
int64_t work_of(const RopeArgs& args) { return args.m * args.heads.row_size(); }
int64_t work_of(const AttentionArgs& args) {
    return args.m * args.heads.num_q * args.heads.head_dim * args.max_visible * 2;
}

template <class Args, class... Given>
void bind_op(nb::class_<CpuEngine>& engine, nb::class_<Program>& program, const char* name, Args (*make)(Given...),
             void (CpuEngine::*op)(const Args&)) {
    engine.def(name, [make, op](CpuEngine& self, Given... given) {
        const Args args = make(given...);
        call(work_of(args), [&] { (self.*op)(args); });
    });
    program.def(name, [make, op](Program& self, Given... given) { self.add(make(given...), op); });
}

void pack(CpuEngine& engine, Address weight, Address packed, int64_t n, int64_t k, int dtype) {
    call(n * k, [&] { engine.pack({at<void>(weight), at<void>(packed), n, k, Dtype{dtype}}); });
}

int64_t grouped_bytes(int64_t n, int64_t k, int64_t group_size, int storage, bool half, bool has_offsets) {
    return (n + kLanes - 1) / kLanes * grouped_layout(k, group_size, storage, half, has_offsets).panel_bytes;
}

void pack_grouped(CpuEngine& engine, Address codes, Address scales, Address offsets, Address packed, int64_t n,
                  int64_t k, int64_t group_size, int storage, bool half) {
    const GroupedLayout layout = grouped_layout(k, group_size, storage, half, offsets != 0);
    const PackGroupedArgs args{at<uint8_t>(codes), at<void>(scales), at<void>(offsets), at<uint8_t>(packed), n, k,
                               layout};
    call(n * k, [&] { engine.pack_grouped(args); });
}

void gumbel(CpuEngine& engine, Address logits, Address temperatures, Address seeds, Address positions, Address streams,
            int64_t r, int64_t v, int64_t k, Address ids, Address scores) {
    GumbelArgs args{};
    args.logits = at<float>(logits);
    args.temperatures = at<double>(temperatures);
    args.seeds = at<int64_t>(seeds);
    args.positions = at<int64_t>(positions);
    args.streams = at<int64_t>(streams);
    args.r = r;
    args.v = v;
    args.k = k;
    call(r * v * 64, [&] { engine.gumbel(args, at<int64_t>(ids), at<double>(scores)); });
}

void move_rows(CpuEngine&, Address keys, Address values, Address key_scales, Address value_scales, int64_t block_size,
               int dtype, int64_t num_kv, int64_t head_dim, Address sources, Address targets, int64_t num) {
    CpuEngine::move_rows(pool(keys, values, key_scales, value_scales, block_size, dtype), num_kv, head_dim,
                         at<int32_t>(sources), at<int32_t>(targets), num);
}

void run_program(Program& program, const std::vector<Address>& addresses, int64_t rows, int64_t logit_rows,
                 int64_t max_blocks, int64_t max_visible) {
    const nb::gil_scoped_release released;
    program.run(addresses, {rows, logit_rows, max_blocks, max_visible});
}

void draft_chains(CpuEngine& engine, Program& first, Program& next, const std::vector<Address>& addresses,
                  int64_t rows, int64_t max_blocks, int64_t max_visible, Address temperatures, Address seeds,
                  Address streams, Address noise_positions, Address num_active, int64_t steps, int64_t r,
                  int64_t vocab, int64_t block_size, int64_t logits_step, Address ids, Address log_chances, int64_t shift,
                  int64_t features_step, int64_t num_rivals, double rivals_scale, double least) {
    const ChainArgs args{at<double>(temperatures), at<int64_t>(seeds),      at<int64_t>(streams),
                         at<int64_t>(noise_positions), at<int64_t>(num_active), steps, r, vocab, block_size,
                         logits_step, at<int64_t>(ids), at<double>(log_chances), shift, features_step,
                         num_rivals, rivals_scale, least};
    const nb::gil_scoped_release released;
    run_chains(engine, first, next, addresses, {rows, r, max_blocks, max_visible}, args);
}

void bind_suffix(nb::module_& module) {
    nb::class_<SuffixCorpus>(module, "SuffixCorpus")
        .def(nb::init<int64_t, int32_t>())
        .def_prop_ro("num_tokens", &SuffixCorpus::num_tokens)
        .def("add", &SuffixCorpus::add);
    nb::class_<SuffixText>(module, "SuffixText")
        .def(nb::init<int32_t, const SuffixCorpus*>(), nb::arg(), nb::arg().none(), nb::keep_alive<1, 3>())
        .def_prop_ro("size", &SuffixText::size)
        .def("extend", &SuffixText::extend)
        .def("copy", [](const SuffixText& self, int32_t shortest, int32_t longest, int32_t num) {
            const SuffixCopy copied = self.copy(shortest, longest, num);
            return nb::make_tuple(copied.length, copied.tokens);
        })
        .def("grow", [](SuffixText& self, int32_t max_nodes, double least) {
            nb::list guesses;
            for (const SuffixGuess& guess : self.grow(max_nodes, least))
                guesses.append(nb::make_tuple(guess.parent, guess.token, guess.chance));
            return guesses;
        });
}

}  // namespace
}  // namespace forerun

NB_MODULE(_native, module) {
    using namespace forerun;
    module.attr("LANES") = kLanes;
    module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    module.attr("MAX_HEADS_PER_GROUP") = kMaxHeadsPerGroup;
    module.def("grouped_bytes", &grouped_bytes);
    module.def("available_isas", &CpuEngine::available);
    module.def("prefer_huge_pages", [](Address address, size_t size) { prefer_huge_pages(at<void>(address), size); });

    nb::class_<CpuEngine> engine(module, "CpuEngine");
    engine.def(nb::init<int, const std::string&>())
        .def_prop_ro("isa", [](const CpuEngine& self) { return std::string(self.isa()); })
        .def_prop_ro("num_threads", &CpuEngine::num_threads)
        .def("pack", &pack)
        .def("pack_grouped", &pack_grouped)
        .def("gumbel", &gumbel)
        .def("draft_chains", &draft_chains)
        .def("stream_read", [](CpuEngine& self, Address data, int64_t size) {
            const nb::gil_scoped_release released;
            return self.stream_read(at<void>(data), size);
        })
        .def("move_rows", &move_rows);

    nb::class_<Program> program(module, "Program");
    program.def(nb::init<CpuEngine&>(), nb::keep_alive<1, 2>())
        .def_prop_ro("num_steps", &Program::num_steps)
        .def("bind", &Program::bind)
        .def("finish", &Program::finish)
        .def("run", &run_program);

    bind_suffix(module);

    bind_op(engine, program, "linear", &linear, &CpuEngine::linear);
    bind_op(engine, program, "grouped", &grouped, &CpuEngine::grouped);
    bind_op(engine, program, "norm", &norm, &CpuEngine::norm);
    bind_op(engine, program, "gated_act", &gated_act, &CpuEngine::gated_act);
    bind_op(engine, program, "embedding", &embedding, &CpuEngine::embedding);
    bind_op(engine, program, "select_rows", &select_rows, &CpuEngine::select_rows);
    bind_op(engine, program, "copy_columns", &copy_columns, &CpuEngine::copy_columns);
    bind_op(engine, program, "add", &add, &CpuEngine::add);
    bind_op(engine, program, "fill", &fill, &CpuEngine::fill);
    bind_op(engine, program, "scatter_columns", &scatter_columns, &CpuEngine::scatter_columns);
    bind_op(engine, program, "rope_and_cache", &rope_and_cache, &CpuEngine::rope_and_cache);
    bind_op(engine, program, "attention", &attention, &CpuEngine::attention);

    nb::class_<ExpertBank>(module, "ExpertBank")
        .def("__init__", [](ExpertBank* self, int64_t h, int64_t f, int activation) {
            new (self) ExpertBank{h, f, Activation{activation}, {}, {}};
        })
        .def("add_linear", &add_linear)
        .def("add_grouped", &add_grouped);
    bind_op(engine, program, "latent_attention", &latent_attention, &CpuEngine::attention);
    bind_op(engine, program, "latent_rope", &latent_rope, &CpuEngine::latent_rope);
    bind_op(engine, program, "linear_heads", &linear_heads, &CpuEngine::linear_heads);
    bind_op(engine, program, "route", &route, &CpuEngine::route);
    bind_op(engine, program, "experts", &experts, &CpuEngine::experts);
}
