// Ops over whole tensors: picks the instruction set, cuts an op into units and hands them to the thread pool.
// Knows: pointers, sizes, how much work is worth sharing. Does not know: Python, models.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "experts.h"
#include "grouped_layout.h"
#include "kernel_table.h"
#include "scratch.h"
#include "thread_pool.h"

namespace forerun {

class CpuEngine {
public:
    // isa: "" for the best this CPU has, else a name of `available()`. pins: see ThreadPool. Throws
    // std::invalid_argument and std::system_error.
    CpuEngine(int num_threads, const std::string& isa, const std::vector<ThreadPool::Cpus>& pins);

    static std::vector<std::string> available();
    const char* isa() const { return table_->name; }
    int num_threads() const { return pool_.num_threads(); }
    int64_t num_jobs() const { return pool_.num_jobs(); }
    // Panels of a grouped matrix [n, k] that each thread owns, for a product with m rows that all fit into a unit.
    std::vector<int64_t> owned_panels(int64_t m, int64_t n, int64_t k, const GroupedLayout& layout) const;

    void pack(const PackArgs& args);
    void linear(const LinearArgs& args);
    void pack_grouped(const PackGroupedArgs& args);
    void grouped(const GroupedArgs& args);
    void grouped_rows(const GroupedRowsArgs& args);    // throws std::out_of_range
    void rms_norm(const NormArgs& args);
    void gated_act(const GatedArgs& args);
    void scaled(const ScaledArgs& args);
    void embedding(const EmbeddingArgs& args);         // throws std::out_of_range
    void rope_and_cache(const RopeArgs& args);         // throws std::out_of_range
    void latent_rope(const LatentRopeArgs& args);      // throws std::out_of_range
    void attention(const AttentionArgs& args);
    void linear_heads(const HeadLinearArgs& args);
    void route(const RouteArgs& args);
    void experts(const ExpertsArgs& args);
    void causal_conv(const ConvArgs& args);            // throws std::out_of_range
    void gated_delta(const DeltaArgs& args);           // likewise
    void select_rows(const SelectArgs& args);
    void copy_columns(const ColumnsArgs& args);
    void add(const AddArgs& args);
    void fill(const FillArgs& args);
    void scatter_columns(const ScatterArgs& args);  // throws std::out_of_range
    // Best k of every row -> ids [r, k], scores [r, k] (may be null).
    void gumbel(GumbelArgs args, int64_t* ids, double* scores);

    // Reads memory from end to end on all threads: the upper limit for reading weights.
    uint64_t stream_read(const void* data, int64_t size);

    void move_rows(const KV& kv, int64_t num_kv, int64_t head_dim, const int32_t* sources, const int32_t* targets,
                   int64_t num);

private:
    template <class Args>
    struct Job {
        void (*kernel)(const Args&, int64_t, int64_t);
        const Args* args;
        int64_t units, chunks;

        int64_t begin(int64_t chunk) const { return chunk * units / chunks; }
        static void run(const void* job_pointer, int64_t chunk) {
            const Job& job = *static_cast<const Job*>(job_pointer);
            job.kernel(*job.args, job.begin(chunk), job.begin(chunk + 1));
        }
    };

    // Divides units among the threads. by_owners: as ThreadPool::run has it, for memory that is written first.
    template <class Args>
    void share(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t units, int64_t work_per_unit,
               bool by_owners = false) {
        if (units <= 0) return;
        const int64_t chunks = num_chunks(units, work_per_unit);
        if (chunks < 2) return kernel(args, 0, units);
        const Job<Args> job{kernel, &args, units, chunks};
        pool_.run(&Job<Args>::run, &job, chunks, by_owners);
    }
    int64_t num_chunks(int64_t units, int64_t work_per_unit) const;
    template <class Args>
    struct Cut {  // a product in units
        Args args;
        int64_t units, work_per_unit;
    };
    Cut<LinearArgs> cut(LinearArgs args) const;
    Cut<GroupedArgs> cut(GroupedArgs args) const;
    bool splits(const LinearArgs& args) const;
    int64_t panels_in_unit(int64_t n, int64_t wanted) const;
    int64_t rows_together(const AttentionArgs& args) const;

    const KernelTable* table_;
    ThreadPool pool_;
    Scratch scratch_;
};

}  // namespace forerun
