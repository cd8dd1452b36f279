// Where the numbers of a packed grouped matrix lie, how one is packed and its rows are read back.
// Knows: planes, panels, sizes. Does not know: arithmetic (grouped.inc), threads, Python.
//
// A matrix is cut into panels of 16 outputs, one after the other. A panel holds a low plane, maybe a high plane, then
// scales, each from a multiple of 64 bytes on. Inputs go in blocks of 16, the last one filled up with zeros. A block's
// codes are four lines of 64 bytes: 4 inputs of 16 outputs each, output by output.
//
//   storage  low plane                                high plane
//   8        the four lines
//   4, 5, 6  two lines of nibbles: lines 0|1, 2|3     5: a bit a byte of the four lines; 6: as the low plane of 2
//   2, 3     one line of bit pairs: lines 0|1|2|3     3: a bit a byte of the four lines
//   kTabled  as 4
//   kGrid    see below
//
// Points of a grid: every 8 or 4 neighbouring codes are one of its points, to which signs add 8. A point is a word of 16
// bits, code j at bit 8 * (j % 2) + 4 * (j / 2 % 2) + 2 * (j / 4). Words of inputs 0 .. 7 and 8 .. 15 of 16 outputs in
// turns are lines of bit pairs, or where runs have four codes of nibbles, of a block whose inputs are reordered: line j
// has 2 j, 2 j + 1, 2 j + 8, 2 j + 9. 128 inputs, a stretch, are lines of 32 bytes: of each such line the low bytes of
// the points' numbers; their further bits, the lowest first, a byte for 8 lines; then of every two blocks the signs, a
// bit a byte of their eight lines. Where 7 signs of 8 codes are stored, the eighth makes the number of signs even: the
// bits of the odd inputs are missing in each block's last line, so that the two share their 8 bytes. Where 1 is stored,
// which all have, the blocks share one such line.
//
// Scales lie unit by unit: first their units (float16 [16], and those of the offsets), if there are any,
// then group by group the scales [16] and the offsets [16].
//
//   scales   a group's scale and offset                                    groups of a unit
//   0, 1     float32, float16                                              1, nothing to count
//   2        signed bytes                                                  any number
//   3        one byte for both, the scale below 16 in its low half         likewise
//   4        a byte e for 2^(e - 128), no offsets                          1
//   5        e4m3 without a sign of twice the scale / unit_scale            1
//   6        half a byte n for the scale 2 n + 1, the even group's low     an even number
//   7        likewise n < 8 for the scale 8 (2 n + 1), with an offset of   likewise; one unit for both
//            2 n + 1, which is negative unless 8 is added to n
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace forerun {

// See GridLayout. Runs of four codes have 7 or 8 signs.
GridLayout grid_layout(const uint16_t* points, int run, int bits, int signs);

// storage: bits a code occupies, one of 2, 3, 4, 5, 6, 8. groups_a_unit: 1 where scales count nothing. table: 16 bytes
// that codes of 4 bits stand for, or null. With a grid k is a multiple of 128, and 512 one of group_size.
GroupedLayout grouped_layout(int64_t k, int64_t group_size, int storage, ScaleKind scales, bool has_offsets,
                             int64_t groups_a_unit, const uint8_t* table, float unit_scale = 1, GridLayout grid = {});

struct PackGroupedArgs {
    const uint8_t* codes;  // [n, k], each below 2^storage
    const void* scales;    // [n, num_groups] as the layout says; nibbles: scale and offset in a byte
    const void* offsets;   // likewise, or null
    const void* units;     // [n, num_units] float16, or null: what scales count
    const void* offset_units;
    const uint16_t* points;  // [n, k / run], or null: numbers of points of the grid
    uint8_t* packed;  // [panels, panel_bytes]
    int64_t n, k;
    GroupedLayout layout;
};

void pack_grouped_panels(const PackGroupedArgs& args, int64_t begin, int64_t end);  // unit: a panel

// Rows of a packed matrix as floats: scale * (code - zero) - offset, rounded after each operation.
struct GroupedRowsArgs {
    const int64_t* ids;     // [m]
    const uint8_t* weight;  // [panels, panel_bytes]
    float* y;               // [m, k]
    const int64_t* order;   // [k], as for GroupedArgs, or null
    int64_t m, n, k;
    int64_t zero;
    GroupedLayout layout;

    template <class F>
    auto given(F call) {
        return call(ids, weight, y, order, m, n, k, zero, layout);
    }
    int64_t work() const { return m * k * 8; }
};

void unpack_grouped_rows(const GroupedRowsArgs& args, int64_t begin, int64_t end);  // unit: a row

}  // namespace forerun
