// Digests and clones of many leaves by one launch on a CUDA device. Owns the loaded kernel, one a device; the
// tables and results are the caller's. See docs/gpu.md.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashckpt {

// The table of one launch, to be put into device memory as it is. A leaf is contiguous bytes of any
// alignment; a destination of 0, or none at all, is a digest alone. An error that names the leaf for an
// address that cannot be and for a destination that overlaps any other range. Sources may overlap each other.
Error digest_table(const std::uint64_t* sources, const std::uint64_t* destinations,
                   const std::uint64_t* sizes, std::size_t num_leaves, std::vector<std::uint8_t>& out);

// Loads the kernel on that device, if it is not there yet; the error says why it cannot be used there.
Error cuda_digests_usable(int device);

// Queues one pass over a table: `digests` (u64[num_leaves], in device memory) is filled with the empty mark
// at first, and a leaf's digest is written when its last block has been counted. The launch before must have
// ended, in the order of streams, before the same table is launched again: its scratch is in it.
Error cuda_digest_launch(std::uint64_t stream, std::uint64_t table, std::size_t num_leaves,
                         std::uint64_t digests, int device);

} // namespace flashckpt
