// Memory for slots: from which NUMA node it is taken, taking it in huge pages, and faulting it in.
#pragma once

#include "base/error.h"

#include <cstdint>

namespace flashckpt {

// Faults [address, address + num_bytes) in for writing, on `threads` threads; contents do not change, and
// other processes may use the memory meanwhile.
Error populate(std::uint64_t address, std::uint64_t num_bytes, int threads);

// The first `num_bytes` of a file on tmpfs (also a memfd) come from that NUMA node from now on, whichever
// process takes them, and from others once the node has none left: the policy stays with the file. Memory
// that the file has already stays where it is.
Error prefer_node(int fd, std::uint64_t num_bytes, int node);

// Takes the whole huge pages that lie in [offset, offset + num_bytes) of a file on tmpfs, as such: in small
// pages, each new mapping pays for its first touch about what digesting the bytes costs. `taken` says whether
// all were to be had; where they were not, some memory of the range may be taken. The file grows to the end
// of the range before there is memory: nobody else may touch it meanwhile.
Error take_huge_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes, bool& taken);

} // namespace flashckpt
