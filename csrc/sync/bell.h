// One lock and one condition variable for all events and seals, so that a thread can wait for many of them at
// one place. The lock is held only briefly. Safe across fork.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace flashckpt {

class Bell {
  public:
    // Never destroyed. A fork takes the lock, so the guarded data are consistent in the child.
    static Bell& get();

    std::mutex mutex;
    // Both need `mutex`. `rings` is a counter: a waiter that has read it misses no later ring.
    void ring();
    std::uint64_t rings() const { return rings_; }

    template <class Done>
    bool wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout, Done done) {
        return rung_->wait_for(lock, timeout, done);
    }

    // Number of forks from the first process to this one. Threads of earlier processes do not exist here.
    std::uint64_t forks() const { return forks_; }

  private:
    Bell();
    static void in_child();

    std::condition_variable* rung_;
    std::uint64_t rings_ = 0;
    std::uint64_t forks_ = 0;
};

// Clamps a caller's seconds to the range that can be added to a clock.
std::chrono::nanoseconds bounded(double seconds);

} // namespace flashckpt
