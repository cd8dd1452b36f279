// Chains of drafted tokens without Python between them: forward, draw, forward, draw.
// Knows the order of a program's address slots and how a chain's next row follows from its last. Does not know what
// the program computes (program.h), nor who decides how long chains are (src/forerun/speculation/growth.py).
#pragma once

#include <vector>

#include "cpu_engine.h"
#include "program.h"

namespace forerun {

// Slots of a recorded forward, as src/forerun/kernels/cpu/program.py binds them.
enum Slot : size_t {
    kTokenIds,
    kPositions,
    kSlots,
    kLogitRows,
    kSeqIds,
    kPrefixLens,
    kTreeMasks,
    kTreeStarts,
    kBlockTables,
    kLogits,
    kNextFeatures,  // [r, width]: what a head puts out beside its logits for the rows below
    kFeatures,      // [rows, width]: what it is fed
    kNumSlots
};

struct ChainArgs {
    const double* temperatures;       // [r]
    const int64_t *seeds, *streams;   // [r]
    const int64_t* noise_positions;   // [steps, r]
    const int64_t* num_active;        // [steps]: how many rows, the first ones, still draw; never rising
    int64_t steps, r, vocab, block_size;
    int64_t logits_step;  // floats between the logits of two steps; 0: each step overwrites the last
    int64_t* ids;         // [steps, r]: the drawn tokens, -1 where none was
    double* log_chances;  // [steps, r], or null: of the drawn tokens, log softmax of their scores / rivals_scale among
                          // the `num_rivals` best scores
    int64_t shift;        // added to the positions rows stand at, not to the slots
    int64_t features_step;  // floats a step puts out for the next; 0: the program is fed tokens alone
    int64_t num_rivals;
    double rivals_scale;
    double least;  // with `log_chances`: drawing ends where the chances of all chains to be right so far sum to less
};

// Runs `first` on a batch whose r logit rows are the roots of r sequences, draws a token for each row, runs `next` on
// those tokens as the children of the roots, and so on. The forward of the last token is not run. With features, the
// slot kNextFeatures has room for those of two steps, which take turns.
void run_chains(CpuEngine& engine, Program& first, Program& next, std::vector<uintptr_t> addresses,
                const RunSizes& sizes, const ChainArgs& args);

}  // namespace forerun
