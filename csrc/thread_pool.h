// One pool of threads over which the numbered chunks of a job are divided.
// Knows: who owns which chunks, spinning, sleeping, forks, on which CPUs a thread stays. Does not know: what a chunk computes,
// nor which CPUs there are (src/forerun/kernels/cores.py).
//
// Thread t of T owns the chunks from t * C / T on, in every job, so that a thread reads the memory that it wrote first.
// Whoever has finished takes chunks over from the threads of its group and from those with its place in other groups;
// the caller takes over from everybody. Nothing is counted in one place for all threads: chunks done are counted with
// their owner, owners done with their group, groups done in one counter.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

class ThreadPool {
public:
    using Function = void (*)(const void* context, int64_t chunk);
    using Cpus = std::vector<int>;

    // The calling thread counts as one. pins[t] lists the CPUs that thread t stays on, where the system can do that;
    // the calling thread is not pinned, since what it starts would inherit that. Empty: nobody is. Throws
    // std::system_error where the system starts no such number of threads.
    ThreadPool(int num_threads, const std::vector<Cpus>& pins);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(owners_.size()); }
    int64_t num_jobs() const { return num_jobs_.load(std::memory_order_relaxed); }  // worth dividing: a barrier each
    // The first chunk of a job that a thread owns; that of thread num_threads is num_chunks.
    static int64_t first_chunk(int64_t thread, int64_t num_threads, int64_t num_chunks) {
        return (thread * num_chunks + num_threads - 1) / num_threads;
    }

    // Calls function(context, chunk) for every chunk in [0, num_chunks), on any threads, and returns when all are done.
    // If the pool is busy with another caller's job, this caller does its chunks alone; so does every caller in a child
    // after fork(), where there are no workers.
    // `by_owners`: chunks are done by who owns them, even if the others have to wait.
    void run(Function function, const void* context, int64_t num_chunks, bool by_owners = false);

private:
    using Clock = std::chrono::steady_clock;

    struct alignas(64) Owner {
        // High half: the job's number. Low half: chunks of the owner that were handed out in it. One word, so that a
        // thread that was descheduled before it took a chunk fails its exchange instead of taking one of the next job.
        std::atomic<uint64_t> ticket{0};
        std::atomic<int64_t> done{0};
    };
    struct alignas(64) Group {
        std::atomic<int64_t> done{0};  // owners whose chunks are done
    };

    // What workers wait with. It is left alone in a child after fork(), where joining or destroying would not return.
    struct Crew {
        std::mutex sleep_mutex;
        std::condition_variable wake;
        std::vector<std::thread> workers;
    };

    bool is_orphan() const;  // the workers are another process's
    void end();
    void work(int64_t self);
    void compute(int64_t self, uint64_t job);
    void take_over(int64_t owner, uint64_t job);
    int64_t busy_owners(int64_t group, int64_t num_chunks) const;
    void count_owner(int64_t group, int64_t num_chunks);
    bool wait_awake(uint64_t seen) const;
    void wake_two();
    void sleep(uint64_t seen);
    void judge_wait(Clock::time_point start, Clock::duration waited, Clock::time_point now);

    // High half: the job's number. Low half: its chunks, and whether only their owners may do them.
    alignas(64) std::atomic<uint64_t> job_{0};
    std::atomic<Function> function_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<int64_t> groups_done_{0};
    alignas(64) std::atomic<bool> stopping_{false};
    std::atomic<int> sleeping_{0};
    std::mutex caller_mutex_;
    std::atomic<int64_t> num_jobs_{0};
    Clock::time_point alone_until_{};  // guarded by caller_mutex_, as are the next
    Clock::duration alone_for_{};
    Clock::time_point watched_since_{};
    Clock::duration lost_{};  // since then
    std::vector<Owner> owners_;
    std::vector<Group> groups_;
    Crew* const crew_ = new Crew;
    const unsigned born_;  // after so many forks
};

}  // namespace forerun
