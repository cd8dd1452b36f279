// What this 64-bit ARM CPU can do beyond NEON, as the operating system says. Static: see kernels_impl.inc.
#pragma once

#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // not in the headers of Linux before 5.10
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace forerun {

#if defined(__linux__)
static inline bool has_dot_products() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
static inline bool has_byte_matrices() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#elif defined(__APPLE__)
static inline bool system_says(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
static inline bool has_dot_products() { return system_says("hw.optional.arm.FEAT_DotProd"); }
static inline bool has_byte_matrices() { return system_says("hw.optional.arm.FEAT_I8MM"); }
#else
static inline bool has_dot_products() { return false; }
static inline bool has_byte_matrices() { return false; }
#endif

}  // namespace forerun
