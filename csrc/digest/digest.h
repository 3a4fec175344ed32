// The digest of a leaf's bytes: nbytes·0x9E3779B97F4A7C15 + Σ (2j+1)·s_j mod 2^64 over its signed 32-bit
// little-endian words s_j, the tail padded with zeros. It is a sum over bytes, so the shares of any pieces
// of a leaf, cut anywhere, add up to it. See docs/format.md.
#pragma once

#include "digest/definition.h"

#include <cstddef>
#include <cstdint>

namespace flashckpt {

constexpr std::uint64_t kDigestSeed = 0x9E3779B97F4A7C15ull;

constexpr std::uint64_t digest_start(std::uint64_t leaf_bytes) {
    return leaf_bytes * kDigestSeed;
}

// What bytes [offset, offset + num_bytes) of a leaf add to its digest. `source` is where the piece stands.
std::uint64_t digest_share(const std::uint8_t* source, std::size_t num_bytes, std::uint64_t offset);
// The same while copying; see `copy_words` for `stream`.
std::uint64_t copy_share(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                         std::uint64_t offset, bool stream);

inline std::uint64_t digest(const std::uint8_t* source, std::size_t num_bytes) {
    return digest_start(num_bytes) + digest_share(source, num_bytes, 0);
}

// One digest a leaf, written to `out[num_leaves]`.
void digest_many(const std::uint64_t* addresses, const std::uint64_t* sizes, std::size_t num_leaves,
                 std::uint64_t* out, int threads);

} // namespace flashckpt
