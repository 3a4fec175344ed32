// Enters and leaves a device's primary context. Owns no device memory and no stream.
#pragma once

#include "device/driver.h"

namespace flashckpt {

// Returns the driver, or an error with the reason why it is missing.
Error need_driver(const Driver*& driver);

// Puts this thread into relaxed capture mode and one device's primary context (the one torch uses) during its
// lifetime, and restores both. Does not break a graph that another thread captures.
class Entered {
  public:
    Entered() = default;
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

    Error enter(const Driver& driver, int device);

  private:
    const Driver* driver_ = nullptr;
    CuContext before_ = nullptr;
    int mode_ = kCuCaptureRelaxed;
    bool relaxed_ = false;
    bool moved_ = false;
};

} // namespace flashckpt
