// Whether the digest kernel, as a driver has compiled it for its device, does there what it should.
#pragma once

#include "device/driver.h"

#include <cstddef>
#include <cstdint>
#include <functional>

namespace flashckpt {

// Queues a launch: stream, table, number of leaves, digests.
using DigestLaunch = std::function<Error(CuStream, std::uint64_t, std::size_t, std::uint64_t)>;

// Digests and clones of leaves of all alignments on the device, compared with the processor's. The calling
// thread is in the device's context; it waits for a stream of its own, and takes two megabytes meanwhile.
Error try_digests(const Driver& driver, const DigestLaunch& launch);

} // namespace flashckpt
