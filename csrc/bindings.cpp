// The only file here that knows Python: addresses and sizes in, engine calls out.
// Tensors arrive as integers (tensor.data_ptr()), which costs a tenth of converting array objects; the Python side
// (src/forerun/kernels/cpu/backend.py) checks dtypes, shapes and contiguity before it hands over an address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu_engine.h"

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

// An index outside its table would read or write foreign memory: refuse it here.
template <class T>
void check_range(const char* what, const T* values, int64_t num, int64_t limit) {
    for (int64_t i = 0; i < num; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            throw std::out_of_range(std::string(what) + " " + std::to_string(values[i]) + " is outside 0 .. " +
                                    std::to_string(limit - 1));
        }
    }
}

void pack(CpuEngine& engine, Address weight, Address packed, int64_t n, int64_t k, int dtype) {
    call(n * k, [&] { engine.pack({at<void>(weight), at<void>(packed), n, k, Dtype{dtype}}); });
}

void linear(CpuEngine& engine, Address x, Address weight, Address bias, Address y, int64_t m, int64_t n, int64_t k,
            int dtype) {
    LinearArgs args{at<float>(x), at<void>(weight), at<float>(bias), at<float>(y), m, n, k, Dtype{dtype}, 0, 0};
    call(m * n * k, [&] { engine.linear(args); });
}

void norm(CpuEngine& engine, Address x, Address residual, Address weight, Address bias, Address y, int64_t m, int64_t h,
          float eps, bool subtract_mean) {
    const NormArgs args{at<float>(x), at<float>(residual), at<float>(weight), at<float>(bias), at<float>(y), m, h, eps};
    call(m * h, [&] { engine.norm(args, subtract_mean); });
}

void gated_act(CpuEngine& engine, Address x, Address y, int64_t m, int64_t f, int activation) {
    call(m * f * 4, [&] { engine.gated_act({at<float>(x), at<float>(y), m, f, Activation{activation}}); });
}

void embedding(CpuEngine& engine, Address ids, Address table, Address y, int64_t m, int64_t h, int64_t vocab_size,
               int dtype) {
    check_range("token id", at<int64_t>(ids), m, vocab_size);
    call(m * h, [&] { engine.embedding({at<int64_t>(ids), at<void>(table), at<float>(y), m, h, Dtype{dtype}}); });
}

void rope_and_cache(CpuEngine& engine, Address qkv, int64_t num_q, int64_t num_kv, int64_t head_dim, int64_t rotary_dim,
                    Address table, int64_t max_position, Address positions, Address slots, Address keys, Address values,
                    int64_t num_blocks, int64_t block_size, int dtype, Address q_norm, Address k_norm, float eps,
                    int64_t m) {
    check_range("position", at<int32_t>(positions), m, max_position);
    check_range("cache slot", at<int32_t>(slots), m, num_blocks * block_size);
    const Heads heads{num_q, num_kv, head_dim, rotary_dim};
    const KV kv{at<void>(keys), at<void>(values), block_size, Dtype{dtype}};
    const RopeArgs args{at<float>(qkv),     heads, at<float>(table),  at<int32_t>(positions),
                        at<int32_t>(slots), kv,    at<float>(q_norm), at<float>(k_norm),
                        eps,                m};
    call(m * heads.row_size(), [&] { engine.rope_and_cache(args); });
}

void attention(CpuEngine& engine, Address qkv, Address y, int64_t num_q, int64_t num_kv, int64_t head_dim, Address keys,
               Address values, int64_t block_size, int dtype, Address seq_ids, Address prefix_lens, Address tree_masks,
               Address tree_starts, Address block_tables, int64_t max_blocks, float scale, int64_t window, int64_t m,
               int64_t max_visible) {
    const AttentionArgs args{at<float>(qkv),
                             at<float>(y),
                             {num_q, num_kv, head_dim, 0},
                             {at<void>(keys), at<void>(values), block_size, Dtype{dtype}},
                             at<int32_t>(seq_ids),
                             at<int32_t>(prefix_lens),
                             at<int64_t>(tree_masks),
                             at<int32_t>(tree_starts),
                             at<int32_t>(block_tables),
                             max_blocks,
                             scale,
                             window,
                             m,
                             0,
                             nullptr};
    call(m * num_q * head_dim * max_visible * 2, [&] { engine.attention(args, max_visible); });
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

void move_rows(CpuEngine&, Address keys, Address values, int64_t block_size, int dtype, int64_t num_kv,
               int64_t head_dim, Address sources, Address targets, int64_t num) {
    CpuEngine::move_rows({at<void>(keys), at<void>(values), block_size, Dtype{dtype}}, num_kv, head_dim,
                         at<int32_t>(sources), at<int32_t>(targets), num);
}

}  // namespace
}  // namespace forerun

NB_MODULE(_native, module) {
    using namespace forerun;
    module.attr("LANES") = kLanes;
    module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    module.attr("MAX_HEADS_PER_GROUP") = kMaxHeadsPerGroup;
    module.def("available_isas", &CpuEngine::available);
    nb::class_<CpuEngine>(module, "CpuEngine")
        .def(nb::init<int, const std::string&>())
        .def_prop_ro("isa", [](const CpuEngine& engine) { return std::string(engine.isa()); })
        .def_prop_ro("num_threads", &CpuEngine::num_threads)
        .def("pack", &pack)
        .def("linear", &linear)
        .def("norm", &norm)
        .def("gated_act", &gated_act)
        .def("embedding", &embedding)
        .def("rope_and_cache", &rope_and_cache)
        .def("attention", &attention)
        .def("gumbel", &gumbel)
        .def("move_rows", &move_rows);
}
