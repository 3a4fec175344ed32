// Memory for slots: its NUMA node, huge pages, and faulting in.
#pragma once

#include "base/error.h"

#include <cstdint>

namespace flashckpt {

// Faults in [address, address + num_bytes) for writing, on `threads` threads. Contents do not change, and
// other processes may use the memory meanwhile.
Error populate(std::uint64_t address, std::uint64_t num_bytes, int threads);

// Takes the first `num_bytes` of a tmpfs file (also a memfd) from that NUMA node from now on, and from other
// nodes once it has no memory left. The policy belongs to the file and holds for all processes. Existing
// memory of the file does not move.
Error prefer_node(int fd, std::uint64_t num_bytes, int node);

// Allocates the huge pages that are completely in [offset, offset + num_bytes) of a tmpfs file. With small
// pages, the first touch of each new mapping costs as much as digesting the bytes. `taken`: whether all were
// available; if not, some memory of the range may be allocated. The file grows to the end of the range before
// its memory exists, so no other process may touch the range meanwhile.
Error take_huge_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes, bool& taken);

} // namespace flashckpt
