#include "thread_pool.h"

#include "own_time.h"

#include <algorithm>
#include <chrono>

#ifdef __linux__
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
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
constexpr int64_t kGroup = 8;  // threads that help each other, and that are counted in one place
constexpr uint64_t kLow = 0xFFFFFFFFu, kByOwners = 1u << 31;

uint32_t number_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
int64_t chunks_of(uint64_t job) { return static_cast<int64_t>(job & kLow & ~kByOwners); }

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void stay_on(const ThreadPool::Cpus& cpus) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);  // those beyond the set are left out
    sched_setaffinity(0, sizeof set, &set);  // a hint: where it is refused, the thread goes where it likes
#else
    (void)cpus;
#endif
}

std::atomic<unsigned> forks{0};  // that led to this process since the first pool was made

unsigned count_forks() {
#if defined(__unix__) || defined(__APPLE__)
    static const int is_counting = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)is_counting;
#endif
    return forks.load();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<Cpus>& pins)
    : owners_(static_cast<size_t>(num_threads)), groups_(static_cast<size_t>((num_threads + kGroup - 1) / kGroup)),
      born_(count_forks()) {
    try {
        for (size_t self = 1; self < owners_.size(); ++self) {
            const Cpus cpus = self < pins.size() ? pins[self] : Cpus{};
            crew_->workers.emplace_back([this, self, cpus] {
                if (!cpus.empty()) stay_on(cpus);
                work(static_cast<int64_t>(self));
            });
        }
    } catch (...) {  // the system starts no more threads
        end();
        throw;
    }
}

ThreadPool::~ThreadPool() { end(); }

bool ThreadPool::is_orphan() const { return forks.load(std::memory_order_relaxed) != born_; }

void ThreadPool::end() {
    if (is_orphan()) return;
    stopping_.store(true);
    {
        const std::lock_guard<std::mutex> lock(crew_->sleep_mutex);
        crew_->wake.notify_all();
    }
    for (std::thread& worker : crew_->workers) worker.join();
    delete crew_;
}

// Computes what is left of an owner's chunks.
void ThreadPool::take_over(int64_t owner, uint64_t job) {
    const int64_t num_chunks = chunks_of(job), first = first_chunk(owner, num_threads(), num_chunks);
    const int64_t owned = first_chunk(owner + 1, num_threads(), num_chunks) - first;
    Owner& from = owners_[static_cast<size_t>(owner)];
    uint64_t ticket = from.ticket.load(std::memory_order_acquire);
    for (;;) {
        const auto behind = static_cast<int32_t>(number_of(job) - number_of(ticket));
        const int64_t taken = behind > 0 ? 0 : static_cast<int64_t>(ticket & kLow);
        if (behind < 0 || taken >= owned) return;
        const Function function = function_.load(std::memory_order_relaxed);
        const void* const context = context_.load(std::memory_order_relaxed);
        const uint64_t next = (job & ~kLow) | static_cast<uint64_t>(taken + 1);
        if (!from.ticket.compare_exchange_weak(ticket, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
            continue;
        }
        function(context, first + taken);
        if (from.done.fetch_add(1, std::memory_order_acq_rel) + 1 == owned) {
            from.done.store(0, std::memory_order_relaxed);
            count_owner(owner / kGroup, num_chunks);
        }
        ticket = from.ticket.load(std::memory_order_acquire);
    }
}

// Owners of a group that own a chunk.
int64_t ThreadPool::busy_owners(int64_t group, int64_t num_chunks) const {
    const int64_t begin = group * kGroup, end = std::min<int64_t>(begin + kGroup, num_threads());
    const int64_t chunks =
        first_chunk(end, num_threads(), num_chunks) - first_chunk(begin, num_threads(), num_chunks);
    return num_chunks < num_threads() ? chunks : end - begin;
}

void ThreadPool::count_owner(int64_t group, int64_t num_chunks) {
    std::atomic<int64_t>& done = groups_[static_cast<size_t>(group)].done;
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != busy_owners(group, num_chunks)) return;
    done.store(0, std::memory_order_relaxed);
    groups_done_.fetch_add(1, std::memory_order_release);
}

// A thread's part in a job: its own chunks, then what others have not come to.
void ThreadPool::compute(int64_t self, uint64_t job) {
    take_over(self, job);
    if (job & kByOwners) return;
    const int64_t num = num_threads();
    for (int64_t i = 1; self == 0 && i < num; ++i) take_over(i, job);
    if (self == 0) return;
    const int64_t padded = static_cast<int64_t>(groups_.size()) * kGroup;
    for (int64_t i = 1; i < kGroup; ++i) {  // some of a group that is not full are not there
        const int64_t neighbour = self / kGroup * kGroup + (self + i) % kGroup;
        if (neighbour < num) take_over(neighbour, job);
    }
    for (int64_t i = kGroup; i < padded; i += kGroup) {
        const int64_t counterpart = (self + i) % padded;
        if (counterpart < num) take_over(counterpart, job);
    }
}

void ThreadPool::run(Function function, const void* context, int64_t num_chunks, bool by_owners) {
    std::unique_lock<std::mutex> only_caller(caller_mutex_, std::try_to_lock);
    const auto start = Clock::now();
    const bool has_workers = owners_.size() > 1 && !is_orphan();
    const bool is_divided = has_workers && num_chunks > 1 && only_caller.owns_lock();
    if (is_divided) num_jobs_.fetch_add(1, std::memory_order_relaxed);
    if (!is_divided || start < alone_until_) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) function(context, chunk);
        return;
    }
    int64_t busy_groups = 0;
    for (size_t i = 0; i < groups_.size(); ++i) busy_groups += busy_owners(static_cast<int64_t>(i), num_chunks) > 0;
    groups_done_.store(0, std::memory_order_relaxed);
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    const uint64_t number = (job_.load(std::memory_order_relaxed) >> 32) + 1;
    const uint64_t job = number << 32 | static_cast<uint64_t>(num_chunks) | (by_owners ? kByOwners : 0);
    job_.store(job, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake_two();
    compute(0, job);
    int looks = 0;
    Clock::time_point waiting_since;
    int64_t impatient_ns = -1;  // the caller's computing time when it had waited for long
    for (; groups_done_.load(std::memory_order_acquire) != busy_groups; ++looks) {
        pause_briefly();
        if (looks == kLooksBeforeYield) waiting_since = Clock::now();
        if (looks <= kLooksBeforeYield) continue;
        std::this_thread::yield();  // the worker may be waiting for this very core
        if (impatient_ns < 0 && Clock::now() - waiting_since >= kPatience) impatient_ns = computed_ns();
    }
    if (impatient_ns < 0) return;
    // Chunks are small parts of a call: who waits longer than it has worked does not wait because chunks are uneven.
    const auto now = Clock::now();
    if (now - waiting_since < waiting_since - start) return;
    const int64_t waited_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now - waiting_since).count();
    set_own_time_back(std::min(computed_ns() - impatient_ns, waited_ns));
    if (!by_owners) judge_wait(start, now - waiting_since, now);
}

void ThreadPool::judge_wait(Clock::time_point start, Clock::duration waited, Clock::time_point now) {
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

void ThreadPool::work(int64_t self) {
    uint64_t seen = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (!wait_awake(seen)) sleep(seen);
        const uint64_t job = job_.load(std::memory_order_acquire);
        if (job != seen) compute(self, job);
        seen = job;
    }
}

// Spins until there is another job than the one seen; false if none came for a while.
bool ThreadPool::wait_awake(uint64_t seen) const {
    const auto give_up = Clock::now() + kSpinTime;
    do {
        for (int i = 0; i < kPausesBetweenLooks; ++i) {
            if (job_.load(std::memory_order_relaxed) != seen) return true;
            pause_briefly();
        }
    } while (Clock::now() < give_up);
    return false;
}

void ThreadPool::sleep(uint64_t seen) {
    {
        std::unique_lock<std::mutex> lock(crew_->sleep_mutex);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        crew_->wake.wait(lock, [&] { return stopping_.load() || job_.load(std::memory_order_seq_cst) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (sleeping_.load(std::memory_order_relaxed) > 0) wake_two();
}

// Who wakes up wakes two more: the caller does not wake them all one by one.
void ThreadPool::wake_two() {
    const std::lock_guard<std::mutex> lock(crew_->sleep_mutex);
    crew_->wake.notify_one();
    crew_->wake.notify_one();
}

}  // namespace forerun
