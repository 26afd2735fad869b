#include "pool.h"

#include <immintrin.h>
#include <pthread.h>

#include <chrono>

namespace forerun {

namespace {

// Between two operations of a step Python needs some 10 us; waking a thread costs as much.
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int PATIENCE = 2000;  // pauses, some 20 to 80 us

// The i-th look at something that another thread is about to do: it may have lost its processor in the middle of it.
void pause_or_yield(int i) {
    if (i < PATIENCE)
        _mm_pause();
    else
        std::this_thread::yield();
}

}  // namespace

Pool::Pool(int threads) : count_(threads), ranges_(new Range[threads]) {
    try {
        for (int t = 1; t < threads; ++t) helpers_.emplace_back([this, t] { serve(t); });
    } catch (...) {  // the system has no more threads
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

void Pool::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void Pool::open(Call call, const void* work) {
    if (count_ == 1) {
        Member alone(*this, 0, state_.load(std::memory_order_relaxed));
        return call(work, alone);
    }
    call_ = call;
    work_ = work;
    for (int t = 0; t < count_; ++t) ranges_[t].next.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    uint64_t open = state_.load(std::memory_order_relaxed) + 1;
    state_.store(open);  // sequentially consistent: either a helper going to sleep sees it, or it is seen sleeping
    if (sleeping_.load()) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    Member member(*this, 0, open);
    call(work, member);
    state_.store(open + 1);
    for (int i = 0; inside_.load(); ++i) pause_or_yield(i);
}

// Until so many pieces of the region are done.
void Pool::wait_for(uint64_t target) const {
    for (int i = 0; done_.load(std::memory_order_acquire) < target; ++i) pause_or_yield(i);
}

void Pool::serve(int thread) {
    for (uint64_t seen = 0;;) {
        seen = await(seen);
        if (ending_.load()) return;
        inside_.fetch_add(1);
        // Only now does the region stay as it is until we leave; it may have been closed, or be the next one already.
        uint64_t state = state_.load();
        if (state & 1) {
            Member member(*this, thread, state);
            call_(work_, member);
        }
        seen = state;
        inside_.fetch_sub(1);
    }
}

// Until there is an open region other than `seen`, or the end.
uint64_t Pool::await(uint64_t seen) {
    auto news = [&] {
        uint64_t state = state_.load();
        return ((state & 1) && state != seen) || ending_.load();
    };
    auto deadline = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i) {
            if (news()) return state_.load();
            _mm_pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    // Not wake_.wait(): its symbol changed with GCC 12, and a library that asks for the new one needs a system as new.
    while (!news()) pthread_cond_wait(wake_.native_handle(), mutex_.native_handle());
    sleeping_.fetch_sub(1);
    return state_.load();
}

}  // namespace forerun
