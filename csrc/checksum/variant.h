// The interface between XXH3 and its variants for instruction sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace flashckpt {

struct Xxh3Variant {
    size_t state_bytes;
    uint64_t (*at_once_64)(const void* data, size_t num_bytes);
    void (*at_once_128)(const void* data, size_t num_bytes, uint8_t* out);
    void (*start)(void* state);
    void (*update)(void* state, const void* data, size_t num_bytes);
    void (*finish)(const void* state, uint8_t* out);
};

extern const Xxh3Variant kXxh3Portable;
extern const Xxh3Variant kXxh3Avx2;

} // namespace flashckpt
