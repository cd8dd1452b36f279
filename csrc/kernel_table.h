// One instruction set's kernels: functions over ranges of units.
// Knows which there are. Does not know what they are told (ops.h), nor threads (cpu_engine.cpp cuts the ranges).
#pragma once

#include "ops.h"
#include "recurrent_ops.h"

namespace forerun {

// The kernels of an instruction set. Each computes units [begin, end) of its op; the unit is named beside it.
#define FORERUN_KERNELS(KERNEL)                                           \
    KERNEL(pack, PackArgs)                    /* a panel */               \
    KERNEL(linear, LinearArgs)                /* panels x rows */         \
    KERNEL(coded, LinearArgs)                 /* likewise */              \
    KERNEL(gated_act, GatedArgs)              /* row x piece */           \
    KERNEL(rms_norm, NormArgs)                /* a row, also below */     \
    KERNEL(scaled, ScaledArgs)                /* row x piece */           \
    KERNEL(add_rows, AddArgs)                                             \
    KERNEL(embedding, EmbeddingArgs)                                      \
    KERNEL(rope_and_cache, RopeArgs)                                      \
    KERNEL(latent_rope, LatentRopeArgs)                                   \
    KERNEL(route, RouteArgs)                                              \
    KERNEL(causal_conv, ConvArgs)             /* a row, also below */     \
    KERNEL(delta_prepare, DeltaArgs)                                      \
    KERNEL(gated_delta, DeltaArgs)            /* sequence x head x columns */ \
    KERNEL(attention, AttentionArgs)          /* rows x KV head */        \
    KERNEL(attention_split, AttentionArgs)    /* rows x KV head x split */\
    KERNEL(attention_combine, AttentionArgs)  /* row x KV head */         \
    KERNEL(gumbel_maxima, GumbelArgs)         /* row x part */            \
    KERNEL(gumbel_search, GumbelArgs)         /* row x part */            \
    KERNEL(grouped_quantize, GroupedArgs)     /* rows x section */        \
    KERNEL(grouped, GroupedArgs)              /* panels x rows */

struct KernelTable {
    const char* name;
    int64_t panel_group;  // panels a unit of one row should hold a multiple of
#define FORERUN_FIELD(kernel, Args) void (*kernel)(const Args&, int64_t begin, int64_t end);
    FORERUN_KERNELS(FORERUN_FIELD)
#undef FORERUN_FIELD
    void (*split_activations)(const LinearArgs&, int64_t begin, int64_t end);  // unit: a row; null where not wanted
};

// Null if this CPU has none.
const KernelTable* portable_kernels();  // never null
#ifdef FORERUN_X86
const KernelTable* avx2_kernels();
const KernelTable* avx2vnni_kernels();  // differs from avx2 in grouped kernels only
const KernelTable* avx512_kernels();
const KernelTable* avx512vnni_kernels();  // differs from avx512 in grouped kernels only
const KernelTable* amx_kernels();         // differs from avx512vnni in grouped and dense kernels and attention
#endif
#ifdef FORERUN_ARM
const KernelTable* neon_kernels();
const KernelTable* neondot_kernels();   // differs from neon in grouped kernels only
const KernelTable* neoni8mm_kernels();  // likewise
#endif

// Best first.
constexpr const KernelTable* (*kKernelTables[])() = {
#ifdef FORERUN_X86
    amx_kernels,      avx512vnni_kernels, avx512_kernels, avx2vnni_kernels, avx2_kernels,
#endif
#ifdef FORERUN_ARM
    neoni8mm_kernels, neondot_kernels,    neon_kernels,
#endif
    portable_kernels,
};

}  // namespace forerun
