// The inner loops of the digest, over whole words, with or without a copy on the way. Chosen once, by what
// the processor can do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// Over words s_0 … s_{n-1}: plain = Σ s_j, weighted = Σ (2j+1)·s_j, both mod 2^64.
struct Sums {
    std::uint64_t plain = 0;
    std::uint64_t weighted = 0;
};

// Any alignment of `source` is allowed.
Sums sum_words(const std::uint8_t* source, std::size_t num_words);
// The same while copying; the digest is of the bytes that were stored. With `stream` the stores go past the
// caches where alignment allows it: the caller must call `settle_stores` before it tells another thread.
Sums copy_words(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_words, bool stream);
// Orders streaming stores before whatever this thread stores next.
void settle_stores();

} // namespace flashckpt
