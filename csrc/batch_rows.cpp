#include "batch_rows.h"

#include <algorithm>
#include <stdexcept>

namespace forerun {

BatchRows::BatchRows(const std::vector<SequenceRows>& sequences, int64_t block_size, int64_t shift)
    : block_size_(block_size), shift_(shift) {
    for (const SequenceRows& sequence : sequences)
        max_blocks_ = std::max(max_blocks_, static_cast<int64_t>(sequence.block_table.size()));
    for (size_t index = 0; index < sequences.size(); ++index) add(sequences[index], static_cast<int32_t>(index));
}

void BatchRows::add(const SequenceRows& sequence, int32_t index) {
    const auto first = static_cast<int64_t>(token_ids.size());
    int64_t position = sequence.start;
    for (const int64_t token_id : sequence.span) {
        add_row(sequence, token_id, position, position, position + 1, 0);
        ++position;
    }
    const auto root = static_cast<int64_t>(token_ids.size()), start = sequence.tree_start;
    for (size_t i = 0; i < sequence.tree_tokens.size(); ++i) {
        add_row(sequence, sequence.tree_tokens[i], start + sequence.tree_depths.at(i), start + sequence.tree_rows.at(i),
                start, sequence.tree_masks.at(i));
    }
    const auto end = static_cast<int64_t>(token_ids.size());
    for (int64_t row = sequence.span_logits ? first : root; row < end; ++row) logit_rows.push_back(row);
    seq_ids.resize(static_cast<size_t>(end), index);
    tree_starts.push_back(static_cast<int32_t>(start));
    for (const int64_t block : sequence.block_table) block_tables.push_back(static_cast<int32_t>(block));
    block_tables.resize(static_cast<size_t>((index + 1) * max_blocks_));
}

void BatchRows::add_row(const SequenceRows& sequence, int64_t token_id, int64_t position, int64_t logical,
                        int64_t prefix_len, int64_t mask) {
    const int64_t block = sequence.block_table.at(static_cast<size_t>(logical / block_size_));
    token_ids.push_back(token_id);
    positions.push_back(static_cast<int32_t>(shift_ ? std::max<int64_t>(position + shift_, 0) : position));
    slots.push_back(static_cast<int32_t>(block * block_size_ + logical % block_size_));
    prefix_lens.push_back(static_cast<int32_t>(prefix_len));
    tree_masks.push_back(mask);
    max_visible_ = std::max(max_visible_, position + 1);
}

std::vector<uintptr_t> BatchRows::addresses() const {
    const auto at = [](const auto& column) { return reinterpret_cast<uintptr_t>(column.data()); };
    return {at(token_ids), at(positions), at(slots), at(logit_rows), at(seq_ids), at(prefix_lens), at(tree_masks),
            at(tree_starts), at(block_tables)};
}

RunSizes BatchRows::sizes() const {
    return {static_cast<int64_t>(token_ids.size()), static_cast<int64_t>(logit_rows.size()), max_blocks_, max_visible_};
}

}  // namespace forerun
