#include "planes/planes.h"

#include <algorithm>
#include <cstring>

namespace flashckpt {
namespace {

// Each plane needs a pass over the numbers of a block, so a block fits into the first-level cache.
constexpr std::size_t kBlock = 1024;

template <class Word>
Word turn_left(Word word) {
    return static_cast<Word>(word << 1 | word >> (8 * sizeof(Word) - 1));
}

template <class Word>
Word turn_right(Word word) {
    return static_cast<Word>(word >> 1 | word << (8 * sizeof(Word) - 1));
}

template <class Word>
void split(const std::uint8_t* __restrict source, std::size_t num_bytes, std::uint8_t* __restrict planes) {
    constexpr std::size_t width = sizeof(Word);
    const std::size_t count = num_bytes / width;
    Word block[kBlock];
    for (std::size_t first = 0; first < count; first += kBlock) {
        const std::size_t here = std::min(kBlock, count - first);
        std::memcpy(block, source + first * width, here * width);
        for (std::size_t plane = 0; plane < width; ++plane) {
            const int shift = static_cast<int>(8 * (width - 1 - plane));
            std::uint8_t* __restrict out = planes + plane * count + first;
            for (std::size_t i = 0; i < here; ++i)
                out[i] = static_cast<std::uint8_t>(turn_left(block[i]) >> shift);
        }
    }
    std::memcpy(planes + count * width, source + count * width, num_bytes - count * width);
}

template <class Word>
void join(const std::uint8_t* __restrict planes, std::size_t num_bytes,
          std::uint8_t* __restrict destination) {
    constexpr std::size_t width = sizeof(Word);
    const std::size_t count = num_bytes / width;
    Word block[kBlock];
    for (std::size_t first = 0; first < count; first += kBlock) {
        const std::size_t here = std::min(kBlock, count - first);
        const std::uint8_t* __restrict from = planes + first;
        for (std::size_t i = 0; i < here; ++i) {
            Word word = 0;
            for (std::size_t plane = 0; plane < width; ++plane)
                word = static_cast<Word>(word << 8 | from[plane * count + i]);
            block[i] = turn_right(word);
        }
        std::memcpy(destination + first * width, block, here * width);
    }
    std::memcpy(destination + count * width, planes + count * width, num_bytes - count * width);
}

// Calls `of` with a number of `width` bytes. Single bytes are their own only plane.
template <class Of>
void by_width(int width, const std::uint8_t* from, std::size_t num_bytes, std::uint8_t* into, Of of) {
    switch (width) {
    case 2:
        return of(std::uint16_t{});
    case 4:
        return of(std::uint32_t{});
    case 8:
        return of(std::uint64_t{});
    default:
        std::memcpy(into, from, num_bytes);
    }
}

} // namespace

void split_planes(const std::uint8_t* source, std::size_t num_bytes, int width, std::uint8_t* planes) {
    by_width(width, source, num_bytes, planes,
             [=](auto number) { split<decltype(number)>(source, num_bytes, planes); });
}

void join_planes(const std::uint8_t* planes, std::size_t num_bytes, int width, std::uint8_t* destination) {
    by_width(width, planes, num_bytes, destination,
             [=](auto number) { join<decltype(number)>(planes, num_bytes, destination); });
}

} // namespace flashckpt
