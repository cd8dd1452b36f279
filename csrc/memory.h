// Hints to the operating system about memory. Knows: pages. Does not know: what lies in them.
#pragma once

#include <cstddef>

namespace forerun {

// Asks for huge pages on the whole huge pages inside [address, address + size): weights are read from end to end for
// every token, and with 4 KiB pages translation costs up to a third of the bandwidth. Only a hint, never an error.
void prefer_huge_pages(void* address, size_t size);

}  // namespace forerun
