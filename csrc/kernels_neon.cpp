// The kernels compiled for 64-bit ARM, all of which has NEON.
#define FORERUN_ISA neon
#define FORERUN_ISA_NAME "neon"
#include "kernel_table.h"
#include "simd_neon.h"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable* neon_kernels() { return &neon::kTable; }

}  // namespace forerun
