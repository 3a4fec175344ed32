// The inner loops of the digest, over the blocks of a piece of a leaf, with or without a copy on the way.
// Chosen once, by what the processor can do; every choice gives the same number.
#pragma once

#include "digest/definition.h"

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// The sum of the hashes of the blocks in `source`, of which the first has the number `first_block` in its
// leaf. Where num_bytes is no whole number of blocks, the leaf must end there: the last block is padded with
// zeros. Any alignment of `source` is allowed.
Word hash_blocks(const std::uint8_t* source, std::size_t num_bytes, Word first_block);
// The same while copying. What is hashed is what was stored: each byte of the source is loaded once. With
// `stream` the stores go past the caches: the caller must call `settle_stores` before it tells another
// thread.
Word copy_blocks(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                 Word first_block, bool stream);
// Orders streaming stores before whatever this thread stores next.
void settle_stores();

} // namespace flashckpt
