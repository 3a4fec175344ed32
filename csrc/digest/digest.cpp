#include "digest/digest.h"

#include "copy/pieces.h"

#include <algorithm>
#include <cstring>

namespace flashckpt {
namespace {

std::uint64_t num_blocks_of(std::uint64_t num_bytes) {
    return num_bytes / kBlockBytes + (num_bytes % kBlockBytes != 0);
}

} // namespace

void digest_many(const std::uint64_t* addresses, const std::uint64_t* sizes, std::size_t num_leaves,
                 std::uint64_t* out, int threads) {
    share_out(sizes, num_leaves, out, threads,
              [=](std::size_t leaf, std::uint64_t offset, std::size_t count) {
                  const auto* source = reinterpret_cast<const std::uint8_t*>(addresses[leaf]);
                  return hash_blocks(source + offset, count, offset / kBlockBytes);
              });
}

PieceDigests::PieceDigests(std::vector<std::uint64_t> sizes)
    : sizes_(std::move(sizes)), leaves_(new Leaf[sizes_.size()]) {}

void PieceDigests::add(std::size_t leaf, std::uint64_t offset, const std::uint8_t* data,
                       std::uint64_t num_bytes) {
    std::uint64_t done = std::min((kBlockBytes - offset % kBlockBytes) % kBlockBytes, num_bytes);
    if (done > 0) add_cut(leaf, offset, data, done);
    std::uint64_t left = num_bytes - done;
    // The last block of a leaf is short but complete.
    std::uint64_t whole = offset + num_bytes == sizes_[leaf] ? left : left / kBlockBytes * kBlockBytes;
    if (whole > 0) {
        Word hashes = hash_blocks(data + done, whole, (offset + done) / kBlockBytes);
        add_hashes(leaf, hashes, num_blocks_of(whole));
    }
    if (left > whole) add_cut(leaf, offset + done + whole, data + done + whole, left - whole);
}

void PieceDigests::add_cut(std::size_t leaf, std::uint64_t offset, const std::uint8_t* data,
                           std::uint64_t num_bytes) {
    std::uint64_t block = offset / kBlockBytes;
    std::uint64_t size = std::min<std::uint64_t>(kBlockBytes, sizes_[leaf] - block * kBlockBytes);
    std::unique_lock lock(mutex_);
    auto [found, is_new] = cut_.try_emplace({leaf, block});
    CutBlock& cut = found->second;
    if (is_new) cut.missing = size;
    std::memcpy(cut.bytes.data() + offset % kBlockBytes, data, num_bytes);
    cut.missing -= num_bytes;
    if (cut.missing > 0) return;
    auto whole = cut_.extract(found);
    lock.unlock();
    add_hashes(leaf, hash_blocks(whole.mapped().bytes.data(), size, block), 1);
}

void PieceDigests::add_hashes(std::size_t leaf, Word hashes, std::uint64_t num_blocks) {
    leaves_[leaf].hashes.fetch_add(hashes, std::memory_order_relaxed);
    leaves_[leaf].num_blocks.fetch_add(num_blocks, std::memory_order_relaxed);
}

std::vector<std::uint64_t> PieceDigests::digests() const {
    std::vector<std::uint64_t> digests(sizes_.size());
    for (std::size_t leaf = 0; leaf < digests.size(); ++leaf) {
        bool complete = leaves_[leaf].num_blocks.load() == num_blocks_of(sizes_[leaf]);
        digests[leaf] = complete ? finish_digest(sizes_[leaf], leaves_[leaf].hashes.load()) : kEmptyDigest;
    }
    return digests;
}

} // namespace flashckpt
