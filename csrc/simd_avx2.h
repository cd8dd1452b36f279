// 16 virtual float lanes on two 256-bit registers. Knows intrinsics only; every wrapper header offers the same names
// with the same rounding, so that the kernels give the same bits on every instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "repeat.h"

namespace forerun::FORERUN_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

// Accumulators that fit the 16 registers beside weights and a broadcast; see linear.inc and attention.inc.
constexpr int kMaxTileRows = 6;
constexpr int tile_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int kMaxHeadsTogether = 4;  // query vectors that share the loads of their keys
constexpr int attention_tiles(int heads) { return heads == 1 ? 4 : heads == 2 ? 2 : 1; }

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float v) {
    const __m256 s = _mm256_set1_ps(v);
    return {s, s};
}
inline F broadcast(const float* p) {
    const __m256 s = _mm256_broadcast_ss(p);
    return {s, s};
}
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline F load(const int8_t* p) {
    const __m256i lo = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i hi = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)));
    return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)};
}
inline F load(const uint16_t* p) {  // bfloat16
    const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}

// Weights of two neighbouring inputs. bfloat16: of each input the neighbours in one 32-bit word are lanes i and i + 8,
// so one load becomes two vectors with a shift and a mask.
constexpr int pair_place(int input, int lane) { return 16 * input + (lane < 8 ? 2 * lane : 2 * (lane - 8) + 1); }
inline F load_panel(const uint16_t* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
inline F load_panel(const float* p) { return load(p); }
#include "panel_pair.inc"

inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // x < y ? x : y
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // x > y ? x : y

// Bit i of the result: x[i] < y[i] (false for NaN), x[i] > y[i].
inline uint32_t less(F x, F y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))) << 8;
}
inline uint32_t equal(F x, F y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ))) << 8;
}

// Folds halves: 16 -> 8 -> 4 -> 2 -> 1, in this order on every instruction set.
inline float sum(F v) {
    const __m256 eight = _mm256_add_ps(v.a, v.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float maximum(F v) {
    const __m256 eight = _mm256_max_ps(v.a, v.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline I iset1(uint32_t v) {
    const __m256i s = _mm256_set1_epi32(static_cast<int>(v));
    return {s, s};
}
inline I iota() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline I load_words(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline I load_bytes(const uint8_t* p) {  // 16 of them, unsigned
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
// e4m3 but NaN, divided by 256: the same bits in float16's places, whose exponents start 8 lower.
inline F load_float8(const uint8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline __m256 look_up(__m256 low, __m256 high, __m256i x) {
    const __m256 above = _mm256_castsi256_ps(_mm256_slli_epi32(x, 28));  // the sign says 8 or more
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, x), _mm256_permutevar8x32_ps(high, x), above);
}
inline F look_up(const float* table, I x) {  // of 16
    const F all = load(table);
    return {look_up(all.a, all.b, x.a), look_up(all.a, all.b, x.b)};
}
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
inline I shift_left(I x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline I shift_right_signed(I x) {
    return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
template <int N>
inline I shift_right(I x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }  // signed

inline void multiply_wide(__m256i x, __m256i m, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(x, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
// 32 x 32 -> 64 bit products, lane by lane.
inline void multiply_wide(I x, uint32_t multiplier, I& high, I& low) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(multiplier));
    multiply_wide(x.a, m, high.a, low.a);
    multiply_wide(x.b, m, high.b, low.b);
}
inline void interleave(__m256i w0, __m256i w1, __m256i w2, __m256i w3, uint32_t* out) {
    const __m256i p0 = _mm256_unpacklo_epi32(w0, w1), p1 = _mm256_unpackhi_epi32(w0, w1);
    const __m256i p2 = _mm256_unpacklo_epi32(w2, w3), p3 = _mm256_unpackhi_epi32(w2, w3);
    const __m256i q0 = _mm256_unpacklo_epi64(p0, p2), q1 = _mm256_unpackhi_epi64(p0, p2);
    const __m256i q2 = _mm256_unpacklo_epi64(p1, p3), q3 = _mm256_unpackhi_epi64(p1, p3);
    __m256i* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(q0, q1, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(q2, q3, 0x20));
    _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(q0, q1, 0x31));
    _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(q2, q3, 0x31));
}
// out[4 * i + j] = wj[i]
inline void store_interleaved(I w0, I w1, I w2, I w3, uint32_t* out) {
    interleave(w0.a, w1.a, w2.a, w3.a, out);
    interleave(w0.b, w1.b, w2.b, w3.b, out + 32);
}

inline float square_root(float v) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(v))); }
FORERUN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Grouped weights (grouped.inc). A line is 64 bytes: unsigned weights of 16 outputs times 4 inputs, output by output.
constexpr int kMaxGroupedRows = 4;
constexpr int kGroupedWordRun = 1;
constexpr int grouped_panels(int, int rows) { return rows == 1 ? 2 : 1; }

// Stores the lanes, whose values fit into bytes, as bytes.
inline void store_bytes(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

struct Bytes {
    __m256i a, b;
};
inline Bytes load_line(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void store_line(uint8_t* p, Bytes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
// (bytes >> N) & MASK, where MASK keeps no bit that came from a neighbour.
template <int N, int MASK>
inline Bytes bits_down(Bytes x) {
    const __m256i mask = _mm256_set1_epi8(MASK);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, N), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, N), mask)};
}
template <int N, int MASK>
inline Bytes bits_up(Bytes x) {
    const __m256i mask = _mm256_set1_epi8(MASK);
    return {_mm256_and_si256(_mm256_slli_epi16(x.a, N), mask), _mm256_and_si256(_mm256_slli_epi16(x.b, N), mask)};
}
// Replaces every byte i by byte i of a table of 16.
inline Bytes look_up(Bytes x, const uint8_t* table) {
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(bytes, x.a), _mm256_shuffle_epi8(bytes, x.b)};
}
inline Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int BIT>
inline __m256i spread_bits(uint32_t bits) {
    const __m256i which = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, which), which),
                            _mm256_set1_epi8(static_cast<char>(BIT)));
}
// Sets BIT, which is clear, in every byte whose bit among the 64 at p is set.
template <int BIT>
inline Bytes set_bits(Bytes x, const uint8_t* p) {
    uint32_t masks[2];
    std::memcpy(masks, p, 8);
    return {_mm256_or_si256(x.a, spread_bits<BIT>(masks[0])), _mm256_or_si256(x.b, spread_bits<BIT>(masks[1]))};
}
inline F load_half(const uint16_t* p) {  // float16
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

#ifdef __AVXVNNI__
constexpr int kByteBias = 0;
template <int BITS>
using Weights = Bytes;
template <int BITS>
inline Bytes prepare(Bytes x) {
    return x;
}
// acc plus the products of four lines with 16 activations, four of them at words, words + stride, ...
template <int BITS>
inline I dot(I acc, const Bytes (&w)[4], const int32_t* words, int stride) {
    for (int j = 0; j < 4; ++j) {
        const __m256i q = _mm256_set1_epi32(words[j * stride]);
        acc.a = _mm256_dpbusd_avx_epi32(acc.a, w[j].a, q);
        acc.b = _mm256_dpbusd_avx_epi32(acc.b, w[j].b, q);
    }
    return acc;
}
#else
// Pairs of products are summed in 16 bits: 8-bit weights would overflow, so those become signed by taking away
// kByteBias, and their signs go over to the activations: 2 * 128 * 127 fits.
constexpr int kByteBias = 128;
struct SignedBytes {
    Bytes size, sign;
};
template <int BITS>
struct WeightsOf {
    using Type = Bytes;
};
template <>
struct WeightsOf<8> {
    using Type = SignedBytes;
};
template <int BITS>
using Weights = typename WeightsOf<BITS>::Type;
template <int BITS>
inline Weights<BITS> prepare(Bytes x) {
    if constexpr (BITS < 8) {
        return x;
    } else {
        const __m256i bias = _mm256_set1_epi8(-128);
        const Bytes w = {_mm256_xor_si256(x.a, bias), _mm256_xor_si256(x.b, bias)};
        return {{_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)}, w};
    }
}
#define FORERUN_PAIR_SUMS
struct Pairs {
    __m256i a, b;
};
template <int BITS>
inline Pairs pair_sums(const Bytes& w, const int32_t* word) {
    const __m256i q = _mm256_set1_epi32(*word);
    return {_mm256_maddubs_epi16(w.a, q), _mm256_maddubs_epi16(w.b, q)};
}
// Adds the products of one line's first 8 outputs, or its last 8, to a row's sums: all rows of a half share weights that
// stay in registers, beside the sums of both halves.
FORERUN_INLINE void add_half(__m256i& sums, __m256i size, __m256i sign, const int32_t* word) {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(*word), sign));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(sums));  // as below
}
constexpr int kRegisters = 2;  // that 16 sums take
template <int HALF>
FORERUN_INLINE void add_line(I& sums, const SignedBytes& w, const int32_t* word) {
    if constexpr (HALF == 0) {
        add_half(sums.a, w.size.a, w.sign.a, word);
    } else {
        add_half(sums.b, w.size.b, w.sign.b, word);
    }
}
inline Pairs add_pairs(Pairs x, Pairs y) {
    x = {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
    asm("" : "+x"(x.a), "+x"(x.b));  // else gcc makes a tree of a chain, for which there are not enough registers
    return x;
}
inline void add_all_pairs(I& sums, Pairs x) {
    const __m256i ones = _mm256_set1_epi16(1);
    sums = {_mm256_add_epi32(sums.a, _mm256_madd_epi16(x.a, ones)),
            _mm256_add_epi32(sums.b, _mm256_madd_epi16(x.b, ones))};
}
#endif

}  // namespace forerun::FORERUN_ISA
