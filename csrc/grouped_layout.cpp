#include "grouped_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace forerun {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMaxStep = 128;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t lines(int64_t bytes) { return divide_up(bytes, kLine) * kLine; }

int low_bits(int bits) { return bits < 4 ? 2 : bits < 8 ? 4 : 8; }

int64_t plane_bytes(int64_t k_padded, int bits) { return lines(k_padded * kLanes * bits / 8); }

// Puts a code's low bits where the low plane wants them: bits [0, BITS) of a byte hold line 0, and so on upwards.
void put_low(uint8_t* plane, int64_t block, int line, int place, int bits, uint8_t code) {
    const int lines_a_byte = 8 / bits;
    uint8_t* to = plane + block * 32 * bits + line / lines_a_byte * kLine + place;
    *to = static_cast<uint8_t>(*to | (code & ((1 << bits) - 1)) << line % lines_a_byte * bits);
}

void put_high(uint8_t* plane, int64_t block, int line, int place, int bits, uint8_t code) {
    if (bits == 2) return put_low(plane, block, line, place, 2, code);
    uint8_t* to = plane + block * 32 + line * 8 + place / 8;
    *to = static_cast<uint8_t>(*to | (code & 1) << place % 8);
}

struct BitPlace {
    int64_t byte;
    int bit;
};

constexpr int64_t kGridLine = 2 * kLanes;

int64_t grid_lines(int run) { return kStretch / (run == 8 ? 16 : 8); }

int64_t stretch_at(const GridLayout& grid, int64_t i) { return i / kStretch * grid.stretch_bytes; }

// Bit `bit` of the number of the point that input i belongs to; the lowest eight are a byte.
BitPlace number_place(const GridLayout& grid, int64_t i, int lane, int bit) {
    const int64_t block = i % kStretch / 16, lines = grid_lines(grid.run);
    const int64_t line = grid.run == 8 ? block : 2 * block + i % 8 / 4;  // a division by grid.run took most of packing
    const int64_t at = stretch_at(grid, i) + lane * 2 + i % 16 / 8;
    if (bit < 8) return {at + line * kGridLine, bit};
    return {at + (lines + (bit - 8) * lines / 8 + line / 8) * kGridLine, static_cast<int>(line % 8)};
}

BitPlace sign_place(const GridLayout& grid, int64_t i, int lane) {
    const int j = static_cast<int>(i % 32), block = j / 16, line = j % 8 / 2;
    int word = block * 4 + line, bit = lane * 4 + j % 16 / 8 * 2 + j % 2;
    if (grid.signs < 8) {
        const bool shared = grid.signs == 1 || line == 3;
        word = shared ? grid.signs - 1 : block * 3 + line;
        bit += shared ? block : 0;
    }
    const int64_t at = stretch_at(grid, i) + grid.signs_at + i % kStretch / 32 * 8 * grid.signs;
    return {at + word * 8 + bit / 8, bit % 8};
}

void pack_grid_row(const PackGroupedArgs& args, int64_t row, int lane, uint8_t* panel) {
    const GridLayout& grid = args.layout.grid;
    for (int64_t i = 0; i < args.k; i += grid.run) {
        const int point = args.points[(row * args.k + i) / grid.run];
        panel[number_place(grid, i, lane, 0).byte] = static_cast<uint8_t>(point);
        for (int bit = 8; bit < grid.bits; ++bit) {
            const BitPlace place = number_place(grid, i, lane, bit);
            panel[place.byte] = static_cast<uint8_t>(panel[place.byte] | (point >> bit & 1) << place.bit);
        }
    }
    for (int64_t i = 0; i < args.k; ++i) {
        if (i % 8 >= grid.signs) continue;
        const BitPlace place = sign_place(grid, i, lane);
        const int sign = args.codes[row * args.k + i] >> 3 & 1;
        panel[place.byte] = static_cast<uint8_t>(panel[place.byte] | sign << place.bit);
    }
}

void pack_row(const PackGroupedArgs& args, int64_t row, int lane, uint8_t* panel) {
    if (args.layout.storage == kGrid) return pack_grid_row(args, row, lane, panel);
    const int bits = code_bits(args.layout.storage), low = low_bits(bits), high = bits - low;
    const uint8_t* codes = args.codes + row * args.k;
    for (int64_t i = 0; i < args.k; ++i) {
        const int64_t block = i / kGroupedBlock;
        const int line = static_cast<int>(i % kGroupedBlock / 4), place = lane * 4 + static_cast<int>(i % 4);
        if (low == 8) {
            panel[block * 256 + line * kLine + place] = codes[i];
            continue;
        }
        put_low(panel, block, line, place, low, codes[i]);
        const uint8_t rest = static_cast<uint8_t>(codes[i] >> low);
        if (high) put_high(panel + args.layout.high_at, block, line, place, high, rest);
    }
}

int64_t scale_size(ScaleKind kind) { return kind == ScaleKind::kFloat32 ? 4 : kind == ScaleKind::kFloat16 ? 2 : 1; }

bool two_groups_a_byte(ScaleKind kind) { return kind == ScaleKind::kOddNibbles || kind == ScaleKind::kSignedNibbles; }

int64_t groups_a_number(ScaleKind kind) { return two_groups_a_byte(kind) ? 2 : 1; }

// One row's numbers for groups or units, `size` bytes each: number i goes to to + place(i).
template <class Place>
void pack_numbers(const void* numbers, int64_t row, int64_t count, int64_t size, uint8_t* to, Place place) {
    if (!numbers) return;
    const uint8_t* from = static_cast<const uint8_t*>(numbers) + row * count * size;
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + place(i), from + i * size, static_cast<size_t>(size));
}

void pack_scales(const PackGroupedArgs& args, int64_t row, int lane, uint8_t* to) {
    const GroupedLayout& layout = args.layout;
    const int64_t size = scale_size(layout.scales), num_units = layout.num_groups / layout.groups_a_unit;
    const int64_t together = groups_a_number(layout.scales), count = layout.num_groups / together;
    const auto of_group = [&](int64_t i) {
        const int64_t group = i * together, unit = group / layout.groups_a_unit * layout.unit_bytes;
        return unit + layout.head_bytes + group % layout.groups_a_unit * layout.group_bytes + lane * size;
    };
    const auto of_unit = [&](int64_t i) { return i * layout.unit_bytes + lane * 2; };
    pack_numbers(args.scales, row, count, size, to, of_group);
    pack_numbers(args.offsets, row, count, size, to + size * kLanes, of_group);
    pack_numbers(args.units, row, num_units, 2, to, of_unit);
    pack_numbers(args.offset_units, row, num_units, 2, to + 2 * kLanes, of_unit);
}

// What put_low has put there.
int get_low(const uint8_t* plane, int64_t block, int line, int place, int bits) {
    const int lines_a_byte = 8 / bits;
    const int byte = plane[block * 32 * bits + line / lines_a_byte * kLine + place];
    return byte >> line % lines_a_byte * bits & ((1 << bits) - 1);
}

int get_high(const uint8_t* plane, int64_t block, int line, int place, int bits) {
    if (bits == 2) return get_low(plane, block, line, place, 2);
    return plane[block * 32 + line * 8 + place / 8] >> place % 8 & 1;
}

int get_sign(const GridLayout& grid, const uint8_t* panel, int lane, int64_t i) {
    if (i % 8 < grid.signs) {
        const BitPlace place = sign_place(grid, i, lane);
        return panel[place.byte] >> place.bit & 1;
    }
    int odd = 0;
    for (int j = 0; j < grid.signs; ++j) odd ^= get_sign(grid, panel, lane, i / 8 * 8 + j);
    return odd;
}

int get_grid_code(const GridLayout& grid, const uint8_t* panel, int lane, int64_t i) {
    int number = panel[number_place(grid, i, lane, 0).byte];
    for (int bit = 8; bit < grid.bits; ++bit) {
        const BitPlace place = number_place(grid, i, lane, bit);
        number |= (panel[place.byte] >> place.bit & 1) << bit;
    }
    const int j = static_cast<int>(i % grid.run), shift = j % 2 * 8 + j / 2 % 2 * 4 + j / 4 * 2;
    return (grid.points[number] >> shift & (grid.run == 8 ? 3 : 15)) | get_sign(grid, panel, lane, i) << 3;
}

// What the code of input i stands for, zero not yet taken away.
int get_code(const GroupedLayout& layout, const uint8_t* panel, int lane, int64_t i) {
    if (layout.storage == kGrid) return layout.table[get_grid_code(layout.grid, panel, lane, i)];
    const int bits = code_bits(layout.storage), low = low_bits(bits), high = bits - low;
    const int64_t block = i / kGroupedBlock;
    const int line = static_cast<int>(i % kGroupedBlock / 4), place = lane * 4 + static_cast<int>(i % 4);
    int code = get_low(panel, block, line, place, low);
    if (high) code |= get_high(panel + layout.high_at, block, line, place, high) << low;
    return layout.storage == kTabled ? layout.table[code] : code;
}

float get_half(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    return half_to_float(half);
}

// Number `place` of a group: its scale, or 16 entries later its offset.
float get_scale(const GroupedLayout& layout, const uint8_t* panel, int64_t group, int place) {
    const uint8_t* unit = panel + layout.scales_at + group / layout.groups_a_unit * layout.unit_bytes;
    const int64_t place_in_unit = group % layout.groups_a_unit, together = groups_a_number(layout.scales);
    const uint8_t* at = unit + layout.head_bytes + place_in_unit / together * together * layout.group_bytes;
    const auto counting = [&](int what) {
        const float of = get_half(unit + 2 * (together == 2 ? place % kLanes : place));
        return layout.unit_scale * of * static_cast<float>(what);
    };
    const int byte = at[place % kLanes], half = place_in_unit % 2 ? byte >> 4 : byte & 15, odd = half % 8 * 2 + 1;
    float scale;
    switch (layout.scales) {
        case ScaleKind::kFloat32: std::memcpy(&scale, at + 4 * place, 4); return scale;
        case ScaleKind::kFloat16: return get_half(at + 2 * place);
        case ScaleKind::kPowers: return std::ldexp(1.0f, byte - 128);
        case ScaleKind::kFloat8:
            scale = byte < 8 ? std::ldexp(static_cast<float>(byte), -10)
                             : std::ldexp(static_cast<float>(8 + byte % 8), byte / 8 - 11);
            return scale * layout.unit_scale;
        case ScaleKind::kBytes: return counting(static_cast<int8_t>(at[place]));
        case ScaleKind::kNibbles: return counting(place < kLanes ? byte & 15 : byte >> 4);
        case ScaleKind::kOddNibbles: return counting(2 * half + 1);
        default: return counting(place < kLanes ? 8 * odd : half < 8 ? -odd : odd);
    }
}

void unpack_row(const GroupedRowsArgs& args, int64_t row, float* to) {
    const GroupedLayout& layout = args.layout;
    const uint8_t* panel = args.weight + row / kLanes * layout.panel_bytes;
    const int lane = static_cast<int>(row % kLanes);
    for (int64_t group = 0; group < layout.num_groups; ++group) {
        const float scale = get_scale(layout, panel, group, lane);
        const float offset = layout.has_offsets ? get_scale(layout, panel, group, kLanes + lane) : 0.0f;
        const int64_t end = std::min(args.k, (group + 1) * layout.group_size);
        for (int64_t i = group * layout.group_size; i < end; ++i) {
            const float value = static_cast<float>(get_code(layout, panel, lane, i) - args.zero) * scale;
            to[args.order ? args.order[i] : i] = layout.has_offsets ? value - offset : value;
        }
    }
}

}  // namespace

GridLayout grid_layout(const uint16_t* points, int run, int bits, int signs) {
    const int64_t signs_at = grid_lines(run) * bits / 8 * kGridLine;
    return {points, signs_at + kStretch / 32 * 8 * signs, signs_at, run, bits, signs};
}

GroupedLayout grouped_layout(int64_t k, int64_t group_size, int storage, ScaleKind scales, bool has_offsets,
                             int64_t groups_a_unit, const uint8_t* table, float unit_scale, GridLayout grid) {
    GroupedLayout layout{};
    layout.storage = grid.points ? kGrid : table ? kTabled : storage;
    layout.unit_scale = unit_scale;
    layout.grid = grid;
    layout.scales = scales;
    layout.has_offsets = has_offsets;
    for (size_t i = 0; i < sizeof layout.table; ++i) layout.table[i] = table ? table[i] : static_cast<uint8_t>(i);
    layout.group_size = group_size = std::min(group_size, k);
    layout.k_padded = divide_up(k, kGroupedBlock) * kGroupedBlock;
    layout.num_groups = divide_up(k, group_size);
    const int64_t last = k - (layout.num_groups - 1) * group_size;
    layout.num_steps = (layout.num_groups - 1) * divide_up(group_size, kMaxStep) + divide_up(last, kMaxStep);
    const int low = low_bits(storage);
    layout.high_at = plane_bytes(layout.k_padded, low);
    layout.scales_at = layout.high_at + plane_bytes(layout.k_padded, storage - low);
    if (grid.points) layout.scales_at = lines(layout.k_padded / kStretch * grid.stretch_bytes);
    layout.groups_a_unit = groups_a_unit;
    const bool pairs = two_groups_a_byte(scales);
    const bool counted = scales == ScaleKind::kBytes || scales == ScaleKind::kNibbles;
    const int numbers = has_offsets ? 2 : 1;
    layout.head_bytes = pairs ? 2 * kLanes : counted ? 2 * kLanes * numbers : 0;
    layout.group_bytes = scale_size(scales) * kLanes * numbers;
    if (pairs) layout.group_bytes = kLanes / 2;
    if (scales == ScaleKind::kNibbles) layout.group_bytes = kLanes;
    layout.unit_bytes = layout.head_bytes + layout.group_bytes * groups_a_unit;
    layout.panel_bytes = layout.scales_at + lines(layout.num_groups / groups_a_unit * layout.unit_bytes);
    return layout;
}

void pack_grouped_panels(const PackGroupedArgs& args, int64_t begin, int64_t end) {
    const GroupedLayout& layout = args.layout;
    for (int64_t index = begin; index < end; ++index) {
        uint8_t* panel = args.packed + index * layout.panel_bytes;
        std::memset(panel, 0, static_cast<size_t>(layout.panel_bytes));
        for (int lane = 0; lane < kLanes && index * kLanes + lane < args.n; ++lane) {
            const int64_t row = index * kLanes + lane;
            pack_row(args, row, lane, panel);
            pack_scales(args, row, lane, panel + layout.scales_at);
        }
    }
}

void unpack_grouped_rows(const GroupedRowsArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) unpack_row(args, args.ids[row], args.y + row * args.k);
}

}  // namespace forerun
