#include "sync/bell.h"

#include <algorithm>
#include <pthread.h>

namespace flashckpt {

Bell::Bell() : rung_(new std::condition_variable) {
    ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, in_child);
}

Bell& Bell::get() {
    static Bell* bell = new Bell;
    return *bell;
}

void Bell::in_child() {
    Bell& bell = get();
    // Make a new condition: the old one still counts waiters that do not exist in the child.
    bell.rung_ = new std::condition_variable;
    ++bell.forks_;
    bell.mutex.unlock();
}

void Bell::ring() {
    ++rings_;
    rung_->notify_all();
}

std::chrono::nanoseconds bounded(double seconds) {
    constexpr double most = 1e8;
    double kept = seconds > 0 ? std::min(seconds, most) : 0; // NaN becomes 0
    return std::chrono::nanoseconds(static_cast<std::int64_t>(kept * 1e9));
}

} // namespace flashckpt
