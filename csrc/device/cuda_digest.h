// Digests and clones of many leaves by one launch on a CUDA device. Owns the loaded kernel of each device;
// the caller owns tables and results. See docs/gpu.md.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashckpt {

// Makes the table of one launch, to be copied into device memory. A leaf is contiguous bytes of any
// alignment. A destination of 0, or no destinations, computes only digests. Returns an error that names the
// leaf for an invalid address and for a destination that overlaps another range. Sources may overlap each
// other.
Error digest_table(const std::uint64_t* sources, const std::uint64_t* destinations,
                   const std::uint64_t* sizes, std::size_t num_leaves, std::vector<std::uint8_t>& out);

// Loads the kernel on that device if necessary; the error has the reason if it cannot be used.
Error cuda_digests_usable(int device);

// Queues one pass over a table. It fills `digests` (u64[num_leaves], in device memory) with the empty mark,
// and writes a leaf's digest after its last block. Before a table is launched again, its previous launch must
// have ended in stream order, since the table contains scratch memory.
Error cuda_digest_launch(std::uint64_t stream, std::uint64_t table, std::size_t num_leaves,
                         std::uint64_t digests, int device);

} // namespace flashckpt
