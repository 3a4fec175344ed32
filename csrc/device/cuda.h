// Operations on a CUDA device: page-locking a slot, the device's PCI address, detection of graph captures.
// Every call enters the device's primary context (the one torch uses) and relaxed capture mode, so that it
// does not break a graph that another thread captures, and restores both.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <optional>

namespace flashckpt {

// Whether there is a usable driver and at least one device.
bool cuda_available();

// The device's PCI address: domain, bus and device. The function is 0.
Error cuda_pci_address(int device, int (&address)[3]);

// Memory is page-locked in runs that end at multiples of this address. A single call for a whole slot fails
// for more than 2 GiB on Linux 6.11 to 6.13 and for 512 GiB and more on driver r580, and holds the process's
// mmap_lock until it returns. A copy must not span two runs: see DeviceCopies.
constexpr std::uint64_t kRegisteredRun = 1ull << 30;

// Page-locks memory for every device, run by run. A run that the driver refuses stays pageable, without
// effect on others. The error has the number of bytes of all refused runs and the driver's reason for the
// first. `num_registered` counts the page-locked bytes, also after an error: if it is not 0, call
// `cuda_unregister` before the memory is unmapped.
Error cuda_register(std::uint64_t address, std::uint64_t num_bytes, int device,
                    std::uint64_t& num_registered);
// Undoes `cuda_register` for all runs, in the same device's context.
Error cuda_unregister(std::uint64_t address);

// Whether a graph is being captured on one of these streams; also true if the legacy stream is among them and
// a stream that blocks it is captured. Never breaks a capture.
Error cuda_capturing(const std::uint64_t* streams, std::size_t num_streams, int device, bool& capturing);

// Seconds between two recorded events; nothing if one has not happened yet or the driver refuses. Uses
// relaxed mode, since another query would end a capture of another thread.
std::optional<double> cuda_elapsed_s(std::uint64_t start, std::uint64_t end, int device);

} // namespace flashckpt
