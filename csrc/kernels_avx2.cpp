// The kernels compiled for avx2; the build gives this file its compiler flags.
#define FORERUN_ISA avx2
#define FORERUN_ISA_NAME "avx2"
#include "kernel_table.h"
#include "simd_avx2.h"
#include "x86_features.h"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable* avx2_kernels() {
    const bool supported =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    return supported ? &avx2::kTable : nullptr;
}

}  // namespace forerun
