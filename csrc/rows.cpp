// Ops that move rows and columns about without computing: few are worth sharing between threads, many rows are.
#include "rows.h"

#include "cpu_engine.h"

namespace forerun {
namespace {

constexpr int64_t kEntries = 16;  // copied in a nanosecond, roughly

void select_some(const SelectArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* from = args.x + (args.row_ids ? args.row_ids[row] : row) * args.h;
        std::copy_n(from, args.h, args.y + row * args.h);
    }
}

void copy_some(const ColumnsArgs& args, int64_t begin, int64_t end) {
    move_columns(args.x + begin * args.x_stride + args.x_first, args.x_stride,
                 args.y + begin * args.y_stride + args.y_first, args.y_stride, args.width, end - begin);
}

void fill_some(const FillArgs& args, int64_t begin, int64_t end) {
    std::fill_n(args.y + begin * args.h, (end - begin) * args.h, args.value);
}

void scatter_some(const ScatterArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* x = args.x + row * args.n;
        float* y = args.y + row * args.h;
        for (int64_t i = 0; i < args.n; ++i) y[args.ids[i]] = x[i];
    }
}

}  // namespace

void CpuEngine::select_rows(const SelectArgs& args) { share(&select_some, args, args.m, args.h / kEntries); }

void CpuEngine::copy_columns(const ColumnsArgs& args) { share(&copy_some, args, args.m, args.width / kEntries); }

void CpuEngine::fill(const FillArgs& args) { share(&fill_some, args, args.m, args.h / kEntries); }

void CpuEngine::scatter_columns(const ScatterArgs& args) {
    check_range("column", args.ids, args.n, args.h);
    share(&scatter_some, args, args.m, args.n);
}

}  // namespace forerun
