// The kernels compiled for avx2; the build gives this file its compiler flags.
#include "kernel_table.h"
#include "simd_avx2.h"

#define FORERUN_ISA avx2
#define FORERUN_ISA_NAME "avx2"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable* avx2_kernels() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kTable : nullptr;
}

}  // namespace forerun
