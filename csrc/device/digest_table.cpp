#include "device/cuda_digest.h"

#include "device/digest_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

namespace flashckpt {
namespace {

constexpr std::uint64_t kHighest = std::numeric_limits<std::uint64_t>::max();

struct Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t entry;
    bool is_written;
};

std::string named(const Range& range) {
    return (range.is_written ? "the destination of leaf " : "the source of leaf ") +
           std::to_string(range.entry);
}

Error check_range(const Range& range) {
    if (range.begin == 0) return value_error(named(range) + " has no address");
    if (range.end < range.begin) return value_error(named(range) + " goes past the end of all addresses");
    return {};
}

// Warps take groups in any order, so no leaf may read or write a range that another leaf writes.
Error check_overlap(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    const Range* read = nullptr;    // the earlier read range that ends last
    const Range* written = nullptr; // the earlier written range that ends last
    for (const Range& range : ranges) {
        const Range* met = written != nullptr && range.begin < written->end ? written : nullptr;
        if (range.is_written && read != nullptr && range.begin < read->end) met = read;
        if (met != nullptr) return value_error(named(range) + " overlaps " + named(*met));
        const Range*& last = range.is_written ? written : read;
        if (last == nullptr || range.end > last->end) last = &range;
    }
    return {};
}

} // namespace

Error digest_table(const std::uint64_t* sources, const std::uint64_t* destinations,
                   const std::uint64_t* sizes, std::size_t num_leaves, std::vector<std::uint8_t>& out) {
    std::vector<DigestEntry> entries(num_leaves + 1);
    std::vector<Range> ranges;
    std::uint64_t num_groups = 0;
    for (std::size_t leaf = 0; leaf < num_leaves; ++leaf) {
        std::uint64_t destination = destinations == nullptr || sizes[leaf] == 0 ? 0 : destinations[leaf];
        entries[leaf] = {sources[leaf], destination, sizes[leaf], num_groups};
        num_groups += digest_groups(sizes[leaf]);
        if (sizes[leaf] == 0) continue;
        ranges.push_back({sources[leaf], sources[leaf] + sizes[leaf], leaf, false});
        if (Error error = check_range(ranges.back())) return error;
        if (destination == 0) continue;
        ranges.push_back({destination, destination + sizes[leaf], leaf, true});
        if (Error error = check_range(ranges.back())) return error;
    }
    if (Error error = check_overlap(ranges)) return error;
    // The last entry ends the last leaf and terminates every search.
    entries[num_leaves] = {0, 0, kHighest, num_groups};
    DigestTable head = {kDigestTableMagic, num_leaves, num_groups, 0};
    out.assign(digest_table_bytes(num_leaves), 0);
    std::memcpy(out.data(), &head, sizeof(head));
    std::memcpy(out.data() + sizeof(head), entries.data(), entries.size() * sizeof(DigestEntry));
    return {};
}

} // namespace flashckpt
