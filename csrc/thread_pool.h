// One pool of threads that hands out numbered chunks of a job.
// Knows: spinning, sleeping, chunks. Does not know: what a chunk computes.
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

    explicit ThreadPool(int num_threads);  // the calling thread counts as one
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls function(context, chunk) for every chunk in [0, num_chunks), on any threads, and returns when all are done.
    // If the pool is busy with another caller's job, this caller does its chunks alone.
    void run(Function function, const void* context, int64_t num_chunks);

private:
    using Clock = std::chrono::steady_clock;

    void work();
    bool take_and_do();
    void judge_wait(Clock::time_point start, Clock::time_point waiting_since, Clock::time_point now);
    void sleep();

    // High half: the job's number. Low half: chunks not handed out yet. One word, so that a thread that was descheduled
    // between reading a job and taking a chunk of it fails its exchange instead of taking a chunk of the next job.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<Function> function_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int64_t> num_chunks_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleeping_{0};
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::mutex caller_mutex_;
    Clock::time_point alone_until_{};  // guarded by caller_mutex_, as are the next
    Clock::duration alone_for_{};
    Clock::time_point watched_since_{};
    Clock::duration lost_{};  // since then
    std::vector<std::thread> workers_;
};

}  // namespace forerun
