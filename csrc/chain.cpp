#include "chain.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace forerun {
namespace {

template <class T>
const T* at(const std::vector<uintptr_t>& addresses, Slot slot) {
    return reinterpret_cast<const T*>(addresses[slot]);
}

// The rows of one level of all chains: node `depth` of sequence i in row i.
struct Level {
    std::vector<int64_t> token_ids, logit_rows, tree_masks;
    std::vector<int32_t> positions, slots, seq_ids, prefix_lens;
    const int32_t *roots, *tables;
    int64_t max_blocks, block_size, shift, largest_root = 0;

    Level(const std::vector<uintptr_t>& addresses, const RunSizes& sizes, const ChainArgs& args)
        : token_ids(static_cast<size_t>(args.r)),
          logit_rows(token_ids),
          tree_masks(token_ids),
          positions(static_cast<size_t>(args.r)),
          slots(positions),
          seq_ids(positions),
          prefix_lens(positions),
          roots(at<int32_t>(addresses, kTreeStarts)),
          tables(at<int32_t>(addresses, kBlockTables)),
          max_blocks(sizes.max_blocks),
          block_size(args.block_size),
          shift(args.shift) {
        for (int64_t i = 0; i < args.r; ++i) {
            const auto row = static_cast<size_t>(i);
            logit_rows[row] = i;
            seq_ids[row] = static_cast<int32_t>(i);
            prefix_lens[row] = roots[i];
            largest_root = std::max<int64_t>(largest_root, roots[i]);
        }
    }

    void descend(int64_t depth, int64_t rows, const int64_t* drawn) {
        for (int64_t i = 0; i < rows; ++i) {
            const auto row = static_cast<size_t>(i);
            const int64_t position = roots[i] + depth;
            if (position / block_size >= max_blocks) throw std::out_of_range("a chain outgrew its block table");
            token_ids[row] = std::max<int64_t>(drawn[i], 0);  // a chain that ended computes token 0, which nobody reads
            positions[row] = static_cast<int32_t>(position + shift);
            slots[row] = tables[i * max_blocks + position / block_size] * static_cast<int32_t>(block_size) +
                         static_cast<int32_t>(position % block_size);
            tree_masks[row] = depth >= 63 ? -1 : static_cast<int64_t>((uint64_t{2} << depth) - 1);
        }
    }

    void put_into(std::vector<uintptr_t>& addresses) const {
        addresses[kTokenIds] = reinterpret_cast<uintptr_t>(token_ids.data());
        addresses[kPositions] = reinterpret_cast<uintptr_t>(positions.data());
        addresses[kSlots] = reinterpret_cast<uintptr_t>(slots.data());
        addresses[kLogitRows] = reinterpret_cast<uintptr_t>(logit_rows.data());
        addresses[kSeqIds] = reinterpret_cast<uintptr_t>(seq_ids.data());
        addresses[kPrefixLens] = reinterpret_cast<uintptr_t>(prefix_lens.data());
        addresses[kTreeMasks] = reinterpret_cast<uintptr_t>(tree_masks.data());
    }
};

// The log chance of each drawn token: log softmax of the row's `k` best scores, divided by a scale.
void write_log_chances(const ChainArgs& args, const std::vector<double>& scores, int64_t k, int64_t step) {
    for (int64_t i = 0; i < args.num_active[step]; ++i) {
        const double* best = scores.data() + i * k;
        double sum = 0.0;
        for (int64_t rank = 0; rank < k; ++rank) sum += std::exp((best[rank] - best[0]) / args.rivals_scale);
        args.log_chances[step * args.r + i] = -std::log(sum);
    }
}

void draw(CpuEngine& engine, const ChainArgs& args, const float* logits, int64_t step) {
    const bool with_log_chances = args.log_chances != nullptr;
    GumbelArgs gumbel{};
    gumbel.logits = logits;
    gumbel.temperatures = args.temperatures;
    gumbel.seeds = args.seeds;
    gumbel.positions = args.noise_positions + step * args.r;
    gumbel.streams = args.streams;
    gumbel.r = args.num_active[step];
    gumbel.v = args.vocab;
    gumbel.k = with_log_chances ? std::min(args.num_rivals, args.vocab) : 1;
    std::vector<int64_t> best(static_cast<size_t>(gumbel.r * gumbel.k));
    std::vector<double> scores(best.size());
    engine.gumbel(gumbel, best.data(), scores.data());
    int64_t* ids = args.ids + step * args.r;
    for (int64_t i = 0; i < args.r; ++i) {
        // a chain that has ended stays ended
        const bool goes_on = i < gumbel.r && (step == 0 || ids[i - args.r] >= 0);
        ids[i] = goes_on ? best[static_cast<size_t>(i * gumbel.k)] : -1;
    }
    if (with_log_chances) write_log_chances(args, scores, gumbel.k, step);
}

// The chances that a chain is right so far, summed over the chains that go on.
class Ends {
public:
    explicit Ends(int64_t r) : log_chances_(static_cast<size_t>(r)) {}

    double after(const ChainArgs& args, int64_t step) {
        double sum = 0.0;
        for (int64_t i = 0; i < args.num_active[step + 1]; ++i) {
            if (args.ids[step * args.r + i] < 0) continue;
            double& path = log_chances_[static_cast<size_t>(i)];
            path += args.log_chances[step * args.r + i];
            sum += std::exp(path);
        }
        return sum;
    }

private:
    std::vector<double> log_chances_;
};

// The next step is fed what the last one put out, and writes its own output to the other of two places.
void hand_on_features(std::vector<uintptr_t>& addresses, const ChainArgs& args, int64_t step) {
    const auto size = static_cast<uintptr_t>(args.features_step) * sizeof(float);
    addresses[kFeatures] = addresses[kNextFeatures];
    addresses[kNextFeatures] += step % 2 == 0 ? size : 0 - size;
}

}  // namespace

void run_chains(CpuEngine& engine, Program& first, Program& next, std::vector<uintptr_t> addresses,
                const RunSizes& sizes, const ChainArgs& args) {
    const size_t wanted = args.features_step > 0 ? kNumSlots : kLogits + 1;
    if (addresses.size() != wanted) throw std::invalid_argument("chains need a forward that returns what they read");
    Level level(addresses, sizes, args);
    Ends ends(args.r);
    first.run(addresses, sizes);
    for (int64_t step = 0;; ++step) {
        draw(engine, args, at<float>(addresses, kLogits), step);
        if (step + 1 == args.steps) return;
        if (args.log_chances != nullptr && ends.after(args, step) < args.least) {
            std::fill(args.ids + (step + 1) * args.r, args.ids + args.steps * args.r, -1);
            return;
        }
        const int64_t rows = args.num_active[step + 1];
        level.descend(step + 1, rows, args.ids + step * args.r);
        level.put_into(addresses);
        if (args.features_step > 0) hand_on_features(addresses, args, step);
        addresses[kLogits] += static_cast<uintptr_t>(args.logits_step) * sizeof(float);
        next.run(addresses, {rows, rows, sizes.max_blocks, level.largest_root + step + 2});
    }
}

}  // namespace forerun
