// Numbers whose bytes lie plane by plane: what of them repeats (exponents, high halves) side by side, so that
// a compressor finds it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashckpt {

// `width` (1, 2, 4 or 8) is the bytes of a number, little-endian. Each is turned left by one bit, which makes
// of sign and exponent of a float32 or bfloat16 a whole byte of exponent; then come the highest bytes of all,
// the next ones, … and the bytes at the end that are no whole number, as they are. Neither may overlap.
void split_planes(const std::uint8_t* source, std::size_t num_bytes, int width, std::uint8_t* planes);
void join_planes(const std::uint8_t* planes, std::size_t num_bytes, int width, std::uint8_t* destination);

} // namespace flashckpt
