// Ops of recurrent layers: the order in which a tree is walked, and advancing the tails of convolutions.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cpu_engine.h"

namespace forerun {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check(const Walk& walk) {
    for (int64_t sequence = 0; sequence < walk.num_sequences; ++sequence) {
        const int32_t first = walk.firsts[sequence], end = walk.firsts[sequence + 1];
        bool fits = first < end && walk.num_known[sequence] >= 1 && walk.num_known[sequence] <= end - first &&
                    walk.slots[sequence] >= 0 && walk.slots[sequence] < walk.num_slots;
        for (int32_t row = first; row < end; ++row) {
            const int32_t parent = walk.parents[row], known = first + walk.num_known[sequence];
            fits = fits && (row < known ? parent == (row == first ? -1 : row - 1) : parent >= known - 1 && parent < row);
        }
        if (!fits) throw std::out_of_range("a walk whose rows do not follow each other, or without a slot");
    }
}

// Rows in the order they are walked: known ones, then drafts depth first; what drafts with several children are saved
// at, so that a place is free again when the last of them begins.
struct Order {
    std::vector<int32_t> rows, places;
    int64_t num_places = 0;

    Order(const Walk& walk, int64_t m) : places(static_cast<size_t>(m), -1) {
        std::vector<std::vector<int32_t>> children(static_cast<size_t>(m));
        for (auto row = static_cast<int32_t>(m) - 1; row >= 0; --row) {
            if (walk.parents[row] >= 0) children[static_cast<size_t>(walk.parents[row])].push_back(row);
        }
        for (int64_t sequence = 0; sequence < walk.num_sequences; ++sequence) {
            const int32_t first = walk.firsts[sequence], root = first + walk.num_known[sequence] - 1;
            for (int32_t row = first; row < root; ++row) rows.push_back(row);
            add(root, children, root, 0);
        }
    }

    void add(int32_t row, const std::vector<std::vector<int32_t>>& children, int32_t root, int32_t place) {
        const std::vector<int32_t>& below = children[static_cast<size_t>(row)];
        rows.push_back(row);
        const bool is_saved = row != root && below.size() > 1;  // the root's state is in the slot
        if (is_saved) places[static_cast<size_t>(row)] = place;
        num_places = std::max<int64_t>(num_places, place + is_saved);
        for (auto child = below.rbegin(); child != below.rend(); ++child) add(*child, children, root, place + is_saved);
    }
};

struct DeltaJob {
    DeltaArgs args;
    const KernelTable* table;
    Scratch* scratch;
    int64_t num_places;
};

void walk_states(const DeltaJob& job, int64_t begin, int64_t end) {
    const size_t size = static_cast<size_t>((1 + job.num_places) * job.args.key_dim * kDeltaColumns);
    const Scratch::Piece piece = job.scratch->take(size * sizeof(float));
    DeltaArgs args = job.args;
    args.work_space = static_cast<float*>(piece.memory());
    job.table->gated_delta(args, begin, end);
}

}  // namespace

void CpuEngine::causal_conv(const ConvArgs& args) {
    check(args.walk);
    if (args.taps > kMaxTaps) throw std::out_of_range("a convolution of more taps than the C++ kernels take");
    share(table_->causal_conv, args, args.m, args.c * args.taps / 8);
    const int64_t kept = args.taps - 1, c = args.c;
    for (int64_t sequence = 0; sequence < args.walk.num_sequences; ++sequence) {
        float* tail = args.tails + args.walk.slots[sequence] * kept * c;
        const int64_t known = args.walk.num_known[sequence], first = args.walk.firsts[sequence];
        for (int64_t i = 0; i < kept; ++i) {
            const int64_t row = i + known - kept;  // of the sequence
            std::copy_n(row < 0 ? tail + (i + known) * c : args.x + (first + row) * c, c, tail + i * c);
        }
    }
}

void CpuEngine::gated_delta(const DeltaArgs& given) {
    if (given.m <= 0) return;
    check(given.walk);
    DeltaArgs args = given;
    const Scratch::Piece piece = scratch_.take(static_cast<size_t>(args.m * args.prepared_size()) * sizeof(float));
    args.prepared = static_cast<float*>(piece.memory());
    share(table_->delta_prepare, args, args.m, args.prepared_size());
    const Order order(args.walk, args.m);
    args.order = order.rows.data();
    args.places = order.places.data();
    const DeltaJob job{args, table_, &scratch_, order.num_places};
    const int64_t units = args.walk.num_sequences * args.num_values * divide_up(args.value_dim, kDeltaColumns);
    share(&walk_states, job, units, divide_up(args.m, args.walk.num_sequences) * args.key_dim * 4);
}

}  // namespace forerun
