// The kernels compiled for portable; the build gives this file its compiler flags.
#include "kernel_table.h"
#include "simd_portable.h"

#define FORERUN_ISA portable
#define FORERUN_ISA_NAME "portable"
#include "kernels_impl.inc"

namespace forerun {

const KernelTable& portable_kernels() { return portable::kTable; }

}  // namespace forerun
