// A recorded forward pass: ops with their addresses, run one after the other by one call.
// Knows: which fields of an op are addresses and row counts, and what to put there for a run. Does not know: what the
// ops compute (cpu_engine.h), nor who recorded them (src/forerun/kernels/cpu/program.py).
#pragma once

#include <memory>
#include <stdexcept>
#include <type_traits>
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

// Thrown when an op that cannot be part of a program is called while one is recorded, and for what cannot be replayed.
struct NotRecordable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Program {
public:
    explicit Program(CpuEngine& engine) : engine_(engine) {}
    ~Program() { stop(); }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // From `record` to `stop`, ops that this thread calls are added to this program instead of being run.
    void record();
    void stop();
    static Program* recording();  // the program that takes down this thread's ops, or null
    static void refuse(const char* op);  // throws NotRecordable if there is one

    template <class Args>
    void add(const Args& args, void (CpuEngine::*op)(const Args&)) {
        auto step = std::make_unique<OpStep<Args>>(args, op);
        Fields& fields = step->fields;
        step->args.given([&fields](auto&... given) { (fields.add(given), ...); });
        fields.rows = &step->args.m;
        if constexpr (std::is_same_v<Args, AttentionArgs>) {
            fields.max_blocks = &step->args.max_blocks;
            fields.max_visible = &step->args.max_visible;
        }
        steps_.push_back(std::move(step));
    }
    int64_t num_steps() const { return static_cast<int64_t>(steps_.size()); }

    // From step `first_step` on, the recorded address stands for addresses[slot] of a run.
    void bind(int64_t slot, uintptr_t recorded, int64_t first_step);
    // Row counts were recorded as these numbers and stand for RunSizes. Throws NotRecordable for any other.
    void finish(int64_t recorded_rows, int64_t recorded_logit_rows);
    void run(const std::vector<uintptr_t>& addresses, const RunSizes& sizes);

private:
    struct Fields {
        std::vector<void*> addresses;  // where the op's arguments hold a pointer
        int64_t* rows = nullptr;
        int64_t* max_blocks = nullptr;
        int64_t* max_visible = nullptr;

        template <class Field>
        void add(Field& field) {
            if constexpr (std::is_pointer_v<Field>) addresses.push_back(&field);
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

    CpuEngine& engine_;
    std::vector<std::unique_ptr<Step>> steps_;
    std::vector<Patch> patches_;
    std::vector<int64_t*> rows_, logit_rows_, max_blocks_, max_visible_;
    size_t num_slots_ = 0;
};

}  // namespace forerun
