// Test of the digest kernel as the driver has compiled it for its device.
#pragma once

#include "device/driver.h"

#include <cstddef>
#include <cstdint>
#include <functional>

namespace flashckpt {

// Queues a launch: stream, table, number of leaves, digests.
using DigestLaunch = std::function<Error(CuStream, std::uint64_t, std::size_t, std::uint64_t)>;

// Digests and clones leaves of all alignments on the device, and compares them with the processor's results.
// The calling thread must be in the device's context. Uses its own stream and two megabytes, and waits.
Error try_digests(const Driver& driver, const DigestLaunch& launch);

} // namespace flashckpt
