// The grouped kernels compiled for ARM with its dot products of bytes; everything else is neon's own.
#define FORERUN_ISA neondot
#include "arm_features.h"
#include "kernel_table.h"
#include "simd_neon.h"

namespace forerun::neondot {
namespace {

#include "math.inc"

#include "tile.inc"

#include "grouped.inc"

KernelTable extend(KernelTable table) {
    table.name = "neondot";
    table.grouped_quantize = grouped_quantize;
    table.grouped = grouped;
    return table;
}

}  // namespace
}  // namespace forerun::neondot

namespace forerun {

const KernelTable* neondot_kernels() {
    if (!has_dot_products()) return nullptr;
    static const KernelTable table = neondot::extend(*neon_kernels());
    return &table;
}

}  // namespace forerun
