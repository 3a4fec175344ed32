// Copies of leaves with their digests, in one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// Copies sizes[i] bytes from sources[i] to destinations[i] and writes each leaf's digest to digests[i].
// Addresses may have any alignment; ranges must not overlap. The digest is of the bytes that were stored.
// On return, all stores are ordered before this thread's next store.
void copy_digest(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                 std::size_t num_leaves, std::uint64_t* digests, int threads);

} // namespace flashckpt
