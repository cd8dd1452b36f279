#include "memory.h"

#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

void prefer_huge_pages(uintptr_t address, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHugePage = 2u << 20;
    const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t end = (address + size) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)size;
#endif
}

bool spread_over_nodes(uintptr_t address, size_t size, const std::vector<int>& nodes) {
#if defined(__linux__) && defined(SYS_mbind) && defined(SYS_get_mempolicy)
    constexpr size_t kMostNodes = 1024, kWord = 8 * sizeof(unsigned long);
    constexpr int kDefault = 0, kInterleave = 3;  // as in linux/mempolicy.h
    int policy = kDefault;
    if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != kDefault) return false;
    unsigned long mask[kMostNodes / kWord] = {};
    for (const int node : nodes) mask[static_cast<size_t>(node) % kMostNodes / kWord] |= 1ul << node % kWord;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = address / page * page;
    const size_t length = address + size - begin;
    return syscall(SYS_mbind, begin, length, kInterleave, mask, kMostNodes, 0) == 0;
#else
    (void)address;
    (void)size;
    (void)nodes;
    return false;
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
