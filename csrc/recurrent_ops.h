// What the ops of recurrent layers are told; as ops.h. Shape letters as in src/forerun/kernels/recurrent_ops.py.
#pragma once

#include <cstdint>

namespace forerun {

constexpr int64_t kMaxTaps = 64;       // of a short convolution
constexpr int64_t kDeltaColumns = 64;  // of a recurrent state that are advanced together

// How rows follow each other: src/forerun/kernels/recurrent_ops.py.
struct Walk {
    const int32_t* slots;      // [s]
    const int32_t* firsts;     // [s + 1]
    const int32_t* num_known;  // [s]
    const int32_t* parents;    // [m]
    int64_t num_sequences, num_slots;
};

struct ConvArgs {
    const float* x;       // [m, c]
    const float* weight;  // [taps, c]
    const float* bias;    // [c], or null
    float* tails;         // [slots, taps - 1, c], advanced
    float* y;             // [m, c]
    Walk walk;
    int64_t m, c, taps;
    bool silu;

    template <class F>
    auto given(F call) {
        return call(x, weight, bias, tails, y, walk.slots, walk.firsts, walk.num_known, walk.parents, walk.num_sequences,
                    walk.num_slots, m, c, taps, silu);
    }
    int64_t work() const { return m * c * taps; }
};

// Of the gated delta rule, or of Mamba-2 where there is `skip`.
struct DeltaArgs {
    const float* qkv;    // [m, row_size]
    const float* gates;  // [m, num_values + num_decays]: b, a; of Mamba-2 [m, num_values]: dt
    const float* decay;  // [num_decays]
    const float* bias;   // [num_decays]
    const float* skip;   // [num_values], or null
    float* memory;       // [slots, num_values, key_dim, value_dim], advanced
    float* y;            // [m, num_values, value_dim]
    Walk walk;
    int64_t m, num_keys, num_values, key_dim, value_dim;
    int64_t num_decays;     // num_values, or as many times key_dim: a gate for each channel of keys
    float* prepared;        // [m, prepared_size] scratch, set by the engine, as are the next
    const int32_t* order;   // [m]: rows as they are walked
    const int32_t* places;  // [m]: where a row's state is saved, or -1
    float* work_space;      // [1 + places, key_dim, kDeltaColumns] scratch of a call

    int64_t row_size() const { return 2 * num_keys * key_dim + num_values * value_dim; }
    int64_t prepared_size() const { return 2 * num_keys * key_dim + num_values + num_decays; }
    template <class F>
    auto given(F call) {
        return call(qkv, gates, decay, bias, skip, memory, y, walk.slots, walk.firsts, walk.num_known, walk.parents,
                    walk.num_sequences, walk.num_slots, m, num_keys, num_values, key_dim, value_dim, num_decays);
    }
    int64_t work() const { return m * num_values * key_dim * value_dim * 3; }
};

}  // namespace forerun
