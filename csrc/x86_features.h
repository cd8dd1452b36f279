// What this x86 CPU can do of which clang's __builtin_cpu_supports does not know. Static: see kernels_impl.inc.
// That the operating system keeps the registers is asked elsewhere: of AVX2, which has those of F16C and AVX-VNNI, and of
// AMX's tiles.
#pragma once

#include <cpuid.h>

namespace forerun {

struct CpuidAnswer {
    unsigned eax, ebx, ecx, edx;
};

static inline CpuidAnswer ask_cpuid(unsigned leaf, unsigned subleaf) {
    CpuidAnswer answer{};
    __get_cpuid_count(leaf, subleaf, &answer.eax, &answer.ebx, &answer.ecx, &answer.edx);
    return answer;
}

static inline bool has_f16c() { return ask_cpuid(1, 0).ecx >> 29 & 1; }
static inline bool has_avxvnni() { return ask_cpuid(7, 1).eax >> 4 & 1; }
static inline bool has_amx() {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBFloat16 = 1u << 22, kAll = kTile | kInt8 | kBFloat16;
    return (ask_cpuid(7, 0).edx & kAll) == kAll;
}

}  // namespace forerun
