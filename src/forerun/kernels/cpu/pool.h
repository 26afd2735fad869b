// A few threads that go through a region of code together: they spin a moment after one, then sleep.
//
// A region is a row of shared works, each cut into pieces, and every thread goes through all of it. A work is over when
// its pieces are done, not when all threads have come: one that wakes late, or lost its processor between two pieces,
// finds the work done rather than holding it up. So who computes a piece must never matter for its bits. That also makes
// a forked child, which has no such threads, work alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

class Pool;

// One thread's way through a region.
class Member {
public:
    const int thread;

    // Calls work(piece) for every piece in [0, pieces), here and on the other threads; returns when all are done.
    // `pieces` is the same on every thread, whenever it comes here: it may not depend on what is computed in the region.
    template <typename Work>
    void share(long pieces, const Work& work);

    // The others are through with the region: nothing of it is left to do.
    bool left_behind() const;

private:
    friend class Pool;
    Member(Pool& pool, int thread, uint64_t state) : thread(thread), pool_(pool), state_(state) {}

    Pool& pool_;
    uint64_t state_;       // of the pool, while the region is open
    uint32_t number_ = 0;  // of the shared work at hand
    uint64_t target_ = 0;  // pieces up to and with it
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int threads() const { return count_; }

    // Calls work(member) on this thread and those that are awake in time; all of them go through the same shared works.
    template <typename Work>
    void region(const Work& work) {
        open([](const void* self, Member& member) { (*(const Work*)self)(member); }, &work);
    }

    // A region of one shared work: work(piece, thread).
    template <typename Work>
    void run(long pieces, const Work& work) {
        region([&](Member& member) { member.share(pieces, [&](long piece) { work(piece, member.thread); }); });
    }

private:
    friend class Member;
    using Call = void (*)(const void*, Member&);
    // The pieces that a thread takes first: the number of the work in the upper half, the next piece in the lower one.
    struct alignas(128) Range {  // its own cache lines
        std::atomic<uint64_t> next{0};
    };

    void open(Call call, const void* work);
    void end();
    void serve(int thread);
    uint64_t await(uint64_t seen);
    void wait_for(uint64_t target) const;

    // Piece of the work `number` from a thread's range [first, last); negative if none is left or the work is over.
    long take(int range, uint32_t number, long first, long last) {
        std::atomic<uint64_t>& next = ranges_[range].next;
        uint64_t value = next.load(std::memory_order_relaxed);
        for (;;) {
            uint32_t current = value >> 32;
            if (current > number) return -1;
            long piece = current == number ? (long)(uint32_t)value : first;
            if (piece >= last) return -1;
            if (next.compare_exchange_weak(value, (uint64_t)number << 32 | (piece + 1), std::memory_order_relaxed))
                return piece;
        }
    }

    int count_;
    Call call_ = nullptr;
    const void* work_ = nullptr;
    std::unique_ptr<Range[]> ranges_;
    // Two times the number of the region, plus 1 while it is open.
    alignas(128) std::atomic<uint64_t> state_{0};
    alignas(128) std::atomic<uint64_t> done_{0};  // pieces of the region, over all its works
    alignas(128) std::atomic<int> inside_{0};     // helpers that may be looking at the region
    alignas(128) std::atomic<int> sleeping_{0};
    std::atomic<bool> ending_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> helpers_;
};

template <typename Work>
void Member::share(long pieces, const Work& work) {
    int count = pool_.count_;
    if (count == 1) {
        for (long piece = 0; piece < pieces; ++piece) work(piece);
        return;
    }
    ++number_;
    target_ += pieces;
    if (pool_.done_.load(std::memory_order_acquire) >= target_) return;
    long mine = 0;
    // Own pieces first (their data lie side by side), then what others have not begun.
    for (int i = 0; i < count; ++i) {
        int range = (thread + i) % count;
        long first = pieces * range / count, last = pieces * (range + 1) / count;
        for (long piece; (piece = pool_.take(range, number_, first, last)) >= 0; ++mine) work(piece);
    }
    if (mine) pool_.done_.fetch_add(mine, std::memory_order_acq_rel);
    pool_.wait_for(target_);
}

inline bool Member::left_behind() const { return pool_.state_.load(std::memory_order_relaxed) != state_; }

}  // namespace forerun
