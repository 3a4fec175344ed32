// XXH3, at once or in pieces, with the widest instructions of the processor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace flashckpt {

// Canonical form: 16 bytes, big-endian, high half first.
using Checksum = std::array<std::uint8_t, 16>;

std::uint64_t xxh3_64(const void* data, std::size_t num_bytes);
Checksum xxh3_128(const void* data, std::size_t num_bytes);

// XXH3-128 of bytes that arrive in pieces.
class Xxh3Stream {
  public:
    Xxh3Stream();
    void reset();
    void update(const void* data, std::size_t num_bytes);
    Checksum checksum() const;

  private:
    alignas(64) std::uint8_t state_[640];
};

} // namespace flashckpt
