// The process's native threads for long work. They start when first used, never before, and a forked child
// that uses them gets its own.
#pragma once

#include <functional>

namespace flashckpt {

// Runs `work` on this thread and on up to `threads - 1` others at the same time, and returns when all of
// them have left it. `work` takes its turns from a counter of its own: with no other thread to be had, one
// call does everything. Must not throw.
void parallel(int threads, const std::function<void()>& work);

// Blocks every signal for the thread that makes one, so that threads it starts inherit a full mask: signals
// belong to the interpreter's threads.
class SignalsBlocked {
  public:
    SignalsBlocked();
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    alignas(16) unsigned char saved_[128];
};

// At most 15 characters are kept.
void name_this_thread(const char* name);

} // namespace flashckpt
