#define FLASHCKPT_VARIANT kXxh3Portable
#include "checksum/variant.inc"

#include "checksum/xxh3.h"

namespace flashckpt {
namespace {

static_assert(sizeof(XXH3_state_t) <= 640);

const Xxh3Variant& chosen() {
#if defined(FLASHCKPT_XXH3_AVX2)
    static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
    if (has_avx2) return kXxh3Avx2;
#endif
    return kXxh3Portable;
}

} // namespace

std::uint64_t xxh3_64(const void* data, std::size_t num_bytes) {
    return chosen().at_once_64(data, num_bytes);
}

Checksum xxh3_128(const void* data, std::size_t num_bytes) {
    Checksum out;
    chosen().at_once_128(data, num_bytes, out.data());
    return out;
}

Xxh3Stream::Xxh3Stream() {
    reset();
}

void Xxh3Stream::reset() {
    chosen().start(state_);
}

void Xxh3Stream::update(const void* data, std::size_t num_bytes) {
    chosen().update(state_, data, num_bytes);
}

Checksum Xxh3Stream::checksum() const {
    Checksum out;
    chosen().finish(state_, out.data());
    return out;
}

} // namespace flashckpt
