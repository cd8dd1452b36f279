// A layer's experts one after the other, each over the rows that chose it.
//
// A row's result adds up its experts in the order of their indices, product and sum rounded one by one, and an expert's
// output for a row does not depend on which other rows it is given (cpu_engine.h): so the sum is the row's own.
#include "experts.h"

#include <algorithm>

#include "cpu_engine.h"

namespace forerun {
namespace {

struct Rows {
    std::vector<int64_t> ids;

    void choose(const ExpertsArgs& args, int64_t expert) {
        ids.clear();
        for (int64_t row = 0; row < args.m; ++row) {
            if (args.weights[row * args.bank->size() + expert] != 0.0f) ids.push_back(row);
        }
    }
    int64_t size() const { return static_cast<int64_t>(ids.size()); }
    float weight(const ExpertsArgs& args, int64_t expert, int64_t at) const {
        return args.weights[ids[static_cast<size_t>(at)] * args.bank->size() + expert];
    }
    // What an expert reads [size, h]: the rows side by side, where they are or copied to `space`.
    const float* gather(CpuEngine& engine, const ExpertsArgs& args, int64_t expert, float* space) const {
        const int64_t h = args.bank->h;
        const bool scaled = args.bank->scales_inputs;
        if (!scaled && ids.back() - ids.front() + 1 == size()) return args.x + ids.front() * h;
        engine.select_rows({args.x, ids.data(), space, size(), h});
        for (int64_t at = 0; scaled && at < size(); ++at) {
            for (int64_t i = 0; i < h; ++i) space[at * h + i] *= weight(args, expert, at);
        }
        return space;
    }
};

void multiply(CpuEngine& engine, const ExpertMatrix& matrix, const float* x, float* y, int64_t rows) {
    if (matrix.is_grouped) {
        GroupedArgs args = matrix.grouped;
        args.x = x;
        args.y = y;
        args.m = rows;
        return engine.grouped(args);
    }
    LinearArgs args = matrix.linear;
    args.x = x;
    args.y = y;
    args.m = rows;
    engine.linear(args);
}

struct Addition {
    const ExpertsArgs& args;
    int64_t expert;
    const Rows& rows;
    const float* outputs;  // of the expert for these rows
};

void add_weighted(const Addition& addition, int64_t begin, int64_t end) {
    const ExpertsArgs& args = addition.args;
    const int64_t h = args.bank->h;
    for (int64_t at = begin; at < end; ++at) {
        const int64_t row = addition.rows.ids[static_cast<size_t>(at)];
        const float weight = args.bank->scales_inputs ? 1.0f : addition.rows.weight(args, addition.expert, at);
        const float* output = addition.outputs + at * h;
        float* y = args.y + row * h;
        for (int64_t i = 0; i < h; ++i) y[i] += weight * output[i];
    }
}

}  // namespace

void CpuEngine::experts(const ExpertsArgs& args) {
    if (args.m <= 0) return;
    const ExpertBank& bank = *args.bank;
    const int64_t h = bank.h, f = bank.f;
    args.base ? select_rows({args.base, nullptr, args.y, args.m, h}) : fill({args.y, args.m, h, 0.0f});
    const Scratch::Piece piece = scratch_.take(static_cast<size_t>(args.m * (2 * h + 3 * f)) * sizeof(float));
    float* gathered = static_cast<float*>(piece.memory());
    float* outputs = gathered + args.m * h;
    float* gate_up = outputs + args.m * h;
    float* gated = gate_up + args.m * 2 * f;
    Rows rows;
    for (int64_t expert = 0; expert < bank.size(); ++expert) {
        rows.choose(args, expert);
        if (rows.ids.empty()) continue;
        const auto at = static_cast<size_t>(expert);
        multiply(*this, bank.gate_up[at], rows.gather(*this, args, expert, gathered), gate_up, rows.size());
        gated_act({gate_up, gated, rows.size(), f, bank.activation, 0});
        multiply(*this, bank.down[at], gated, outputs, rows.size());
        share(&add_weighted, Addition{args, expert, rows, outputs}, rows.size(), h / 8);
    }
}

}  // namespace forerun
