// Steps of a target without Python between them: pass, choice by the coupled rule, the drafts of the next pass.
// Knows sequences, their blocks, what ends them, texts to copy drafts from. Does not know requests, policies, who owns
// blocks: src/forerun/engine/ahead.py decides which steps run, and takes them one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "batch_rows.h"
#include "suffix_text.h"
#include "tree_walk.h"

namespace forerun {

// What Python says of a sequence beside its rows, in the order of StepsOf in src/forerun/runtime/runner.py.
struct SequenceSteps {
    SequenceRows rows;  // of the first step: a chain of nodes, no span
    double temperature;
    int64_t seed, stream;
    std::vector<int64_t> stops;  // tokens that end it
    int64_t num_left;            // tokens after which it ends
    int64_t num_drafts;          // of a step, at most
    int64_t shortest, longest;   // tails that are looked up for them
    SuffixText* text;            // in this text, which holds all known tokens; null: no drafts
};

struct StepRun {
    double pass_s;
    std::vector<std::vector<int64_t>> tokens;  // that each sequence's nodes hold, the root first
    std::vector<WalkedPath> paths;
};

// Where the logits of the steps go: `rows` rows of `vocab` floats a step.
struct StepLogits {
    float* first;
    int64_t rows, vocab;
};

// Runs up to `most` steps, the first over the rows given. Ends after a step in which a sequence ended or has no token,
// and before one whose rows have no place in a sequence's blocks or among the logits.
std::vector<StepRun> run_steps(CpuEngine& engine, Program& program, std::vector<SequenceSteps>& sequences,
                               int64_t block_size, const StepLogits& logits, int64_t most);

}  // namespace forerun
