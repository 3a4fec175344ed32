// Room for slots: reserving it in a file and faulting it in.
#pragma once

#include "base/error.h"

#include <cstdint>

namespace flashckpt {

// Faults [address, address + num_bytes) in for writing, on `threads` threads; contents do not change, and
// other processes may use the memory meanwhile.
Error populate(std::uint64_t address, std::uint64_t num_bytes, int threads);

} // namespace flashckpt
