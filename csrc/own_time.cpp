#include "own_time.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__) || defined(__APPLE__)
#include <time.h>
#endif
#ifdef __linux__
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#endif

namespace forerun {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTries = 8;

// What the system counts for a thread. "Nanoseconds on a core, nanoseconds ready to run without one, turns".
class Delays {
public:
    int64_t lost_ns = 0, shown_ns = 0;

#ifdef __linux__
    Delays() { open_file(); }
    ~Delays() { close_file(); }

    int64_t read_ns() {
        char text[80];
        const ssize_t size = file_ < 0 ? 0 : pread(file_, text, sizeof text - 1, 0);
        if (size <= 0) return last_ns_;
        text[size] = 0;
        char* rest = nullptr;
        std::strtoll(text, &rest, 10);
        return last_ns_ = std::strtoll(rest, nullptr, 10);
    }

    // In the child of a fork the file tells of the parent's thread.
    void reopen() {
        close_file();
        open_file();
    }

private:
    void open_file() { file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC); }
    void close_file() const {
        if (file_ >= 0) close(file_);
    }

    int file_ = -1;
    int64_t last_ns_ = 0;
#else
    int64_t read_ns() const { return 0; }
#endif
};

Delays& delays() {
    thread_local Delays own;
#ifdef __linux__
    static const int is_watching = pthread_atfork(nullptr, nullptr, [] { delays().reopen(); });
    (void)is_watching;
#endif
    return own;
}

}  // namespace

double own_time() {
    Delays& own = delays();
    Clock::time_point now;
    int64_t delay_ns = own.read_ns();
    for (int turn = 0; turn < kTries; ++turn) {  // a thread that lost its core between the two clocks reads both again
        now = Clock::now();
        const int64_t before_ns = delay_ns;
        delay_ns = own.read_ns();
        if (delay_ns == before_ns) break;
    }
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    own.shown_ns = std::max<int64_t>(own.shown_ns, ns - delay_ns - own.lost_ns);
    return static_cast<double>(own.shown_ns) * 1e-9;
}

int64_t computed_ns() {
#if defined(__linux__) || defined(__APPLE__)
    timespec time;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0) return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
#endif
    return 0;
}

void set_own_time_back(int64_t ns) { delays().lost_ns += ns; }

}  // namespace forerun
