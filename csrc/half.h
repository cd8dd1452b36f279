// float16 as float32, without an instruction set's help.
#pragma once

#include <cstdint>
#include <cstring>

namespace forerun {

inline float half_to_float(uint16_t half) {
    constexpr uint32_t kUp = 0x77800000u;  // 2^112: the difference of the exponents
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7FFFu;
    uint32_t bits = 0x7F800000u | (rest & 0x3FFu) << 13;  // infinity or NaN
    if (rest < 0x7C00u) {
        float size, up;
        bits = rest << 13;
        std::memcpy(&size, &bits, 4);
        std::memcpy(&up, &kUp, 4);
        size *= up;  // exact, subnormals included
        std::memcpy(&bits, &size, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace forerun
