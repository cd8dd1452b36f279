// A recorded forward pass: ops with their addresses, run one after the other by one call.
// Knows: which fields of an op are addresses and row counts, and what to put there for a run. Does not know: what the
// ops compute (cpu_engine.h), nor who recorded them (src/forerun/kernels/cpu/program.py).
#pragma once

#include <memory>
#include <vector>

#include "cpu_engine.h"

namespace forerun {

// What differs from run to run, besides addresses.
struct RunSizes {
    int64_t rows;         // M
    int64_t logit_rows;   // R
    int64_t max_blocks;   // width of the block tables
    int64_t max_visible;  // keys a row sees at most
};

class Program {
public:
    explicit Program(CpuEngine& engine) : engine_(engine) {}
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    template <class Args>
    void add(const Args& args, void (CpuEngine::*op)(const Args&)) {
        auto step = std::make_unique<OpStep<Args>>(args, op);
        list_fields(step->args, step->fields);
        steps_.push_back(std::move(step));
    }
    int64_t num_steps() const { return static_cast<int64_t>(steps_.size()); }

    // From step `first_step` on, the recorded address stands for addresses[slot] of a run.
    void bind(int64_t slot, uintptr_t recorded, int64_t first_step);
    // Row counts were recorded as these numbers and stand for RunSizes. Throws std::invalid_argument for any other.
    void finish(int64_t recorded_rows, int64_t recorded_logit_rows);
    void run(const std::vector<uintptr_t>& addresses, const RunSizes& sizes);

private:
    struct Fields {
        std::vector<void*> addresses;  // where the op's arguments hold a pointer
        int64_t* rows = nullptr;
        int64_t* max_blocks = nullptr;
        int64_t* max_visible = nullptr;

        template <class... Pointers>
        void add_addresses(Pointers&... pointers) {
            (addresses.push_back(&pointers), ...);
        }
    };
    struct Step {
        Fields fields;
        virtual ~Step() = default;
        virtual void run(CpuEngine& engine) const = 0;
    };
    template <class Args>
    struct OpStep : Step {
        Args args;
        void (CpuEngine::*op)(const Args&);
        OpStep(const Args& a, void (CpuEngine::*o)(const Args&)) : args(a), op(o) {}
        void run(CpuEngine& engine) const override { (engine.*op)(args); }
    };
    struct Patch {
        void* where;
        size_t slot;
    };

    static void list_fields(LinearArgs& args, Fields& fields);
    static void list_fields(GroupedArgs& args, Fields& fields);
    static void list_fields(NormArgs& args, Fields& fields);
    static void list_fields(GatedArgs& args, Fields& fields);
    static void list_fields(EmbeddingArgs& args, Fields& fields);
    static void list_fields(RopeArgs& args, Fields& fields);
    static void list_fields(AttentionArgs& args, Fields& fields);
    static void list_fields(LatentRopeArgs& args, Fields& fields);
    static void list_fields(HeadLinearArgs& args, Fields& fields);
    static void list_fields(RouteArgs& args, Fields& fields);
    static void list_fields(ExpertsArgs& args, Fields& fields);
    static void list_fields(SelectArgs& args, Fields& fields);
    static void list_fields(ColumnsArgs& args, Fields& fields);
    static void list_fields(AddArgs& args, Fields& fields);
    static void list_fields(FillArgs& args, Fields& fields);
    static void list_fields(ScatterArgs& args, Fields& fields);

    CpuEngine& engine_;
    std::vector<std::unique_ptr<Step>> steps_;
    std::vector<Patch> patches_;
    std::vector<int64_t*> rows_, logit_rows_, max_blocks_, max_visible_;
    size_t num_slots_ = 0;
};

}  // namespace forerun
