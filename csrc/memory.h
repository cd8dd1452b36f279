// Hints to the operating system about memory, and plain reading of it. Knows: pages. Does not know: what lies in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forerun {

// Asks for huge pages on the whole huge pages inside [address, address + size): weights are read from end to end for
// every token, and with 4 KiB pages translation costs up to a third of the bandwidth. Only a hint, never an error.
void prefer_huge_pages(uintptr_t address, size_t size);

// Asks for pages that are not touched yet to lie on these memory nodes in turns: for what any thread may read. False
// where the system does not do that, or whoever started the process (numactl) chose where its memory lies.
bool spread_over_nodes(uintptr_t address, size_t size, const std::vector<int>& nodes);

// Reads size bytes (a multiple of 256) in four ascending streams and does next to nothing with them: what a matrix
// product over them can at best reach. Returns their exclusive or, so that the reading cannot be left out.
uint64_t read_streams(const void* data, size_t size);

}  // namespace forerun
