#include "memory.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace forerun {

void prefer_huge_pages(void* address, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHugePage = 2u << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(address) + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + size) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)size;
#endif
}

uint64_t read_streams(const void* data, size_t size) {
    constexpr size_t kStreams = 4, kLine = 64, kAhead = 2048;
    const char* from = static_cast<const char*>(data);
    const size_t stride = size / kStreams;
    uint64_t mixed[8] = {};
    for (size_t at = 0; at + kLine <= stride; at += kLine) {
        for (size_t stream = 0; stream < kStreams; ++stream) {
            const char* line = from + stream * stride + at;
            __builtin_prefetch(line + kAhead);
            uint64_t words[8];
            __builtin_memcpy(words, line, kLine);
            for (int i = 0; i < 8; ++i) mixed[i] ^= words[i];
        }
    }
    uint64_t all = 0;
    for (uint64_t word : mixed) all ^= word;
    return all;
}

}  // namespace forerun
