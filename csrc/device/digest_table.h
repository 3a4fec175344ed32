// The table of one launch of the digest kernel in device memory: header, entries and a final entry, scratch
// memory of the kernel. Shared by host and kernel; see docs/gpu.md.
#pragma once

#include "digest/definition.h"

namespace flashckpt {

// A warp takes four blocks at a time, so that each thread has sixteen loads in flight.
constexpr int kGroupBlocks = 4;
constexpr int kGroupWords = kGroupBlocks * kBlockWords;
constexpr int kGroupBytes = kGroupBlocks * kBlockBytes;

constexpr Word kDigestTableMagic = 0x3162617474736764ull; // "dgsttab1"
constexpr int kDigestThreads = 256;                       // per thread block of the launch

struct DigestTable {
    Word magic;
    Word num_entries;
    Word num_groups;
    Word reserved;
};

// A leaf without bytes also has one group, so that its digest is written like any other.
struct DigestEntry {
    Word source;
    Word destination; // 0: no copy
    Word num_bytes;
    Word first_group; // groups of all entries before this one
};

// Scratch memory of a leaf whose groups several warps take; zero before a launch.
struct DigestScratch {
    Word hashes;
    Word groups; // number of groups added to `hashes`
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
