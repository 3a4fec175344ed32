// Signals belong to the interpreter's threads.
#pragma once

namespace flashckpt {

// Blocks every signal for the current thread during its lifetime. Threads started meanwhile inherit the mask.
class SignalsBlocked {
  public:
    SignalsBlocked();
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    alignas(16) unsigned char saved_[128];
};

} // namespace flashckpt
