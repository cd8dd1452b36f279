// What kernel_hashes.cpp stands on: made inputs, hashes of outputs, and which kernels were called.
// Knows no kernel's arguments.
#pragma once

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "../kernel_table.h"

namespace forerun {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Steele, Lea and Flood's SplitMix64. Whole numbers alone, so that every machine makes the same inputs.
struct Generator {
    uint64_t state;

    uint64_t next() {
        state += 0x9E3779B97F4A7C15u;
        uint64_t z = state;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
    float number() { return static_cast<float>(below(1 << 23) - (1 << 22)) * 0x1p-21f; }  // in [-2, 2)
};

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Memory from a cache line on, as the engine hands it out, with a line behind it that tiles may read.
template <class T>
class Array {
public:
    explicit Array(int64_t size) : size_(size), bytes_(static_cast<size_t>(size) * sizeof(T) + 128) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(bytes_.data());
        begin_ = reinterpret_cast<T*>((address + 63) / 64 * 64);
    }
    template <class Make>
    Array(int64_t size, Make make) : Array(size) {
        for (int64_t i = 0; i < size; ++i) begin_[i] = static_cast<T>(make(i));
    }
    Array(const Array&) = delete;
    Array(Array&&) = default;
    T* begin() { return begin_; }
    T* end() { return begin_ + size_; }
    T& operator[](int64_t i) { return begin_[i]; }

private:
    int64_t size_;
    std::vector<unsigned char> bytes_;
    T* begin_;
};
using Floats = Array<float>;

// FNV-1a. One NaN is like another: processors differ in the sign of those they make.
struct Hash {
    uint64_t value = 0xCBF29CE484222325u;

    void add(uint64_t number) {
        for (int shift = 0; shift < 64; shift += 8) value = (value ^ (number >> shift & 0xFF)) * 0x100000001B3u;
    }
    void add(float number) { add(uint64_t{number != number ? 0x7FC00000u : bits_of(number)}); }
    void add(double number) { add(static_cast<float>(number)); }  // logarithms are the C library's
    void add(int64_t number) { add(static_cast<uint64_t>(number)); }
    void add(int8_t number) { add(int64_t{number}); }
    void add(uint16_t number) { add(uint64_t{(number & 0x7FFFu) > 0x7F80u ? 0x7FC0u : number}); }  // bfloat16
    template <class T>
    void add(Array<T>& numbers) {
        for (T number : numbers) add(number);
    }
};

class Run {
public:
    explicit Run(const KernelTable& table) : table_(table) {}

    template <class Args>
    void call(const char* name, void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t units) {
        called_.insert(name);
        const int64_t middle = units / 2;  // in two parts, as threads would
        kernel(args, 0, middle);
        kernel(args, middle, units);
    }
    template <class... Outputs>
    void print(const std::string& name, Outputs&... outputs) const {
        Hash hash;
        (hash.add(outputs), ...);
        std::printf("%s %s %016llx\n", table_.name, name.c_str(), static_cast<unsigned long long>(hash.value));
    }
    const KernelTable& table() const { return table_; }

    // Whether every kernel was called; says which was not.
    bool complete() const {
        bool all = true;
#define FORERUN_CHECK(kernel, Args)                                      \
    if (!called_.count(#kernel)) {                                       \
        std::fprintf(stderr, "no case for the kernel %s\n", #kernel);    \
        all = false;                                                     \
    }
        FORERUN_KERNELS(FORERUN_CHECK)
#undef FORERUN_CHECK
        return all;
    }

private:
    const KernelTable& table_;
    std::set<std::string> called_;
};
#define FORERUN_CALL(run, kernel, args, units) (run).call(#kernel, (run).table().kernel, args, units)

template <class T>
Array<T> numbers(Generator& from, int64_t size);
template <>
inline Floats numbers<float>(Generator& from, int64_t size) {
    return Floats(size, [&](int64_t) { return from.number(); });
}
template <>
inline Array<uint16_t> numbers<uint16_t>(Generator& from, int64_t size) {
    return Array<uint16_t>(size, [&](int64_t) { return bits_of(from.number()) >> 16; });
}
template <>
inline Array<int8_t> numbers<int8_t>(Generator& from, int64_t size) {
    return Array<int8_t>(size, [&](int64_t) { return from.below(255) - 127; });
}

template <class T>
constexpr Dtype kDtype = sizeof(T) == 4 ? Dtype::kFloat32 : sizeof(T) == 2 ? Dtype::kBFloat16 : Dtype::kInt8;
template <class T>
const char* const kDtypeName = sizeof(T) == 4 ? "float32" : sizeof(T) == 2 ? "bfloat16" : "int8";

inline std::string join(const char* name, std::initializer_list<int64_t> sizes) {
    std::string all = name;
    for (int64_t size : sizes) all += "-" + std::to_string(size);
    return all;
}

}  // namespace forerun
