// What the engine asks of a CUDA device: pinning a slot, whether a graph is captured. Every call enters the
// device's primary context (the one torch uses) and relaxed capture mode, so that a graph that another
// thread captures is not broken by it, and leaves both as they were.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace flashckpt {

// Whether there is a usable driver and at least one device.
bool cuda_available();

// Page-locks memory for every device. Errors if a part of it is registered already.
Error cuda_register(std::uint64_t address, std::uint64_t num_bytes, int device);
Error cuda_unregister(std::uint64_t address);

// Whether a graph is being captured on one of these streams; also true where the legacy stream is among them
// and some stream that blocks it is captured. Never breaks a capture.
Error cuda_capturing(const std::uint64_t* streams, std::size_t num_streams, int device, bool& capturing);

// Seconds from one recorded event to another; nothing until both have been passed, or where the driver
// refuses to answer. A query outside of relaxed mode would end a capture that another thread has begun.
std::optional<double> cuda_elapsed_s(std::uint64_t start, std::uint64_t end, int device);

} // namespace flashckpt
