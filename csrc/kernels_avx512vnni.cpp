// The grouped kernels compiled for avx512 with its dot products of bytes; everything else is avx512's own.
#define FORERUN_ISA avx512vnni
#include "kernel_table.h"
#include "simd_avx512.h"

namespace forerun::avx512vnni {
namespace {

#include "math.inc"

#include "tile.inc"

#include "grouped.inc"

KernelTable extend(KernelTable table) {
    table.name = "avx512vnni";
    table.grouped_quantize = grouped_quantize;
    table.grouped = grouped;
    return table;
}

}  // namespace
}  // namespace forerun::avx512vnni

namespace forerun {

const KernelTable* avx512vnni_kernels() {
    const KernelTable* base = avx512_kernels();
    if (base == nullptr || !__builtin_cpu_supports("avx512vnni")) return nullptr;
    static const KernelTable table = avx512vnni::extend(*base);
    return &table;
}

}  // namespace forerun
