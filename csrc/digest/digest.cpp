#include "digest/digest.h"

#include "copy/pieces.h"
#include "digest/words.h"

#include <algorithm>

namespace flashckpt {
namespace {

// A byte at `position` of the leaf: its word's weight times its own place in the word, the highest signed.
std::uint64_t byte_share(std::uint8_t byte, std::uint64_t position) {
    auto value = position % 4 == 3 ? static_cast<std::uint64_t>(static_cast<std::int8_t>(byte)) : byte;
    return (2 * (position / 4) + 1) * (value << (8 * (position % 4)));
}

// Bytes before the first whole word of a piece that starts at `offset`.
std::size_t head_bytes(std::uint64_t offset, std::size_t num_bytes) {
    return std::min<std::size_t>((4 - offset % 4) % 4, num_bytes);
}

} // namespace

std::uint64_t digest_share(const std::uint8_t* source, std::size_t num_bytes, std::uint64_t offset) {
    std::uint64_t share = 0;
    std::size_t head = head_bytes(offset, num_bytes);
    for (std::size_t i = 0; i < head; ++i)
        share += byte_share(source[i], offset + i);
    std::size_t num_words = (num_bytes - head) / 4;
    Sums sums = sum_words(source + head, num_words);
    share += sums.weighted + 2 * ((offset + head) / 4) * sums.plain;
    for (std::size_t i = head + 4 * num_words; i < num_bytes; ++i)
        share += byte_share(source[i], offset + i);
    return share;
}

std::uint64_t copy_share(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                         std::uint64_t offset, bool stream) {
    std::uint64_t share = 0;
    auto copy_bytes = [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            std::uint8_t byte = *const_cast<const volatile std::uint8_t*>(source + i);
            destination[i] = byte;
            share += byte_share(byte, offset + i);
        }
    };
    std::size_t head = head_bytes(offset, num_bytes);
    copy_bytes(0, head);
    std::size_t num_words = (num_bytes - head) / 4;
    Sums sums = copy_words(destination + head, source + head, num_words, stream);
    share += sums.weighted + 2 * ((offset + head) / 4) * sums.plain;
    copy_bytes(head + 4 * num_words, num_bytes);
    return share;
}

void digest_many(const std::uint64_t* addresses, const std::uint64_t* sizes, std::size_t num_leaves,
                 std::uint64_t* out, int threads) {
    share_out(sizes, num_leaves, out, threads,
              [=](std::size_t leaf, std::uint64_t offset, std::size_t count) {
                  const auto* source = reinterpret_cast<const std::uint8_t*>(addresses[leaf]);
                  return digest_share(source + offset, count, offset);
              });
}

} // namespace flashckpt
