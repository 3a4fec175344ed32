// The table of one launch of the digest kernel, as it lies in device memory: header, entries and one more
// that ends them, scratch of the kernel. Read by the host and by the kernel; see docs/gpu.md.
#pragma once

#include "digest/definition.h"

namespace flashckpt {

// What a warp takes at a time: four blocks, so that each thread has sixteen loads on their way.
constexpr int kGroupBlocks = 4;
constexpr int kGroupWords = kGroupBlocks * kBlockWords;
constexpr int kGroupBytes = kGroupBlocks * kBlockBytes;

constexpr Word kDigestTableMagic = 0x3162617474736764ull; // "dgsttab1"
constexpr int kDigestThreads = 256;                       // of one thread block of the launch

struct DigestTable {
    Word magic;
    Word num_entries;
    Word num_groups;
    Word reserved;
};

// A leaf without bytes has one group as well: its digest is written like any other.
struct DigestEntry {
    Word source;
    Word destination; // 0: nothing is written
    Word num_bytes;
    Word first_group; // groups of all entries before this one
};

// A leaf whose groups are taken by more than one warp at a time: all zero before a launch.
struct DigestScratch {
    Word hashes;
    Word groups; // how many are in `hashes`
};

FLASHCKPT_HOST_DEVICE constexpr Word digest_groups(Word num_bytes) {
    return num_bytes == 0 ? 1 : num_bytes / kGroupBytes + (num_bytes % kGroupBytes != 0 ? 1 : 0);
}
FLASHCKPT_HOST_DEVICE constexpr Word digest_scratch_offset(Word num_entries) {
    return sizeof(DigestTable) + (num_entries + 1) * sizeof(DigestEntry);
}
FLASHCKPT_HOST_DEVICE constexpr Word digest_table_bytes(Word num_entries) {
    return digest_scratch_offset(num_entries) + num_entries * sizeof(DigestScratch);
}

} // namespace flashckpt
