// The digest kernel, compiled for the host: what a launch of it does, and what it did to memory.
#include "emulated_warp.h"

#include "device/digest.cu"

using flashckpt::DigestEntry;
using flashckpt::DigestTable;
using flashckpt::Word;

// did[3]: bytes loaded, bytes stored, atomic adds. Leaves may be read and clones written, and nothing else.
extern "C" void emulate_digest(DigestTable* table, Word num_entries, Word* digests, unsigned num_blocks,
                               std::uint64_t seed, std::uint64_t* did) {
    emulated::memory = {};
    const auto* entries = reinterpret_cast<const DigestEntry*>(table + 1);
    for (Word i = 0; table->magic == flashckpt::kDigestTableMagic && i < table->num_entries; ++i) {
        const DigestEntry& entry = entries[i];
        emulated::memory.readable.emplace_back(entry.source, entry.source + entry.num_bytes);
        if (entry.destination != 0)
            emulated::memory.writable.emplace_back(entry.destination, entry.destination + entry.num_bytes);
    }
    emulated::launch(num_blocks, flashckpt::kDigestThreads, seed,
                     [=] { flashckpt_digest(table, num_entries, digests); });
    if (did == nullptr) return;
    did[0] = emulated::memory.loaded_bytes;
    did[1] = emulated::memory.stored_bytes;
    did[2] = emulated::memory.atomic_adds;
}
