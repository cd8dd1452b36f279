#include "steps.h"

#include <algorithm>
#include <chrono>

namespace forerun {
namespace {

// The rows of a root at `position` and of a chain of drafts below it.
void place(SequenceRows& rows, int64_t position, std::vector<int64_t> tokens) {
    const auto num = static_cast<int64_t>(tokens.size());
    rows.start = rows.tree_start = position;
    rows.tree_tokens = std::move(tokens);
    rows.tree_rows.resize(static_cast<size_t>(num));
    rows.tree_masks.resize(static_cast<size_t>(num));
    for (int64_t node = 0; node < num; ++node) {
        rows.tree_rows[static_cast<size_t>(node)] = node;
        rows.tree_masks[static_cast<size_t>(node)] = static_cast<int64_t>((uint64_t{2} << node) - 1);
    }
    rows.tree_depths = rows.tree_rows;
}

PlainTree tree_of(const SequenceSteps& sequence, int64_t first_row) {
    const SequenceRows& rows = sequence.rows;
    PlainTree tree{first_row,     rows.tree_tokens,        rows.tree_rows, rows.tree_rows, sequence.temperature,
                   sequence.seed, rows.tree_start + 1, sequence.stream};
    for (int64_t& parent : tree.parents) --parent;
    return tree;
}

bool has_place(const SequenceRows& rows, size_t num_rows, int64_t block_size) {
    return rows.tree_start + static_cast<int64_t>(num_rows) <= static_cast<int64_t>(rows.block_table.size()) * block_size;
}

// Makes the rows of the step after `path`; whether there is one.
bool go_on(SequenceSteps& sequence, const WalkedPath& path, int64_t block_size) {
    SequenceRows& rows = sequence.rows;
    std::vector<int64_t> chosen;
    for (size_t i = 1; i < path.nodes.size(); ++i)
        chosen.push_back(rows.tree_tokens[static_cast<size_t>(path.nodes[i])]);
    chosen.push_back(path.token);
    sequence.num_left -= static_cast<int64_t>(chosen.size());
    const auto ends = [&](int64_t token) {
        return token < 0 || std::find(sequence.stops.begin(), sequence.stops.end(), token) != sequence.stops.end();
    };
    if (sequence.num_left <= 0 || std::any_of(chosen.begin(), chosen.end(), ends)) return false;
    std::vector<int64_t> next{path.token};
    const int64_t num_drafts = std::min(sequence.num_drafts, sequence.num_left - 1);
    if (sequence.text) {
        sequence.text->extend(std::vector<int32_t>(chosen.begin(), chosen.end()));
        if (num_drafts > 0) {
            const SuffixCopy copied = sequence.text->copy(static_cast<int32_t>(sequence.shortest),
                                                          static_cast<int32_t>(sequence.longest),
                                                          static_cast<int32_t>(num_drafts));
            next.insert(next.end(), copied.tokens.begin(), copied.tokens.end());
        }
    }
    place(rows, rows.tree_start + static_cast<int64_t>(chosen.size()), std::move(next));
    return has_place(rows, rows.tree_tokens.size(), block_size);
}

}  // namespace

std::vector<StepRun> run_steps(CpuEngine& engine, Program& program, std::vector<SequenceSteps>& sequences,
                               int64_t block_size, const StepLogits& logits, int64_t most) {
    std::vector<StepRun> steps;
    bool goes_on = true;
    while (goes_on && static_cast<int64_t>(steps.size()) < most) {
        StepRun& step = steps.emplace_back();
        std::vector<SequenceRows> rows;
        std::vector<PlainTree> trees;
        int64_t num_rows = 0;
        for (const SequenceSteps& sequence : sequences) {
            rows.push_back(sequence.rows);
            trees.push_back(tree_of(sequence, num_rows));
            step.tokens.push_back(sequence.rows.tree_tokens);
            num_rows += static_cast<int64_t>(sequence.rows.tree_tokens.size());
        }
        float* own = logits.first + static_cast<int64_t>(steps.size() - 1) * logits.rows * logits.vocab;
        const BatchRows batch(rows, block_size, 0);
        std::vector<uintptr_t> addresses = batch.addresses();
        addresses.push_back(reinterpret_cast<uintptr_t>(own));
        const auto start = std::chrono::steady_clock::now();
        program.run(addresses, batch.sizes());
        step.pass_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        step.paths = walk_trees(engine, own, logits.vocab, trees);
        num_rows = 0;
        for (size_t i = 0; i < sequences.size(); ++i) {
            goes_on = go_on(sequences[i], step.paths[i], block_size) && goes_on;
            num_rows += static_cast<int64_t>(sequences[i].rows.tree_tokens.size());
        }
        goes_on = goes_on && num_rows <= logits.rows;
    }
    return steps;
}

}  // namespace forerun
