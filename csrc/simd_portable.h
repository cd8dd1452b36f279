// 16 float lanes in an array, for any CPU. Same names and rounding as simd_avx2.h: every operation is IEEE single
// precision and every fma is fused (a library call where the CPU has no such instruction: slow, but the same bits).
#pragma once

#include <cstdint>
#include <cstring>

namespace forerun::portable {

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
constexpr int panel_slot(int lane) { return lane; }
inline F load_panel(const uint16_t* p) { return load(p); }
inline F load_panel(const float* p) { return load(p); }

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
inline F fma(const F& x, const F& y, const F& z) {
    return map([&](int i) { return __builtin_fmaf(x.v[i], y.v[i], z.v[i]); });
}
inline F fnma(const F& x, const F& y, const F& z) {
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
inline void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace forerun::portable
