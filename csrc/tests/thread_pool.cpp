// Holds up the caller of a pool in the first chunk that it takes until the others have done all the rest, and prints
//   THREADS CHUNKS CHUNKS_OF_THE_CALLER
// of pools of several sizes; then lets a worker sleep in its chunk, as if it had lost its core, and prints
//   MICROSECONDS_OF_THE_CALLERS_OWN_CLOCK MICROSECONDS_THAT_PASSED
// (tests/kernels/test_many_threads.py).
#include "../own_time.h"
#include "../thread_pool.h"

#include <cstdio>

namespace {

using namespace forerun;
using Clock = std::chrono::steady_clock;

constexpr int64_t kChunksPerThread = 8;
constexpr auto kPatience = std::chrono::seconds(20);  // then nobody will help

struct Job {
    std::thread::id caller;
    int64_t chunks;
    std::atomic<int64_t> by_caller{0}, by_others{0};

    static void run(const void* pointer, int64_t) {
        Job& job = **static_cast<Job* const*>(pointer);
        if (std::this_thread::get_id() != job.caller) {
            job.by_others.fetch_add(1);
            return;
        }
        if (job.by_caller.fetch_add(1) > 0) return;
        const auto give_up = Clock::now() + kPatience;
        while (job.by_others.load() + 1 < job.chunks && Clock::now() < give_up) std::this_thread::yield();
    }
};

struct Sleeper {
    std::thread::id caller;
    std::atomic<bool> sleeps{false};

    static void run(const void* pointer, int64_t) {
        Sleeper& job = **static_cast<Sleeper* const*>(pointer);
        if (std::this_thread::get_id() == job.caller) {
            while (!job.sleeps.load()) std::this_thread::yield();
            return;
        }
        job.sleeps.store(true);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
};

long long microseconds(double seconds) { return static_cast<long long>(1e6 * seconds); }

}  // namespace

int main() {
    for (int threads : {2, 3, 7, 8, 9, 17}) {
        ThreadPool pool(threads, {});
        Job job{std::this_thread::get_id(), threads * kChunksPerThread};
        Job* const context = &job;
        pool.run(&Job::run, &context, job.chunks);
        const auto chunks = static_cast<long long>(job.chunks), own = static_cast<long long>(job.by_caller.load());
        std::printf("%d %lld %lld\n", threads, chunks, own);
    }
    ThreadPool pool(2, {});
    Job woken{std::this_thread::get_id(), kChunksPerThread};
    Job* const waking = &woken;
    pool.run(&Job::run, &waking, woken.chunks);  // the worker runs now, which may take a while
    Sleeper job{std::this_thread::get_id()};
    Sleeper* const context = &job;
    const double own = own_time();
    const auto start = Clock::now();
    pool.run(&Sleeper::run, &context, 2);
    const std::chrono::duration<double> wall = Clock::now() - start;
    std::printf("%lld %lld\n", microseconds(own_time() - own), microseconds(wall.count()));
}
