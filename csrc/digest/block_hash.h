// The inner loops of the digest over the blocks of a piece of a leaf, with or without a copy. Chosen once by
// the processor's features; every choice gives the same number.
#pragma once

#include "digest/definition.h"

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// The sum of the hashes of the blocks in `source`. `first_block`: index of the first block in its leaf. If
// num_bytes is not a multiple of a block, the leaf must end there; the last block is padded with zeros.
// `source` may have any alignment.
Word hash_blocks(const std::uint8_t* source, std::size_t num_bytes, Word first_block);
// Like it, and copies. Hashes the stored bytes: each byte of the source is loaded once. With `stream`, stores
// bypass the caches, and the caller must call `settle_stores` before it notifies another thread.
Word copy_blocks(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                 Word first_block, bool stream);
// Orders streaming stores before this thread's later stores.
void settle_stores();

} // namespace flashckpt
