// 16 float lanes in one 512-bit register. Same names and rounding as simd_avx2.h. Needs AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "repeat.h"

namespace forerun::FORERUN_ISA {

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};

constexpr int kMaxTileRows = 8;
constexpr int tile_panels(int rows) { return rows <= 4 ? 4 : 2; }
constexpr int kMaxHeadsTogether = 8;  // query vectors that share the loads of their keys
constexpr int attention_tiles(int heads) { return heads <= 2 ? 8 / heads : heads <= 5 ? 4 : 2; }

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float v) { return {_mm512_set1_ps(v)}; }
inline F broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v.v); }
inline F load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F load(const uint16_t* p) {  // bfloat16
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
// Weights of two neighbouring inputs. bfloat16: one 32-bit word holds both of a lane, so that one load becomes two
// vectors with a shuffle (which leaves the ports of fma alone) and a mask.
constexpr int pair_place(int input, int lane) { return 2 * lane + input; }
template <class T>
struct PanelPair {
    const T* at;
};
template <>
struct PanelPair<uint16_t> {
    __m512i words;
};
inline PanelPair<float> load_pair(const float* p) { return {p}; }
inline F first_of(PanelPair<float> pair) { return load(pair.at); }
inline F second_of(PanelPair<float> pair) { return load(pair.at + 16); }
inline PanelPair<uint16_t> load_pair(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
inline F first_of(PanelPair<uint16_t> pair) {
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13));
    return {_mm512_castsi512_ps(_mm512_shuffle_epi8(pair.words, order))};
}
inline F second_of(PanelPair<uint16_t> pair) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(pair.words, mask))};
}

inline F add(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F sub(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F mul(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F div(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline F fnma(F x, F y, F z) { return {_mm512_fnmadd_ps(x.v, y.v, z.v)}; }
inline F min(F x, F y) { return {_mm512_min_ps(x.v, y.v)}; }
inline F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
inline uint32_t less(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ); }
inline uint32_t equal(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_EQ_OQ); }

inline float sum(F v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float maximum(F v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline I iset1(uint32_t v) { return {_mm512_set1_epi32(static_cast<int>(v))}; }
inline I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline I load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline I load_bytes(const uint8_t* p) {  // 16 of them, unsigned
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// e4m3 but NaN, divided by 256: the same bits in float16's places, whose exponents start 8 lower.
inline F load_float8(const uint8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
    return {_mm512_cvtph_ps(halves)};
}
inline F look_up(const float* table, I x) { return {_mm512_permutexvar_ps(x.v, _mm512_loadu_ps(table))}; }  // of 16
inline I iadd(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline I isub(I x, I y) { return {_mm512_sub_epi32(x.v, y.v)}; }
inline I ixor(I x, I y) { return {_mm512_xor_si512(x.v, y.v)}; }
template <int N>
inline I shift_left(I x) {
    return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
inline I shift_right_signed(I x) {
    return {_mm512_srai_epi32(x.v, N)};
}
template <int N>
inline I shift_right(I x) {
    return {_mm512_srli_epi32(x.v, N)};
}
inline I as_int(F x) { return {_mm512_castps_si512(x.v)}; }
inline F as_float(I x) { return {_mm512_castsi512_ps(x.v)}; }
inline F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }  // signed

inline void multiply_wide(I x, uint32_t multiplier, I& high, I& low) {
    const __m512i m = _mm512_set1_epi32(static_cast<int>(multiplier));
    const __m512i even = _mm512_mul_epu32(x.v, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x.v, 32), m);
    low.v = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high.v = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}
// out[4 * i + j] = wj[i]
inline void store_interleaved(I w0, I w1, I w2, I w3, uint32_t* out) {
    const __m512i p0 = _mm512_unpacklo_epi32(w0.v, w1.v), p1 = _mm512_unpackhi_epi32(w0.v, w1.v);
    const __m512i p2 = _mm512_unpacklo_epi32(w2.v, w3.v), p3 = _mm512_unpackhi_epi32(w2.v, w3.v);
    const __m512i q[4] = {_mm512_unpacklo_epi64(p0, p2), _mm512_unpackhi_epi64(p0, p2), _mm512_unpacklo_epi64(p1, p3),
                          _mm512_unpackhi_epi64(p1, p3)};
    // 128-bit part i of q[j] holds the four words of index 4 * i + j.
    for (int j = 0; j < 4; ++j) {
        __m128i* to = reinterpret_cast<__m128i*>(out) + j;
        _mm_storeu_si128(to, _mm512_castsi512_si128(q[j]));
        _mm_storeu_si128(to + 4, _mm512_extracti32x4_epi32(q[j], 1));
        _mm_storeu_si128(to + 8, _mm512_extracti32x4_epi32(q[j], 2));
        _mm_storeu_si128(to + 12, _mm512_extracti32x4_epi32(q[j], 3));
    }
}

inline float square_root(float v) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(v))); }
FORERUN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Grouped weights (grouped.inc). A line is 64 bytes: unsigned weights of 16 outputs times 4 inputs, output by output.
constexpr int kMaxGroupedRows = 12;
constexpr int kGroupedWordRun = 1;
#ifdef __AVX512VNNI__
// Above 6 rows the sums and totals of two panels do not fit the registers, which costs little where steps are long.
constexpr int grouped_panels(int steps, int rows) { return rows <= 6 || steps == 0 ? 2 : 1; }  // steps: see grouped.inc
#else
constexpr int grouped_panels(int, int rows) { return rows <= 4 ? 2 : 1; }
#endif

// Stores the lanes, whose values fit into bytes, as bytes.
inline void store_bytes(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v)); }

struct Bytes {
    __m512i v;
};
inline Bytes load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_line(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }
// (bytes >> N) & MASK, where MASK keeps no bit that came from a neighbour.
template <int N, int MASK>
inline Bytes bits_down(Bytes x) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.v, N), _mm512_set1_epi8(MASK))};
}
template <int N, int MASK>
inline Bytes bits_up(Bytes x) {
    return {_mm512_and_si512(_mm512_slli_epi16(x.v, N), _mm512_set1_epi8(MASK))};
}
// Replaces every byte i by byte i of a table of 16.
inline Bytes look_up(Bytes x, const uint8_t* table) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), x.v)};
}
inline Bytes either(Bytes x, Bytes y) { return {_mm512_or_si512(x.v, y.v)}; }
// Sets BIT, which is clear, in every byte whose bit among the 64 at p is set.
template <int BIT>
inline Bytes set_bits(Bytes x, const uint8_t* p) {
    uint64_t mask;
    std::memcpy(&mask, p, 8);
    return {_mm512_mask_add_epi8(x.v, mask, x.v, _mm512_set1_epi8(static_cast<char>(BIT)))};
}
// Points of a grid by their numbers (grid.inc), out of a table of REGISTERS * 32.
template <int REGISTERS>
inline __m512i pick_points(const __m512i* table, __m512i numbers) {
    if constexpr (REGISTERS == 2) {
        return _mm512_permutex2var_epi16(table[0], numbers, table[1]);
    } else {
        const __mmask32 above = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(16 * REGISTERS));
        const __m512i low = pick_points<REGISTERS / 2>(table, numbers);
        return _mm512_mask_mov_epi16(low, above, pick_points<REGISTERS / 2>(table + REGISTERS / 2, numbers));
    }
}
template <int REGISTERS>
inline bool pick_all(const uint16_t* points, uint16_t* numbers, int count) {
    __m512i table[REGISTERS];
    for (int i = 0; i < REGISTERS; ++i) table[i] = _mm512_loadu_si512(points + 32 * i);
    for (int i = 0; i < count; i += 32) {
        _mm512_storeu_si512(numbers + i, pick_points<REGISTERS>(table, _mm512_loadu_si512(numbers + i)));
    }
    return true;
}
// Replaces numbers by points, 32 at a time, and returns true, if there are as few as 2^bits of them that this pays.
#define FORERUN_FEW_POINTS
inline bool look_up_few(const uint16_t* points, int bits, uint16_t* numbers, int count) {
    if (bits <= 8) return pick_all<8>(points, numbers, count);
    return bits == 9 && pick_all<16>(points, numbers, count);
}
inline F load_half(const uint16_t* p) {  // float16
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

#ifdef __AVX512VNNI__
constexpr int kByteBias = 0;
template <int BITS>
using Weights = Bytes;
template <int BITS>
inline Bytes prepare(Bytes x) {
    return x;
}
// What the intrinsics stand for, but gcc copies sums between them and loads the word of a single panel by an instruction
// of its own, for want of which a tile would run out of issue slots.
FORERUN_INLINE void add_word(__m512i& sum, __m512i w, __m512i word) {
    asm("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(word), "v"(w));
}
FORERUN_INLINE void add_word(__m512i& sum, __m512i w, const int32_t& word) {
    asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(word), "v"(w));
}
FORERUN_INLINE __m512i broadcast_word(const int32_t& word) {
    __m512i all;
    asm("vpbroadcastd %1, %0" : "=v"(all) : "m"(word));
    return all;
}
// A row's sums wait for each other, so rows take turns; one load of a word serves all panels.
#define FORERUN_ADD_LINES
template <int BITS, int ROWS, int PANELS, int LINES, class Line>
FORERUN_INLINE void add_lines(I (&sums)[ROWS][PANELS], const int32_t* words, Line line) {
    repeat<LINES>([&](auto j) FORERUN_FLAT {
        Bytes w[PANELS];
        repeat<PANELS>([&](int p) FORERUN_FLAT { w[p] = line(p, j); });
        repeat<ROWS>([&](int r) FORERUN_FLAT {
            const int32_t& from = words[j * ROWS + r];
            if constexpr (PANELS == 1) return add_word(sums[r][0].v, w[0].v, from);
            const __m512i word = broadcast_word(from);
            repeat<PANELS>([&](int p) FORERUN_FLAT { add_word(sums[r][p].v, w[p].v, word); });
        });
    });
}
#else
// Pairs of products are summed in 16 bits: 8-bit weights would overflow, so those become signed by taking away
// kByteBias, and their signs go over to the activations: 2 * 128 * 127 fits.
constexpr int kByteBias = 128;
template <int BITS>
struct Weights {
    __m512i size;
    __mmask64 negative;
};
template <int BITS>
inline Weights<BITS> prepare(Bytes x) {
    if (BITS < 8) return {x.v, 0};
    const __m512i w = _mm512_xor_si512(x.v, _mm512_set1_epi8(-128));
    return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
#define FORERUN_PAIR_SUMS
struct Pairs {
    __m512i v;
};
template <int BITS>
inline Pairs pair_sums(const Weights<BITS>& w, const int32_t* word) {
    __m512i q = _mm512_set1_epi32(*word);
    if (BITS == 8) q = _mm512_mask_sub_epi8(q, w.negative, _mm512_setzero_si512(), q);
    return {_mm512_maddubs_epi16(w.size, q)};
}
inline Pairs add_pairs(Pairs x, Pairs y) {
    x = {_mm512_add_epi16(x.v, y.v)};
    asm("" : "+v"(x.v));  // else gcc makes a tree of a chain, for which there are not enough registers
    return x;
}
inline void add_all_pairs(I& sums, Pairs x) {
    sums.v = _mm512_add_epi32(sums.v, _mm512_madd_epi16(x.v, _mm512_set1_epi16(1)));
}
constexpr int kRegisters = 1;  // that 16 sums take
template <int HALF, int BITS>
inline void add_line(I& sums, const Weights<BITS>& w, const int32_t* word) {
    add_all_pairs(sums, pair_sums<BITS>(w, word));
}
#endif

}  // namespace forerun::FORERUN_ISA
