// 16 float lanes in an array, for any CPU. Same names and rounding as simd_avx2.h: every operation is IEEE single
// precision and every fma is fused (a library call where the CPU has no such instruction: slow, but the same bits).
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
#include "repeat.h"

namespace forerun::FORERUN_ISA {

struct F {
    float v[16];
};
struct I {
    uint32_t v[16];
};

constexpr int kMaxTileRows = 4;
constexpr int tile_panels(int) { return 1; }
constexpr int kMaxHeadsTogether = 4;  // query vectors that share the loads of their keys
constexpr int attention_tiles(int heads) { return heads == 1 ? 2 : 1; }

template <class Op>
inline F map(Op op) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
}
template <class Op>
inline I imap(Op op) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
}
inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline F zero() { return F{}; }
inline F set1(float v) {
    return map([=](int) { return v; });
}
inline F broadcast(const float* p) { return set1(*p); }
inline F load(const float* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store(float* p, const F& v) { std::memcpy(p, v.v, sizeof v.v); }
inline F load(const int8_t* p) {
    return map([=](int i) { return static_cast<float>(p[i]); });
}
inline F load(const uint16_t* p) {  // bfloat16
    return map([=](int i) { return bits_to_float(static_cast<uint32_t>(p[i]) << 16); });
}
// Weights of two neighbouring inputs.
constexpr int pair_place(int input, int lane) { return 16 * input + lane; }
template <class T>
inline F load_panel(const T* p) {
    return load(p);
}
#include "panel_pair.inc"

inline F add(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] + y.v[i]; });
}
inline F sub(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] - y.v[i]; });
}
inline F mul(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] * y.v[i]; });
}
inline F div(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] / y.v[i]; });
}
// Not inlined, as `dot` is not: a call costs little beside what it does, and a tile would hold many copies.
[[gnu::noinline]] inline F fma(const F& x, const F& y, const F& z) {
    return map([&](int i) { return __builtin_fmaf(x.v[i], y.v[i], z.v[i]); });
}
[[gnu::noinline]] inline F fnma(const F& x, const F& y, const F& z) {
    return map([&](int i) { return __builtin_fmaf(-x.v[i], y.v[i], z.v[i]); });
}
inline F min(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
inline F max(const F& x, const F& y) {
    return map([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline uint32_t less(const F& x, const F& y) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(x.v[i] < y.v[i]) << i;
    return bits;
}
inline uint32_t equal(const F& x, const F& y) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(x.v[i] == y.v[i]) << i;
    return bits;
}
inline float sum(F v) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v.v[i] = v.v[i] + v.v[i + half];
    return v.v[0];
}
inline float maximum(F v) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v.v[i] = v.v[i] > v.v[i + half] ? v.v[i] : v.v[i + half];
    return v.v[0];
}

inline I iset1(uint32_t v) {
    return imap([=](int) { return v; });
}
inline I iota() {
    return imap([](int i) { return static_cast<uint32_t>(i); });
}
inline I load_words(const uint32_t* p) {
    I r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline I load_bytes(const uint8_t* p) {  // 16 of them, unsigned
    return imap([=](int i) { return uint32_t{p[i]}; });
}
// e4m3 but NaN, divided by 256: the same bits in float16's places, whose exponents start 8 lower.
inline F load_float8(const uint8_t* p) {
    return map([=](int i) { return half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7)); });
}
inline F look_up(const float* table, const I& x) {  // of 16
    return map([&](int i) { return table[x.v[i]]; });
}
inline I iadd(const I& x, const I& y) {
    return imap([&](int i) { return x.v[i] + y.v[i]; });
}
inline I isub(const I& x, const I& y) {
    return imap([&](int i) { return x.v[i] - y.v[i]; });
}
inline I ixor(const I& x, const I& y) {
    return imap([&](int i) { return x.v[i] ^ y.v[i]; });
}
template <int N>
inline I shift_left(const I& x) {
    return imap([&](int i) { return x.v[i] << N; });
}
template <int N>
inline I shift_right_signed(const I& x) {
    return imap([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(x.v[i]) >> N); });
}
template <int N>
inline I shift_right(const I& x) {
    return imap([&](int i) { return x.v[i] >> N; });
}
inline I as_int(const F& x) {
    return imap([&](int i) { return float_to_bits(x.v[i]); });
}
inline F as_float(const I& x) {
    return map([&](int i) { return bits_to_float(x.v[i]); });
}
inline F to_float(const I& x) {  // signed
    return map([&](int i) { return static_cast<float>(static_cast<int32_t>(x.v[i])); });
}
inline void multiply_wide(const I& x, uint32_t multiplier, I& high, I& low) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t product = static_cast<uint64_t>(x.v[i]) * multiplier;
        high.v[i] = static_cast<uint32_t>(product >> 32);
        low.v[i] = static_cast<uint32_t>(product);
    }
}
// out[4 * i + j] = wj[i]
inline void store_interleaved(const I& w0, const I& w1, const I& w2, const I& w3, uint32_t* out) {
    for (int i = 0; i < 16; ++i) {
        out[4 * i] = w0.v[i];
        out[4 * i + 1] = w1.v[i];
        out[4 * i + 2] = w2.v[i];
        out[4 * i + 3] = w3.v[i];
    }
}

inline float square_root(float v) { return __builtin_sqrtf(v); }
FORERUN_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

// Grouped weights (grouped.inc). A line is 64 bytes: unsigned weights of 16 outputs times 4 inputs, output by output.
constexpr int kMaxGroupedRows = 4;
constexpr int kGroupedWordRun = 1;
constexpr int grouped_panels(int, int) { return 1; }

// Stores the lanes, whose values fit into bytes, as bytes.
inline void store_bytes(int8_t* p, const I& x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(static_cast<int32_t>(x.v[i]));
}

struct Bytes {
    uint8_t v[64];
};
template <class Op>
inline Bytes bmap(Op op) {
    Bytes r;
    for (int i = 0; i < 64; ++i) r.v[i] = static_cast<uint8_t>(op(i));
    return r;
}
inline Bytes load_line(const uint8_t* p) {
    Bytes r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store_line(uint8_t* p, const Bytes& x) { std::memcpy(p, x.v, sizeof x.v); }
// (bytes >> N) & MASK
template <int N, int MASK>
inline Bytes bits_down(const Bytes& x) {
    return bmap([&](int i) { return x.v[i] >> N & MASK; });
}
template <int N, int MASK>
inline Bytes bits_up(const Bytes& x) {
    return bmap([&](int i) { return x.v[i] << N & MASK; });
}
// Replaces every byte i by byte i of a table of 16.
inline Bytes look_up(const Bytes& x, const uint8_t* table) {
    return bmap([&](int i) { return table[x.v[i]]; });
}
inline Bytes either(const Bytes& x, const Bytes& y) {
    return bmap([&](int i) { return x.v[i] | y.v[i]; });
}
// Sets BIT, which is clear, in every byte whose bit among the 64 at p is set.
template <int BIT>
inline Bytes set_bits(const Bytes& x, const uint8_t* p) {
    return bmap([&](int i) { return x.v[i] | (p[i / 8] >> i % 8 & 1) * BIT; });
}
inline F load_half(const uint16_t* p) {
    return map([=](int i) { return half_to_float(p[i]); });
}

constexpr int kByteBias = 0;
template <int BITS>
using Weights = Bytes;
template <int BITS>
inline const Bytes& prepare(const Bytes& x) {
    return x;
}
// acc plus the products of four lines with 16 activations, four of them at words, words + stride, ...
template <int BITS>
[[gnu::noinline]] I dot(I acc, const Bytes (&w)[4], const int32_t* words, int stride) {
    for (int j = 0; j < 4; ++j) {
        int8_t q[4];
        std::memcpy(q, words + j * stride, 4);
        for (int lane = 0; lane < 16; ++lane)
            for (int i = 0; i < 4; ++i) acc.v[lane] += static_cast<uint32_t>(w[j].v[4 * lane + i] * q[i]);
    }
    return acc;
}

}  // namespace forerun::FORERUN_ISA
