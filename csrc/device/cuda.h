// What the engine asks of a CUDA device: page-locking a slot, where the device is attached, whether a graph
// is captured. Every call enters the device's primary context (the one torch uses) and relaxed capture mode,
// so that a graph that another thread captures is not broken by it, and leaves both as they were.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace flashckpt {

// Whether there is a usable driver and at least one device.
bool cuda_available();

// Where the device is attached: domain, bus and device of its PCI address. Its function is 0.
Error cuda_pci_address(int device, int (&address)[3]);

// Memory is page-locked in runs that end at multiples of this address. A single call for a whole slot fails
// for more than 2 GiB on Linux 6.11 to 6.13 and for 512 GiB and more on driver r580, and holds the process's
// mmap_lock until it returns. A copy must not span two runs: see DeviceCopies.
constexpr std::uint64_t kRegisteredRun = 1ull << 30;

// Page-locks memory for every device, run by run. A run that the driver refuses stays pageable; the others do
// not depend on it. The error counts the bytes of all refused runs and has the driver's reason for the first
// one. `num_registered` counts the bytes that are page-locked now, with an error as well: where it is not 0,
// `cuda_unregister` must follow before the memory is unmapped.
Error cuda_register(std::uint64_t address, std::uint64_t num_bytes, int device,
                    std::uint64_t& num_registered);
// Undoes `cuda_register` for all runs, in the same device's context.
Error cuda_unregister(std::uint64_t address);

// Whether a graph is being captured on one of these streams; also true where the legacy stream is among them
// and some stream that blocks it is captured. Never breaks a capture.
Error cuda_capturing(const std::uint64_t* streams, std::size_t num_streams, int device, bool& capturing);

// Seconds from one recorded event to another; nothing until both have been passed, or where the driver
// refuses to answer. A query outside of relaxed mode would end a capture that another thread has begun.
std::optional<double> cuda_elapsed_s(std::uint64_t start, std::uint64_t end, int device);

} // namespace flashckpt
