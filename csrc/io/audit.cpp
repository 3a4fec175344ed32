#include "io/audit.h"

#include "base/posix.h"

#include <algorithm>
#include <string>

namespace flashckpt {
namespace {

// Digest and checksum alternate on windows that stay in the second-level cache. The digest is first, since
// its loop prefetches. Windows of 16 KiB took a sixth longer with a copy.
constexpr std::uint64_t kWindowBytes = 64 << 10;

std::vector<std::size_t> by_offset(const Geometry& geometry) {
    std::vector<std::size_t> order;
    for (std::size_t leaf = 0; leaf < geometry.leaf_sizes.size(); ++leaf) {
        if (geometry.leaf_sizes[leaf] > 0) order.push_back(leaf);
    }
    const auto& offsets = geometry.leaf_offsets;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; });
    return order;
}

} // namespace

std::uint64_t Geometry::bytes_of(std::uint64_t chunk) const {
    return std::min(chunk_bytes, num_bytes - chunk * chunk_bytes);
}

Error Geometry::check() const {
    if (chunk_bytes == 0 || chunk_bytes % kPage != 0 || chunk_bytes > kMostChunkBytes) {
        return value_error("chunk_bytes must be a multiple of 4096, at most 16 MiB, not " +
                           std::to_string(chunk_bytes));
    }
    if (num_bytes > (1ull << 62)) return value_error("num_bytes is no size: " + std::to_string(num_bytes));
    if (leaf_offsets.size() != leaf_sizes.size()) {
        return value_error("leaf_offsets and leaf_sizes differ in length");
    }
    for (std::size_t leaf = 0; leaf < leaf_sizes.size(); ++leaf) {
        if (leaf_offsets[leaf] > num_bytes || leaf_sizes[leaf] > num_bytes - leaf_offsets[leaf]) {
            return value_error("leaf " + std::to_string(leaf) + " ends beyond the last byte");
        }
    }
    std::uint64_t end = 0;
    for (std::size_t leaf : by_offset(*this)) {
        if (leaf_offsets[leaf] < end) {
            return value_error("leaf " + std::to_string(leaf) + " overlaps another");
        }
        end = leaf_offsets[leaf] + leaf_sizes[leaf];
    }
    return {};
}

Audit::Audit(const Geometry& geometry)
    : geometry_(geometry), digests_(std::make_shared<PieceDigests>(geometry.leaf_sizes)) {
    for (std::size_t leaf : by_offset(geometry)) {
        const std::uint64_t begin = geometry.leaf_offsets[leaf];
        parts_.push_back({begin, begin + geometry.leaf_sizes[leaf], leaf, 0});
    }
}

Audit::Audit(const Geometry& geometry, std::vector<LeafPart> parts, std::shared_ptr<PieceDigests> digests)
    : geometry_(geometry), parts_(std::move(parts)), digests_(std::move(digests)) {}

Checksum Audit::add(std::uint64_t chunk, const std::uint8_t* data) {
    Xxh3Stream stream;
    const std::uint64_t start = chunk * geometry_.chunk_bytes;
    const std::uint64_t stop = start + geometry_.bytes_of(chunk);
    for (std::uint64_t begin = start; begin < stop;) {
        std::uint64_t end = end_of_window(begin, stop);
        const std::uint8_t* window = data + (begin - start);
        add_pieces(window, begin, end);
        stream.update(window, end - begin);
        begin = end;
    }
    return stream.checksum();
}

// Windows end between two blocks of a leaf; only the end of a chunk cuts a block.
std::uint64_t Audit::end_of_window(std::uint64_t begin, std::uint64_t stop) const {
    std::uint64_t end = begin + kWindowBytes;
    if (end >= stop) return stop;
    auto part = first_ending_after(end);
    if (part == parts_.end() || part->begin >= end) return end;
    return end - (end - part->begin + part->offset) % kBlockBytes;
}

std::vector<LeafPart>::const_iterator Audit::first_ending_after(std::uint64_t position) const {
    return std::lower_bound(parts_.begin(), parts_.end(), position,
                            [](const LeafPart& part, std::uint64_t at) { return part.end <= at; });
}

// `data` holds bytes [begin, end) of the file.
void Audit::add_pieces(const std::uint8_t* data, std::uint64_t begin, std::uint64_t end) {
    for (auto part = first_ending_after(begin); part != parts_.end() && part->begin < end; ++part) {
        std::uint64_t first = std::max(begin, part->begin);
        std::uint64_t last = std::min(end, part->end);
        digests_->add(part->leaf, part->offset + first - part->begin, data + (first - begin), last - first);
    }
}

std::vector<std::uint64_t> Audit::digests() const {
    return digests_->digests();
}

} // namespace flashckpt
