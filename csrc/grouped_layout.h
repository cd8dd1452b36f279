// Where the numbers of a packed grouped matrix lie, and how one is packed.
// Knows: planes, panels, sizes. Does not know: arithmetic (grouped.inc), threads, Python.
//
// A matrix is cut into panels of 16 outputs, one after the other. A panel holds a low plane, maybe a high plane, then
// scales [num_groups, 16], then maybe offsets, each from a multiple of 64 bytes on. Inputs go in blocks of 16, the last
// one filled up with zeros. A block's codes are four lines of 64 bytes: 4 inputs of 16 outputs each, output by output.
//
//   storage  low plane                                high plane
//   8        the four lines
//   4, 5, 6  two lines of nibbles: lines 0|1, 2|3     5: a bit a byte of the four lines; 6: as the low plane of 2
//   2, 3     one line of bit pairs: lines 0|1|2|3     3: a bit a byte of the four lines
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace forerun {

// storage: bits a code occupies, one of 2, 3, 4, 5, 6, 8. half: scales and offsets are float16.
GroupedLayout grouped_layout(int64_t k, int64_t group_size, int storage, bool half, bool has_offsets);

struct PackGroupedArgs {
    const uint8_t* codes;  // [n, k], each below 2^storage
    const void* scales;    // [n, num_groups], float16 or float32 as the layout says
    const void* offsets;   // likewise, or null
    uint8_t* packed;       // [panels, panel_bytes]
    int64_t n, k;
    GroupedLayout layout;
};

void pack_grouped_panels(const PackGroupedArgs& args, int64_t begin, int64_t end);  // unit: a panel

}  // namespace forerun
