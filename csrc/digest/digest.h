// The digest of a leaf's bytes, at once or from pieces. See docs/format.md ("Digest") for its definition.
#pragma once

#include "digest/block_hash.h"
#include "digest/definition.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace flashckpt {

inline Word digest(const std::uint8_t* source, std::size_t num_bytes) {
    return finish_digest(num_bytes, hash_blocks(source, num_bytes, 0));
}

// Writes the digest of each leaf to `out[num_leaves]`.
void digest_many(const std::uint64_t* addresses, const std::uint64_t* sizes, std::size_t num_leaves,
                 std::uint64_t* out, int threads);

// Digests of leaves whose bytes arrive in pieces cut anywhere, in any order, from any thread, each byte once.
// Hashes whole blocks at once, and keeps the parts of a cut block until it is complete. For pieces of whole
// blocks, sums of `hash_blocks` suffice.
class PieceDigests {
  public:
    explicit PieceDigests(std::vector<std::uint64_t> sizes);

    const std::vector<std::uint64_t>& sizes() const { return sizes_; }

    // Adds the leaf's bytes [offset, offset + num_bytes).
    void add(std::size_t leaf, std::uint64_t offset, const std::uint8_t* data, std::uint64_t num_bytes);
    // kEmptyDigest for a leaf with a byte that was never added.
    std::vector<std::uint64_t> digests() const;

  private:
    struct CutBlock {
        std::array<std::uint8_t, kBlockBytes> bytes{};
        std::uint64_t missing = 0;
    };
    struct Leaf {
        std::atomic<Word> hashes{0};
        std::atomic<std::uint64_t> num_blocks{0};
    };

    void add_cut(std::size_t leaf, std::uint64_t offset, const std::uint8_t* data, std::uint64_t num_bytes);
    void add_hashes(std::size_t leaf, Word hashes, std::uint64_t num_blocks);

    std::vector<std::uint64_t> sizes_;
    std::unique_ptr<Leaf[]> leaves_;
    std::mutex mutex_;
    std::map<std::pair<std::size_t, std::uint64_t>, CutBlock> cut_; // by leaf and block
};

} // namespace flashckpt
