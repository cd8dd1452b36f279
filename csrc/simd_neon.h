// 16 float lanes on four 128-bit registers of 64-bit ARM. Same names and rounding as simd_avx2.h. Dot products of bytes
// and products of byte matrices are used where the build gives them (armv8.2-a+dotprod, +i8mm).
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "repeat.h"

namespace forerun::FORERUN_ISA {

struct F {
    float32x4_t a, b, c, d;
};
struct I {
    uint32x4_t a, b, c, d;
};
struct Bytes {
    uint8x16_t a, b, c, d;
};

// op on each of the four registers.
template <class Out, class Op, class... In>
FORERUN_INLINE Out each(Op op, In... x) {
    return {op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
}

// Accumulators that fit the 32 registers beside weights and a broadcast; see linear.inc and attention.inc.
constexpr int kMaxTileRows = 6;
constexpr int tile_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
constexpr int kMaxHeadsTogether = 4;  // query vectors that share the loads of their keys
constexpr int attention_tiles(int heads) { return heads == 1 ? 4 : heads == 2 ? 2 : 1; }

inline F set1(float v) {
    const float32x4_t s = vdupq_n_f32(v);
    return {s, s, s, s};
}
inline F zero() { return set1(0.0f); }
inline F broadcast(const float* p) {
    const float32x4_t s = vld1q_dup_f32(p);
    return {s, s, s, s};
}
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
    vst1q_f32(p + 8, v.c);
    vst1q_f32(p + 12, v.d);
}
inline F load(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_high_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))};
}
inline F load(const uint16_t* p) {  // bfloat16
    const uint16x8_t none = vdupq_n_u16(0), lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
    return {vreinterpretq_f32_u16(vzip1q_u16(none, lo)), vreinterpretq_f32_u16(vzip2q_u16(none, lo)),
            vreinterpretq_f32_u16(vzip1q_u16(none, hi)), vreinterpretq_f32_u16(vzip2q_u16(none, hi))};
}
inline F load_half(const uint16_t* p) {  // float16
    const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
    const float16x8_t x = vreinterpretq_f16_u16(lo), y = vreinterpretq_f16_u16(hi);
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)), vcvt_high_f32_f16(y)};
}

// Weights of two neighbouring inputs.
constexpr int pair_place(int input, int lane) { return 16 * input + lane; }
template <class T>
inline F load_panel(const T* p) {
    return load(p);
}
#include "panel_pair.inc"

// The processor's own minimum and maximum treat NaN differently.
inline float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }

inline F add(F x, F y) {
    return each<F>([](auto p, auto q) { return vaddq_f32(p, q); }, x, y);
}
inline F sub(F x, F y) {
    return each<F>([](auto p, auto q) { return vsubq_f32(p, q); }, x, y);
}
inline F mul(F x, F y) {
    return each<F>([](auto p, auto q) { return vmulq_f32(p, q); }, x, y);
}
inline F div(F x, F y) {
    return each<F>([](auto p, auto q) { return vdivq_f32(p, q); }, x, y);
}
inline F fma(F x, F y, F z) {
    return each<F>([](auto p, auto q, auto r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
inline F fnma(F x, F y, F z) {
    return each<F>([](auto p, auto q, auto r) { return vfmsq_f32(r, p, q); }, x, y, z);
}
inline F min(F x, F y) { return each<F>(lesser, x, y); }   // x < y ? x : y
inline F max(F x, F y) { return each<F>(greater, x, y); }  // x > y ? x : y

// Bit i of the result: lane i of the comparison holds.
inline uint32_t lane_bits(I holds) {
    const uint32x4_t a = {1, 2, 4, 8}, b = vshlq_n_u32(a, 4), c = vshlq_n_u32(a, 8), d = vshlq_n_u32(a, 12);
    const I bits = each<I>([](auto p, auto q) { return vandq_u32(p, q); }, holds, I{a, b, c, d});
    return vaddvq_u32(vorrq_u32(vorrq_u32(bits.a, bits.b), vorrq_u32(bits.c, bits.d)));
}
inline uint32_t less(F x, F y) {
    return lane_bits(each<I>([](auto p, auto q) { return vcltq_f32(p, q); }, x, y));
}
inline uint32_t equal(F x, F y) {
    return lane_bits(each<I>([](auto p, auto q) { return vceqq_f32(p, q); }, x, y));
}

// Folds halves: 16 -> 8 -> 4 -> 2 -> 1.
inline float sum(F v) {
    const float32x4_t four = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float maximum(F v) {
    const float32x4_t four = greater(greater(v.a, v.c), greater(v.b, v.d));
    const float32x4_t two = greater(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(greater(two, vextq_f32(two, two, 1)), 0);
}

inline I iset1(uint32_t v) {
    const uint32x4_t s = vdupq_n_u32(v);
    return {s, s, s, s};
}
inline I load_words(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4), vld1q_u32(p + 8), vld1q_u32(p + 12)}; }
inline I iota() {
    static constexpr uint32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_words(kNumbers);
}
inline I load_bytes(const uint8_t* p) {  // 16 of them, unsigned
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
            vmovl_u16(vget_high_u16(high))};
}
inline F load_float8(const uint8_t* p) {  // e4m3, divided by 256; see simd_avx2.h
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const auto half = [](int16x8_t x) {
        return vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(x), vdupq_n_u16(0xBF80)));
    };
    const float16x8_t x = half(vshll_n_s8(vget_low_s8(bytes), 7)), y = half(vshll_high_n_s8(bytes, 7));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)), vcvt_high_f32_f16(y)};
}
inline F look_up(const float* table, I x) {  // of 16: the four bytes of number i are 4 * i and the next
    const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
    const auto at = [](uint32x4_t i) { return vmlaq_n_u32(vdupq_n_u32(0x03020100u), i, 0x04040404u); };
    return each<F>([=](auto i) { return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(at(i)))); }, x);
}
inline I iadd(I x, I y) {
    return each<I>([](auto p, auto q) { return vaddq_u32(p, q); }, x, y);
}
inline I isub(I x, I y) {
    return each<I>([](auto p, auto q) { return vsubq_u32(p, q); }, x, y);
}
inline I ixor(I x, I y) {
    return each<I>([](auto p, auto q) { return veorq_u32(p, q); }, x, y);
}
template <int N>
inline I shift_left(I x) {
    return each<I>([](auto p) { return vshlq_n_u32(p, N); }, x);
}
template <int N>
inline I shift_right_signed(I x) {
    return each<I>([](auto p) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(p), N)); }, x);
}
template <int N>
inline I shift_right(I x) {
    return each<I>([](auto p) { return vshrq_n_u32(p, N); }, x);
}
inline I as_int(F x) {
    return each<I>([](auto p) { return vreinterpretq_u32_f32(p); }, x);
}
inline F as_float(I x) {
    return each<F>([](auto p) { return vreinterpretq_f32_u32(p); }, x);
}
inline F to_float(I x) {  // signed
    return each<F>([](auto p) { return vcvtq_f32_s32(vreinterpretq_s32_u32(p)); }, x);
}

// 32 x 32 -> 64 bit products, lane by lane.
inline void multiply_wide(I x, uint32_t multiplier, I& high, I& low) {
    const auto products = [=](uint32x4_t p, uint32x4_t& upper, uint32x4_t& lower) {
        const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(p), multiplier));
        const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_n_u32(p, multiplier));
        lower = vuzp1q_u32(first, second);
        upper = vuzp2q_u32(first, second);
    };
    products(x.a, high.a, low.a);
    products(x.b, high.b, low.b);
    products(x.c, high.c, low.c);
    products(x.d, high.d, low.d);
}
// out[4 * i + j] = wj[i]
inline void store_interleaved(I w0, I w1, I w2, I w3, uint32_t* out) {
    const uint32x4x4_t a{{w0.a, w1.a, w2.a, w3.a}}, b{{w0.b, w1.b, w2.b, w3.b}};
    const uint32x4x4_t c{{w0.c, w1.c, w2.c, w3.c}}, d{{w0.d, w1.d, w2.d, w3.d}};
    vst4q_u32(out, a);
    vst4q_u32(out + 16, b);
    vst4q_u32(out + 32, c);
    vst4q_u32(out + 48, d);
}

inline float square_root(float v) { return __builtin_sqrtf(v); }
FORERUN_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

// Grouped weights (grouped.inc). A line is 64 bytes: unsigned weights of 16 outputs times 4 inputs, output by output.
constexpr int kMaxGroupedRows = 4;
constexpr int kGroupedWordRun = 4;  // a row's 16 activations of a block are one register
constexpr int grouped_panels(int, int rows) { return rows == 1 ? 2 : 1; }

// Stores the lanes, whose values fit into bytes, as bytes.
inline void store_bytes(int8_t* p, I x) {
    const uint16x8_t lo = vmovn_high_u32(vmovn_u32(x.a), x.b), hi = vmovn_high_u32(vmovn_u32(x.c), x.d);
    vst1q_s8(p, vreinterpretq_s8_u8(vmovn_high_u16(vmovn_u16(lo), hi)));
}

inline Bytes load_line(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline void store_line(uint8_t* p, Bytes x) {
    vst1q_u8(p, x.a);
    vst1q_u8(p + 16, x.b);
    vst1q_u8(p + 32, x.c);
    vst1q_u8(p + 48, x.d);
}
// (bytes >> N) & MASK
template <int N, int MASK>
inline Bytes bits_down(Bytes x) {
    return each<Bytes>(
        [](auto p) {
            if constexpr (N > 0) p = vshrq_n_u8(p, N);
            return MASK == 0xFF >> N ? p : vandq_u8(p, vdupq_n_u8(MASK));
        },
        x);
}
template <int N, int MASK>
inline Bytes bits_up(Bytes x) {
    return each<Bytes>([](auto p) { return vandq_u8(vshlq_n_u8(p, N), vdupq_n_u8(MASK)); }, x);
}
// Replaces every byte i by byte i of a table of 16.
inline Bytes look_up(Bytes x, const uint8_t* table) {
    const uint8x16_t bytes = vld1q_u8(table);
    return each<Bytes>([=](auto p) { return vqtbl1q_u8(bytes, p); }, x);
}
inline Bytes either(Bytes x, Bytes y) {
    return each<Bytes>([](auto p, auto q) { return vorrq_u8(p, q); }, x, y);
}
// Sets BIT, which is clear, in every byte whose bit among the 64 at p is set.
template <int BIT>
inline Bytes set_bits(Bytes x, const uint8_t* p) {
    const uint8x16_t which = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u)), bit = vdupq_n_u8(BIT);
    const uint8x16_t bits = vcombine_u8(vld1_u8(p), vdup_n_u8(0));
    const uint8x16_t twice = vzip1q_u8(bits, bits), low = vzip1q_u8(twice, twice), high = vzip2q_u8(twice, twice);
    const Bytes spread{vzip1q_u8(low, low), vzip2q_u8(low, low), vzip1q_u8(high, high), vzip2q_u8(high, high)};
    return each<Bytes>([=](auto p, auto q) { return vorrq_u8(p, vandq_u8(vtstq_u8(q, which), bit)); }, x, spread);
}

template <int BITS>
using Weights = Bytes;

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int kByteBias = 0;
template <int BITS>
inline Bytes prepare(Bytes x) {
    return x;
}
#else
// Weights are multiplied as signed bytes, so those of 8 bits lose kByteBias first.
constexpr int kByteBias = 128;
template <int BITS>
inline Bytes prepare(Bytes x) {
    if (BITS < 8) return x;
    return each<Bytes>([](auto p) { return veorq_u8(p, vdupq_n_u8(128)); }, x);
}
#endif

#ifdef __ARM_FEATURE_DOTPROD
// acc plus the products of four lines with a row's 16 activations.
template <int BITS>
FORERUN_INLINE I dot(I acc, const Bytes (&w)[4], int8x16_t q) {
    repeat<4>([&](auto j) FORERUN_FLAT {
        constexpr int kWord = decltype(j)::value;
        const auto products = [=](uint32x4_t sums, uint8x16_t line) FORERUN_FLAT {
            const int32x4_t from = vreinterpretq_s32_u32(sums);
#ifdef __ARM_FEATURE_MATMUL_INT8
            return vreinterpretq_u32_s32(vusdotq_laneq_s32(from, line, q, kWord));
#else
            return vreinterpretq_u32_s32(vdotq_laneq_s32(from, vreinterpretq_s8_u8(line), q, kWord));
#endif
        };
        acc = each<I>(products, acc, w[kWord]);
    });
    return acc;
}
#else
template <int BITS>
FORERUN_INLINE I dot(I acc, const Bytes (&w)[4], int8x16_t q) {
    constexpr int kSums = BITS <= 5 ? 4 : BITS <= 6 ? 2 : 1;  // lines whose pair sums add up in 16 bits
    const int32x4_t words = vreinterpretq_s32_s8(q);
    const int8x8_t x[4] = {
        vreinterpret_s8_s32(vdup_laneq_s32(words, 0)), vreinterpret_s8_s32(vdup_laneq_s32(words, 1)),
        vreinterpret_s8_s32(vdup_laneq_s32(words, 2)), vreinterpret_s8_s32(vdup_laneq_s32(words, 3))};
    repeat<4 / kSums>([&](auto part) FORERUN_FLAT {
        constexpr int kFirst = decltype(part)::value * kSums;
        const auto products = [&](uint32x4_t sums, auto... line) FORERUN_FLAT {
            const int8x16_t lines[4] = {vreinterpretq_s8_u8(line)...};
            int16x8_t low = vmull_s8(vget_low_s8(lines[kFirst]), x[kFirst]);
            int16x8_t high = vmull_s8(vget_high_s8(lines[kFirst]), x[kFirst]);
            repeat<kSums - 1>([&](auto next) FORERUN_FLAT {
                constexpr int kLine = kFirst + 1 + decltype(next)::value;
                low = vmlal_s8(low, vget_low_s8(lines[kLine]), x[kLine]);
                high = vmlal_s8(high, vget_high_s8(lines[kLine]), x[kLine]);
            });
            return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sums), vpaddq_s16(low, high)));
        };
        acc = each<I>(products, acc, w[0], w[1], w[2], w[3]);
    });
    return acc;
}
#endif

inline int8x16_t load_activations(const int32_t* words) { return vld1q_s8(reinterpret_cast<const int8_t*>(words)); }

#ifdef __ARM_FEATURE_MATMUL_INT8
// Products of matrices, two outputs by eight inputs by two rows: while they are added to, the sums of rows r and r + 1
// lie output by output, outputs 0 .. 7 in the first row's registers and 8 .. 15 in the second's.
#define FORERUN_PAIRED_ROWS
template <int ROWS, int PANELS>
FORERUN_INLINE void pair_rows(I (&sums)[ROWS][PANELS]) {
    repeat<ROWS / 2>([&](auto pair) FORERUN_FLAT {
        repeat<PANELS>([&](auto p) FORERUN_FLAT {
            const I x = sums[2 * pair][p], y = sums[2 * pair + 1][p];
            sums[2 * pair][p] = {vzip1q_u32(x.a, y.a), vzip2q_u32(x.a, y.a), vzip1q_u32(x.b, y.b),
                                 vzip2q_u32(x.b, y.b)};
            sums[2 * pair + 1][p] = {vzip1q_u32(x.c, y.c), vzip2q_u32(x.c, y.c), vzip1q_u32(x.d, y.d),
                                     vzip2q_u32(x.d, y.d)};
        });
    });
}
template <int ROWS, int PANELS>
FORERUN_INLINE void part_rows(I (&sums)[ROWS][PANELS]) {
    repeat<ROWS / 2>([&](auto pair) FORERUN_FLAT {
        repeat<PANELS>([&](auto p) FORERUN_FLAT {
            const I x = sums[2 * pair][p], y = sums[2 * pair + 1][p];
            sums[2 * pair][p] = {vuzp1q_u32(x.a, x.b), vuzp1q_u32(x.c, x.d), vuzp1q_u32(y.a, y.b),
                                 vuzp1q_u32(y.c, y.d)};
            sums[2 * pair + 1][p] = {vuzp2q_u32(x.a, x.b), vuzp2q_u32(x.c, x.d), vuzp2q_u32(y.a, y.b),
                                     vuzp2q_u32(y.c, y.d)};
        });
    });
}
// Two registers of the lines x and y as four, of two outputs each: four inputs of x, four of y.
inline Bytes interleave(uint8x16_t x0, uint8x16_t y0, uint8x16_t x1, uint8x16_t y1) {
    const uint32x4_t a = vreinterpretq_u32_u8(x0), b = vreinterpretq_u32_u8(y0);
    const uint32x4_t c = vreinterpretq_u32_u8(x1), d = vreinterpretq_u32_u8(y1);
    return {vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b)),
            vreinterpretq_u8_u32(vzip1q_u32(c, d)), vreinterpretq_u8_u32(vzip2q_u32(c, d))};
}
inline I add_pair_products(I sums, Bytes outputs, int8x16_t rows) {
    return each<I>(
        [=](uint32x4_t from, uint8x16_t w) {
            return vreinterpretq_u32_s32(vusmmlaq_s32(vreinterpretq_s32_u32(from), w, rows));
        },
        sums, outputs);
}
#endif

// Adds the products of four lines a panel with 16 activations of each row, whose words lie at words + 4 * row.
#define FORERUN_ADD_PRODUCTS
template <int BITS, int ROWS, int PANELS>
FORERUN_INLINE void add_products(I (&sums)[ROWS][PANELS], const Bytes (&w)[PANELS][4], const int32_t* words) {
    int paired = 0;
#ifdef FORERUN_PAIRED_ROWS
    paired = ROWS / 2 * 2;
    repeat<PANELS>([&](auto p) FORERUN_FLAT {
        repeat<2>([&](auto half) FORERUN_FLAT {
            const Bytes &x = w[p][2 * half], &y = w[p][2 * half + 1];
            const Bytes first = interleave(x.a, y.a, x.b, y.b), second = interleave(x.c, y.c, x.d, y.d);
            repeat<ROWS / 2>([&](auto pair) FORERUN_FLAT {
                const int64x2_t q0 = vreinterpretq_s64_s8(load_activations(words + 8 * pair));
                const int64x2_t q1 = vreinterpretq_s64_s8(load_activations(words + 8 * pair + 4));
                const int8x16_t rows = vreinterpretq_s8_s64(half == 0 ? vzip1q_s64(q0, q1) : vzip2q_s64(q0, q1));
                sums[2 * pair][p] = add_pair_products(sums[2 * pair][p], first, rows);
                sums[2 * pair + 1][p] = add_pair_products(sums[2 * pair + 1][p], second, rows);
            });
        });
    });
#endif
    repeat<ROWS>([&](auto r) FORERUN_FLAT {
        if (r < paired) return;
        const int8x16_t q = load_activations(words + 4 * r);
        repeat<PANELS>([&](auto p) FORERUN_FLAT { sums[r][p] = dot<BITS>(sums[r][p], w[p], q); });
    });
}

}  // namespace forerun::FORERUN_ISA
