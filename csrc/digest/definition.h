// The digest's constants and arithmetic, as docs/format.md ("Digest") defines them. Needs no host: the CUDA
// kernel includes this header too, also with NVRTC, which has no standard headers.
//
// Bytes of a leaf are little-endian 64-bit words, in blocks of 1,024 bytes; the last block is padded with
// zeros. Word w of a block (0 ≤ w < 128) is in lane w % 8. A block has two sets of eight accumulators:
//   first[i]  = first_start(i)  + Σ product(x, first_key(w)) over lane i + Σ x over lane i ^ 1
//   second[i] = second_start(i) + Σ product(x, second_key(w)) over lane i
//   hash      = block_hash(block, Σ fold_first(i, first[i], first[i+1]) + Σ fold_second(i, …), i = 0 2 4 6)
//   digest    = finish_digest(num_bytes, Σ hash over all blocks)
// all mod 2^64.
#pragma once

#if defined(__CUDACC_RTC__)
namespace flashckpt {
using Word = unsigned long long;
}
#else
#include <cstdint>
namespace flashckpt {
using Word = std::uint64_t;
}
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FLASHCKPT_HOST_DEVICE __host__ __device__
#else
#define FLASHCKPT_HOST_DEVICE
#endif

namespace flashckpt {

constexpr int kDigestLanes = 8;
constexpr int kDigestStripes = 16;
constexpr int kBlockWords = kDigestLanes * kDigestStripes;
constexpr int kBlockBytes = 8 * kBlockWords;

constexpr Word kDigestFactor = 0x9E3779B97F4A7C15ull;
// Fills a digest table before a capture. No leaf has this digest.
constexpr Word kEmptyDigest = ~0ull;

// SplitMix64's finalizer.
FLASHCKPT_HOST_DEVICE constexpr Word finalize(Word z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Output number n (from 0) of SplitMix64 with seed 0.
FLASHCKPT_HOST_DEVICE constexpr Word digest_key(int n) {
    return finalize((static_cast<Word>(n) + 1) * kDigestFactor);
}
FLASHCKPT_HOST_DEVICE constexpr Word first_key(int word) {
    return digest_key(word);
}
FLASHCKPT_HOST_DEVICE constexpr Word second_key(int word) {
    return digest_key(128 + word);
}
FLASHCKPT_HOST_DEVICE constexpr Word first_start(int lane) {
    return digest_key(256 + lane);
}
FLASHCKPT_HOST_DEVICE constexpr Word second_start(int lane) {
    return digest_key(264 + lane);
}
FLASHCKPT_HOST_DEVICE constexpr Word first_fold_key(int lane) {
    return digest_key(272 + lane);
}
FLASHCKPT_HOST_DEVICE constexpr Word second_fold_key(int lane) {
    return digest_key(280 + lane);
}

// The low half of x ^ key times its high half: 32 by 32 bits, unsigned, all 64 kept.
FLASHCKPT_HOST_DEVICE constexpr Word product(Word x, Word key) {
    return ((x ^ key) & 0xFFFFFFFFull) * ((x ^ key) >> 32);
}

// Low ^ high half of the 128-bit product.
FLASHCKPT_HOST_DEVICE inline Word fold(Word a, Word b) {
#if defined(__CUDA_ARCH__)
    return (a * b) ^ __umul64hi(a, b);
#else
    unsigned __int128 wide = static_cast<unsigned __int128>(a) * b;
    return static_cast<Word>(wide) ^ static_cast<Word>(wide >> 64);
#endif
}
// `a` is the accumulator of `lane`, which is even, and `b` that of `lane` + 1.
FLASHCKPT_HOST_DEVICE inline Word fold_first(int lane, Word a, Word b) {
    return fold(a ^ first_fold_key(lane), b ^ first_fold_key(lane + 1));
}
FLASHCKPT_HOST_DEVICE inline Word fold_second(int lane, Word a, Word b) {
    return fold(a ^ second_fold_key(lane), b ^ second_fold_key(lane + 1));
}

// `block` counts from 0 within the leaf; `folds` is the sum of the block's eight folds.
FLASHCKPT_HOST_DEVICE constexpr Word block_hash(Word block, Word folds) {
    return finalize((block + 1) * kDigestFactor + folds);
}

// `hashes` is the sum of the hashes of all blocks of a leaf, including the padded block.
FLASHCKPT_HOST_DEVICE constexpr Word finish_digest(Word num_bytes, Word hashes) {
    Word digest = num_bytes * kDigestFactor + hashes;
    return digest == kEmptyDigest ? kEmptyDigest - 1 : digest;
}

} // namespace flashckpt
