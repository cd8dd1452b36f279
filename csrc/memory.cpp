#include "memory.h"

#include <cstdint>

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

}  // namespace forerun
