// The rows of one pass over several sequences, as columns: src/forerun/models/batch.py says what they hold.
// Knows how spans and trees are laid out. Does not know what a pass computes.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace forerun {

// What Python says of a sequence, in the order of SequenceRows in src/forerun/models/batch.py.
struct SequenceRows {
    std::vector<int64_t> block_table;
    int64_t start;
    std::vector<int64_t> span;
    int64_t tree_start;
    std::vector<int64_t> tree_tokens, tree_rows, tree_masks, tree_depths;
    bool span_logits;
};

class BatchRows {
public:
    // `shift` is added to positions, never to slots. Throws std::out_of_range where a block table is too short.
    BatchRows(const std::vector<SequenceRows>& sequences, int64_t block_size, int64_t shift);

    // The columns' addresses, in the order of a program's slots (chain.h).
    std::vector<uintptr_t> addresses() const;
    RunSizes sizes() const;

    std::vector<int64_t> token_ids, tree_masks, logit_rows;
    std::vector<int32_t> positions, slots, seq_ids, prefix_lens, tree_starts, block_tables;

private:
    void add(const SequenceRows& sequence, int32_t index);
    void add_row(const SequenceRows& sequence, int64_t token_id, int64_t position, int64_t logical, int64_t prefix_len,
                 int64_t mask);

    int64_t block_size_, shift_, max_blocks_ = 0, max_visible_ = 0;
};

}  // namespace forerun
