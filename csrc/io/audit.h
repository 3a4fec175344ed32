// Audit of bytes on their way between memory and a file: a checksum for every chunk, a digest for every leaf.
// Owns the arithmetic of chunks and leaves; does no I/O.
#pragma once

#include "base/error.h"
#include "checksum/xxh3.h"
#include "digest/digest.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace flashckpt {

constexpr std::uint64_t kMostChunkBytes = 16 << 20; // a reader holds some chunks

// A file (or region) of `num_bytes` in chunks; leaves are ranges of it that do not overlap.
struct Geometry {
    std::uint64_t num_bytes = 0;
    std::uint64_t chunk_bytes = 4 << 20;
    std::vector<std::uint64_t> leaf_offsets;
    std::vector<std::uint64_t> leaf_sizes;

    std::uint64_t num_chunks() const { return (num_bytes + chunk_bytes - 1) / chunk_bytes; }
    std::uint64_t bytes_of(std::uint64_t chunk) const;
    // Chunks must be whole pages, leaves within the bytes and apart from each other.
    Error check() const;
};

// Bytes [begin, end) of a file belong to a leaf from its `offset`. Parts do not overlap.
struct LeafPart {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::size_t leaf = 0;
    std::uint64_t offset = 0;
};

// Any number of threads may add chunks, each chunk once, in any order.
class Audit {
  public:
    // Audits all leaves of the geometry.
    explicit Audit(const Geometry& geometry);
    // Audits parts, in the order of the file. Other audits may add to the same digests.
    Audit(const Geometry& geometry, std::vector<LeafPart> parts, std::shared_ptr<PieceDigests> digests);

    // Adds all bytes of one chunk. Returns its checksum.
    Checksum add(std::uint64_t chunk, const std::uint8_t* data);
    // kEmptyDigest for leaves with a chunk that was never added.
    std::vector<std::uint64_t> digests() const;

  private:
    std::uint64_t end_of_window(std::uint64_t begin, std::uint64_t end) const;
    std::vector<LeafPart>::const_iterator first_ending_after(std::uint64_t position) const;
    void add_pieces(const std::uint8_t* data, std::uint64_t begin, std::uint64_t end);

    const Geometry& geometry_;
    std::vector<LeafPart> parts_;
    std::shared_ptr<PieceDigests> digests_;
};

} // namespace flashckpt
