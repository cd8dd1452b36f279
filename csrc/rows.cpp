// Ops that move rows and columns about without computing: too short to be worth sharing between threads.
#include "rows.h"

#include "cpu_engine.h"

namespace forerun {

void CpuEngine::select_rows(const SelectArgs& args) {
    for (int64_t row = 0; row < args.m; ++row) {
        const float* from = args.x + (args.row_ids ? args.row_ids[row] : row) * args.h;
        std::copy_n(from, args.h, args.y + row * args.h);
    }
}

void CpuEngine::copy_columns(const ColumnsArgs& args) {
    move_columns(args.x + args.x_first, args.x_stride, args.y + args.y_first, args.y_stride, args.width, args.m);
}

void CpuEngine::fill(const FillArgs& args) { std::fill_n(args.y, args.m * args.h, args.value); }

void CpuEngine::scatter_columns(const ScatterArgs& args) {
    check_range("column", args.ids, args.n, args.h);
    for (int64_t row = 0; row < args.m; ++row) {
        const float* x = args.x + row * args.n;
        float* y = args.y + row * args.h;
        for (int64_t i = 0; i < args.n; ++i) y[args.ids[i]] = x[i];
    }
}

}  // namespace forerun
