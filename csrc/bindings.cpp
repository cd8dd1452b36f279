// Beside op_binding.h the only file here that knows Python: addresses and sizes in, engine calls out.
// Tensors arrive as integers (tensor.data_ptr()), which costs a tenth of converting array objects; the Python side
// (src/forerun/kernels/cpu/backend.py) checks dtypes, shapes and contiguity before it hands over an address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "batch_rows.h"
#include "chain.h"
#include "chain_step.h"
#include "memory.h"
#include "op_binding.h"
#include "own_time.h"
#include "suffix_text.h"
#include "tree_walk.h"

namespace forerun {
namespace {

void add_matrix(ExpertBank& bank, const ExpertMatrix& matrix, bool is_down) {
    (is_down ? bank.down : bank.gate_up).push_back(matrix);
}

void add_linear(ExpertBank& bank, bool is_down, Address bias, Address weight, int64_t n, int64_t k, int dtype,
                Address layout) {
    add_matrix(bank, {false, make<LinearArgs>(0, weight, bias, 0, 0, n, k, n, dtype, layout), {}}, is_down);
}

void add_grouped(ExpertBank& bank, bool is_down, Address bias, Address weight, Address order, int64_t n, int64_t k,
                 int64_t zero, const GroupedLayout& layout) {
    add_matrix(bank, {true, {}, make<GroupedArgs>(0, weight, bias, 0, order, 0, n, k, zero, layout)}, is_down);
}

void pack(CpuEngine& engine, Address weight, Address packed, int64_t n, int64_t k, int dtype) {
    Program::refuse("packing");
    call(n * k, [&] { engine.pack({at<void>(weight), at<void>(packed), n, k, Dtype{dtype}}); });
}

void pack_grouped(CpuEngine& engine, Address codes, Address scales, Address offsets, Address units,
                  Address offset_units, Address points, Address packed, int64_t n, int64_t k,
                  const GroupedLayout& layout) {
    Program::refuse("packing");
    const PackGroupedArgs args{at<uint8_t>(codes),     at<void>(scales),     at<void>(offsets),   at<void>(units),
                               at<void>(offset_units), at<uint16_t>(points), at<uint8_t>(packed), n, k, layout};
    call(n * k, [&] { engine.pack_grouped(args); });
}

void gumbel(CpuEngine& engine, Address logits, Address temperatures, Address seeds, Address positions, Address streams,
            int64_t r, int64_t v, int64_t k, Address ids, Address scores) {
    Program::refuse("drawing");
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

void move_rows(CpuEngine& engine, Address keys, Address values, Address key_scales, Address value_scales, int64_t block_size,
               int dtype, int64_t num_kv, int64_t head_dim, Address sources, Address targets, int64_t num) {
    Program::refuse("moving rows of a pool");
    const KV kv{at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales), block_size,
                Dtype{dtype}};
    engine.move_rows(kv, num_kv, head_dim, at<int32_t>(sources), at<int32_t>(targets), num);
}

// The numbers of a Python sequence; 64-bit words keep their bits.
std::vector<int64_t> numbers(PyObject* given) {
    const nb::object items = nb::steal(PySequence_Fast(given, "a sequence of numbers is needed"));
    if (!items.is_valid()) throw nb::python_error();
    const auto num = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
    std::vector<int64_t> found(num);
    for (size_t i = 0; i < num; ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
        found[i] = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(item));
    }
    if (PyErr_Occurred()) throw nb::python_error();
    return found;
}

void read(int64_t& field, PyObject* given) {
    field = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(given));  // a 64-bit seed keeps its bits
    if (field == -1 && PyErr_Occurred()) throw nb::python_error();
}
void read(double& field, PyObject* given) { field = nb::cast<double>(nb::handle(given)); }
void read(bool& field, PyObject* given) { field = nb::cast<bool>(nb::handle(given)); }
void read(std::vector<int64_t>& field, PyObject* given) { field = numbers(given); }
void read(std::vector<double>& field, PyObject* given) { field = nb::cast<std::vector<double>>(nb::handle(given)); }

// What a NamedTuple holds, field by field.
template <class... Fields>
void read_all(const nb::handle& given, Py_ssize_t first, Fields&... fields) {
    if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != first + Py_ssize_t{sizeof...(fields)})
        throw std::invalid_argument("a tuple of other fields was given");
    Py_ssize_t index = first;
    (read(fields, PyTuple_GET_ITEM(given.ptr(), index++)), ...);
}

BatchRows batch_of(const nb::sequence& given, int64_t block_size, int64_t shift) {
    std::vector<SequenceRows> sequences;
    for (const nb::handle each : given) {
        SequenceRows& rows = sequences.emplace_back();
        read_all(each, 1, rows.block_table, rows.start, rows.span, rows.tree_start, rows.tree_tokens, rows.tree_rows,
                 rows.tree_masks, rows.tree_depths, rows.span_logits);  // the first is the request's id
    }
    return {sequences, block_size, shift};
}

// Those of a batch and, behind them, those of outputs and features.
std::vector<Address> all_addresses(const BatchRows& batch, const std::vector<Address>& others) {
    std::vector<Address> addresses = batch.addresses();
    addresses.insert(addresses.end(), others.begin(), others.end());
    return addresses;
}

void run_batch(Program& program, const nb::sequence& sequences, int64_t block_size, int64_t shift,
               const std::vector<Address>& others) {
    const BatchRows batch = batch_of(sequences, block_size, shift);
    const std::vector<Address> addresses = all_addresses(batch, others);
    const nb::gil_scoped_release released;
    program.run(addresses, batch.sizes());
}

nb::list walk_plain_trees(CpuEngine& engine, Address logits, int64_t vocab, const nb::sequence& given) {
    Program::refuse("walking trees");
    std::vector<PlainTree> trees;
    for (const nb::handle each : given) {
        PlainTree& tree = trees.emplace_back();
        read_all(each, 0, tree.first_row, tree.tokens, tree.parents, tree.verified, tree.temperature, tree.seed,
                 tree.position, tree.stream);
    }
    std::vector<WalkedPath> paths;
    call(static_cast<int64_t>(trees.size()) * vocab * 64,
         [&] { paths = walk_trees(engine, at<float>(logits), vocab, trees); });
    nb::list found;
    for (const WalkedPath& path : paths) {
        found.append(nb::make_tuple(nb::tuple(nb::cast(path.nodes)), path.token));
    }
    return found;
}

// -> seconds of the pass, and of every chain how many drafts were accepted and the token behind them. None where there
// are more rows than `max_rows`, or a row of the logits allows no token. `states`: where the program's other outputs go.
nb::object chain_step_with_states(CpuEngine& engine, Program& program, const nb::sequence& given, int64_t block_size,
                                  Address logits, int64_t max_rows, int64_t vocab, const std::vector<Address>& states) {
    Program::refuse("walking trees");
    std::vector<PlainChain> chains;
    for (const nb::handle each : given) {
        PlainChain& chain = chains.emplace_back();
        read_all(each, 0, chain.block_table, chain.position, chain.tokens, chain.temperature, chain.seed, chain.stream);
        max_rows -= static_cast<int64_t>(chain.tokens.size());
    }
    if (max_rows < 0) return nb::none();
    ChainStep step;
    {
        const nb::gil_scoped_release released;
        step = run_chain_step(engine, program, chains, block_size, at<float>(logits), vocab, states);
    }
    nb::list found;
    for (const ChainChoice& choice : step.choices) {
        if (choice.token < 0) return nb::none();
        found.append(nb::make_tuple(choice.num_accepted, choice.token));
    }
    return nb::make_tuple(step.pass_s, found);
}

// The same for a program that gives logits and nothing else.
nb::object chain_step(CpuEngine& engine, Program& program, const nb::sequence& given, int64_t block_size, Address logits,
                      int64_t max_rows, int64_t vocab) {
    return chain_step_with_states(engine, program, given, block_size, logits, max_rows, vocab, {});
}

void run_program(Program& program, const std::vector<Address>& addresses, int64_t rows, int64_t logit_rows,
                 int64_t max_blocks, int64_t max_visible) {
    const nb::gil_scoped_release released;
    program.run(addresses, {rows, logit_rows, max_blocks, max_visible});
}

// What Python gives for chains to draft, in the order of ChainsGiven in src/forerun/runtime/recorded.py.
struct ChainsGiven {
    std::vector<double> temperatures;
    std::vector<int64_t> seeds, streams, positions, num_active;
    int64_t vocab, block_size, shift, logits_step, features_step, num_rivals;
    double rivals_scale, least;
    bool says_chances;

    ChainsGiven(const nb::handle& given) {
        read_all(given, 0, temperatures, seeds, streams, positions, num_active, vocab, block_size, shift, logits_step,
                 features_step, num_rivals, rivals_scale, least, says_chances);
    }
};

// The tokens of every chain, and the log chances of its paths.
nb::list drafted(const ChainArgs& args) {
    nb::list chains;
    for (int64_t i = 0; i < args.r; ++i) {
        nb::list tokens, log_chances;
        double path = 0.0;
        for (int64_t at = i; at < args.steps * args.r && args.ids[at] >= 0; at += args.r) {
            if (args.log_chances) path += std::min(args.log_chances[at], 0.0);
            tokens.append(args.ids[at]);
            log_chances.append(path);
        }
        chains.append(nb::make_tuple(tokens, log_chances));
    }
    return chains;
}

nb::list draft_chains(CpuEngine& engine, Program& first, Program& next, const nb::sequence& sequences,
                      const std::vector<Address>& others, const nb::handle& chains) {
    const ChainsGiven given(chains);
    const size_t steps = given.num_active.size(), num = given.seeds.size();
    std::vector<int64_t> ids(steps * num);
    std::vector<double> log_chances(given.says_chances ? ids.size() : 0);
    ChainArgs args{};
    args.temperatures = given.temperatures.data();
    args.seeds = given.seeds.data();
    args.streams = given.streams.data();
    args.noise_positions = given.positions.data();
    args.num_active = given.num_active.data();
    args.steps = static_cast<int64_t>(steps);
    args.r = static_cast<int64_t>(num);
    args.vocab = given.vocab;
    args.block_size = given.block_size;
    args.logits_step = given.logits_step;
    args.ids = ids.data();
    args.log_chances = given.says_chances ? log_chances.data() : nullptr;
    args.shift = given.shift;
    args.features_step = given.features_step;
    args.num_rivals = given.num_rivals;
    args.rivals_scale = given.rivals_scale;
    args.least = given.least;
    const BatchRows batch = batch_of(sequences, args.block_size, args.shift);
    const std::vector<Address> addresses = all_addresses(batch, others);
    {
        const nb::gil_scoped_release released;
        run_chains(engine, first, next, addresses, batch.sizes(), args);
    }
    return drafted(args);
}

// NotRecordable is a KernelError in Python.
void translate(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const NotRecordable& refusal) {
        PyErr_SetString(nb::module_::import_("forerun.errors").attr("KernelError").ptr(), refusal.what());
    }
}

void bind_suffix(nb::module_& module) {
    nb::class_<SuffixCorpus>(module, "SuffixCorpus")
        .def(nb::init<int64_t, int32_t>())
        .def_prop_ro("num_tokens", &SuffixCorpus::num_tokens)
        .def("add", &SuffixCorpus::add);
    nb::class_<SuffixStore>(module, "SuffixStore")
        .def("__init__",
             [](SuffixStore* made, Address tokens, Address order, int64_t size, nb::object) {
                 new (made) SuffixStore(at<int32_t>(tokens), at<int32_t>(order), size);
             },
             nb::keep_alive<1, 5>());  // the last argument owns the memory
    nb::class_<SuffixText>(module, "SuffixText")
        .def(nb::init<int32_t, const SuffixCorpus*, const SuffixStore*>(), nb::arg(), nb::arg().none(),
             nb::arg("store").none() = nb::none(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
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
    nb::set_leak_warnings(false);  // the command line leaves its modules to the end of the process (gc.freeze)
    module.attr("LANES") = kLanes;
    module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    module.attr("MAX_HEADS_PER_GROUP") = kMaxHeadsPerGroup;
    module.def("available_isas", &CpuEngine::available);
    module.def("own_time", &own_time);
    module.def("prefer_huge_pages", &prefer_huge_pages);
    module.def("spread_over_nodes", &spread_over_nodes);
    nb::register_exception_translator(&translate);
    nb::class_<CpuEngine> engine(module, "CpuEngine");
    engine.def(nb::init<int, const std::string&, const std::vector<ThreadPool::Cpus>&>())
        .def_prop_ro("isa", [](const CpuEngine& self) { return std::string(self.isa()); })
        .def_prop_ro("num_threads", &CpuEngine::num_threads)
        .def_prop_ro("num_jobs", &CpuEngine::num_jobs)
        .def("owned_panels", &CpuEngine::owned_panels);

    nb::class_<Program>(module, "Program")
        .def(nb::init<CpuEngine&>(), nb::keep_alive<1, 2>())
        .def_prop_ro("num_steps", &Program::num_steps)
        .def("record", &Program::record)
        .def("stop", &Program::stop)
        .def("bind", &Program::bind)
        .def("finish", &Program::finish)
        .def("run", &run_program)
        .def("run_batch", &run_batch);
    nb::class_<GroupedLayout>(module, "GroupedLayout")
        .def("__init__", [](GroupedLayout* self, int64_t k, int64_t group_size, int storage, int scales, bool offsets,
                            int64_t groups_a_unit, Address table, float unit_scale, Address points, int run,
                            int point_bits, int signs) {
            const GridLayout grid = points ? grid_layout(at<uint16_t>(points), run, point_bits, signs) : GridLayout{};
            new (self) GroupedLayout(grouped_layout(k, group_size, storage, ScaleKind{scales}, offsets, groups_a_unit,
                                                    at<uint8_t>(table), unit_scale, grid));
        })
        .def_ro("panel_bytes", &GroupedLayout::panel_bytes);
    nb::class_<ExpertBank>(module, "ExpertBank")
        .def("__init__", [](ExpertBank* self, int64_t h, int64_t f, int activation, bool scales_inputs) {
            new (self) ExpertBank{h, f, Activation{activation}, scales_inputs, {}, {}};
        })
        .def("add_linear", &add_linear).def("add_grouped", &add_grouped);
    bind_suffix(module);

    engine.def("pack", &pack).def("pack_grouped", &pack_grouped).def("gumbel", &gumbel)
        .def("draft_chains", &draft_chains).def("walk_trees", &walk_plain_trees)
        .def("chain_step", &chain_step)
        .def("chain_step_with_states", &chain_step_with_states)
        .def("stream_read", [](CpuEngine& self, Address data, int64_t size) {
            const nb::gil_scoped_release released;
            return self.stream_read(at<void>(data), size);
        }).def("move_rows", &move_rows);
    bind_op(engine, "linear", &CpuEngine::linear);
    bind_op(engine, "grouped", &CpuEngine::grouped);
    bind_op(engine, "grouped_rows", &CpuEngine::grouped_rows);
    bind_op(engine, "rms_norm", &CpuEngine::rms_norm);
    bind_op(engine, "gated_act", &CpuEngine::gated_act);
    bind_op(engine, "scaled", &CpuEngine::scaled);
    bind_op(engine, "embedding", &CpuEngine::embedding);
    bind_op(engine, "select_rows", &CpuEngine::select_rows);
    bind_op(engine, "copy_columns", &CpuEngine::copy_columns);
    bind_op(engine, "add", &CpuEngine::add);
    bind_op(engine, "fill", &CpuEngine::fill);
    bind_op(engine, "scatter_columns", &CpuEngine::scatter_columns);
    bind_op(engine, "rope_and_cache", &CpuEngine::rope_and_cache);
    bind_op(engine, "attention", &CpuEngine::attention);
    bind_op(engine, "latent_rope", &CpuEngine::latent_rope);
    bind_op(engine, "linear_heads", &CpuEngine::linear_heads);
    bind_op(engine, "route", &CpuEngine::route);
    bind_op(engine, "experts", &CpuEngine::experts);
    bind_op(engine, "causal_conv", &CpuEngine::causal_conv, false);
    bind_op(engine, "gated_delta", &CpuEngine::gated_delta, false);
}
