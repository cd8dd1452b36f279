// What ops over rows share: checking indices, moving columns. Knows pointers and sizes alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace forerun {

// An index outside its table would read or write foreign memory: refuse it here.
template <class T>
void check_range(const char* what, const T* values, int64_t num, int64_t limit) {
    for (int64_t i = 0; i < num; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            throw std::out_of_range(std::string(what) + " " + std::to_string(values[i]) + " is outside 0 .. " +
                                    std::to_string(limit - 1));
        }
    }
}

// The first `width` columns of rows of from_stride entries -> those of rows of to_stride entries.
inline void move_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t width,
                         int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) std::copy_n(from + row * from_stride, width, to + row * to_stride);
}

}  // namespace forerun
