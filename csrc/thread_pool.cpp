#include "thread_pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace forerun {
namespace {

// Between two forwards of a draft Python needs some 100 microseconds, and waking a sleeper costs as much again: long
// enough to bridge that, short enough that an idle engine leaves the cores to others.
constexpr auto kSpinTime = std::chrono::microseconds(250);
constexpr int kPausesBetweenLooks = 16;
constexpr int kLooksBeforeYield = 64;
// A worker that lost its core in the middle of a chunk holds up the caller for a time slice. Where that takes more of the
// time than the workers save, other programs want the cores: the caller then works alone for a while, and longer each
// time it happens again soon. A slice now and then is no reason: a server's own event loop and its clients take those.
constexpr auto kPatience = std::chrono::microseconds(200);
constexpr auto kLeastWatched = std::chrono::milliseconds(10), kMostWatched = std::chrono::milliseconds(50);
constexpr auto kShortestAlone = std::chrono::milliseconds(10), kLongestAlone = std::chrono::milliseconds(160);
constexpr auto kCalm = std::chrono::seconds(2);
constexpr uint64_t kRemaining = 0xFFFFFFFFu;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    {
        const std::lock_guard<std::mutex> lock(sleep_mutex_);
        wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
}

// Takes one chunk and computes it; false when none is left.
bool ThreadPool::take_and_do() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const uint64_t remaining = ticket & kRemaining;
        if (remaining == 0) return false;
        const Function function = function_.load(std::memory_order_relaxed);
        const void* const context = context_.load(std::memory_order_relaxed);
        const int64_t num_chunks = num_chunks_.load(std::memory_order_relaxed);
        if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            function(context, num_chunks - static_cast<int64_t>(remaining));
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
}

void ThreadPool::run(Function function, const void* context, int64_t num_chunks) {
    std::unique_lock<std::mutex> only_caller(caller_mutex_, std::try_to_lock);
    const auto start = Clock::now();
    if (workers_.empty() || num_chunks < 2 || !only_caller.owns_lock() || start < alone_until_) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) function(context, chunk);
        return;
    }
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_chunks_.store(num_chunks, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | static_cast<uint64_t>(num_chunks), std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
        const std::lock_guard<std::mutex> lock(sleep_mutex_);
        wake_.notify_all();
    }
    while (take_and_do()) {
    }
    int looks = 0;
    Clock::time_point waiting_since;
    for (; done_.load(std::memory_order_acquire) != num_chunks; ++looks) {
        pause_briefly();
        if (looks == kLooksBeforeYield) waiting_since = Clock::now();
        if (looks > kLooksBeforeYield) std::this_thread::yield();  // the worker may be waiting for this very core
    }
    if (looks > kLooksBeforeYield) judge_wait(start, waiting_since, Clock::now());
}

// Chunks are small parts of a call: who waits longer than it has worked does not wait because chunks are uneven.
void ThreadPool::judge_wait(Clock::time_point start, Clock::time_point waiting_since, Clock::time_point now) {
    const auto waited = now - waiting_since;
    if (waited < kPatience || waited < waiting_since - start) return;
    if (now - watched_since_ > kMostWatched) {
        watched_since_ = start;
        lost_ = {};
    }
    lost_ += waited;
    const auto watched = now - watched_since_;
    if (watched < kLeastWatched || lost_ * num_threads() < watched * (num_threads() - 1)) return;
    const bool again = now - alone_until_ < kCalm;
    alone_for_ = again ? std::min<Clock::duration>(2 * alone_for_, kLongestAlone) : Clock::duration(kShortestAlone);
    alone_until_ = watched_since_ = now + alone_for_;
    lost_ = {};
}

void ThreadPool::work() {
    while (!stopping_.load(std::memory_order_relaxed)) {
        while (take_and_do()) {
        }
        const auto give_up = Clock::now() + kSpinTime;
        bool found = false;
        do {
            for (int i = 0; i < kPausesBetweenLooks && !found; ++i) {
                pause_briefly();
                found = (ticket_.load(std::memory_order_relaxed) & kRemaining) != 0;
            }
        } while (!found && Clock::now() < give_up);
        if (!found) sleep();
    }
}

void ThreadPool::sleep() {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [this] {
        return stopping_.load() || (ticket_.load(std::memory_order_seq_cst) & kRemaining) != 0;
    });
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace forerun
