// The grouped kernels compiled for ARM with its products of byte matrices; everything else is neon's own.
#define FORERUN_ISA neoni8mm
#include "arm_features.h"
#include "kernel_table.h"
#include "simd_neon.h"

namespace forerun::neoni8mm {
namespace {

#include "math.inc"

#include "tile.inc"

#include "grouped.inc"

KernelTable extend(KernelTable table) {
    table.name = "neoni8mm";
    table.grouped_quantize = grouped_quantize;
    table.grouped = grouped;
    return table;
}

}  // namespace
}  // namespace forerun::neoni8mm

namespace forerun {

const KernelTable* neoni8mm_kernels() {
    const KernelTable* base = neondot_kernels();
    if (base == nullptr || !has_byte_matrices()) return nullptr;
    static const KernelTable table = neoni8mm::extend(*base);
    return &table;
}

}  // namespace forerun
