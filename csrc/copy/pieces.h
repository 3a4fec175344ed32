// Distributes leaves of any size over threads by bytes: cuts large leaves, and batches small ones.
#pragma once

#include "digest/definition.h"
#include "sync/pool.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashckpt {

// A whole number of blocks, so that the hashes of a leaf's pieces add up to its digest. Large enough to make
// scheduling free, small enough that all threads end together. A whole number of pages, so that every piece
// of an aligned leaf is aligned.
constexpr std::uint64_t kTurnBytes = 1 << 20;
static_assert(kTurnBytes % kBlockBytes == 0);
// Fixed cost of a leaf, in bytes that take the same time.
constexpr std::uint64_t kLeafCostBytes = 256;

// One task: the whole leaves [first, last), or bytes [offset, offset + count) of leaf `first`.
struct Turn {
    std::size_t first = 0;
    std::size_t last = 0;
    std::uint64_t offset = 0;
    std::uint64_t count = 0;
};

inline std::vector<Turn> cut_turns(const std::uint64_t* sizes, std::size_t num_leaves) {
    std::vector<Turn> turns;
    std::uint64_t cost = 0;
    std::size_t first = 0;
    auto flush = [&](std::size_t last) {
        if (first < last) turns.push_back({first, last, 0, 0});
        first = last;
        cost = 0;
    };
    for (std::size_t leaf = 0; leaf < num_leaves; ++leaf) {
        if (sizes[leaf] > 2 * kTurnBytes) {
            flush(leaf);
            for (std::uint64_t offset = 0; offset < sizes[leaf]; offset += kTurnBytes) {
                std::uint64_t count = std::min(kTurnBytes, sizes[leaf] - offset);
                turns.push_back({leaf, leaf, offset, count});
            }
            first = leaf + 1;
            continue;
        }
        cost += sizes[leaf] + kLeafCostBytes;
        if (cost >= kTurnBytes) flush(leaf + 1);
    }
    flush(num_leaves);
    return turns;
}

// Calls work(leaf, offset, count) -> sum of block hashes for every piece, on `threads` threads, and writes
// each leaf's digest to `out` when all its pieces are done. Pieces start at whole blocks.
template <class Work>
void share_out(const std::uint64_t* sizes, std::size_t num_leaves, std::uint64_t* out, int threads,
               Work work) {
    std::vector<Turn> turns = cut_turns(sizes, num_leaves);
    std::vector<Word> hashes(turns.size());
    std::atomic<std::size_t> next{0};
    auto run = [&] {
        for (std::size_t turn; (turn = next.fetch_add(1, std::memory_order_relaxed)) < turns.size();) {
            const Turn& mine = turns[turn];
            if (mine.count > 0) hashes[turn] = work(mine.first, mine.offset, mine.count);
            for (std::size_t leaf = mine.first; leaf < mine.last; ++leaf) {
                out[leaf] = finish_digest(sizes[leaf], work(leaf, 0, sizes[leaf]));
            }
        }
    };
    parallel(static_cast<int>(std::min<std::size_t>(threads, turns.size())), run);
    for (std::size_t turn = 0; turn < turns.size();) {
        if (turns[turn].count == 0) {
            ++turn;
            continue;
        }
        std::size_t leaf = turns[turn].first;
        Word sum = 0;
        for (; turn < turns.size() && turns[turn].count > 0 && turns[turn].first == leaf; ++turn) {
            sum += hashes[turn];
        }
        out[leaf] = finish_digest(sizes[leaf], sum);
    }
}

} // namespace flashckpt
