#include "chain_step.h"

#include <chrono>
#include <numeric>

#include "batch_rows.h"
#include "tree_walk.h"

namespace forerun {
namespace {

std::vector<int64_t> numbered(size_t num, int64_t first) {
    std::vector<int64_t> numbers(num);
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
}

SequenceRows rows_of(const PlainChain& chain) {
    const std::vector<int64_t> nodes = numbered(chain.tokens.size(), 0);
    std::vector<int64_t> masks;
    for (const int64_t node : nodes) masks.push_back(static_cast<int64_t>((uint64_t{2} << node) - 1));
    return {chain.block_table, chain.position, {}, chain.position, chain.tokens, nodes, masks, nodes, false};
}

PlainTree tree_of(const PlainChain& chain, int64_t first_row) {
    const size_t num = chain.tokens.size();
    return {first_row,          chain.tokens, numbered(num, -1),  numbered(num, 0),
            chain.temperature, chain.seed,   chain.position + 1, chain.stream};
}

}  // namespace

ChainStep run_chain_step(CpuEngine& engine, Program& program, const std::vector<PlainChain>& chains, int64_t block_size,
                         float* logits, int64_t vocab, const std::vector<uintptr_t>& states) {
    std::vector<SequenceRows> sequences;
    std::vector<PlainTree> trees;
    int64_t num_rows = 0;
    for (const PlainChain& chain : chains) {
        sequences.push_back(rows_of(chain));
        trees.push_back(tree_of(chain, num_rows));
        num_rows += static_cast<int64_t>(chain.tokens.size());
    }
    const BatchRows batch(sequences, block_size, 0);
    std::vector<uintptr_t> addresses = batch.addresses();
    addresses.push_back(reinterpret_cast<uintptr_t>(logits));
    addresses.insert(addresses.end(), states.begin(), states.end());
    ChainStep step;
    const auto start = std::chrono::steady_clock::now();
    program.run(addresses, batch.sizes());
    step.pass_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const WalkedPath& path : walk_trees(engine, logits, vocab, trees))
        step.choices.push_back({static_cast<int64_t>(path.nodes.size()) - 1, path.token});
    return step;
}

}  // namespace forerun
