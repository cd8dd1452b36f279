// The grouped kernels compiled for avx2 with its dot products of bytes; everything else is avx2's own.
#define FORERUN_ISA avx2vnni
#include "kernel_table.h"
#include "simd_avx2.h"
#include "x86_features.h"

namespace forerun::avx2vnni {
namespace {

#include "math.inc"

#include "tile.inc"

#include "grouped.inc"

KernelTable extend(KernelTable table) {
    table.name = "avx2vnni";
    table.grouped_quantize = grouped_quantize;
    table.grouped = grouped;
    return table;
}

}  // namespace
}  // namespace forerun::avx2vnni

namespace forerun {

const KernelTable* avx2vnni_kernels() {
    const KernelTable* base = avx2_kernels();
    if (base == nullptr || !has_avxvnni()) return nullptr;
    static const KernelTable table = avx2vnni::extend(*base);
    return &table;
}

}  // namespace forerun
