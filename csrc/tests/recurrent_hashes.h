// Part of kernel_hashes.cpp: the kernels of recurrent layers.
#pragma once

#include "hashing.h"

namespace forerun {
namespace {

// Two sequences: known tokens alone, and one known token with a tree that branches twice below it.
void run_recurrent(Run& run, int64_t value_dim) {
    constexpr int64_t m = 9, taps = 4, num_keys = 2, num_values = 4, key_dim = 24, num_slots = 3;
    const int32_t slots[] = {2, 0}, firsts[] = {0, 3, 9}, num_known[] = {3, 1}, order[] = {0, 1, 2, 3, 4, 6, 7, 5, 8};
    const int32_t parents[] = {-1, 0, 1, -1, 3, 3, 4, 4, 5}, places[] = {-1, -1, -1, -1, 0, -1, -1, -1, -1};
    const Walk walk{slots, firsts, num_known, parents, 2, num_slots};
    Generator from{static_cast<uint64_t>(value_dim)};
    DeltaArgs args{};
    args.m = m, args.num_keys = num_keys, args.num_values = num_values, args.key_dim = key_dim, args.value_dim = value_dim;
    constexpr int64_t per_channel = num_values * key_dim;
    args.num_decays = per_channel;  // of all that are hashed, this needs the most room
    const int64_t c = args.row_size();
    auto x = numbers<float>(from, m * c), weight = numbers<float>(from, taps * c);
    auto tails = numbers<float>(from, num_slots * (taps - 1) * c);
    auto memory = numbers<float>(from, num_slots * num_values * key_dim * value_dim);
    auto gates = numbers<float>(from, m * (num_values + per_channel));
    auto decay = numbers<float>(from, per_channel), bias = numbers<float>(from, per_channel);
    Floats qkv(m * c), y(m * num_values * value_dim), prepared(m * args.prepared_size()), work(2 * key_dim * kDeltaColumns);
    auto shift = numbers<float>(from, c), skip = numbers<float>(from, num_values);
    ConvArgs conv{x.begin(), weight.begin(), nullptr, tails.begin(), qkv.begin(), walk, m, c, taps, true};
    FORERUN_CALL(run, causal_conv, conv, m);
    run.print(join("causal_conv", {value_dim}), qkv);
    conv.bias = shift.begin();
    FORERUN_CALL(run, causal_conv, conv, m);
    run.print(join("causal_conv", {value_dim, 1}), qkv);
    args.qkv = qkv.begin(), args.gates = gates.begin(), args.decay = decay.begin(), args.bias = bias.begin();
    args.memory = memory.begin(), args.y = y.begin(), args.walk = walk, args.prepared = prepared.begin();
    args.order = order, args.places = places, args.work_space = work.begin();
    for (int64_t num_decays : {per_channel, num_values}) {
        args.num_decays = num_decays;
        FORERUN_CALL(run, delta_prepare, args, m);
        run.print(join("delta_prepare", {value_dim, num_decays}), prepared);
        FORERUN_CALL(run, gated_delta, args, 2 * num_values * divide_up(value_dim, kDeltaColumns));
        run.print(join("gated_delta", {value_dim, num_decays}), y, memory);
    }
    args.skip = skip.begin();
    FORERUN_CALL(run, delta_prepare, args, m);
    FORERUN_CALL(run, gated_delta, args, 2 * num_values * divide_up(value_dim, kDeltaColumns));
    run.print(join("mamba2", {value_dim}), y, memory);
}

}  // namespace
}  // namespace forerun
