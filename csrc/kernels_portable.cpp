// The kernels compiled for portable; the build gives this file its compiler flags.
#define FORERUN_ISA portable
#define FORERUN_ISA_NAME "portable"
#include "kernel_table.h"
#include "simd_portable.h"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable* portable_kernels() { return &portable::kTable; }

}  // namespace forerun
