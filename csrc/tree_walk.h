// The coupled rule on many trees at once: src/forerun/kernels/reference.py is the reference.
// Knows nodes, keys and rows of logits. Does not know requests; their parameters leave the logits as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_engine.h"

namespace forerun {

// In the order of PlainTree in src/forerun/kernels/draws.py, which explains the fields.
struct PlainTree {
    int64_t first_row;
    std::vector<int64_t> tokens, parents, verified;
    double temperature;
    int64_t seed, position, stream;
};

struct WalkedPath {
    std::vector<int64_t> nodes{0};
    int64_t token = -1;  // after the last of them; -1: its row of the logits allows none
};

// Walks down all trees together, a level at a time: `logits` [., vocab].
std::vector<WalkedPath> walk_trees(CpuEngine& engine, const float* logits, int64_t vocab,
                                   const std::vector<PlainTree>& trees);

}  // namespace forerun
