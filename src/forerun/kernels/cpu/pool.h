// A few threads that wait for work close by: they spin a moment after a job, then sleep.
//
// Who computes a piece must never matter for its bits; so pieces are taken as they come, and a thread that wakes late
// finds the work done rather than holding it up. That also makes a forked child, which has no such threads, work alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int threads() const { return count_; }

    // Calls work(piece, thread) for every piece in [0, pieces), on this thread and those that are awake in time.
    template <typename Work>
    void run(long pieces, const Work& work) {
        start(pieces, [](const void* self, long piece, int thread) { (*(const Work*)self)(piece, thread); }, &work);
    }

private:
    using Call = void (*)(const void*, long, int);
    struct alignas(128) Range {  // its own cache lines
        std::atomic<long> next{0};
        long end = 0;
    };

    void start(long pieces, Call call, const void* work);
    void take_part(int thread);
    void serve(int thread);
    uint64_t await(uint64_t seen);

    int count_;
    Call call_ = nullptr;
    const void* work_ = nullptr;
    std::unique_ptr<Range[]> ranges_;
    // Two times the number of the job, plus 1 while it is open.
    alignas(128) std::atomic<uint64_t> state_{0};
    alignas(128) std::atomic<int> inside_{0};  // helpers that may be looking at the job
    alignas(128) std::atomic<int> sleeping_{0};
    std::atomic<bool> ending_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> helpers_;
};

}  // namespace forerun
