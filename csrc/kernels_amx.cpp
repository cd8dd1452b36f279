// Products on AMX tiles: dense bfloat16 weights, grouped weights where the rows are many, and attention.
#define FORERUN_ISA amx
#include <cstdlib>
#include <new>

#include "kernel_table.h"
#include "simd_avx512.h"
#include "x86_features.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun::amx {
namespace {

#include "math.inc"

#include "tile.inc"

#include "grouped_amx.inc"

#include "linear_amx.inc"

#include "attention_keys.inc"

#include "attention_rows.inc"

#include "attention_amx.inc"

KernelTable extend(KernelTable table) {
    table.name = "avx512amx";
    table.grouped_quantize = amx_quantize;
    table.grouped = amx_grouped;
    table.split_activations = split_activations;
    table.linear = amx_linear;
    table.attention = amx_attention;
    table.attention_split = amx_attention_split;
    return table;
}

// Linux lets a process use the tile registers only after it has asked (Documentation/arch/x86/xstate.rst).
bool tiles_permitted() {
#ifdef __linux__
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace
}  // namespace forerun::amx

namespace forerun {

const KernelTable* amx_kernels() {
    const KernelTable* base = avx512vnni_kernels();
    if (base == nullptr || !has_amx()) return nullptr;
    static const bool permitted = amx::tiles_permitted();
    static const KernelTable table = amx::extend(*base);
    return permitted ? &table : nullptr;
}

}  // namespace forerun
