#include "digest/block_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static_assert(std::endian::native == std::endian::little, "words are little-endian by definition");

namespace flashckpt {
namespace {

constexpr std::size_t kStripeBytes = 8 * kDigestLanes;

// The two sets of accumulators of one block, by lane.
struct alignas(64) Accumulators {
    Word first[kDigestLanes];
    Word second[kDigestLanes];
};

struct Keys {
    alignas(64) Word first[kBlockWords] = {};
    alignas(64) Word second[kBlockWords] = {};
    // starts[n]: initial accumulators of a block with n stripes, which include the stripes of padding. So a
    // leaf of four bytes costs one stripe.
    Accumulators starts[kDigestStripes + 1] = {};
    Accumulators folds = {};
};

constexpr Keys make_keys() {
    Keys keys;
    for (int word = 0; word < kBlockWords; ++word) {
        keys.first[word] = first_key(word);
        keys.second[word] = second_key(word);
    }
    for (int lane = 0; lane < kDigestLanes; ++lane) {
        Accumulators* starts = keys.starts;
        starts[kDigestStripes].first[lane] = first_start(lane);
        starts[kDigestStripes].second[lane] = second_start(lane);
        for (int stripe = kDigestStripes - 1; stripe >= 0; --stripe) {
            int word = stripe * kDigestLanes + lane;
            starts[stripe].first[lane] = starts[stripe + 1].first[lane] + product(0, first_key(word));
            starts[stripe].second[lane] = starts[stripe + 1].second[lane] + product(0, second_key(word));
        }
        keys.folds.first[lane] = first_fold_key(lane);
        keys.folds.second[lane] = second_fold_key(lane);
    }
    return keys;
}

constexpr Keys kKeys = make_keys();

// `keyed`: accumulators ^ fold keys.
Word fold_keyed(const Accumulators& keyed) {
    Word folds = 0;
    for (int lane = 0; lane < kDigestLanes; lane += 2) {
        folds += fold(keyed.first[lane], keyed.first[lane + 1]);
        folds += fold(keyed.second[lane], keyed.second[lane + 1]);
    }
    return folds;
}

// Keeps the compiler from reading the source again instead of the copy: the source may have changed.
void forget_memory() {
    asm volatile("" ::: "memory");
}

// The compiler vectorizes the next two: with SSE2 on any x86-64, with NEON on any arm64.
Word hash_stripes(const std::uint8_t* source, int stripes, Word block) {
    Accumulators sums = kKeys.starts[stripes];
    Word plain[kDigestLanes] = {};
    for (int stripe = 0; stripe < stripes; ++stripe) {
        const Word* first = kKeys.first + stripe * kDigestLanes;
        const Word* second = kKeys.second + stripe * kDigestLanes;
        Word words[kDigestLanes];
        std::memcpy(words, source + stripe * kStripeBytes, kStripeBytes);
        for (int lane = 0; lane < kDigestLanes; ++lane) {
            sums.first[lane] += product(words[lane], first[lane]);
            sums.second[lane] += product(words[lane], second[lane]);
            plain[lane] += words[lane];
        }
    }
    for (int lane = 0; lane < kDigestLanes; ++lane) {
        sums.first[lane] = (sums.first[lane] + plain[lane ^ 1]) ^ kKeys.folds.first[lane];
        sums.second[lane] ^= kKeys.folds.second[lane];
    }
    return block_hash(block, fold_keyed(sums));
}

Word blocks_portable(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_blocks,
                     Word first_block) {
    Word hashes = 0;
    for (std::size_t block = 0; block < num_blocks; ++block, source += kBlockBytes) {
        const std::uint8_t* hashed = source;
        if (destination != nullptr) {
            std::uint8_t* to = destination + block * kBlockBytes;
            std::memcpy(to, source, kBlockBytes);
            forget_memory();
            hashed = to;
        }
        hashes += hash_stripes(hashed, kDigestStripes, first_block + block);
    }
    return hashes;
}

#if defined(__x86_64__)
#define FLASHCKPT_AVX2 __attribute__((target("avx2,bmi2")))

enum class Store { none, cached, streaming, shifted };

// Prefetch distance. The processor's own prefetch stops at page ends; measured, this adds a quarter to the
// rate. The non-temporal hint keeps the model in the caches.
constexpr std::size_t kAheadBlocks = 3;
constexpr std::size_t kVectorBytes = 32;

FLASHCKPT_AVX2 inline __m256i load(const Word* words) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
}

FLASHCKPT_AVX2 inline __m256i products(__m256i words, const Word* keys) {
    __m256i keyed = _mm256_xor_si256(words, load(keys));
    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

// Half a stripe: four of its eight lanes.
struct HalfSums {
    __m256i first;
    __m256i second;
    __m256i plain;

    FLASHCKPT_AVX2 __attribute__((always_inline)) void add(__m256i words, int word) {
        first = _mm256_add_epi64(first, products(words, kKeys.first + word));
        second = _mm256_add_epi64(second, products(words, kKeys.second + word));
        plain = _mm256_add_epi64(plain, words);
    }
};

// Streaming stores need an aligned destination, but a leaf may follow another of four bytes in the image. For
// a destination that is `words` 32-bit words past an aligned address, each stored vector joins the end of one
// loaded vector and the start of the next.
struct Shift {
    __m256i turn = {};
    __m256i from_before = {};
    __m256i before = {};

    FLASHCKPT_AVX2 explicit Shift(int words) {
        __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        turn = _mm256_and_si256(_mm256_sub_epi32(places, _mm256_set1_epi32(words)), _mm256_set1_epi32(7));
        from_before = _mm256_cmpgt_epi32(_mm256_set1_epi32(words), places);
    }
    FLASHCKPT_AVX2 __attribute__((always_inline)) __m256i next(__m256i loaded) {
        __m256i turned = _mm256_permutevar8x32_epi32(loaded, turn);
        __m256i out = _mm256_blendv_epi8(turned, before, from_before);
        before = turned;
        return out;
    }
};

// One block in progress.
struct Block {
    HalfSums halves[2];

    FLASHCKPT_AVX2 __attribute__((always_inline)) explicit Block(int stripes) {
        const Accumulators& start = kKeys.starts[stripes];
        for (int half = 0; half < 2; ++half) {
            halves[half] = {load(start.first + 4 * half), load(start.second + 4 * half),
                            _mm256_setzero_si256()};
        }
    }

    template <Store store>
    FLASHCKPT_AVX2 __attribute__((always_inline)) void
    add(std::uint8_t* destination, const std::uint8_t* source, int stripe, Shift& shift) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            std::size_t place = stripe * kStripeBytes + half * kVectorBytes;
            __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + place));
            // Keep it in a register: a second load could see other bytes than those stored.
            if constexpr (store != Store::none) asm volatile("" : "+x"(words));
            halves[half].add(words, stripe * kDigestLanes + 4 * half);
            auto* out = reinterpret_cast<__m256i*>(destination + place);
            if constexpr (store == Store::cached) _mm256_storeu_si256(out, words);
            if constexpr (store == Store::streaming) _mm256_stream_si256(out, words);
            if constexpr (store == Store::shifted) _mm256_stream_si256(out, shift.next(words));
        }
    }

    FLASHCKPT_AVX2 __attribute__((always_inline)) Word hash(Word block) const {
        Accumulators keyed;
        for (int half = 0; half < 2; ++half) {
            // The other lane of each pair.
            __m256i crossed = _mm256_shuffle_epi32(halves[half].plain, 0x4E);
            __m256i first = _mm256_add_epi64(halves[half].first, crossed);
            auto* out = reinterpret_cast<__m256i*>(keyed.first + 4 * half);
            _mm256_store_si256(out, _mm256_xor_si256(first, load(kKeys.folds.first + 4 * half)));
            out = reinterpret_cast<__m256i*>(keyed.second + 4 * half);
            _mm256_store_si256(out,
                               _mm256_xor_si256(halves[half].second, load(kKeys.folds.second + 4 * half)));
        }
        return block_hash(block, fold_keyed(keyed));
    }
};

template <Store store>
FLASHCKPT_AVX2 __attribute__((always_inline)) inline Word
block_avx2(std::uint8_t* destination, const std::uint8_t* source, const std::uint8_t* ahead, Word number,
           Shift& shift) {
    Block block(kDigestStripes);
#pragma GCC unroll 4
    for (int stripe = 0; stripe < kDigestStripes; ++stripe) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + stripe * kStripeBytes), _MM_HINT_NTA);
        block.add<store>(destination, source, stripe, shift);
    }
    return block.hash(number);
}

// Half a stripe with `num_bytes` bytes, padded with zeros. A masked load touches no other bytes.
FLASHCKPT_AVX2 inline __m256i load_short(const std::uint8_t* source, int num_bytes) {
    __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i count = _mm256_set1_epi32(num_bytes >> 2);
    __m256i words =
        _mm256_maskload_epi32(reinterpret_cast<const int*>(source), _mm256_cmpgt_epi32(count, places));
    if (num_bytes > 0 && num_bytes < static_cast<int>(kVectorBytes) && num_bytes % 4 != 0) {
        const std::uint8_t* rest = source + (num_bytes & ~3);
        int last = rest[0];
        if (num_bytes % 4 > 1) last |= rest[1] << 8;
        if (num_bytes % 4 > 2) last |= rest[2] << 16;
        __m256i is_last = _mm256_cmpeq_epi32(count, places);
        words = _mm256_or_si256(words, _mm256_and_si256(_mm256_set1_epi32(last), is_last));
    }
    asm volatile("" : "+x"(words));
    return words;
}

// The last, short block of a leaf.
template <Store store>
FLASHCKPT_AVX2 Word tail_avx2(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                              Word number) {
    static_assert(store == Store::none || store == Store::cached);
    Shift none(0);
    int whole = static_cast<int>(num_bytes / kStripeBytes);
    std::size_t rest = num_bytes % kStripeBytes;
    Block block(whole + (rest > 0));
    for (int stripe = 0; stripe < whole; ++stripe)
        block.add<store>(destination, source, stripe, none);
    if (rest > 0) {
        std::size_t done = whole * kStripeBytes;
        alignas(32) std::uint8_t padded[kStripeBytes];
        for (int half = 0; half < 2; ++half) {
            int place = half * static_cast<int>(kVectorBytes);
            __m256i words = load_short(source + done + place, static_cast<int>(rest) - place);
            block.halves[half].add(words, whole * kDigestLanes + 4 * half);
            _mm256_store_si256(reinterpret_cast<__m256i*>(padded + place), words);
        }
        if constexpr (store == Store::cached) std::memcpy(destination + done, padded, rest);
    }
    return block.hash(number);
}

template <Store store>
FLASHCKPT_AVX2 Word blocks_avx2(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_blocks,
                                Word first_block, Shift& shift) {
    constexpr std::size_t step = store == Store::none ? 0 : kBlockBytes;
    Word hashes = 0;
    for (std::size_t block = 0; block < num_blocks; ++block) {
        const std::uint8_t* ahead = source + std::min(kAheadBlocks, num_blocks - 1 - block) * kBlockBytes;
        hashes += block_avx2<store>(destination, source, ahead, first_block + block, shift);
        source += kBlockBytes;
        destination += step;
    }
    return hashes;
}

FLASHCKPT_AVX2 Word copy_shifted(std::uint8_t* destination, const std::uint8_t* source,
                                 std::size_t num_blocks, Word first_block, std::size_t misplaced) {
    Shift shift(static_cast<int>(misplaced / 4));
    // The first block has no predecessor in this piece.
    Word hashes = blocks_avx2<Store::cached>(destination, source, 1, first_block, shift);
    shift.next(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(destination + kBlockBytes - kVectorBytes)));
    hashes += blocks_avx2<Store::shifted>(destination + kBlockBytes - misplaced, source + kBlockBytes,
                                          num_blocks - 1, first_block + 1, shift);
    std::uint8_t rest[kVectorBytes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest), shift.before);
    std::memcpy(destination + num_blocks * kBlockBytes - misplaced, rest, misplaced);
    return hashes;
}

FLASHCKPT_AVX2 Word copy_whole_avx2(std::uint8_t* destination, const std::uint8_t* source,
                                    std::size_t num_blocks, Word first_block, bool stream) {
    Shift none(0);
    std::size_t misplaced = reinterpret_cast<std::uintptr_t>(destination) % kVectorBytes;
    if (!stream || misplaced % 4 != 0) {
        return blocks_avx2<Store::cached>(destination, source, num_blocks, first_block, none);
    }
    if (misplaced != 0) return copy_shifted(destination, source, num_blocks, first_block, misplaced);
    return blocks_avx2<Store::streaming>(destination, source, num_blocks, first_block, none);
}

FLASHCKPT_AVX2 Word hash_whole_avx2(const std::uint8_t* source, std::size_t num_blocks, Word first_block) {
    Shift none(0);
    return blocks_avx2<Store::none>(nullptr, source, num_blocks, first_block, none);
}

#if defined(FLASHCKPT_PORTABLE_DIGEST) // by a test that runs the portable loop
const bool kHasAvx2 = false;
#else
const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi2") != 0;
#endif
#endif

Word hash_whole(const std::uint8_t* source, std::size_t num_blocks, Word first_block) {
#if defined(__x86_64__)
    if (kHasAvx2) return hash_whole_avx2(source, num_blocks, first_block);
#endif
    return blocks_portable(nullptr, source, num_blocks, first_block);
}

Word copy_whole(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_blocks,
                Word first_block, [[maybe_unused]] bool stream) {
#if defined(__x86_64__)
    if (kHasAvx2) return copy_whole_avx2(destination, source, num_blocks, first_block, stream);
#endif
    return blocks_portable(destination, source, num_blocks, first_block);
}

// The last block of a leaf, padded in a buffer.
Word tail_hash(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes, Word block) {
#if defined(__x86_64__)
    if (kHasAvx2) {
        return destination == nullptr ? tail_avx2<Store::none>(nullptr, source, num_bytes, block)
                                      : tail_avx2<Store::cached>(destination, source, num_bytes, block);
    }
#endif
    alignas(64) std::uint8_t padded[kBlockBytes];
    std::size_t stripes = (num_bytes + kStripeBytes - 1) / kStripeBytes;
    std::memset(padded + (stripes - 1) * kStripeBytes, 0, kStripeBytes);
    std::memcpy(padded, source, num_bytes);
    forget_memory();
    if (destination != nullptr) std::memcpy(destination, padded, num_bytes);
    return hash_stripes(padded, static_cast<int>(stripes), block);
}

} // namespace

Word hash_blocks(const std::uint8_t* source, std::size_t num_bytes, Word first_block) {
    std::size_t whole = num_bytes / kBlockBytes;
    std::size_t rest = num_bytes % kBlockBytes;
    Word hashes = hash_whole(source, whole, first_block);
    if (rest > 0) hashes += tail_hash(nullptr, source + whole * kBlockBytes, rest, first_block + whole);
    return hashes;
}

Word copy_blocks(std::uint8_t* destination, const std::uint8_t* source, std::size_t num_bytes,
                 Word first_block, bool stream) {
    std::size_t whole = num_bytes / kBlockBytes;
    std::size_t rest = num_bytes % kBlockBytes;
    Word hashes = whole > 0 ? copy_whole(destination, source, whole, first_block, stream) : 0;
    if (rest > 0) {
        std::size_t done = whole * kBlockBytes;
        hashes += tail_hash(destination + done, source + done, rest, first_block + whole);
    }
    return hashes;
}

void settle_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

} // namespace flashckpt
