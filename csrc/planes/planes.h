// Byte planes: groups the repetitive bytes of numbers (exponents, high halves), so that a compressor finds
// them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// `width` (1, 2, 4 or 8): bytes of a number, little-endian. Each number is rotated left by one bit, so that
// the exponent of a float32 or bfloat16 fills its highest byte. Then follow the highest bytes of all numbers,
// the next bytes, …, and the bytes at the end that are not a whole number, unchanged. Ranges must not
// overlap.
void split_planes(const std::uint8_t* source, std::size_t num_bytes, int width, std::uint8_t* planes);
void join_planes(const std::uint8_t* planes, std::size_t num_bytes, int width, std::uint8_t* destination);

} // namespace flashckpt
