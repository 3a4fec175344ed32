// A thread in a device's primary context, and out of it again. Owns no device memory and no stream.
#pragma once

#include "device/driver.h"

namespace flashckpt {

// The driver, or an error that says why there is none.
Error need_driver(const Driver*& driver);

// This thread, in relaxed capture mode and in one device's primary context (the one torch uses), until it
// goes: a graph that another thread captures is not broken, and both are left as they were.
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
