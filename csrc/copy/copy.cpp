#include "copy/copy.h"

#include "copy/pieces.h"
#include "digest/block_hash.h"

namespace flashckpt {
namespace {

// Copies of at least this size bypass the caches: another process reads the bytes later.
constexpr std::size_t kStreamBytes = 8192;

} // namespace

void copy_digest(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* sizes,
                 std::size_t num_leaves, std::uint64_t* digests, int threads) {
    share_out(sizes, num_leaves, digests, threads,
              [=](std::size_t leaf, std::uint64_t offset, std::size_t count) {
                  auto* destination = reinterpret_cast<std::uint8_t*>(destinations[leaf]) + offset;
                  const auto* source = reinterpret_cast<const std::uint8_t*>(sources[leaf]) + offset;
                  Word hashes =
                      copy_blocks(destination, source, count, offset / kBlockBytes, count >= kStreamBytes);
                  // Order this thread's streaming stores before the caller's seal.
                  if (count >= kStreamBytes) settle_stores();
                  return hashes;
              });
}

} // namespace flashckpt
