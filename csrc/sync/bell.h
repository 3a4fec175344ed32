// One lock and one condition for everything that is waited for (events, seals), so that a waiter for many
// things needs one place to wait at. Held for moments only; safe across fork.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace flashckpt {

class Bell {
  public:
    // Never destroyed. A fork waits for the lock, so a child finds what it guards in one piece.
    static Bell& get();

    std::mutex mutex;
    // Both need `mutex` held. `rings` counts; a waiter that has seen a count misses no later ring.
    void ring();
    std::uint64_t rings() const { return rings_; }

    template <class Done>
    bool wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout, Done done) {
        return rung_->wait_for(lock, timeout, done);
    }

    // How many forks lie between the first process and this one: threads of an earlier one are not here.
    std::uint64_t forks() const { return forks_; }

  private:
    Bell();
    static void in_child();

    std::condition_variable* rung_;
    std::uint64_t rings_ = 0;
    std::uint64_t forks_ = 0;
};

// Seconds as given by a caller, kept within what a clock can add.
std::chrono::nanoseconds bounded(double seconds);

} // namespace flashckpt
