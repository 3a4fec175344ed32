#include "io/audit.h"

#include "base/posix.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace flashckpt {
namespace {

// Digest and checksum take turns on windows that stay in the second-level cache, the digest first: its loop
// asks memory ahead, and the checksum finds what it brought. With 16 KiB
// and a copy on the way it took a sixth longer.
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
        return value_error("chunk_bytes must be a multiple of 4096, at most 1 GiB, not " +
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
    : geometry_(geometry), order_(by_offset(geometry)), digests_(geometry.leaf_sizes) {}

Checksum Audit::add(std::uint64_t chunk, const std::uint8_t* data) {
    return add(chunk, data, nullptr);
}

Checksum Audit::add(std::uint64_t chunk, const std::uint8_t* data, std::uint8_t* into) {
    Xxh3Stream stream;
    const std::uint64_t start = chunk * geometry_.chunk_bytes;
    const std::uint64_t stop = start + geometry_.bytes_of(chunk);
    for (std::uint64_t begin = start; begin < stop;) {
        std::uint64_t end = end_of_window(begin, stop);
        const std::uint8_t* window = data + (begin - start);
        if (into != nullptr) {
            window =
                static_cast<const std::uint8_t*>(std::memcpy(into + (begin - start), window, end - begin));
        }
        add_pieces(window, begin, end);
        stream.update(window, end - begin);
        begin = end;
    }
    return stream.checksum();
}

// Windows end between blocks of the leaf that they end in: only the end of a chunk cuts one.
std::uint64_t Audit::end_of_window(std::uint64_t begin, std::uint64_t stop) const {
    std::uint64_t end = begin + kWindowBytes;
    if (end >= stop) return stop;
    auto leaf = first_ending_after(end);
    if (leaf == order_.end() || geometry_.leaf_offsets[*leaf] >= end) return end;
    return end - (end - geometry_.leaf_offsets[*leaf]) % kBlockBytes;
}

std::vector<std::size_t>::const_iterator Audit::first_ending_after(std::uint64_t position) const {
    return std::lower_bound(order_.begin(), order_.end(), position, [&](std::size_t leaf, std::uint64_t at) {
        return geometry_.leaf_offsets[leaf] + geometry_.leaf_sizes[leaf] <= at;
    });
}

// `data` holds bytes [begin, end) of the file.
void Audit::add_pieces(const std::uint8_t* data, std::uint64_t begin, std::uint64_t end) {
    auto leaf = first_ending_after(begin);
    for (; leaf != order_.end() && geometry_.leaf_offsets[*leaf] < end; ++leaf) {
        std::uint64_t offset = geometry_.leaf_offsets[*leaf];
        std::uint64_t first = std::max(begin, offset);
        std::uint64_t last = std::min(end, offset + geometry_.leaf_sizes[*leaf]);
        digests_.add(*leaf, first - offset, data + (first - begin), last - first);
    }
}

std::vector<std::uint64_t> Audit::digests() const {
    return digests_.digests();
}

} // namespace flashckpt
