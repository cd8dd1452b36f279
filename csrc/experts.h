// The experts of a layer: matrices of any storage, and what is asked of them.
// Knows: where matrices lie. Does not know: who chose the experts (route.inc), threads, Python.
#pragma once

#include <vector>

#include "kernel_table.h"

namespace forerun {

// A matrix as `linear` or `grouped` takes it, but for rows and their number.
struct ExpertMatrix {
    bool is_grouped;
    LinearArgs linear;
    GroupedArgs grouped;
};

struct ExpertBank {
    int64_t h, f;  // inputs of an expert, and what is inside
    Activation activation;
    bool scales_inputs;  // weights multiply what experts read, not what they give
    std::vector<ExpertMatrix> gate_up, down;  // [2f, h] and [h, f]; of a squared ReLU [f, h] and [h, f]

    int64_t size() const { return static_cast<int64_t>(down.size()); }
};

struct ExpertsArgs {
    const float* x;        // [m, h]
    const float* weights;  // [m, experts]: 0 for those a row did not choose
    const float* base;     // [m, h] or null
    float* y;              // [m, h]
    int64_t m;
    const ExpertBank* bank;

    template <class F>
    auto given(F call) {
        return call(x, weights, base, y, m, bank);
    }
    int64_t work() const { return m * bank->h * bank->f * 3; }
};

}  // namespace forerun
