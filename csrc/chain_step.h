// The pass that verifies chains of drafts, and the choices by the coupled rule that follow from it, in one call.
// Knows how a chain lies in a batch. Does not know requests, who drafted, what becomes of the choices.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_engine.h"
#include "program.h"

namespace forerun {

// In the order of PlainChain in src/forerun/kernels/draws.py, which explains the fields.
struct PlainChain {
    std::vector<int64_t> block_table;
    int64_t position;
    std::vector<int64_t> tokens;
    double temperature;
    int64_t seed, stream;
};

struct ChainChoice {
    int64_t num_accepted, token;  // drafts, and what follows the last of them; token -1: its row of the logits allows none
};

struct ChainStep {
    double pass_s;  // seconds of the pass alone
    std::vector<ChainChoice> choices;
};

// `logits` has room for [tokens of all chains, vocab]; `states` are the addresses of what `program` gives besides.
ChainStep run_chain_step(CpuEngine& engine, Program& program, const std::vector<PlainChain>& chains, int64_t block_size,
                         float* logits, int64_t vocab, const std::vector<uintptr_t>& states);

}  // namespace forerun
