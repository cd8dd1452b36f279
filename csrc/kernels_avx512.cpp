// The kernels compiled for avx512; the build gives this file its compiler flags.
#define FORERUN_ISA avx512
#define FORERUN_ISA_NAME "avx512"
#include "kernel_table.h"
#include "simd_avx512.h"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable* avx512_kernels() {
    const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return supported ? &avx512::kTable : nullptr;
}

}  // namespace forerun
