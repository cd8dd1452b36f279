#include "tree_walk.h"

namespace forerun {
namespace {

// A walk's place: its tree, and the current node's place among the verified ones.
struct Walker {
    size_t tree, place;
};

// The place of the child of `walk`'s node that holds `token`; 0, the root's, if there is none.
size_t child_with(const PlainTree& tree, size_t place, int64_t token) {
    const int64_t node = tree.verified[place];
    for (size_t other = place + 1; other < tree.verified.size(); ++other) {
        const auto child = static_cast<size_t>(tree.verified[other]);
        if (tree.parents.at(child) == node && tree.tokens.at(child) == token) return other;
    }
    return 0;
}

// The token after each walk's node.
std::vector<int64_t> choose(CpuEngine& engine, const float* logits, int64_t vocab, const std::vector<PlainTree>& trees,
                            const std::vector<Walker>& walks, const std::vector<WalkedPath>& paths) {
    const size_t num = walks.size();
    std::vector<int64_t> rows(num), seeds(num), positions(num), streams(num), tokens(num);
    std::vector<double> temperatures(num);
    for (size_t i = 0; i < num; ++i) {
        const PlainTree& tree = trees[walks[i].tree];
        rows[i] = tree.first_row + static_cast<int64_t>(walks[i].place);
        seeds[i] = tree.seed;
        positions[i] = tree.position + static_cast<int64_t>(paths[walks[i].tree].nodes.size()) - 1;
        streams[i] = tree.stream;
        temperatures[i] = tree.temperature;
    }
    GumbelArgs args{};
    args.logits = logits;
    args.rows = rows.data();
    args.temperatures = temperatures.data();
    args.seeds = seeds.data();
    args.positions = positions.data();
    args.streams = streams.data();
    args.r = static_cast<int64_t>(num);
    args.v = vocab;
    args.k = 1;
    engine.gumbel(args, tokens.data(), nullptr);
    return tokens;
}

}  // namespace

std::vector<WalkedPath> walk_trees(CpuEngine& engine, const float* logits, int64_t vocab,
                                   const std::vector<PlainTree>& trees) {
    std::vector<WalkedPath> paths(trees.size());
    std::vector<Walker> walks;
    for (size_t tree = 0; tree < trees.size(); ++tree) walks.push_back({tree, 0});
    while (!walks.empty()) {
        const std::vector<int64_t> tokens = choose(engine, logits, vocab, trees, walks, paths);
        std::vector<Walker> going_on;
        for (size_t i = 0; i < walks.size(); ++i) {
            const PlainTree& tree = trees[walks[i].tree];
            WalkedPath& path = paths[walks[i].tree];
            const size_t child = child_with(tree, walks[i].place, tokens[i]);
            if (child == 0) {
                path.token = tokens[i];
            } else {
                path.nodes.push_back(tree.verified[child]);
                going_on.push_back({walks[i].tree, child});
            }
        }
        walks.swap(going_on);
    }
    return paths;
}

}  // namespace forerun
